"""Negligible tensors are kept unpacked, and a resumed run keeps the same ones."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import encke
from encke.capture import negligible
from encke.capture.facts import SiteFacts, SiteState
from encke.capture.ledger import CASTS, Record
from encke.capture.sites import Site
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed

SMALL = "(small tensors)"


@pytest.fixture(autouse=True)
def shares(monkeypatch) -> None:
    """Give models of some 100 KiB negligible tensors too."""
    monkeypatch.setattr(negligible, "SHARE", 0.05)
    monkeypatch.setattr(negligible, "TOGETHER", 0.1)


class Net(nn.Module):
    """Two wide layers, and a narrow one between them, whose 16 KiB two layers read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.narrow = nn.Linear(256, 1024), nn.Linear(1024, 32)
        self.wide, self.beside, self.last = nn.Linear(32, 1024), nn.Linear(32, 1024), nn.Linear(1024, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.narrow(self.first(x).relu())
        return self.last(self.wide(h).relu() + self.beside(h).relu())


def x(number: int) -> torch.Tensor:
    return torch.randn(128, 256, generator=torch.Generator().manual_seed(number))


def step(model: nn.Module, number: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(x(number)).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def packed(handle: encke.Handle) -> dict[str, str]:
    return {row.layer: row.codec for row in handle.report().sites if row.layer}


def test_a_small_tensor_is_kept_from_the_third_pass_on():
    model = Net()
    handle = encke.attach(model, Fixed(GroupQuant(bits=2)))
    for number in range(2):
        step(model, number)
        assert packed(handle)["wide"] == "GroupQuant"
    step(model, 2)
    assert set(packed(handle)) == {"first", "last"}
    kept = [row for row in handle.report().sites if row.operation == SMALL]
    assert [row.packed_bytes for row in kept] == [2 * 128 * 32 * 4]
    handle.detach()


def test_its_gradients_are_those_of_exact_values():
    """Neither the first nor the second layer that reads it packs it."""
    model, other = Net(), Net()
    handle = encke.attach(model, Fixed(GroupQuant(bits=2)))
    overrides = {"wide": None, "beside": None}
    reference = encke.attach(other, Fixed(GroupQuant(bits=2)), overrides=overrides)
    for number in range(3):
        found, expected = step(model, number), step(other, number)
    names = [name for name, _ in model.named_parameters()]
    for name, a, b in zip(names, found, expected, strict=True):
        if name.startswith(("wide", "beside")):
            assert torch.equal(a, b), name
    handle.detach()
    reference.detach()


def test_nothing_is_decided_where_the_user_says_what_is_small():
    model = Net()
    handle = encke.attach(model, Fixed(GroupQuant(bits=2)), min_bytes=1024)
    for number in range(3):
        step(model, number)
    assert packed(handle)["wide"] == "GroupQuant" and not handle.state_dict()["negligible"]["places"]
    handle.detach()


def test_a_resumed_run_packs_the_same(tmp_path):
    model, policy = Net(), Fixed(GroupQuant(bits=2))
    handle = encke.attach(model, policy)
    for number in range(3):
        step(model, number)
    torch.save(handle.state_dict(), tmp_path / "state.pt")
    expected = step(model, 3)
    handle.detach()
    resumed = Net()
    handle = encke.attach(resumed, policy)
    handle.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(step(resumed, 3), expected, strict=True))
    assert packed(handle)["wide"] == "kept" and packed(handle)["last"] == "GroupQuant"
    handle.detach()


@pytest.mark.parametrize(
    "state", [[], {"places": "narrow"}, {"places": [3]}, {"weight_bytes": -1}, {"weight_bytes": "many"}], ids=str
)
def test_states_that_are_none(state):
    handle = encke.attach(Net())
    good = handle.state_dict()
    with pytest.raises(ValueError, match="cannot continue from this state: .*negligible"):
        handle.load_state_dict(good | {"negligible": state})
    assert handle.state_dict() == good
    handle.load_state_dict({name: value for name, value in good.items() if name != "negligible"})
    handle.detach()


def test_copies_of_small_weights_are_kept_under_autocast(monkeypatch):
    """Copies of 4 and 64 KiB are kept, that of 512 KiB is not: the gradients are the same."""
    monkeypatch.setattr(negligible, "TOGETHER", 0.3)
    layers = [nn.Linear(64, 512), nn.Linear(512, 512), nn.Linear(512, 64), nn.Linear(64, 32)]
    model = nn.Sequential(*layers)
    other = copy.deepcopy(model)
    handle = encke.attach(model, Fixed(ErrorBounded(0)))
    for number in range(3):
        data = torch.randn(512, 64, generator=torch.Generator().manual_seed(number))
        for each in (model, other):
            each.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                each(data).square().mean().backward()
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        if number:
            copies = sum(row.saved_bytes for row in handle.report().sites if row.codec == "cast again")
            assert copies == 2 * (512 * 512 + 512 * 64 * (number == 1))
    handle.detach()


def record(size: int, number: int, state: SiteState = SiteState.KNOWN) -> Record:
    facts = SiteFacts(Site(str(number), "Mm", "self"))
    facts.state = state
    return Record(facts, size)


def test_all_of_them_together_stay_below_their_share():
    """The smallest come first; sites without a known reader are not decided."""
    records = [record(40, number) for number in range(10)] + [record(2000, 20), record(1, 30, SiteState.PENDING)]
    found = negligible.Negligible(automatic=True)
    found.decide([*records, Record(CASTS, 30)])
    total = 40 * 10 + 2000 + 1 + 30
    assert len(found.places) * 40 + 30 + 1 <= 0.1 * total < (len(found.places) + 1) * 40 + 30 + 1
    assert found.decided and found.weight_bytes == 31 and "30/0/Mm.self.0" not in found.places


def test_none_is_larger_than_its_share():
    found = negligible.Negligible(automatic=True)
    found.decide([record(6, 1), record(100, 2)])
    assert not found.places and found.decided
