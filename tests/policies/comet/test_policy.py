"""Comet: arguments, choices before the first collection, readers of one tensor, history, one policy for two models."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.policies import Comet
from tests.policies.comet.trainings import (
    BATCHES,
    ROUNDINGS,
    WEIGHTS,
    last,
    net,
    run,
    sgd,
    steps_of,
    train,
)


def test_attach_takes_comet_with_stochastic_rounding_if_nothing_is_said() -> None:
    handle = encke.attach(nn.Linear(2, 2))
    assert isinstance(handle.policy, Comet) and handle.policy == Comet()
    assert Comet().rounding == "stochastic" and Comet().tolerance == 0.1 and Comet().formula == "exact"
    assert repr(handle.policy) == "Comet()" == handle.report().policy
    assert Comet(rounding="nearest").tolerance == 0.01 and Comet(0.3, rounding="nearest").tolerance == 0.3


def test_prints_as_it_is_written() -> None:
    policy = Comet(0.05, every=100, rounding="nearest", formula="paper", seed=3)
    assert repr(policy) == "Comet(sigma=0.05, every=100, rounding='nearest', formula='paper', seed=3)"
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"sigma": 0}, ValueError, "sigma must be positive.*got 0"),
        ({"sigma": -0.1}, ValueError, "sigma must be positive.*got -0.1"),
        ({"sigma": math.nan}, ValueError, "sigma must be positive.*got nan"),
        ({"sigma": math.inf}, ValueError, "sigma must be positive.*got inf"),
        ({"sigma": "0.1"}, TypeError, "sigma must be a number, got '0.1'"),
        ({"sigma": True}, TypeError, "sigma must be a number, got True"),
        ({"every": 0}, ValueError, "every must be at least 1.*got 0"),
        ({"every": 1.5}, TypeError, "every must be a whole number.*got 1.5"),
        ({"rounding": "up"}, ValueError, "rounding must be .*got 'up'"),
        ({"formula": "guess"}, ValueError, "formula must be .*got 'guess'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Comet(**arguments)


def test_what_is_chosen_before_the_first_collection() -> None:
    def chosen(operation: str, slot: str = "input", **settings: Any) -> Codec:
        return Comet(**settings).choose(Site("layer", operation, slot, need="lossy"))

    averaged = ("Convolution", "Linear", "Addmm", "BatchNorm", "NativeLayerNorm", "FusedRmsNorm")
    assert {chosen(operation, seed=3) for operation in averaged} == {GroupQuant(4, seed=3)}
    assert {chosen(operation, "self", seed=3) for operation in ("Silu", "Mul", "MyFunction")} == {GroupQuant(8, seed=3)}
    assert chosen("Convolution", rounding="nearest") == ErrorBounded(1e-2, "rel", coarsens=True)
    query = Site("layer", "ScaledDotProductAttention", "query", need="attention")
    assert Comet().choose(query) == GroupQuant(2)


class Fork(nn.Module):
    """Two convolutions read one tensor; the gradient of one is the same every step, the other's is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        return self.a(h), self.b(h)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("noisy", [0, 1])
def test_a_tensor_is_packed_for_its_strictest_reader(rounding: str, noisy: int) -> None:
    torch.manual_seed(0)
    model = Fork()
    optimizer = sgd(model, 0.0)
    handle = encke.attach(
        model, Comet(0.07 if rounding == "stochastic" else 0.02, every=10, rounding=rounding), optimizer
    )
    x = BATCHES[0][0]
    for step in range(22):
        model.zero_grad()
        out = model(x)
        noise = torch.randn(out[0].shape, generator=torch.Generator().manual_seed(step))
        (out[noisy] * noise).mean().backward(retain_graph=True)
        (out[1 - noisy] * (1 + noise)).mean().backward()
        optimizer.step()
    rows = last(handle)
    strict, loose = rows["ab"[noisy]], rows["ba"[noisy]]
    settings = handle.policy.state_dict()["settings"]
    assert len([place for place in settings if place.startswith(("a/", "b/"))]) == 2
    (packed,) = [row for row in handle.report().sites if row.operation == "Tanh"]
    if rounding == "stochastic":
        # One run of memory has one setting; the looser reader alone would need fewer bits.
        assert strict["bits"] == loose["bits"] == 4 and packed.bound == "4 bits"
        assert 5 * loose["predicted"] < loose["tolerated"] and 5 * strict["predicted"] > strict["tolerated"]
    else:
        assert strict["bound"] < 0.7 * loose["bound"] and packed.bound == f"{strict['bound']:.3g} abs"


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_history_has_a_row_for_each_place_of_each_collection_step(rounding: str) -> None:
    handle = run(Comet(every=5, rounding=rounding), steps=11)
    assert {(row["step"], row["layer"]) for row in handle.history} == {
        (step, layer) for step in (1, 5, 10) for layer in (*WEIGHTS, "1")
    }
    assert len(handle.history) == 15
    for row in handle.history:
        assert (row["bits"] is None) == (rounding == "nearest") == (row["bound"] is not None)
        assert 0 < row["share"] <= 1 and row["std"] > 0
        if row["layer"] in WEIGHTS:
            assert row["predicted"] > 0 and row["tolerated"] > 0 and row["momentum"] > 0
    json.dumps(handle.history, allow_nan=False)
    handle.history.clear()
    assert handle.history


def test_one_policy_serves_two_models() -> None:
    policy = Comet(every=5)
    handles = []
    for steps in (6, 11):
        model = net()
        optimizer = sgd(model)
        handles.append((encke.attach(model, policy, optimizer), model, optimizer, steps))
    for _, model, optimizer, steps in handles:
        train(model, optimizer, steps)
    assert steps_of(handles[0][0]) == [1, 5] and steps_of(handles[1][0]) == [1, 5, 10]
    assert policy.history == [] and policy.settings == {}
