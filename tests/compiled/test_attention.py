"""Attention in compiled graphs computes its results again, from decoded inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.capture import scores
from encke.codecs import GroupQuant
from encke.policies import Comet, Fixed
from tests.compiled.common import compile, error, gradients

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.1},
    "mask": {"attn_mask": torch.ones(64, 64, dtype=torch.bool).tril(8)},
    "grouped": {"enable_gqa": True},
}


class Attention(nn.Module):
    def __init__(self, sharpness: float = 1.0, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(64, 192)
        self.merge = nn.Linear(64, 64)
        self.project.weight.data *= sharpness
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        if self.options.get("enable_gqa"):
            k, v = k[:, :2], v[:, :2]
        return self.merge(F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))


def x() -> Tensor:
    return torch.randn(8, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_eager_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores far beyond 8 bits: a softmax that does not belong to its inputs would be off by exponentials."""
    monkeypatch.setattr(scores, "SCORE_ERROR", 1e9)
    model = Attention(20.0, **CALLS[name])
    eager = copy.deepcopy(model)
    plain = gradients(copy.deepcopy(model), x())
    encke.attach(eager, Fixed(GroupQuant(8)))
    for _ in range(2):
        expected = error(plain, gradients(eager, x()))
    compiled = compile(model)
    handle = encke.attach(compiled, Fixed(GroupQuant(8)))
    for _ in range(3):
        assert 0 < error(plain, gradients(compiled, x())) < 2 * expected
    handle.detach()


@pytest.mark.soak
def test_inductor() -> None:
    model = Attention(8.0, is_causal=True)
    compiled = compile(model, backend="inductor")
    plain = gradients(compiled, x())
    handle = encke.attach(compiled, Fixed(GroupQuant(8)))
    assert error(plain, gradients(compiled, x())) < 0.5
    rows = {(row.slot, row.codec) for row in handle.report().sites if "Attention" in row.operation}
    assert ("logsumexp", "recomputed") in rows and ("output", "GroupQuant") not in rows
    handle.detach()


def test_an_output_is_saved_for_its_other_readers_alone() -> None:
    compiled = compile(Attention())
    handle = encke.attach(compiled, Fixed(GroupQuant(2)))
    gradients(compiled, x())
    rows = {(row.operation, row.slot): (row.codec, row.packed_bytes) for row in handle.report().sites}
    assert rows["ScaledDotProductAttention", "output"] == rows["ScaledDotProductAttention", "logsumexp"]
    assert rows["ScaledDotProductAttention", "output"] == ("recomputed", 0)
    assert rows["Addmm", "mat1"][0] == "GroupQuant"


@pytest.mark.parametrize("policy", [Fixed(GroupQuant(2)), Comet()], ids=str)
def test_sharp_attention_is_measured_and_exact(policy: Any) -> None:
    model = Attention(30.0)
    compiled = compile(model)
    plain = gradients(compiled, x())
    handle = encke.attach(compiled, policy)
    for _ in range(3):
        found = gradients(compiled, x())
    packed = {row.slot for row in handle.report().sites if "Attention" in row.operation and row.codec == "GroupQuant"}
    assert packed == {"value"}
    assert error(plain, found) < 0.3
    handle.detach()


def test_queries_and_keys_are_measured_in_one_pass_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    measure = scores.Scores.measure
    monkeypatch.setattr(scores.Scores, "measure", lambda self, *a: measured.append(a[0].slot) or measure(self, *a))
    compiled = compile(Attention())
    handle = encke.attach(compiled, Fixed(GroupQuant(2)))
    for _ in range(5):
        gradients(compiled, x())
    assert sorted(measured) == ["key", "query"]
    assert handle.report().forwards == 5
    handle.detach()
