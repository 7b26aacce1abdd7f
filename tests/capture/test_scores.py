"""Bits of queries and keys: the error of a score is as predicted and stays within its limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.capture.needs import MIN_BITS
from encke.capture.scores import RATES, SCORE_ERROR, Figures, Scores, error_power, mean_square, score_variances
from encke.capture.sites import Site
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant
from encke.codecs.exact import Keep
from encke.policies import Comet, Fixed
from encke.policies.base import Policy

SEEDS = 64


def figures(t: Tensor, codec: Codec) -> Figures:
    errors = [float(error_power(codec.refined(min_bits=bits), t)) for bits in RATES]
    return Figures(float(mean_square(t)), tuple(errors))


@pytest.mark.parametrize("codec", [GroupQuant(2), DualPrecision(bits=2), ErrorBounded(0.5, "rel")], ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_errors_of_scores_are_as_predicted(codec: Codec, scale: float) -> None:
    torch.manual_seed(0)
    q, k = 2 * torch.randn(4, 2, 128, 64) + 0.5, 0.3 * torch.randn(4, 2, 128, 64)
    predicted = score_variances(figures(q, codec), figures(k, codec), scale**2 * 64)
    for bits, variance in zip(RATES, predicted, strict=True):
        lossy_q, lossy_k = (codec.refined(min_bits=bits).encode(t).decode() for t in (q, k))
        error = scale * (lossy_q @ lossy_k.mT - q @ k.mT)
        # At 2 bits the product of both errors contributes as well.
        assert float(error.square().mean().sqrt()) == pytest.approx(math.sqrt(variance), rel=0.15 if bits > 2 else 0.5)


class Attention(nn.Module):
    """Attention whose scores grow with `sharpness`."""

    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192, bias=False)
        nn.init.normal_(self.project.weight, std=1 / 8)
        self.sharpness = sharpness

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q * self.sharpness, k, v).transpose(1, 2).flatten(2).tanh()


def bits_in_force(handle: encke.Handle) -> set[str]:
    rows = handle.report().sites
    found = {row.bound for row in rows if row.slot in ("query", "key") and row.codec == "GroupQuant"}
    return found or {"exact"}


def train(model: nn.Module, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.randn(4, 128, 64)).square().mean().backward()


@pytest.mark.parametrize("policy", [Fixed(GroupQuant(2)), "default"], ids=str)
@pytest.mark.parametrize(
    ("sharpness", "bits"), [(0.1, "2 bits"), (0.3, "3 bits"), (0.5, "4 bits"), (2.0, "8 bits"), (100.0, "exact")]
)
def test_bits_grow_with_the_scores(policy: Policy | str, sharpness: float, bits: str) -> None:
    torch.manual_seed(0)
    model = Attention(sharpness)
    handle = encke.attach(model, policy)
    for _ in range(3):
        train(model)
        assert bits_in_force(handle) == {bits}


def test_no_fewer_bits_than_the_policy_has() -> None:
    model = Attention(0.1)
    handle = encke.attach(model, Fixed(GroupQuant(8)))
    train(model, 2)
    assert bits_in_force(handle) == {"8 bits"}


def test_attention_that_becomes_sharper_is_noticed() -> None:
    model = Attention(0.1)
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    train(model, 2)
    model.sharpness = 2.0
    train(model, 8)
    assert bits_in_force(handle) == {"2 bits"}
    train(model)
    assert bits_in_force(handle) == {"8 bits"}


def test_a_collection_step_measures_again() -> None:
    model = Attention(0.1)
    handle = encke.attach(model, Comet())
    train(model, 2)
    model.sharpness = 2.0
    handle.collect_now()
    train(model, 2)
    assert bits_in_force(handle) == {"8 bits"}


def test_a_resumed_run_has_the_same_bits() -> None:
    model, other = Attention(0.1), Attention(0.1)
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    train(model)
    state = handle.state_dict()
    resumed = encke.attach(other, Fixed(GroupQuant(2)))
    resumed.load_state_dict(state)
    other.sharpness = 2.0
    train(other, 2)
    assert bits_in_force(resumed) == {"2 bits"}
    state["scores"] = {"somewhere": 5}
    with pytest.raises(ValueError, match="2, 3, 4, 8 or 0"):
        resumed.load_state_dict(state)
    del state["scores"]
    resumed.load_state_dict(state)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_queries_that_are_not_finite_are_exact(value: float) -> None:
    scores = Scores(Fixed(GroupQuant(2)))
    q = torch.randn(4, 2, 128, 64)
    q[0, 0, 0, 0] = value
    found = score_variances(figures(q, GroupQuant(2)), figures(torch.randn(4, 2, 128, 64), GroupQuant(2)), 1.0)
    assert not any(variance <= SCORE_ERROR**2 for variance in found)
    site = Site("", "ScaledDotProductAttention", "query", need="attention")
    scores.bits[site.place] = 0
    assert scores.codec(site) == Keep()


def test_a_query_that_is_a_weight() -> None:
    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Parameter(torch.randn(1, 4, 128, 16))
            self.project = nn.Linear(64, 128)

        def forward(self, x: Tensor) -> Tensor:
            k, v = self.project(x).view(*x.shape[:2], 2, 4, 16).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(self.query.expand(len(x), -1, -1, -1), k, v).tanh()

    model = Pooling()
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    train(model, 2)
    bits = {row.slot: row.bound for row in handle.report().sites if row.codec == "GroupQuant"}
    assert bits["key"] == "4 bits" and "query" not in bits


@pytest.mark.parametrize(("place", "floor"), MIN_BITS.items(), ids=str)
def test_fewest_bits_of_linear_and_quadratic_readers(place: tuple[str, str], floor: int) -> None:
    site = Site("layer", *place, need="lossy", dimensions=4)
    for bits in (2, 3, 4, 8):
        assert Scores(Fixed(GroupQuant(bits))).codec(site) == GroupQuant(max(bits, floor))
    assert Scores(Fixed(ErrorBounded(0.1))).codec(site) == ErrorBounded(0.1, limit=1 / 512)
    assert Scores(Fixed(ErrorBounded(0))).codec(site) == ErrorBounded(0)


def unmeasured(slot: str, codec: Codec) -> Codec:
    return Scores(Fixed(codec)).codec(Site("", "ScaledDotProductAttention", slot, need="attention"))


def test_queries_and_keys_that_were_not_measured_have_8_bits() -> None:
    assert unmeasured("query", GroupQuant(2)) == unmeasured("key", GroupQuant(4)) == GroupQuant(8)
    assert unmeasured("key", DualPrecision(bits=2)) == DualPrecision(bits=8)


def products(leaves: list[Tensor]) -> Tensor:
    """Attention written with matrix products."""
    q, k, v = (t + torch.zeros(()) for t in leaves)
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)


@pytest.mark.parametrize("call", [products, F.scaled_dot_product_attention], ids=["products", "fused"])
@pytest.mark.parametrize("scale", [0.2, 1.0])
def test_errors_of_products_and_softmax_have_no_bias(call: Any, scale: float) -> None:
    """The mean error of 64 draws is at most a quarter of one draw's; an unbiased error gives an eighth."""
    torch.manual_seed(0)
    leaves = [torch.randn(8, 64, 32) * s for s in (scale, 1, 1)]
    leaves = [t.requires_grad_() for t in leaves]
    given = torch.randn(8, 64, 32)

    def attend() -> Tensor:
        if call is products:
            return products(leaves)
        # Queries and keys are exact: the gradient is linear in the values.
        q, k, v = (t.view(2, 4, 64, 32) for t in leaves)
        return call(q, k, v + torch.zeros(())).reshape(8, 64, 32)

    plain = torch.autograd.grad(attend(), leaves, given)
    context = encke.compress(Fixed(GroupQuant(4)))
    draws = []
    for _ in range(SEEDS + 1):
        with context:
            output = attend()
        found = torch.autograd.grad(output, leaves, given)
        draws.append([b - a for a, b in zip(plain, found, strict=True)])
    for errors in zip(*draws[1:], strict=True):
        error = torch.stack(errors)
        assert error[0].norm() == 0 or error.mean(0).norm() <= 0.25 * error[0].norm()
    assert any(error.norm() > 0 for error in draws[1])
