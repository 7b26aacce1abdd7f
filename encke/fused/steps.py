"""Steps of a block: convolution, norms, activations and sum, computed as the fused layers compute them.

A step stores what does not change between forward passes. Its `forward` computes a value and returns the data that
backward needs. Its `backward` returns the gradients of the step's inputs and parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from encke.capture.casts import CastWeight
from encke.capture.expressions import batch_norm
from encke.capture.facts import SiteFacts
from encke.capture.hooks import Capture
from encke.capture.ledger import CAST_AGAIN, CASTS, Record
from encke.codecs.base import check_version
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import FORMATS, Layout
from encke.fused.batchnorm import (
    Settings,
    all_fp32,
    arguments_of,
    backward_kernels,
    forward_kernels,
    gradients_from_codes,
    normalise,
    plain_gradients,
    planes_call,
)
from encke.fused.conv import PLAIN, convolution_backward, convolve, operands_of, parts_of, split_gradients
from encke.fused.leaky import gradient_from_signs, leaky_relu_, leaky_relu_backward
from encke.fused.program import Call
from encke.fused.relu import gradient_from_codes, threshold_backward
from encke.fused.savings import ComputedSaving, PackedSaving, Run, Saving
from encke.fused.smooth import SMOOTH
from encke.kernels.formats import NORM_GROUP
from encke.kernels.formats import SMOOTH as ACTS
from encke.torch_internals import copy_together

Values = list[Any]
"""Values of a forward pass, by number."""
Gradients = tuple[tuple[Any, ...], tuple[Tensor | None, ...]]
"""Gradients of a step's inputs, and of its parameters."""
ALL = (True, True, True)
TOGETHER = 1 << 26
"""Packed bytes up to which a block makes one allocation. Larger blocks release memory step by step in backward."""


class Step:
    """Computation of one call of a block's program."""

    makes = ""
    """Operation whose result backward may recompute with `restore`."""
    parameters = 0
    """Number of parameters."""
    savings: tuple[Saving, ...] = ()
    """Values that backward needs."""

    def __init__(self, call: Call) -> None:
        self.inputs = call.inputs
        self.in_place = call.in_place
        """Whether the result may overwrite the first input."""
        self.records: list[Record] = []
        self.small_bytes = 0
        """Records and bytes of small tensors for the report, in addition to those of the savings."""

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        """Return the current parameters of the call; None if the call differs from the plan."""
        return ()

    def restore(self, held: Any) -> Tensor:
        """Return the result, recomputed from what the block holds."""
        raise NotImplementedError

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        """Append the result to the values, and return the data that backward needs."""
        raise NotImplementedError

    def backward(self, kept: Any, grad: Any, held: Any) -> Gradients:
        """Return the gradients of the inputs and of the parameters.

        Args:
            kept: Data returned by `forward`.
            grad: Gradient of the result. A batch norm that also computes the gradient of the next ReLU gets a pair:
                the gradient of the ReLU's result, and that result packed.
            held: Everything that the block holds (`BlockSaved`).
        """
        raise NotImplementedError


class ConvStep(Step):
    """Convolution."""

    def __init__(
        self, call: Call, saving: Saving, module: Any, x: Tensor, size: tuple[int, ...], stride: tuple[int, ...] | None,
        split: bool, facts: SiteFacts | None, cast: SiteFacts | None, capture: Capture,
    ) -> None:  # fmt: skip
        super().__init__(call)
        self.saving, self.savings = saving, (saving,)
        self.facts = facts
        """Site that saves the input; None for a small input, which has no site."""
        self.parts: int | None = None if split and facts is not None else 1
        """Number of parts into which the batch is split; determined in the first pass."""
        self.dtype, self.dimensions, self.device_type = x.dtype, x.dim(), x.device.type
        self.shape, self.weight_dtype = module.weight.shape, module.weight.dtype
        self.parameters = 1 if module.bias is None else 2
        self.geometry = (module.stride, module.padding, module.dilation, module.groups)
        self.settings = (*self.geometry[:3], False, (0,) * len(module.stride), module.groups)
        self.size, self.stride = size, stride
        """Size and stride of the result. The stride is None where it does not matter."""
        self.split = split
        self.cast = cast
        """Site of the weight's cast copy, if backward makes that copy again."""
        self.changed, self.policy = capture.keep_casts, capture.policy
        copied = 0 if module.weight.dtype is x.dtype else module.weight.numel() * x.element_size()
        if cast is None:
            self.small_bytes = copied
        else:
            self.records.append(Record(CASTS, copied))
            self.records[0].codec = CAST_AGAIN

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        found = operands_of(module, self.dtype, self.dimensions, self.device_type)
        if found is None or (module.stride, module.padding, module.dilation, module.groups) != self.geometry:
            return None
        weight, bias = found
        if weight.shape != self.shape or weight.dtype is not self.weight_dtype:
            return None
        if (bias is None) != (self.parameters == 1) or (bias is not None and bias.dtype is not weight.dtype):
            return None
        if self.cast is not None and (self.cast.cast is None or self.cast.cast.parameter is not weight):
            return None
        if bias is None:
            return (weight,)
        return found if bias.requires_grad else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        weight, bias = operands if len(operands) == 2 else (operands[0], None)  # the block has already cast them
        x = values[self.inputs[0]]
        kept = self.saving.hold(x, run)
        if self.parts is None:
            assert self.facts is not None
            self.parts = parts_of(x, weight, self.settings, self.facts.site, self.policy)
        y = convolve(x, weight, bias, self.settings, self.parts)
        values.append(laid_out(y, self.size, self.stride))
        if self.cast is not None:
            return CastWeight(self.cast.cast.parameter, self.dtype, None, self.changed), 0, kept
        return weight, weight._version, kept

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        weight, version, x = kept
        if weight._version != version:
            check_version(weight, version)
        sizes, needs = (None, (True, True, False)) if self.parameters == 1 else ([self.shape[0]], ALL)
        restore = self.saving.restore
        if self.split:
            parts = self.parts or 1
            found = split_gradients(lambda: (restore(x, held), weight), grad, sizes, self.settings, needs, parts)
        else:
            found = convolution_backward(grad, restore(x, held), weight, sizes, *self.settings, needs)
        return found[:1], found[1 : 1 + self.parameters]


def laid_out(y: Tensor, size: tuple[int, ...], stride: tuple[int, ...] | None) -> Tensor:
    """Return a result with the strides of the previous pass; another backend may have returned other strides."""
    if stride is None or y.stride() == stride:
        return y
    return torch.empty_strided(size, stride, dtype=y.dtype, device=y.device).copy_(y)


def cast_together(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast weights to another dtype in one launch."""
    copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    copy_together(copies, weights)
    return copies


class NormStep(Step):
    """Batch norm in training mode with a packed input."""

    parameters = 2

    def __init__(self, call: Call, facts: SiteFacts, module: Any) -> None:
        super().__init__(call)
        self.saving = saving = PackedSaving(facts)
        self.savings = (saving,)
        self.plan, self.layout = plan, layout = saving.plan, saving.layout
        self.channels, self.dtype = layout.size[1:2], module.weight.dtype
        self.relu: ReluStep | None = None
        """Next ReLU, if its step writes the result of both layers and this step computes the gradient of both."""
        self.smooth: SmoothStep | None = None
        """Smooth activation that this step also computes."""
        self.act = 0
        """Number of that activation in the kernels; 0 for none."""
        self.kernels = None
        """Plan of the kernels that compute the forward while the input is packed."""
        if plan.fuses_forward and plan.format.group == NORM_GROUP and running_of(module) is not None:
            size = tuple(layout.size)
            self.kernels = forward_kernels().forward_plan(size, layout.stride, plan.format.dtype, plan.device)
        self.backward_plan: Any = None
        """Plan of the kernels that read codes in backward."""
        self.grad_is_own = False
        """Whether only this step reads the gradient of the result, and may overwrite it."""

    def plan_backward(self, device: torch.device) -> None:
        """Plan the kernels of backward, once the next steps are known."""
        layout, gate = self.layout, None if self.relu is None else self.relu.plan.format
        if layout.channels_last is not None:
            size, last = tuple(layout.size), layout.channels_last
            self.backward_plan = backward_kernels().norm_plan(
                size, self.plan.format, last, self.dtype, device, gate=gate, act=self.act
            )

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        for parameter in (weight, bias):
            if type(parameter) not in PLAIN or not parameter.requires_grad or parameter.shape != self.channels:
                return None
            if parameter.dtype is not self.dtype:
                return None
        return None if self.kernels is not None and running_of(module) is None else (weight, bias)

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        saving, x, kernels = self.saving, values[self.inputs[0]], self.kernels
        if kernels is None:
            weight, bias, settings = arguments_of(module, x, saving.facts, saving.steady.codec, True, False)
            out, kept = normalise(x, weight, bias, settings)
            values.append(out)
            return saving.hold(x, run), kept
        weight, bias = operands
        plan, buffers = self.plan, module._buffers
        running = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
        statistics, seed = next(run.statistics), saving.seed(run.forward)
        data = plan.encode_moments(x, run.workspace, seed, next(run.codes))
        kernels.gather(run.workspace, weight, bias, running, module.momentum, module.eps, statistics)
        packed = saving.packed(data, seed)
        if self.relu is not None:
            values.append((x if self.in_place else torch.empty_like(x), x, statistics))
        else:
            values.append(x if self.in_place else torch.empty_like(x))
            kernels.normalise(x, statistics, values[-1], self.act)
        return packed, (statistics, None, weight, weight._version, None, 0, module.eps)

    def backward(self, kept: Any, grad: Any, held: Any) -> Gradients:
        packed, settings = kept
        plan, gate, own = self.backward_plan, None, self.grad_is_own
        if self.relu is not None:
            grad, gate = grad
            if plan is None or not plan.gate_bits or grad.dtype is not packed.dtype:
                grad, gate, own = relu_gradient(gate, self.relu.layout, grad), None, False
        elif self.smooth is not None and (plan is None or grad.dtype is not packed.dtype):
            grad, plan = self.smooth.kind.gradient(grad, self.restore_result(packed, settings)), None
        if plan is None or grad.dtype is not packed.dtype:
            if self.kernels is not None:
                settings = (settings[0].view(4, -1), *settings[1:])
            found = plain_gradients(packed.decode_in(self.layout), settings, ALL, grad)
            return found[:1], found[1:]
        mean, invstd, weight, version = settings[:4]
        if weight._version != version:
            check_version(weight, version)
        if grad.stride() != self.layout.stride:
            last = self.layout.channels_last
            grad, own = grad.contiguous(memory_format=FORMATS[grad.dim()] if last else torch.contiguous_format), True
        codes, out = None if gate is None else gate.buffers[0], grad if own else None
        if self.smooth is not None:
            codes = mean
        grad_x, grad_weight, grad_bias = backward_kernels().norm_backward(
            grad, packed.buffers[0], mean, invstd, weight, plan, packed.seed, True, codes, out, held.scratch
        )
        return (grad_x,), (grad_weight, grad_bias)

    def restore_result(self, packed: GroupQuantPacked, settings: Any) -> Tensor:
        """Return the result before the activation, recomputed with plain operations."""
        rows, _, weight, *_, eps = settings
        mean, invstd, _, bias = rows.view(4, -1)
        return batch_norm(packed.decode_in(self.layout), mean, invstd, bias, weight, eps).to(packed.dtype)


def running_of(module: Any) -> tuple[Tensor, ...] | None:
    """Return running mean, running variance and number of batches for the kernels to update; None if they cannot."""
    buffers, parameters = module._buffers, module._parameters
    mean, var, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    if not module.track_running_stats or mean is None or batches is None or module.momentum is None:
        return None
    if batches.dtype is not torch.int64 or batches.device != mean.device:
        return None
    return (mean, var, batches) if all_fp32(parameters["weight"], parameters["bias"], mean, var) else None


class InstanceNormStep(Step):
    """Instance norm with a packed input, computed as a batch norm of one sample with a channel for each plane."""

    def __init__(self, call: Call, facts: SiteFacts, module: Any, size: tuple[int, ...]) -> None:
        super().__init__(call)
        self.saving = PackedSaving(facts)
        self.savings = (self.saving,)
        self.size, self.layout = size, self.saving.layout
        self.parameters = 0 if module.weight is None else 2
        self.dtype = None if module.weight is None else module.weight.dtype

    @staticmethod
    def serves(module: Any) -> bool:
        """Return whether the statistics are computed from the input alone."""
        return not module.track_running_stats and module.running_mean is None

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        found = tuple(each for each in (module.weight, module.bias) if each is not None)
        if len(found) != self.parameters or not self.serves(module) or module.num_features != self.size[1]:
            return None
        for parameter in found:
            if type(parameter) not in PLAIN or not parameter.requires_grad or parameter.shape != self.size[1:2]:
                return None
            if parameter.dtype is not self.dtype:
                return None
        return found

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        x = values[self.inputs[0]].contiguous().view(self.layout.size)
        weight, bias = (each.repeat(self.size[0]) for each in operands) if operands else (None, None)
        settings: Settings = (None, None, 0.0, module.eps, planes_call(x, weight, bias, None))
        out, kept = normalise(x, weight, bias, settings)
        values.append(
            torch.ops.aten._unsafe_view.default(out, self.size)
        )  # not a view: the next activation may be in-place
        return self.saving.hold(x, run), kept

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        packed, settings = kept
        grad, needs = grad.reshape(self.layout.size), (True, *(self.parameters > 0,) * 2)
        found = None
        if grad.dtype is packed.dtype:
            found = gradients_from_codes(packed, self.layout, settings, needs, grad)
        if found is None:
            found = plain_gradients(packed.decode_in(self.layout), settings, needs, grad)
        grad_x, *others = found
        assert grad_x is not None
        rows = [each.view(self.size[:2]).sum(0) for each in others if each is not None]
        return (grad_x.view(self.size),), tuple(rows)


class ReluStep(Step):
    """ReLU with a packed result."""

    def __init__(self, call: Call, facts: SiteFacts) -> None:
        super().__init__(call)
        self.saving = PackedSaving(facts)
        self.savings = (self.saving,)
        self.plan, self.layout = self.saving.plan, self.saving.layout
        last = self.layout.stride[1] == 1 and len(self.layout.size) >= 4
        self.fused = self.plan.fuses_forward and last and self.plan.format.dtype.itemsize == 2
        self.norm: NormStep | None = None
        """Previous batch norm, if this step computes its normalisation."""

    def join(self, norm: Step) -> None:
        """Compute the normalisation of a batch norm too, if there is a kernel and no other step reads its result."""
        if not (self.in_place and self.fused and self.plan.fuses_norm_relu):
            return
        if isinstance(norm, NormStep) and norm.kernels is not None:
            self.norm, norm.relu = norm, self

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        return () if self.in_place or not module.inplace else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        x, saving = values[self.inputs[0]], self.saving
        if not self.fused:
            values.append(torch.relu_(x) if self.in_place else torch.relu(x))
            return saving.hold(values[-1], run)
        seed = saving.seed(run.forward)
        if self.norm is not None:
            y, x, statistics = x
            data = self.plan.encode_norm_relu(x, statistics, y, seed, next(run.codes))
        else:
            y = x if self.in_place else torch.empty_like(x)
            data = self.plan.encode_relu(x, y, seed, next(run.codes))
        values.append(y)
        return saving.packed(data, seed)

    def backward(self, kept: Any, grad: Any, held: Any) -> Gradients:
        return ((grad, kept) if self.norm is not None else relu_gradient(kept, self.layout, grad),), ()


class LeakyReluStep(Step):
    """In-place leaky ReLU with a packed result; the codes keep its signs."""

    def __init__(self, call: Call, facts: SiteFacts, module: Any) -> None:
        super().__init__(call)
        self.saving = PackedSaving(facts)
        self.savings = (self.saving,)
        self.slope: float = module.negative_slope

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        return () if module.inplace and module.negative_slope == self.slope else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        values.append(leaky_relu_(values[self.inputs[0]], self.slope))
        return self.saving.hold(values[-1], run)

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        layout, found = self.saving.layout, None
        if grad.dtype is kept.dtype:
            found = gradient_from_signs(kept, layout, grad, self.slope)
        if found is None:
            found = leaky_relu_backward(grad, kept.decode_in(layout), self.slope, True)
        return (found,), ()


class SmoothStep(Step):
    """Smooth activation of a batch norm's result, computed by the batch norm's step.

    Backward recomputes its input from the batch norm's packed input.
    """

    def __init__(self, call: Call, facts: SiteFacts, module: Any) -> None:
        super().__init__(call)
        self.kind = SMOOTH[call.kind]
        self.makes, self.act = self.kind.operation, ACTS[self.kind.operation]
        self.saving = ComputedSaving(facts, self.restore_input)
        self.savings = (self.saving,)
        self.norm: NormStep | None = None
        """Batch norm whose step computes the activation."""
        self.inplace: bool = module.inplace
        """Whether the layer is in-place."""

    def join(self, norm: Step) -> None:
        """Let a batch norm compute this step, if its kernels can and its input is the source of this step's input."""
        if isinstance(norm, NormStep) and norm.kernels is not None:
            if norm.saving.facts.dependents >= {self.saving.facts}:
                self.norm, norm.smooth, norm.act = norm, self, self.act

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        return () if module.inplace is self.inplace else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        y = values[self.inputs[0]]
        if self.inplace:
            increment_version(y)  # as the in-place operation does
        values.append(y)

    def restore_input(self, held: Any) -> Tensor:
        """Return the input: the batch norm's result, decoded and normalised in one kernel."""
        assert self.norm is not None
        packed, (rows, _, weight, version, *_) = held.kept[self.inputs[0] - 1]
        if weight._version != version:
            check_version(weight, version)
        (mean, invstd, _, bias), layout = rows.view(4, -1).unbind(), self.norm.layout
        norm = (mean, invstd, weight, bias)
        found: Tensor = packed.plan.decode_strided(packed.buffers[0], packed.seed, layout.size, layout.stride, norm)
        return found

    def restore(self, held: Any) -> Tensor:
        """Return the result."""
        return self.kind.function_(self.restore_input(held))

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        return (grad,), ()


def relu_gradient(packed: GroupQuantPacked, layout: Layout, grad: Tensor) -> Tensor:
    """Return the gradient of a ReLU's input from its packed result."""
    found = gradient_from_codes(packed, layout, grad) if grad.dtype is packed.dtype else None
    return threshold_backward(grad, layout.restore(packed.decode_flat(mask=True)), 0) if found is None else found


class SumStep(Step):
    """Sum of two values of the same size and dtype."""

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        first, second = self.inputs
        if self.in_place:
            values.append(values[first].add_(values[second]))
        else:
            values.append(values[first] + values[second])

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        return (grad, grad), ()
