"""Inputs of `torch.utils.checkpoint`: exact and counted as kept, or packed with 8 bits if a user opts in."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import encke
from encke.capture import needs
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed

EXACT = Fixed(ErrorBounded(0))


class Block(nn.Module):
    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.inner = inner

    def part(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1)

    def forward(self, x: Tensor, scale: int = 1) -> Tensor:
        h = self.norm(x)
        h = checkpoint(self.part, h, use_reentrant=False) if self.inner else self.part(h)
        return x + scale * self.down(h)


class Net(nn.Module):
    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, 64), nn.ModuleList(Block(inner) for _ in range(3))
        self.head = nn.Linear(64, 10)
        self.used = True

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = checkpoint(block, h, 1, use_reentrant=False) if self.used else block(h)
        return self.head(h)


TOKENS = torch.arange(16 * 32).view(16, 32) % 50


def gradient(model: nn.Module) -> Tensor:
    torch.manual_seed(3)
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def packed(monkeypatch):
    """Opt in to packed inputs, for one test."""
    monkeypatch.setattr(needs, "_registered", dict(needs._registered))
    encke.register_reader("Checkpoint", "input", "smooth")
    yield
    needs.listed_need.cache_clear()


def boundaries(handle: encke.Handle) -> list[Any]:
    return [row for row in handle.report().sites if row.operation == "Checkpoint"]


@pytest.mark.parametrize("inner", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize("policy", [EXACT, Fixed(GroupQuant(2)), "default"], ids=["bound 0", "2 bits", "default"])
def test_inputs_are_exact_and_counted(policy, inner):
    torch.manual_seed(0)
    model = Net(inner)
    plain = gradient(copy.deepcopy(model))
    handle = encke.attach(model, policy)
    found = [gradient(model) for _ in range(3)]
    regions = sum(p.numel() for p in model.blocks.parameters())
    for each in found:
        # Nothing is compressed inside a region, which is recomputed from exact inputs.
        start = model.embed.weight.numel()
        if policy is EXACT:
            assert torch.equal(each, plain)
        else:
            assert torch.allclose(each[start : start + regions], plain[start : start + regions], atol=1e-7)
    rows = boundaries(handle)
    assert sum(row.saved_bytes for row in rows) == 3 * 16 * 32 * 64 * 4
    if policy is not EXACT:
        assert sum(row.packed_bytes for row in rows) >= 0.9 * 3 * 16 * 32 * 64 * 4


@pytest.mark.parametrize("policy", [Fixed(GroupQuant(2)), "default"], ids=["2 bits", "default"])
def test_packed_inputs_have_8_bits_whatever_the_policy(packed, policy):
    torch.manual_seed(0)
    model = Net()
    model.head.requires_grad_(False)  # its input would have the policy's bits
    plain = copy.deepcopy(model)
    handle = encke.attach(model, policy, overrides={"head": None})

    def trained(network: nn.Module) -> Tensor:
        torch.manual_seed(3)
        network.zero_grad()
        network(TOKENS).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])

    exact = trained(plain)
    for _ in range(3):
        found = trained(model)
        error = (found - exact).norm() / exact.norm()
        assert 0 < error < 0.01
    rows = boundaries(handle)
    assert [row.bound for row in rows] == ["8 bits"] * 3 and all(row.ratio > 3.5 for row in rows)


def test_a_region_that_is_no_longer_checkpointed_is_an_error_once(packed):
    torch.manual_seed(0)
    model = Net()
    handle = encke.attach(model, Fixed(GroupQuant(8)))
    for _ in range(2):
        gradient(model)
    model.used = False
    expected = gradient(copy.deepcopy(model))
    outcomes = []
    for _ in range(4):
        try:
            found = gradient(model)
        except RuntimeError as error:
            assert "Run this step again" in str(error)
            outcomes.append("error")
        else:
            assert (found - expected).norm() < 0.02 * expected.norm()
            outcomes.append("right")
    assert outcomes[-1] == "right"
    handle.detach()


def test_values_that_are_not_finite_stay_exact(packed):
    torch.manual_seed(0)
    model = Net()
    model.embed.weight.data[7] = torch.inf
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    gradient(model)
    assert {row.bound for row in boundaries(handle)} <= {""}


@pytest.mark.parametrize("policy", [EXACT, Fixed(GroupQuant(8))], ids=["bound 0", "8 bits"])
def test_selective_checkpointing(packed, policy):
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]

    class Selective(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            h = self.embed(tokens)
            contexts = partial(create_selective_checkpoint_contexts, saved)
            for block in self.blocks:
                h = checkpoint(block, h, 1, use_reentrant=False, context_fn=contexts)
            return self.head(h)

    torch.manual_seed(0)
    model = Selective()
    plain = gradient(copy.deepcopy(model))
    handle = encke.attach(model, policy)
    for _ in range(3):
        found = gradient(model)
        assert torch.equal(found, plain) if policy is EXACT else (found - plain).norm() < 0.02 * plain.norm()
    assert len(boundaries(handle)) == 3
