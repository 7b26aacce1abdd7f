"""ReLU that reads its mask from the codes of its result.

The layer after a ReLU usually saves the same tensor. Plain hooks would write a mask to memory for ReLU's backward. Here
backward reads the codes that were packed for that layer, in which zeros are exact. For 16-bit values in channels_last
memory, the result is computed while it is packed (`DeferredRelu`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.deferred import DeferredForward
from encke.capture.facts import SiteFacts
from encke.capture.passes import ForwardPass
from encke.codecs import Codec, Packed
from encke.codecs.base import EncoderState
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import Layout
from encke.fused.base import LayerForward, hand_over, in_place_of, packed_in
from encke.kernels import mix

threshold_backward = torch.ops.aten.threshold_backward.default


class DeferredRelu(DeferredForward):
    """ReLU that writes its result to `t` while it packs it."""

    __slots__ = ("x",)
    x: Tensor
    """ReLU's input."""

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, state: EncoderState) -> Packed:
        """Write the result to `t`, and return the packed result."""
        y = self.t
        plan = codec.planned(y, layout, length, state)
        if plan is None or not plan.fuses_forward:
            self.run_unfused()
            return codec.encode_run(y, layout, length, key, state)
        seed = mix(codec.seed, key)
        data = plan.encode_relu(self.x, y, seed)
        return GroupQuantPacked(codec, layout, data, seed, plan)

    def run_unfused(self) -> None:
        """Write the result to `t` without packing it."""
        with torch.no_grad():
            torch.clamp_min(self.x.data, 0, out=self.t.data)


class ReluFunction(torch.autograd.Function):
    """ReLU with a packed result. Arguments: input, whether in-place, and the announcement of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, deferred: DeferredForward) -> Tensor:
        """Return the result. With a `DeferredRelu`, it is written when it is packed, right after this returns."""
        if inplace:
            ctx.mark_dirty(x)
        if type(deferred) is DeferredRelu:
            y = x if inplace else torch.empty_like(x)
            deferred.x = x
        else:
            y = torch.relu_(x) if inplace else torch.relu(x)
        deferred.t = y
        ctx.alone = deferred.alone
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the input's gradient."""
        if not torch.is_grad_enabled():
            saved = ctx._raw_saved_tensors[0].data
            packed = packed_in(saved, grad)
            gradient = None if packed is None else gradient_from_codes(packed, saved.layout, grad)
            if gradient is not None:
                return hand_over(gradient) if ctx.alone else gradient, None, None
        return threshold_backward(grad, ctx.saved_tensors[0], 0), None, None


def gradient_from_codes(packed: Packed, layout: Layout, grad: Tensor) -> Tensor | None:
    """Return `grad` where the packed result is not zero, else zero; None if no kernel reads the result."""
    return packed.gate(grad) if layout.dense and grad.stride() == layout.stride else None


class ReluForward(LayerForward):
    """Run `nn.ReLU` and read its mask from packed codes in backward."""

    layers = (nn.ReLU,)

    def function(self, facts: SiteFacts) -> Any:
        """Return `ReluFunction` if ReLU's result is saved for its mask."""
        site = facts.site
        known = site.slot == "result" and site.need == "mask" and facts.reader == site.operation
        return in_place_of(facts.reader, ReluFunction) if known else None

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call with the function; None if the input differs from the one that the site was learnt for."""
        dtype, dimensions = facts.site.dtype, facts.site.dimensions
        inplace = module.inplace
        if not x.requires_grad or x.dtype is not dtype or x.dim() != dimensions or (inplace and x.is_leaf):
            return None
        fused = dtype.itemsize == 2 and dimensions >= 4 and x.stride(1) == 1 and not x.data_ptr() & 3
        deferred = forward.deferred = (DeferredRelu if fused else DeferredForward)(facts, None, None)
        deferred.alone = forward.read_once is x
        y = facts.function(x, inplace, deferred)
        if forward.deferred is not None:
            forward.run_deferred()
        return y
