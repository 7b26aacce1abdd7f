"""GELU written as a formula in Python, which saves four tensors as large as its input where the input alone suffices.

transformers' GPT-2 has such a layer (`0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3)))`). Once attached, it
runs its own forward, but saves only its input and uses the backward of `torch.nn.GELU`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from encke.capture.facts import SiteFacts
from encke.capture.hooks import Capture
from encke.capture.ledger import Record
from encke.capture.modules import Layer
from encke.capture.passes import ForwardPass, Frame
from encke.capture.sites import Site
from encke.fused.base import TrackedForward

NAMES = {"NewGELUActivation", "NewGELU"}
"""Names of classes that may have this formula. A trial tells whether they do."""
PROBE = torch.linspace(-8, 8, 129)


class Gelu(torch.autograd.Function):
    """GELU with the layer's own forward and the backward of PyTorch's operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the layer's result, and save only its input."""
        ctx.encke_slots = ("self",)
        ctx._saved_approximate = "tanh"  # as on the nodes of PyTorch's operation
        ctx.save_for_backward(x)
        return plain(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the input's gradient."""
        (x,) = ctx.saved_tensors
        # Under autocast the formula is computed in fp32, and its input has 16 bits.
        return torch.ops.aten.gelu_backward(grad, x.to(grad.dtype), approximate="tanh").to(x.dtype), None


class GeluForward(TrackedForward):
    """Run a GELU that is written as a formula, and save only its input.

    Inputs of all sizes use the function: the formula and the function save different tensors, and a site is learnt for
    one of the two.
    """

    def __init__(self, capture: Capture, layer: Layer) -> None:
        super().__init__(capture, layer)
        self.kind = type(layer.owner())
        self.recomputed = SiteFacts(Site(layer.name, "Gelu", "(formula)"))
        """Site in the report for the tensors that the formula would have saved."""
        self.bytes_saved: dict[tuple[Any, ...], int] = {}
        """Bytes that the formula saves for each value, by dtypes."""

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether a module has a known name and computes GELU by its tanh formula."""
        return type(module).__name__ in NAMES and is_tanh_gelu(module)

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        facts = frame.sites[0] if frame.sites else None
        if len(inputs) != 1 or not self.suits(module, inputs[0], facts):
            return None
        return self.save_input_only(type(module).forward.__get__(module), inputs[0])

    def suits(self, module: Any, x: Any, facts: SiteFacts | None) -> bool:
        """Return whether this call's saved tensors go to our capture, and the site was not learnt from the formula.

        If the saved input is restored exactly, the gradient must be exact as well, but the function's gradient differs
        in the last bits.
        """
        if (
            type(module) is not self.kind
            or type(x) is not Tensor
            or (facts is not None and facts.site.operation != "Gelu")
        ):
            return False
        if not self.layer.compress:
            return False
        codec = self.capture.policy.choose(Site(self.layer.name, "Gelu", "self", dtype=x.dtype))
        return codec.takes(x.dtype) and not codec.exact and torch.is_grad_enabled() and self.captured(x)

    def save_input_only(self, plain: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return the layer's result, save only its input, and add a record for the report."""
        if x.requires_grad:
            record = Record(self.recomputed, x.numel() * (self.formula_bytes(plain, x) - x.element_size()))
            record.codec = "recomputed"
            self.capture.threads.forward.tally.records.append(record)
        return Gelu.apply(x, plain)

    def formula_bytes(self, plain: Callable[[Tensor], Tensor], x: Tensor) -> int:
        """Return the bytes that plain autograd would save for each value, for the report."""
        kind = x.device.type
        cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        key = (x.dtype, kind, torch.get_autocast_dtype(kind) if cast else None)
        if key not in self.bytes_saved:
            self.bytes_saved[key] = saved_bytes_per_value(plain, x.dtype, x.device)
        return self.bytes_saved[key]


def saved_bytes_per_value(function: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes that autograd saves for each value of a pointwise function's input."""
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
    """Return whether a layer computes GELU by its tanh formula, tested on a few values."""
    try:
        with torch.no_grad():
            result = type(module).forward(module, PROBE)
        return torch.allclose(result, functional.gelu(PROBE, approximate="tanh"), atol=1e-5)
    except Exception:
        return False
