"""Results that backward recomputes in one kernel, from the codes of saved tensors."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.capture import expressions
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.policies import Fixed
from encke.policies.base import Policy

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH = 64


class Gated(nn.Module):
    """A gated MLP as the Llama and Gemma families have it."""

    def __init__(self, act: nn.Module, swapped: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.down, self.act, self.swapped = nn.Linear(WIDTH, WIDTH, bias=False), act, swapped

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.act(self.gate(x)), self.up(x)
        return self.down(second * first if self.swapped else first * second)


class Sequence(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)))


class Narrow(Gated):
    """The other factor is broadcast."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x)[..., :1])


def gradients(model: nn.Module, autocast: bool, steps: int = 3) -> list[Tensor]:
    x = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    for _ in range(steps):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            out = model(x)
        out.float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Record calls of the kernel: the activation, and its factor."""
    seen: list[str] = []
    kernels = expressions.activation_kernels()
    activate = kernels.activate

    def watched(kind, data, seed, format, factor, *rest):
        beside = "" if factor is None else " * values" if isinstance(factor, Tensor) else " * codes"
        seen.append(kind + beside)
        return activate(kind, data, seed, format, factor, *rest)

    monkeypatch.setattr(kernels, "activate", watched)
    monkeypatch.setattr(expressions, "runs_kernels", lambda device: True)
    return seen


ACTS = {"silu": nn.SiLU(), "gelu": nn.GELU(), "gelu tanh": nn.GELU(approximate="tanh")}


@dataclass(frozen=True)
class FinerFactor(Policy):
    """More bits for the factor of an activation."""

    def choose(self, site: Site) -> Codec:
        return GroupQuant(8 if (site.operation, site.slot) == ("Mul", "other") else 4)


FOUR = Fixed(GroupQuant(4))


def check(kind, act: str, calls: list[str], monkeypatch, autocast=False, policy: Policy = FOUR, **settings) -> None:
    """Gradients are those of the same codes decoded to memory, up to rounding."""
    found = []
    for fused in (True, False):
        monkeypatch.setattr(expressions, "runs_kernels", lambda device, fused=fused: fused)
        torch.manual_seed(1)
        model = kind(ACTS[act], **settings).to(DEVICE)
        encke.attach(model, policy)
        count = len(calls)
        found.append(gradients(model, autocast))
        assert (len(calls) > count) == fused
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= (0.01 if autocast else 1e-5) * b.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("act", ACTS)
def test_gated_product(act, autocast, calls, monkeypatch):
    check(Gated, act, calls, monkeypatch, autocast)
    # One call for the layer after the product, one for the gradient of the other factor.
    assert set(calls) == {act, f"{act} * codes"}


def test_factors_the_other_way_round(calls, monkeypatch):
    check(Gated, "silu", calls, monkeypatch, swapped=True)
    assert "silu * codes" in calls


@pytest.mark.parametrize("act", ACTS)
def test_activation_alone(act, calls, monkeypatch):
    check(Sequence, act, calls, monkeypatch)
    assert set(calls) == {act}


def test_factor_that_is_broadcast_is_multiplied_by_torch(calls, monkeypatch):
    check(Narrow, "silu", calls, monkeypatch)
    assert set(calls) == {"silu"}


def test_factor_in_another_format_is_decoded_first(calls, monkeypatch):
    check(Gated, "silu", calls, monkeypatch, policy=FinerFactor())
    assert set(calls) == {"silu", "silu * values"}


def test_exact_operands_are_left_to_torch(calls):
    results = []
    for attached in (False, True):
        torch.manual_seed(1)
        model = Gated(nn.SiLU()).to(DEVICE)
        handle = encke.attach(model, Fixed(ErrorBounded(0))) if attached else None
        results.append(gradients(model, False))
    assert handle is not None and not calls and all(map(torch.equal, *results))
    assert any(row.codec == "recomputed" for row in handle.report().sites)
