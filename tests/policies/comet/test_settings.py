"""Settings as data: a resumed run decides and ends like an uninterrupted one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import encke
from encke.policies import Comet
from encke.policies.comet import policy as comet_policy
from tests.policies.comet.trainings import (
    ROUNDINGS,
    WEIGHTS,
    net,
    sgd,
    steps_of,
    through_a_file,
    train,
    weight_rows,
)


def resumed(state: dict[str, Any], policy: Comet, given: bool) -> tuple[nn.Module, Optimizer | None, encke.api.Handle]:
    model = net()
    model.load_state_dict(state["model"])
    optimizer = sgd(model) if given else None
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    handle = encke.attach(model, policy, optimizer)
    handle.load_state_dict(state["encke"])
    return model, optimizer, handle


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("given", [True, False], ids=["SGD", "no optimizer"])
@pytest.mark.parametrize("split", [3, 10, 11, 13])
def test_a_resumed_run_decides_and_ends_like_an_uninterrupted_one(split: int, given: bool, rounding: str) -> None:
    policy = Comet(0.1 if rounding == "stochastic" else None, every=5, rounding=rounding)
    model = net()
    optimizer = sgd(model) if given else None
    handle = encke.attach(model, policy, optimizer)
    train(model, optimizer, split)
    state = {"model": model.state_dict(), "encke": handle.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    state = through_a_file(state)
    train(model, optimizer, 22 - split, first=split + 1)
    again, other, second = resumed(state, policy, given)
    train(again, other, 22 - split, first=split + 1)
    assert second.history == handle.history and steps_of(second) == [1, 5, 10, 15, 20]
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.policy.state_dict()["settings"] == handle.policy.state_dict()["settings"]
    assert repr(second.report().sites) == repr(handle.report().sites)


def test_where_memory_is_short_places_are_measured_in_turn_also_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comet_policy, "PROBED", 1)
    policy = Comet(every=5)
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, policy, optimizer)
    train(model, optimizer, 12)
    saved = {"model": model.state_dict(), "encke": handle.state_dict(), "optimizer": optimizer.state_dict()}
    state = through_a_file(saved)
    train(model, optimizer, 9, first=13)
    again, other, second = resumed(state, policy, True)
    train(again, other, 9, first=13)
    rows = [row for row in weight_rows(handle) if row["in_force_measured"] is not None]
    assert [row["step"] for row in rows] == [5, 10, 15, 20]
    assert {row["layer"] for row in rows} == set(WEIGHTS)
    assert second.history == handle.history


def test_a_state_stays_as_it_was_when_training_goes_on() -> None:
    model = net()
    handle = encke.attach(model, Comet(every=5))
    train(model, None, 7)
    state = handle.state_dict()
    before = through_a_file(state)
    train(model, None, 7, first=8)
    assert repr(state) == repr(before)


def test_a_state_taken_after_detach_fits_the_same_kind_of_training() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 6)
    attached = handle.state_dict()
    handle.detach()
    assert repr(handle.state_dict()) == repr(attached)
    encke.attach(model, Comet(every=5), optimizer).load_state_dict(handle.state_dict())


def test_wrong_states_are_told() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 6)
    state = handle.state_dict()
    other = encke.attach(net(), Comet(rounding="nearest"))
    with pytest.raises(ValueError, match=r"saved with Comet\(every=5\).*Comet\(rounding='nearest'\).*stochastic"):
        other.load_state_dict(state)
    for key in ("settings", "schedule", "history"):
        broken = {name: value for name, value in state["policy"].items() if name != key}
        with pytest.raises(ValueError, match=f"not a state of Comet.*{key}"):
            handle.load_state_dict({**state, "policy": broken})
    handle.load_state_dict(state)


VERSION_1: dict[str, str] = {
    "stochastic": """{"version": 1, "step": 4, "policy": {"policy": "Comet(every=3)", "rounding": "stochastic",
        "follower": {"updates": 4, "counted": true, "again": false, "averages": {}}, "settings": {
        "3/0/0": {"bits": 2, "gain": {"value": 1.0, "at": 0.0, "slope": 0.0}, "values": 32768},
        "0/0/0": {"bits": 8, "gain": {"value": 1.0, "at": 0.0, "slope": 0.0}, "values": 6144},
        "1/0/0": {"bits": 4, "gain": {"value": 1.0, "at": 0.0, "slope": 0.0}, "values": 0}},
        "history": [{"step": 3, "layer": "1", "operation": "NativeBatchNorm", "slot": "input", "place": "1/0/0",
        "codec": "GroupQuant", "bound": null, "bits": 4, "share": 1.0, "std": 0.5594290494918823, "gain": 1.0}],
        "turn": 0, "warned": false}}""",
    "nearest": """{"version": 1, "step": 4, "policy": {"policy": "Comet(every=3, rounding='nearest')",
        "rounding": "nearest", "follower": {"updates": 4, "counted": true, "again": false, "averages": {}},
        "settings": {
        "3/0/0": {"bound": 0.5859370827674866, "mode": "abs",
        "gain": {"value": 1.0, "at": 0.0, "slope": 0.0}, "values": 32768},
        "0/0/0": {"bound": 0.3888772027855573, "mode": "abs",
        "gain": {"value": 1.0, "at": 0.0, "slope": 0.0}, "values": 6144},
        "1/0/0": {"bound": 0.13985732197761536, "mode": "abs",
        "gain": {"value": 1.0, "at": 0.0, "slope": 0.0}, "values": 0}},
        "history": [{"step": 3, "layer": "1", "operation": "NativeBatchNorm", "slot": "input", "place": "1/0/0",
        "codec": "ErrorBounded", "bound": 0.13985732197761536, "bits": null, "share": 1.0, "std": 0.5594292879104614,
        "gain": 1.0}], "turn": 0, "warned": false}}""",
}
"""States as release 0.1.0 wrote them for the model below, of which the first has another number of bits for layer 0."""


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_states_of_release_0_1_are_read(rounding: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=3, rounding=rounding), optimizer)
    old = json.loads(VERSION_1[rounding])
    handle.load_state_dict(old)
    steps = []
    for seed in range(2):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        if seed == 0:
            rows = {row.layer: row.bound for row in handle.report().sites}
            settings = handle.state_dict()["policy"]["settings"]
        steps = sorted({row["step"] for row in handle.history})
    kind = "{bits} bits" if rounding == "stochastic" else "{bound:.3g} abs"
    for layer in ("0", "1"):
        assert rows[layer] == kind.format(**old["policy"]["settings"][f"{layer}/0/0"])
    assert len(settings) == 3 and settings.keys().isdisjoint(old["policy"]["settings"])
    assert steps == [3, 6] and handle.state_dict()["version"] == 2 and handle.report().forwards == 6


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 6)
    before = handle.state_dict()
    policy = before["policy"]
    damaged = [
        {**policy, "settings": {"0/0/0": {"bits": 3}}},
        {**policy, "schedule": {"updates": 3}},
        {**policy, "rounding": "nearest"},
        {**policy, "settings": {}, "schedule": {**policy["schedule"], "averages": {"0.weight": 3}}},
    ]
    for bad in ({**before, "step": "x"}, *({**before, "step": 99, "policy": each} for each in damaged)):
        with pytest.raises((ValueError, KeyError, TypeError)):
            handle.load_state_dict(bad)
        assert repr(handle.state_dict()) == repr(before)


def test_states_of_another_model_or_optimizer_are_refused_and_change_nothing() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 6)
    state = handle.state_dict()
    other = nn.Sequential(nn.Conv2d(3, 8, 3))
    for small, words in (
        (encke.attach(other, Comet(every=5), sgd(other)), "another model.*which this Sequential does not have"),
        (encke.attach(model := net(), Comet(every=5), torch.optim.Adam(model.parameters())), "optimizer SGD.*has Adam"),
    ):
        before = small.state_dict()
        with pytest.raises(ValueError, match=words):
            small.load_state_dict(state)
        assert repr(small.state_dict()) == repr(before)
    policy = state["policy"]
    broken = {**policy, "schedule": {**policy["schedule"], "updates": "many"}}
    with pytest.raises(ValueError, match="many"):
        handle.load_state_dict({**state, "policy": broken})
    assert repr(handle.state_dict()) == repr(state)
