"""In-place leaky ReLU that reads the signs of its result from the packed tensor.

The signs are exact in the codes, which also serve the next layer. If no other layer reads the result, only one bit for
each value is kept. Plain hooks would decode values to memory for leaky ReLU's backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.deferred import DeferredForward
from encke.capture.facts import SiteFacts
from encke.capture.passes import ForwardPass
from encke.codecs import Packed
from encke.codecs.layout import Layout
from encke.fused.base import LayerForward, hand_over, in_place_of, packed_in
from encke.torch_internals import is_view

leaky_relu_ = torch.ops.aten.leaky_relu_.default
leaky_relu_backward = torch.ops.aten.leaky_relu_backward.default


class LeakyReluFunction(torch.autograd.Function):
    """In-place leaky ReLU. Arguments: input, negative slope, and the announcement of its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, deferred: DeferredForward) -> Tensor:
        """Return the result."""
        ctx.mark_dirty(x)
        deferred.t = leaky_relu_(x, slope)
        ctx.slope, ctx.alone = slope, deferred.alone
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the input's gradient."""
        if not torch.is_grad_enabled():
            saved = ctx._raw_saved_tensors[0].data
            packed = packed_in(saved, grad)
            gradient = None if packed is None else gradient_from_signs(packed, saved.layout, grad, ctx.slope)
            if gradient is not None:
                return hand_over(gradient) if ctx.alone else gradient, None, None
        return leaky_relu_backward(grad, ctx.saved_tensors[0], ctx.slope, True), None, None


def gradient_from_signs(packed: Packed, layout: Layout, grad: Tensor, slope: float) -> Tensor | None:
    """Return `grad` where the packed result is positive, else `slope * grad`; None if no kernel reads the result."""
    # For negative slopes PyTorch raises an error, since the result does not have the signs of the input.
    return packed.gate(grad, slope) if slope >= 0 and layout.dense and grad.stride() == layout.stride else None


class LeakyReluForward(LayerForward):
    """Run in-place `nn.LeakyReLU` and read its signs from the packed result in backward."""

    layers = (nn.LeakyReLU,)

    def function(self, facts: SiteFacts) -> Any:
        """Return `LeakyReluFunction` if the result is saved for its signs."""
        site = facts.site
        known = site.slot == "result" and site.need == "sign" and facts.reader == site.operation == "LeakyRelu"
        return in_place_of(facts.reader, LeakyReluFunction) if known else None

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call with the function; None if the input differs from the one that the site was learnt for."""
        site = facts.site
        if not module.inplace or not x.requires_grad or x.is_leaf or is_view(x):
            return None
        if x.dtype is not site.dtype or x.dim() != site.dimensions:
            return None
        deferred = forward.deferred = DeferredForward(facts, None, None)
        deferred.alone = forward.read_once is x
        y: Tensor = facts.function(x, module.negative_slope, deferred)
        if forward.deferred is not None:
            forward.run_deferred()
        return y
