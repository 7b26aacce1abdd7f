"""Copies of weights that autocast makes: cast again in backward instead of kept from forward to backward.

Autocast casts a float32 weight to 16 bits, and autograd saves the copy for the layer's backward. One cast of the weight
restores the copy bit for bit. The graph tells which weight the copy was made from. A frozen weight is not in the graph:
there the layer tells, and the copy is compared with the weight once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.facts import SiteFacts

CAST = "ToCopyBackward0"
"""Node of a cast."""
Geometry = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]


class CastWeight:
    """Stand-in for a cast weight, or for a view of one: knows the weight and the cast."""

    __slots__ = ("changed", "dtype", "geometry", "parameter", "version")

    def __init__(
        self, parameter: nn.Parameter, dtype: torch.dtype, geometry: Geometry | None, changed: Callable[[], None]
    ) -> None:
        self.parameter = parameter
        self.version = parameter._version
        self.dtype = dtype
        self.geometry = geometry
        """Size, strides and offset of a view of the copy; None for the copy itself."""
        self.changed = changed
        """Called if the weight turns out to have been modified."""

    @property
    def size(self) -> tuple[int, ...]:
        """Size of the tensor that this object replaces."""
        return tuple(self.parameter.shape if self.geometry is None else self.geometry[0])

    def weight(self) -> Tensor:
        """Return the weight; raise if it was modified since."""
        parameter: Tensor = self.parameter
        if parameter._version != self.version:
            self.changed()
            raise RuntimeError(
                f"encke: a weight of shape {list(parameter.shape)} was modified between forward and backward. "
                "Autocast's copy of it was not kept, because it is cast again in backward. Copies are kept from now "
                "on: run this step again, or modify weights after backward"
            )
        return parameter

    def restore(self) -> Tensor:
        """Cast the weight again."""
        parameter = self.weight()
        copy = (parameter.detach() if torch.is_grad_enabled() else parameter).to(self.dtype)
        return copy if self.geometry is None else copy.as_strided(*self.geometry)


def cast_weight(t: Tensor, facts: SiteFacts, changed: Callable[[], None]) -> CastWeight | None:
    """Return a stand-in for a tensor if it is, or views, the cast copy of a weight; else None.

    Args:
        t: The tensor that is saved.
        facts: The site, which remembers the weight of the last copy that it saved.
        changed: Called if the weight turns out to have been modified.
    """
    copy: Any = t if t._base is None else t._base
    node = copy.grad_fn
    if node is None or type(node).__name__ != CAST:
        return None
    parameter: Any = getattr(node.next_functions[0][0], "variable", None)
    geometry = None if copy is t else (t.size(), t.stride(), t.storage_offset())
    known, dtype = facts.cast, copy.dtype
    if known is not None and known.parameter is parameter and known.dtype is dtype and known.geometry == geometry:
        same = t.dtype is dtype and copy.shape == parameter.shape and copy.stride() == parameter.stride()
    else:
        same = t.dtype is dtype and may_be_copy(copy, parameter)
    facts.cast = CastWeight(parameter, dtype, geometry, changed) if same else None
    return facts.cast


def cast_frozen(t: Tensor, module: Any, facts: SiteFacts, changed: Callable[[], None]) -> CastWeight | None:
    """Return a stand-in for a tensor if it is, or views, the cast copy of a linear layer's frozen weight; else None.

    Args:
        t: The tensor that is saved.
        module: The layer whose call saves it.
        facts: The site, which remembers the weight, and its version, that the last such tensor was equal to.
        changed: Called if the weight turns out to have been modified.
    """
    copy: Any = t if t._base is None else t._base
    # A `forward` that was replaced may multiply by anything.
    if type(module) is not nn.Linear or "forward" in module.__dict__ or copy.requires_grad or copy._version:
        return None
    if t.dtype is not copy.dtype:
        return None
    weight: Any = module.weight
    if weight.requires_grad or not may_be_copy(copy, weight):
        return None
    known = (weight, weight._version)
    if facts.copied is None or facts.copied[0] is not weight or facts.copied[1] != weight._version:
        # The host waits for the GPU, once as long as the weight stays frozen.
        if not torch.equal(weight.detach().to(copy.dtype), copy):
            return None
        facts.copied = known
    return CastWeight(weight, t.dtype, None if copy is t else (t.size(), t.stride(), t.storage_offset()), changed)


def may_be_copy(copy: Tensor, parameter: Any) -> bool:
    """Return whether casting the parameter again would give memory of the same dtype and layout."""
    if type(parameter) is not nn.Parameter or parameter.dtype == copy.dtype or parameter.device != copy.device:
        return False
    same = parameter.shape == copy.shape and parameter.stride() == copy.stride() and copy.storage_offset() == 0
    return same and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
