"""Steps of a block: convolution, batch norm, ReLU and sum, computed as the fused layers compute them.

A step has what does not change from pass to pass. Its `forward` computes a value and returns what backward needs; its
`backward` returns the gradients of the values that it took and of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encke.capture.casts import CastWeight
from encke.capture.facts import SiteFacts, SteadySave
from encke.capture.ledger import CAST_AGAIN, CASTS, Record
from encke.capture.passes import ForwardPass
from encke.codecs.base import check_version
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import Layout
from encke.fused.batchnorm import arguments_of, gradients_from_codes, normalise, plain_gradients
from encke.fused.conv import PLAIN, convolution, convolution_backward, operands_of, split_gradients
from encke.fused.program import Call
from encke.fused.relu import gradient_from_codes as relu_gradient
from encke.fused.relu import threshold_backward
from encke.kernels import GroupPlan, mix
from encke.torch_internals import copy_together

Values = list[Any]
"""Values of a pass by number."""
Gradients = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]
"""Gradients of the values that a step took, and of its parameters."""
ALL = (True, True, True)


class Step:
    """A call of a block's program."""

    parameters = 0
    """Number of parameters that it takes."""

    def __init__(self, call: Call, facts: SiteFacts | None = None) -> None:
        self.inputs = call.inputs
        self.in_place = call.in_place
        """Whether the result may take the place of the first value."""
        self.facts: Any = facts
        """Site inside the block that saves first; None for a sum, and where that is the block's input."""
        self.steady: Any = None if facts is None else facts.steady
        """Decisions of that site."""
        self.records: list[Record] = []
        self.small_bytes = 0
        """Records, and bytes of small tensors, for the report."""

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        """Return the parameters of a call now; None where it is not the one that was planned."""
        return ()

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], forward: ForwardPass) -> Any:
        """Append the result to the values, and return what backward needs."""
        raise NotImplementedError

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        """Return the gradients of the values and of the parameters; `held` is what the block holds."""
        raise NotImplementedError


class PackingStep(Step):
    """A step that packs its input or its result."""

    def __init__(self, call: Call, facts: SiteFacts) -> None:
        super().__init__(call, facts)
        self.plan: GroupPlan = facts.encoder_state.plan[4]
        self.layout: Layout = self.steady.layout
        record = Record(facts, self.plan.numel * self.plan.format.dtype.itemsize, self.plan.nbytes)
        record.codec = self.steady.codec
        self.records.append(record)

    def number(self, forward: ForwardPass) -> int:
        """Return the key of what is packed in this pass."""
        return mix(forward.step, self.facts.site.number, forward.rank)


class ConvStep(Step):
    """Convolution of a packed value."""

    def __init__(
        self, call: Call, facts: SiteFacts | None, module: Any, x: Tensor, result: SteadySave, split: bool,
        cast: SiteFacts | None, changed: Callable[[], None],
    ) -> None:  # fmt: skip
        super().__init__(call, facts)
        self.dtype, self.dimensions, self.device_type = x.dtype, x.dim(), x.device.type
        self.shape, self.weight_dtype = module.weight.shape, module.weight.dtype
        self.parameters = 1 if module.bias is None else 2
        self.geometry = (module.stride, module.padding, module.dilation, module.groups)
        self.settings = (*self.geometry[:3], False, (0,) * len(module.stride), module.groups)
        self.size, self.stride = result.size, result.stride
        self.split = split
        self.cast = cast
        """Site of the weight's copy, if that is made again in backward."""
        self.changed = changed
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
        if (bias is None) != (self.parameters == 1):
            return None
        if self.cast is not None and (self.cast.cast is None or self.cast.cast.parameter is not weight):
            return None
        if bias is None:
            return (weight,)
        return found if bias.requires_grad else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], forward: ForwardPass) -> Any:
        weight = operands[0]  # cast already
        bias = operands[1] if len(operands) == 2 else None
        if bias is not None and bias.dtype is not self.dtype:
            bias = bias.to(self.dtype)
        y = convolution(values[self.inputs[0]], weight, bias, *self.settings)
        if y.stride() != self.stride:
            # Another backend than in the pass before.
            y = torch.empty_strided(self.size, self.stride, dtype=y.dtype, device=y.device).copy_(y)
        values.append(y)
        if self.cast is not None:
            return CastWeight(self.cast.cast.parameter, self.dtype, None, self.changed)
        return weight, weight._version

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        weight, version = kept
        if weight._version != version:
            check_version(weight, version)
        sizes, needs = (None, (True, True, False)) if self.parameters == 1 else ([self.shape[0]], ALL)
        if self.split:
            found = split_gradients(lambda: (self.restore(held), weight), grad, sizes, self.settings, needs)
        else:
            found = convolution_backward(grad, self.restore(held), weight, sizes, *self.settings, needs)
        return found[:1], found[1 : 1 + self.parameters]  # type: ignore[return-value]

    def restore(self, held: Any) -> Tensor:
        """Return the value that was taken."""
        source = self.inputs[0]
        return held.kept[source - 1].decode_in(self.steady.layout) if source else held.restore()


def cast_together(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of weights in another dtype, made in one launch."""
    copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    copy_together(copies, weights)
    return copies


class NormStep(PackingStep):
    """Batch norm in training, whose input is packed."""

    parameters = 2

    def __init__(self, call: Call, facts: SiteFacts) -> None:
        super().__init__(call, facts)
        self.channels = self.layout.size[1:2]

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        for parameter in (weight, bias):
            if type(parameter) not in PLAIN or not parameter.requires_grad or parameter.shape != self.channels:
                return None
        return weight, bias

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], forward: ForwardPass) -> Any:
        source, steady, facts = self.inputs[0], self.steady, self.facts
        x = values[source]
        weight, bias, settings = arguments_of(module, x, facts, steady.codec, True)
        out, kept = normalise(x, weight, bias, settings)
        arguments = (steady.packed_layout, steady.length, self.number(forward), facts.encoder_state)
        if settings[4] is None:
            packed = steady.codec.encode_run(x, *arguments)
        else:
            packed = settings[4].encode(steady.codec, *arguments)
        values.append(out)
        return packed, kept

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        packed, settings = kept
        found = None
        if grad.dtype is packed.dtype:
            found = gradients_from_codes(packed, self.layout, settings, ALL, grad)
        if found is None:
            found = plain_gradients(packed.decode_in(self.layout), settings, ALL, grad)
        return found[:1], found[1:]  # type: ignore[return-value]


class ReluStep(PackingStep):
    """ReLU, whose result is packed."""

    def __init__(self, call: Call, facts: SiteFacts) -> None:
        super().__init__(call, facts)
        last = self.layout.stride[1] == 1 and len(self.layout.size) >= 4
        self.fused = self.plan.fuses_forward and last and self.plan.format.dtype.itemsize == 2

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        return () if self.in_place or not module.inplace else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], forward: ForwardPass) -> Any:
        source, codec = self.inputs[0], self.steady.codec
        x, seed = values[source], mix(codec.seed, self.number(forward))
        if self.fused:
            y = x if self.in_place else torch.empty_like(x)
            data = self.plan.encode_relu(x, y, seed)
        else:
            y = torch.relu_(x) if self.in_place else torch.relu(x)
            data = self.plan.encode(y, seed)
        values.append(y)
        return GroupQuantPacked(codec, self.steady.packed_layout, data, seed, self.plan)

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        found = relu_gradient(kept, self.layout, grad) if grad.dtype is kept.dtype else None
        if found is None:
            found = threshold_backward(grad, self.layout.restore(kept.decode_flat(mask=True)), 0)
        return (found,), ()


class SumStep(Step):
    """Sum of two values of one size and dtype."""

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], forward: ForwardPass) -> Any:
        first, second = self.inputs
        if self.in_place:
            values.append(values[first].add_(values[second]))
        else:
            values.append(values[first] + values[second])

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        return (grad, grad), ()
