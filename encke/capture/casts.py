"""Copies of weights that autocast makes: cast again in backward instead of kept from forward to backward.

Autocast casts a float32 weight to 16 bits, and autograd saves that copy for the layer's backward. The copy can be had
again from the weight itself, bit for bit, at the cost of one cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

CAST = "ToCopyBackward0"
"""Node of a cast."""


class CastWeight:
    """Stand-in for a cast weight, or for a view of one: knows the weight and the cast."""

    __slots__ = ("changed", "dtype", "geometry", "parameter", "version")

    def __init__(self, parameter: nn.Parameter, t: Tensor, changed: Callable[[], None]) -> None:
        self.parameter = parameter
        self.version = parameter._version
        self.dtype = t.dtype
        self.geometry = (t.size(), t.stride(), t.storage_offset())
        self.changed = changed
        """Called if the weight turns out to have been modified."""

    def restore(self) -> Tensor:
        """Cast the weight again."""
        parameter = self.parameter
        if parameter._version != self.version:
            self.changed()
            raise RuntimeError(
                f"encke: a weight of shape {list(parameter.shape)} was modified between forward and backward. "
                "Autocast's copy of it was not kept, because it is cast again in backward. Copies are kept from now "
                "on: run this step again, or modify weights after backward"
            )
        return parameter.detach().to(self.dtype).as_strided(*self.geometry)


def cast_weight(t: Tensor, changed: Callable[[], None]) -> CastWeight | None:
    """Return a stand-in for a tensor that is, or views, the copy of a weight that a cast has made; else None."""
    copy: Any = t if t._base is None else t._base
    node = copy.grad_fn
    if node is None or type(node).__name__ != CAST:
        return None
    parameter = getattr(node.next_functions[0][0], "variable", None)
    # Another cast of the weight has to give the same memory.
    if type(parameter) is not nn.Parameter or parameter.dtype == copy.dtype or parameter.device != copy.device:
        return None
    same = parameter.shape == copy.shape and parameter.stride() == copy.stride() and copy.storage_offset() == 0
    dense = parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
    return CastWeight(parameter, t, changed) if same and dense else None
