"""GELU written out as a formula: it saves four tensors as large as its input, where the input alone would do.

That is what transformers' GPT-2 has (`0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`). An attached layer
of that kind runs its own forward, but saves only its input, as `torch.nn.GELU` does, and has that one's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional

from encke.capture.hooks import Capture
from encke.capture.ledger import Record
from encke.capture.modules import Layer, inside_compile
from encke.capture.sites import Site
from encke.fused import layers as fused

NAMES = {"NewGELUActivation", "NewGELU"}
"""Classes that may have this formula; whether they do is tried."""
PROBE = torch.linspace(-8, 8, 129)


class Gelu(torch.autograd.Function):
    """The layer's own forward, and the backward of torch's operation of this name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.encke_slots = ("self",)
        ctx.save_for_backward(x)
        return plain(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        # Under autocast the formula is computed in fp32, and its input has 16 bits.
        return torch.ops.aten.gelu_backward(grad, x.to(grad.dtype), approximate="tanh").to(x.dtype), None


class GeluForward(fused.Forward):
    """Of a GELU written out. The way is the same for inputs of all sizes: the two ways save different tensors."""

    def __init__(self, capture: Capture, layer: Layer, kind: type[nn.Module]) -> None:
        super().__init__(capture, layer, "", 0)
        self.layers = (kind,)
        self.spared = Site(layer.name, -1, (), operation="Gelu", slot="(formula)")
        self.costs: dict[tuple[Any, ...], int] = {}
        """Bytes that the formula saves for each value, by dtypes."""

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        layer = self.layer
        if inside_compile() if layer.parent is None else is_compiling():
            return self.traced(*inputs, **named)
        # Replicas and shallow copies come here too: without weights they are as good as the layer itself.
        module: Any = layer.owner()
        plain = type(module).forward.__get__(module)
        frame = self.capture.passes.enter(layer)
        if frame is None:
            return plain(*inputs, **named)
        output, site = None, frame.sites[0] if frame.sites else None
        try:
            if not named and len(inputs) == 1 and self.suits(module, inputs[0], site):
                output = self.spare(plain, inputs[0])
            else:
                output = plain(*inputs, **named)
            return output
        finally:
            self.capture.passes.leave(layer, output)

    def suits(self, module: Any, x: Any, site: Site | None) -> bool:
        """Whether what this call saves goes to our capture, and has not gone there the plain way before."""
        if type(module) not in self.layers or type(x) is not Tensor or (site is not None and site.operation != "Gelu"):
            return False
        return torch.is_grad_enabled() and self.hooked(x)

    def spare(self, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """The layer's result; nothing but its input is saved, and the report says so."""
        if x.requires_grad:
            record = Record(self.spared, x.numel() * (self.cost(plain, x) - x.element_size()))
            record.codec = "recomputed"
            self.capture.threads.forward.tally.records.append(record)
        return Gelu.apply(x, plain)

    def cost(self, plain: Callable[[Tensor], Tensor], x: Tensor) -> int:
        """Bytes that plain autograd would hold for each value, for the report."""
        kind = x.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        key = (x.dtype, kind, torch.get_autocast_dtype(kind) if cast else None)
        if key not in self.costs:
            self.costs[key] = saved_each(plain, x.dtype, x.device)
        return self.costs[key]


def install(layers: Iterable[Layer], capture: Capture) -> list[GeluForward]:
    """Gives such layers that forward; each has `remove()`."""
    installed: list[GeluForward] = []
    for layer in layers:
        module = layer.owner()
        if module is None or not fused.ENABLED or not layer.compress or type(module).__name__ not in NAMES:
            continue
        fused.drop_copied(module)
        if "forward" not in module.__dict__ and is_tanh_gelu(module):
            installed.append(GeluForward(capture, layer, type(module)))
            module.__dict__["forward"] = installed[-1]
    return installed


def saved_each(function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that autograd saves for each value of a pointwise function's input."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        storages[storage.data_ptr()] = storage
        return t.detach()

    x = torch.ones(64, dtype=dtype, device=device, requires_grad=True)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function(x)
    del result
    return sum(storage.nbytes() for storage in storages.values()) // x.numel()


def is_tanh_gelu(module: nn.Module) -> bool:
    """Whether a layer computes GELU by its tanh formula, as far as some values tell."""
    try:
        with torch.no_grad():
            found = type(module).forward(module, PROBE)
        return torch.allclose(found, functional.gelu(PROBE, approximate="tanh"), atol=1e-5)
    except Exception:
        return False
