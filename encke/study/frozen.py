"""One frozen training step: the same batch and dropout masks each time, with every layer's input and gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.hooks import SMALL
from encke.capture.nodes import VIEWS, operation_name
from encke.policies.comet.products import PRODUCTS
from encke.policies.comet.theory import Product
from encke.study.models import loss_of

SLOTS = {"Convolution": "input", "Linear": "input", "Addmm": "mat1", "Mm": "self"}
"""The slot in which each operation of a layer saves its input."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A convolution or linear layer: its weight's gradient, and the tensors that it is computed from."""

    name: str
    weight: nn.Parameter
    x: Tensor
    """The input; for a linear layer a matrix of rows."""
    g: Tensor
    """The gradient of the output, in the same form."""
    gradient: Tensor
    """The weight's plain gradient."""
    product: Product
    weight_gradient: Callable[[Tensor, Tensor], Tensor]
    """(output gradient, input) -> the weight's gradient. Linear in both, so that errors pass through it."""

    @property
    def kind(self) -> str:
        return "convolution" if self.x.dim() > 2 else "linear"

    @property
    def small(self) -> bool:
        """Whether the input is so small that capture keeps it exactly."""
        return self.x.numel() * self.x.element_size() < SMALL

    @property
    def share(self) -> float:
        """Share of non-zeros of the input."""
        return int(torch.count_nonzero(self.x)) / self.x.numel()

    def planes(self, values: Tensor) -> Tensor:
        """Return an input or output gradient as (planes, channels, positions); a linear layer has one plane."""
        return values.flatten(2) if values.dim() > 2 else values.t()[None]

    def gradient_error(self, error: Tensor) -> Tensor:
        """Return the error of the weight's gradient that an error of the input causes."""
        return self.weight_gradient(self.g, error)


def rms(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) / max(values.numel(), 1) ** 0.5


class Frozen:
    """A model, a batch and a seed: every forward and backward pass gives the same gradients."""

    def __init__(self, model: nn.Module, inputs: Tensor, targets: Tensor, seed: int) -> None:
        self.model = model
        self.inputs, self.targets = inputs, targets
        self.seed = seed
        self.plain = {name: g.clone() for name, g in self.gradients().items()}
        again = self.gradients()
        self.repeatable = {name for name, g in self.plain.items() if torch.equal(g, again[name])}
        """Parameters whose gradient is the same in two plain runs, bit for bit: on a CPU all of them."""

    def gradients(self) -> dict[str, Tensor]:
        """Compute the gradients of all parameters."""
        torch.manual_seed(self.seed)
        self.model.zero_grad()
        loss_of(self.model, self.inputs, self.targets).backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def name_of(self, weight: nn.Parameter) -> str:
        """Return the name of a weight; a shared weight has the name of its first user."""
        return next(name for name, p in self.model.named_parameters() if p is weight)

    def layers(self) -> list[Layer]:
        """Return every convolution and linear layer, in the order of the forward pass."""
        inputs: dict[str, tuple[nn.Parameter, Tensor, Any]] = {}
        output_gradients: dict[str, Tensor] = {}

        def watch(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                def at_backward(gradients: tuple[Tensor, ...]) -> None:
                    output_gradients[name] = gradients[0].detach().clone()

                output.grad_fn.register_prehook(at_backward)  # type: ignore[union-attr]
                assert isinstance(module.weight, nn.Parameter)
                inputs[name] = (module.weight, args[0].detach(), product_node(output.grad_fn))

            return hook

        kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
        hooks = [m.register_forward_hook(watch(n)) for n, m in self.model.named_modules() if isinstance(m, kinds)]
        try:
            self.gradients()
        finally:
            for hook in hooks:
                hook.remove()
        return [
            self._layer(name, weight, x, output_gradients[name], node) for name, (weight, x, node) in inputs.items()
        ]

    def _layer(self, name: str, weight: nn.Parameter, x: Tensor, g: Tensor, node: Any) -> Layer:
        operation = operation_name(node)
        if operation != "Convolution":
            x, g = x.flatten(0, -2), g.flatten(0, -2)
        match = PRODUCTS[operation](node, SLOTS[operation], tuple(x.shape))
        assert match is not None and match[1] is weight, f"the weight of {name} was not found"
        product, _, _, weight_gradient = match
        # A matrix product's gradient is that of the transposed weight.
        transposed = operation in ("Addmm", "Mm")
        function = (lambda g, x: weight_gradient(g, x).t()) if transposed else weight_gradient
        return Layer(name, weight, x, g, self.plain[self.name_of(weight)], product, function)


def product_node(node: Any) -> Any:
    """Return the operation that made an output, behind its views."""
    while operation_name(node) not in SLOTS:
        if operation_name(node) not in VIEWS:
            raise RuntimeError(f"the output of a layer comes from {node.name()}, whose weight gradient is not known")
        node = node.next_functions[0][0]
    return node
