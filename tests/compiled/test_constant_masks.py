"""Attention is called without a mask where a constant one is causal or masks nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.compiled import constant_masks
from encke.compiled.constant_masks import is_causal
from encke.compiled.model import CompiledModel
from encke.compiled.names import arguments_of, name_of
from encke.policies import Fixed
from tests.compiled.common import compile, error, gradients, same

TRIL = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
LOWEST = torch.finfo(torch.bfloat16).min


def added(mask: Tensor, low: float) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, low)


@pytest.mark.parametrize(
    ("mask", "causal"),
    [
        (TRIL, True),
        (TRIL[:1].expand(2, 3, 6, 6), True),
        (added(TRIL, -torch.inf), True),
        (added(TRIL, LOWEST), True),
        (added(TRIL, -65504.0), True),
        (torch.ones_like(TRIL), False),
        (torch.zeros(6, 6), False),
        (torch.ones(6, 8, dtype=torch.bool), False),
        (TRIL.triu(-2), None),
        (TRIL.transpose(2, 3), None),
        (torch.cat([TRIL[:1], TRIL[:1].triu(-2)]), None),
        (torch.ones(6, 8, dtype=torch.bool).tril(), None),
        (added(TRIL, -1e4), None),
        (added(TRIL, -torch.inf) + torch.eye(6), None),
        (torch.zeros(6, 6).fill_(torch.nan), None),
    ],
)
def test_kinds_of_masks(mask: Tensor, causal: bool | None) -> None:
    assert is_causal(mask) is causal


class Attention(nn.Module):
    """Writes its mask out, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.merge, self.kind = nn.Linear(64, 192), nn.Linear(64, 64), kind

    def mask(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        causal = (place[None, :] <= place[:, None])[None, None].expand(x.shape[0], 1, -1, -1)
        if self.kind == "full":
            return causal | True
        if self.kind == "of its input":
            return causal & (x.mean((1, 2), keepdim=True)[..., None] < 1e9)
        if self.kind == "drawn":
            return causal & (torch.rand_like(causal, dtype=torch.float32) >= 0)
        return causal & (place[None, :] > place[:, None] - 5) if self.kind == "window" else causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x)).transpose(1, 2).flatten(2))


def x() -> Tensor:
    return torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Whether each attention in the graphs, backward included, is causal and has a mask."""
    found: list[tuple[bool, bool]] = []
    inline = CompiledModel.inline

    def watched(self: CompiledModel, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, *rest) -> None:
        inline(self, forward, backward, *rest)
        for node in (*forward.graph.nodes, *backward.graph.nodes):
            if "scaled_dot_product" in name_of(node.target):
                arguments = arguments_of(node)
                found.append((arguments["is_causal"], arguments["attn_mask"] is not None))

    monkeypatch.setattr(CompiledModel, "inline", watched)
    return found


@pytest.mark.parametrize(("kind", "causal"), [("causal", True), ("full", False)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_a_constant_mask_becomes_a_setting(
    kind: str, causal: bool, backend: str, calls: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compile(Attention(kind), backend=backend)
    handle = encke.attach(model, Fixed(GroupQuant(8)))
    found = gradients(model, x())
    assert calls == [(causal, False)] * 3
    handle.detach()
    monkeypatch.setattr(constant_masks, "constant_of", lambda node: None)
    handle = encke.attach(model, Fixed(GroupQuant(8)))
    assert error(gradients(model, x()), found) < 1e-5
    assert calls[3:] == [(False, True)] * 3
    handle.detach()


@pytest.mark.parametrize("kind", ["window", "of its input", "drawn"])
def test_other_masks_stay(kind: str, calls: list[tuple[bool, bool]]) -> None:
    model = compile(Attention(kind))
    handle = encke.attach(model, Fixed(GroupQuant(8)))
    gradients(model, x())
    assert calls == [(False, True)] * 3
    handle.detach()


def test_where_nothing_is_lossy_the_mask_stays_and_gradients_are_the_same_bits(calls: list[tuple[bool, bool]]) -> None:
    model = compile(Attention("causal"))
    plain = gradients(model, x())
    handle = encke.attach(model, Fixed(ErrorBounded(0)))
    assert same(plain, gradients(model, x())) and calls == [(False, True)] * 2
    handle.detach()


def test_large_masks_stay(calls: list[tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constant_masks, "LARGEST", 1 << 10)
    model = compile(Attention("causal"))
    handle = encke.attach(model, Fixed(GroupQuant(8)))
    gradients(model, x())
    assert calls == [(False, True)] * 3
    handle.detach()
