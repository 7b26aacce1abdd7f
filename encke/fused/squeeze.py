"""Steps of squeeze-and-excite: a pool, activations of small values, and the product with the pool's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from encke.fused.program import POOL, Call
from encke.fused.relu import threshold_backward
from encke.fused.savings import Run, Saving, SmallSaving
from encke.fused.smooth import SMOOTH
from encke.fused.steps import Gradients, Step, Values, laid_out

aten = torch.ops.aten
OPERATIONS: dict[Any, tuple[Callable[..., Tensor], Callable[..., Tensor], bool]] = {
    nn.ReLU: (torch.relu, lambda grad, y: threshold_backward(grad, y, 0), True),
    nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.default, True),
    nn.Hardsigmoid: (aten.hardsigmoid.default, aten.hardsigmoid_backward.default, False),
    **{kind: (each.function, each.gradient, False) for kind, each in SMOOTH.items()},
}
"""Activation, its gradient, and whether the gradient reads the result instead of the input."""


class PoolStep(Step):
    """Mean of each plane. Nothing is saved."""

    def __init__(self, call: Call, size: tuple[int, ...]) -> None:
        super().__init__(call)
        self.size, self.values = size, size[2] * size[3]

    @staticmethod
    def serves(module: Any) -> bool:
        """Return whether a pool reduces each plane to one value."""
        return type(module) is POOL and module.output_size in (1, (1, 1))

    def operands(self, module: Any) -> tuple[Any, ...] | None:
        return () if self.serves(module) else None

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        values.append(aten.adaptive_avg_pool2d.default(values[self.inputs[0]], (1, 1)))

    def backward(self, kept: None, grad: Tensor, held: Any) -> Gradients:
        return ((grad / self.values).expand(self.size),), ()


class ActivationStep(Step):
    """Activation of small values."""

    def __init__(self, call: Call, saving: SmallSaving) -> None:
        super().__init__(call)
        self.saving, self.savings = saving, (saving,)
        self.function, self.gradient, self.saves_result = OPERATIONS[call.kind]

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        x = values[self.inputs[0]]
        y = self.function(x)
        values.append(y)
        return self.saving.hold(y if self.saves_result else x, run)

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        return (self.gradient(grad, self.saving.restore(kept, held)),), ()


class ProductStep(Step):
    """Product of a value and a small value, which has one element for each plane."""

    makes = "Mul"

    def __init__(self, call: Call, savings: tuple[Saving, Saving], stride: tuple[int, ...]) -> None:
        super().__init__(call)
        self.savings = savings
        self.small = int(isinstance(savings[1], SmallSaving))
        """Index of the small factor."""
        self.stride = stride
        """Stride of the result."""
        self.number = 0
        """Number of the step in its block."""

    def forward(self, module: Any, values: Values, operands: tuple[Any, ...], run: Run) -> Any:
        first, second = values[self.inputs[0]], values[self.inputs[1]]
        y = first * second
        values.append(laid_out(y, y.shape, self.stride))
        return self.savings[0].hold(first, run), self.savings[1].hold(second, run)

    def factors(self, kept: Any, held: Any) -> tuple[Tensor, Tensor]:
        """Return the small factor, and a copy of the other factor that nobody else reads."""
        small, other = self.small, 1 - self.small
        return self.savings[small].restore(kept[small], held), self.savings[other].restore(kept[other], held)

    def restore(self, held: Any) -> Tensor:
        scale, x = self.factors(held.kept[self.number], held)
        return x.mul_(scale)

    def backward(self, kept: Any, grad: Tensor, held: Any) -> Gradients:
        # The next convolution has computed the gradient for this step alone, so it may be overwritten.
        scale, x = self.factors(kept, held)
        grad_scale = x.mul_(grad).sum((2, 3), True, dtype=scale.dtype)  # keeps the dtype under autocast
        del x
        found = (grad_scale, grad.mul_(scale))
        return found if self.small == 0 else found[::-1], ()
