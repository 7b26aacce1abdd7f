"""Batch norm that reads its packed input in backward, and packs it in forward.

Inputs of batch norms make up half of what a convolutional network saves. Plain hooks decode such an input to memory,
and batch norm's backward reads it twice. Here the backward decodes in registers (kernels/gpu/norm_backward.py). If
another codec decodes the input to memory, its gradient overwrites it (kernels/gpu/norm_values.py). For 16-bit inputs
in channels_last memory, the forward is computed while its input is packed, in two passes over the input instead of
four (`DeferredBatchNorm`; kernels/gpu/norm_forward.py). In NCHW memory, the forward also runs in our kernels, in which
many programs share a channel (kernels/gpu/norm_planes.py). All other cases use the plain operation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.deferred import DeferredForward
from encke.capture.facts import SiteFacts
from encke.capture.passes import ForwardPass
from encke.capture.readers import matches
from encke.capture.saved import Saved
from encke.codecs import Codec, Packed
from encke.codecs.base import EncoderState, FlatPacked, check_version
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import FORMATS, Layout
from encke.fused.base import LayerForward, Slot, in_place_of, packed_for
from encke.kernels.formats import NORM_GROUP, mix
from encke.torch_internals import batch_norm_forward, cudnn_enabled, verify_batch_size

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of input, weight and bias."""
Kept = tuple[Tensor, Tensor | None, Tensor | None, int, Tensor | None, int, float]
"""Mean and 1 / standard deviation (or both in the first tensor), weight, its version, reserve, implementation, eps."""
Settings = tuple[Tensor | None, Tensor | None, float, float, Any]
"""Running mean and variance, momentum, eps, and the object that computes the forward: a `DeferredBatchNorm`, a
`PlanesCall`, or None for the plain operation."""


class DeferredBatchNorm(DeferredForward):
    """Batch norm that computes its result and statistics while its input is packed."""

    __slots__ = ("bias", "eps", "momentum", "out", "plan", "running", "statistics", "weight")

    def __init__(
        self, facts: SiteFacts, codec: Codec, x: Tensor, plan: Any, weight: Tensor, bias: Tensor,
        running: tuple[Tensor, Tensor, Tensor] | None, momentum: float, eps: float,
    ) -> None:  # fmt: skip
        self.facts, self.codec, self.t = facts, codec, x
        self.plan, self.weight, self.bias = plan, weight, bias
        self.running, self.momentum, self.eps = running, momentum, eps
        self.out = torch.empty_like(x)
        """The result. It may not be read before `encode` or `run_unfused` has run."""
        self.statistics = torch.empty(4, plan.channels, dtype=torch.float32, device=plan.device)
        """Mean and 1 / standard deviation of each channel, and two rows that only the kernels use."""

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, state: EncoderState) -> Packed:
        """Compute result and statistics, and return the packed input."""
        x = self.t
        plan = codec.planned(x, layout, length, state)
        if plan is None or not plan.fuses_forward or plan.format.group != NORM_GROUP:
            self.run_unfused()
            return codec.encode_run(x, layout, length, key, state)
        workspace = torch.empty(self.plan.workspace_numel, dtype=torch.float32, device=plan.device)
        seed = mix(codec.seed, key)
        data = plan.encode_moments(x, workspace, seed)
        kept = self.statistics
        self.plan.gather(workspace, self.weight, self.bias, self.running, self.momentum, self.eps, kept)
        self.plan.normalise(x, kept, self.out)
        return GroupQuantPacked(codec, layout, data, seed, plan)

    def run_unfused(self) -> None:
        """Compute result and statistics without packing the input."""
        mean, var, batches = (None, None, None) if self.running is None else self.running
        with torch.no_grad():
            if batches is not None:
                batches.add_(1)
            out, mean, invstd = torch.native_batch_norm(
                self.t, self.weight, self.bias, mean, var, True, self.momentum, self.eps
            )
            # Bypass autograd, which already treats these as results.
            self.out.data.copy_(out)
            self.statistics[0].copy_(mean)
            self.statistics[1].copy_(invstd)


class PlanesCall:
    """Call of the kernels of batch norm's forward in NCHW memory."""

    __slots__ = ("plan", "running")

    def __init__(self, plan: Any, running: tuple[Tensor, Tensor, Tensor] | None) -> None:
        self.plan = plan
        self.running = running
        """Running mean and variance and number of batches, which the kernels update."""


class BatchNormFunction(torch.autograd.Function):
    """Batch norm in training mode. Arguments: input, weight, bias, settings."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> Tensor:
        """Return the result. A deferred result is written when the input is packed, right after this returns."""
        out, ctx.kept = normalise(x, weight, bias, settings)
        # Only the input goes through the hooks: the rest is small or a parameter, and would not be packed.
        ctx.save_for_backward(x)
        return out

    # Attributes of the plain operation's node that policies and capture read.
    node = {
        "encke_slots": ("input",),
        "_saved_eps": property(lambda ctx: ctx.kept[6]),
        "_saved_result2": property(lambda ctx: statistics_of(ctx)[1]),
        "_raw_saved_result1": property(lambda ctx: slot_of(statistics_of(ctx)[0])),
        "_raw_saved_result2": property(lambda ctx: slot_of(statistics_of(ctx)[1])),
        "_raw_saved_weight": property(lambda ctx: None if ctx.kept[2] is None else Slot((ctx.kept[2], ctx.kept[3]))),
    }

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        needs, gradients = ctx.needs_input_grad[:3], None
        if not torch.is_grad_enabled():
            saved = ctx._raw_saved_tensors[0].data
            packed = packed_for(saved, grad)
            if packed is not None:
                gradients = gradients_from_codes(packed, saved.layout, ctx.kept, needs, grad)
            if gradients is None and isinstance(saved, Saved) and saved.lossy:
                gradients = gradients_from_values(saved, ctx.kept, needs, grad)
        if gradients is None:
            gradients = plain_gradients(ctx.saved_tensors[0], ctx.kept, needs, grad)
        return (*gradients, None)


def statistics_of(ctx: Any) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation of each channel."""
    mean, invstd = ctx.kept[:2]
    return (mean[0], mean[1]) if invstd is None else (mean, invstd)


def slot_of(t: Tensor) -> Slot:
    """Wrap a tensor that a node keeps in a `Slot`, where capture looks for it."""
    return Slot((t, t._version))


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> tuple[Tensor, Kept]:
    """Return the result, and what backward needs besides the input. A deferred result is not written yet."""
    running_mean, running_var, momentum, eps, call = settings
    version = 0 if weight is None else weight._version
    if call is None:
        out, mean, invstd, reserve, implementation = batch_norm_forward(
            x, weight, bias, running_mean, running_var, True, momentum, eps, cudnn_enabled()
        )
        return out, (mean, invstd, weight, version, reserve, implementation, eps)
    if type(call) is PlanesCall:
        out, statistics = call.plan.run(x, weight, bias, call.running, momentum, eps)
    else:
        out, statistics = call.out, call.statistics
    # The rows of the statistics are split only when one of them is needed.
    return out, (statistics, None, weight, version, None, 0, eps)


def plain_gradients(x: Tensor, kept: Kept, needs: tuple[bool, ...], grad: Tensor) -> Gradients:
    """Return the gradients of plain autograd from the restored input; differentiable if backward is recorded."""
    mean, invstd, weight, version, reserve, implementation, eps = kept
    if invstd is None:
        mean, invstd = mean[0], mean[1]
    if weight is not None:
        check_version(weight, version)
    memory_format = FORMATS.get(x.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=memory_format):
        memory_format = torch.contiguous_format
    return torch.ops.aten._batch_norm_impl_index_backward(
        implementation, x, grad.contiguous(memory_format=memory_format), weight, None, None, mean, invstd,
        True, eps, needs,
        torch.empty(0, dtype=torch.uint8, device=x.device) if reserve is None else reserve.clone(),
    )  # fmt: skip


def gradients_from_codes(
    packed: GroupQuantPacked, layout: Layout, kept: Kept, needs: tuple[bool, ...], grad: Tensor
) -> Gradients | None:
    """Return the gradients from the packed input; None if the kernels do not support it."""
    kernels = backward_kernels()
    mean, invstd, weight, version = kept[:4]
    channels_last = layout.channels_last
    if channels_last is None:
        return None
    weight_dtype = None if weight is None else weight.dtype
    known = packed.plan.norm_plan
    if known is None or known[0] is not layout or known[1] is not weight_dtype:
        found = kernels.norm_plan(layout.size, packed.plan.format, channels_last, weight_dtype, grad.device)
        known = packed.plan.norm_plan = (layout, weight_dtype, found)
    plan = known[2]
    if plan is None:
        return None
    if weight is not None and weight._version != version:
        check_version(weight, version)
    if grad.stride() != layout.stride:
        grad = grad.contiguous(memory_format=FORMATS[grad.dim()] if channels_last else torch.contiguous_format)
    want_x, want_weight, want_bias = needs
    grad_x, grad_weight, grad_bias = kernels.norm_backward(
        grad, packed.buffers[0], mean, invstd, weight, plan, packed.seed, want_x
    )
    return grad_x, grad_weight if want_weight else None, grad_bias if want_bias else None


def gradients_from_values(saved: Saved, kept: Kept, needs: tuple[bool, ...], grad: Tensor) -> Gradients | None:
    """Return the gradients from the decoded input; None if the kernels do not support it.

    The input's gradient overwrites the decoded input, if nobody else reads that.
    """
    layout = saved.layout
    mean, invstd, weight, version = kept[:4]
    if layout.channels_last is None or grad.dtype != saved.dtype:
        return None
    weight_dtype = None if weight is None else weight.dtype
    plan = values_kernels().values_plan(layout.size, saved.dtype, layout.channels_last, weight_dtype, grad.device)
    if plan is None:
        return None
    if weight is not None:
        check_version(weight, version)
    if grad.stride() != layout.stride:
        grad = grad.contiguous(memory_format=FORMATS[grad.dim()] if layout.channels_last else torch.contiguous_format)
    cell, x = saved.cell, saved.restore()
    own = saved.tensor is None and cell is not None and cell.lock is None and isinstance(cell.packed, FlatPacked)
    want_x, want_weight, want_bias = needs
    grad_x, grad_weight, grad_bias = backward_kernels().norm_backward(
        grad, x, mean, invstd, weight, plan, 0, want_x, out=x if own else None
    )
    return grad_x, grad_weight if want_weight else None, grad_bias if want_bias else None


@functools.cache
def backward_kernels() -> Any:
    """Import and return the kernels of batch norm's backward, which need Triton."""
    from encke.kernels.gpu import norm_backward

    return norm_backward


@functools.cache
def values_kernels() -> Any:
    """Import and return the plans of batch norm's backward from values, which need Triton."""
    from encke.kernels.gpu import norm_values

    return norm_values


@functools.cache
def planes_kernels() -> Any:
    """Import and return the kernels of batch norm's forward in NCHW memory, which need Triton."""
    from encke.kernels.gpu import norm_planes

    return norm_planes


@functools.cache
def forward_kernels() -> Any:
    """Import and return the kernels of batch norm's forward, which need Triton."""
    from encke.kernels.gpu import norm_forward

    return norm_forward


class BatchNormForward(LayerForward):
    """Run `nn.BatchNorm1d` to `3d` in training mode, and read their packed input in backward."""

    layers = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    def function(self, facts: SiteFacts) -> Any:
        """Return `BatchNormFunction` for the input of a batch norm, if it has 3 or more dimensions and may be lossy."""
        site = facts.site
        known = site.slot == "input" and site.need == "lossy" and site.operation == "BatchNorm"
        return in_place_of(facts.reader, BatchNormFunction) if known and site.dimensions >= 3 else None

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call with the function; return None in evaluation mode, or if the policy's codec is exact."""
        if not module.training and not (module.running_mean is None and module.running_var is None):
            return None
        if not matches(facts, x):
            return None
        codec = None
        if facts.steady is None or not forward.steady:
            codec = self.capture.policy.choose(facts.site)
            if codec.exact:
                return None
        return training_forward(module, x, facts.function, facts, codec, forward)


def training_forward(
    module: Any, x: Tensor, function: Any, facts: Any = None, codec: Any = None, forward: ForwardPass | None = None
) -> Tensor:
    """Run `forward` of a batch norm in training mode, with another function for the computation itself.

    The forward pass `forward` packs the input, and may compute the result while it does so. It is None if nothing is
    packed.
    """
    module._check_input_dim(x)
    packs = forward is not None and (codec is None or codec.reads_packed)
    weight, bias, settings = arguments_of(module, x, facts, codec, forward is not None, packs)
    return apply_function(function, x, weight, bias, settings, facts, codec, forward)


def apply_function(
    function: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings, facts: Any, codec: Any,
    forward: ForwardPass | None,
) -> Tensor:  # fmt: skip
    """Run the function, and tell the forward pass which tensor it saves."""
    if forward is None:
        return function(x, weight, bias, settings)
    call = settings[4]
    forward.deferred = call if type(call) is DeferredBatchNorm else DeferredForward(facts, codec, x)
    out = function(x, weight, bias, settings)
    if forward.deferred is not None:
        forward.run_deferred()
    return out


def arguments_of(module: Any, x: Tensor, facts: Any, codec: Any, lossy: bool, packs: bool) -> tuple[Any, Any, Settings]:
    """Return weight, bias and settings of a call in training, and count the batch.

    With `lossy`, our kernels may compute the forward. With `packs`, they may do so while the input is packed.
    """
    # Bypass `Module.__getattr__`, which is slow. A replica has its parameters as plain attributes.
    parameters, buffers = module._parameters, module._buffers
    weight = parameters["weight"] if "weight" in parameters else module.weight
    bias = parameters["bias"] if "bias" in parameters else module.bias
    momentum, batches = module.momentum, buffers["num_batches_tracked"]
    tracks = module.training and module.track_running_stats and batches is not None
    if momentum is None:
        momentum = 1.0 / float(batches + 1) if tracks else 0.0
    if x.numel() == x.shape[1]:
        verify_batch_size(x.size())
    mean = var = None
    call: Any = None
    if module.track_running_stats or not module.training:
        mean, var = buffers["running_mean"], buffers["running_var"]
    counts = tracks and batches.dtype is torch.int64 and batches.device == x.device
    if lossy and (counts or mean is None) and (mean is None) == (var is None):
        # The kernels count batches as well.
        running = None if mean is None or var is None else (mean, var, batches)
        plan = None
        if packs and x.dtype.itemsize == 2 and not x.data_ptr() & 3:
            plan = forward_kernels().forward_plan(x.shape, x.stride(), x.dtype, x.device)
        if plan is not None and all_fp32(weight, bias, *(running or ())[:2]):
            call = DeferredBatchNorm(facts, codec, x, plan, weight, bias, running, momentum, module.eps)
        elif x.is_contiguous():
            call = planes_call(x, weight, bias, running)
    if call is None and tracks:
        batches.add_(1)
    return weight, bias, (mean, var, momentum, module.eps, call)


def planes_call(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor, Tensor, Tensor] | None
) -> PlanesCall | None:
    """Return the call of the kernels for a contiguous input; None if the kernels do not support it."""
    if (weight is None) != (bias is None) or (running is not None and not all_fp32(*running[:2])):
        return None
    dtype = None
    if weight is not None and bias is not None:
        dtype = weight.dtype
        if bias.dtype is not dtype or not weight.is_contiguous() or not bias.is_contiguous():
            return None
    plan = planes_kernels().planes_forward(x.shape, x.dtype, dtype, x.device)
    return None if plan is None else PlanesCall(plan, running)


def all_fp32(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are contiguous and fp32, as the kernels require."""
    for t in tensors:  # not `all`, which would resume a generator for each tensor
        if t is None or t.dtype is not torch.float32 or not t.is_contiguous():
            return False
    return True
