"""Smooth activations, which blocks compute together with the previous batch norm (block.py).

Backward reads their input, not their result, so the norm can recompute it. A new activation needs a line in `SMOOTH`, a
number in kernels/formats.py, and a formula with its derivative in kernels/gpu/smooth.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from encke.capture.facts import SiteFacts
from encke.fused.base import LayerForward

aten = torch.ops.aten


class Smooth(NamedTuple):
    """Plain operations of an activation."""

    operation: str
    """Name of the operation, in the reader table and in `kernels.formats.SMOOTH`."""
    function: Callable[[Tensor], Tensor]
    function_: Callable[[Tensor], Tensor]
    """In-place form."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the input, computed from the gradient of the result and the input."""


SMOOTH: dict[type[nn.Module], Smooth] = {
    nn.SiLU: Smooth("Silu", aten.silu.default, aten.silu_.default, aten.silu_backward.default),
    nn.Hardswish: Smooth(
        "Hardswish", aten.hardswish.default, aten.hardswish_.default, aten.hardswish_backward.default
    ),
}  # fmt: skip


class SmoothForward(LayerForward):
    """Run the layer as it is. Outside a block, backward reads the values that the plain hooks restore."""

    layers = tuple(SMOOTH)

    def function(self, facts: SiteFacts) -> Any:
        """Return None: no function replaces the operation."""
        return None
