"""Sites that reuse their decisions of the previous pass: bit-equal to deciding again every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import encke
from encke.capture import encoding, hooks
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.policies import Fixed, Policy

STEPS = 8


class Switching(Policy):
    """Choose two bits, from one step on others."""

    def __init__(self) -> None:
        self.codec: Codec = GroupQuant(bits=2)

    def choose(self, site: encke.Site) -> Codec:
        return self.codec


class Block(nn.Module):
    """Layers whose inputs are shared: a ReLU's result is read by two layers, a sum by a norm and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.last = nn.LayerNorm(64), nn.Linear(64, 8)
        self.third: nn.Linear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        both = self.left(x) + self.right(x)
        if self.third is not None:
            both = both + self.third(x)
        return self.last(self.norm(both).tanh())


class Transformer(nn.Module):
    """Casts of one tensor with three readers, attention, and results that backward recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.LayerNorm(32), nn.LayerNorm(32)
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 8, 32) + self.norm.bias
        y = self.norm(x)
        query, key, value = (
            each(y).unflatten(-1, (2, 16)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        y = self.last_norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def change_codec(step: int, model: Block, policy: Switching) -> int:
    if step == 4:
        policy.codec = GroupQuant(bits=4)
    return 64


def change_to_a_bound(step: int, model: Block, policy: Switching) -> int:
    policy.codec = ErrorBounded(1e-2) if step in (4, 5) else GroupQuant(bits=2)
    return 64


def change_batch(step: int, model: Block, policy: Switching) -> int:
    return 48 if step == 4 else 64


def add_a_reader(step: int, model: Block, policy: Switching) -> int:
    if step == 4 and model.third is None:
        model.third = model.right  # another call of a layer, which also reads the memory
    return 64


def freeze(step: int, model: Block, policy: Switching) -> int:
    model.left.requires_grad_(step != 5)
    return 64


def gradients(
    change: Callable[[int, Any, Switching], int], kind: type[nn.Module] = Block
) -> tuple[list[torch.Tensor], int]:
    """Return the gradients of all steps, and how often a site reused its decisions."""
    torch.manual_seed(3)
    model, policy, found, again = kind(), Switching(), [], 0
    original = hooks.save_again

    def counting(*args):
        nonlocal again
        saved = original(*args)
        again += saved is not None
        return saved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "save_again", counting)
        handle = encke.attach(model, policy, min_bytes=1)
        for step in range(STEPS):
            batch = change(step, model, policy)
            x = torch.randn(batch, 32, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=kind is Transformer):
                loss = model(x).square().mean()
            loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        handle.detach()
    return found, again


@pytest.mark.parametrize("change", [change_codec, change_to_a_bound, change_batch, add_a_reader, freeze])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_are_those_of_decisions_made_anew(change, monkeypatch):
    monkeypatch.setattr(encoding, "EXAMINED", ())  # as on a GPU
    got, again = gradients(change)
    assert again >= STEPS  # most sites, in most steps
    monkeypatch.setattr(hooks, "steady_save", lambda *args: None)
    expected, none = gradients(change)
    assert none == 0 and len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("change", [change_codec, change_to_a_bound, change_batch])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_casts_attention_and_recomputed_results_save_as_before(change, monkeypatch):
    monkeypatch.setattr(encoding, "EXAMINED", ())  # as on a GPU
    got, again = gradients(change, Transformer)
    assert again >= 8 * (STEPS - 4)  # three casts, two inputs of norms, three of attention, others
    monkeypatch.setattr(hooks, "steady_save", lambda *args: None)
    expected, none = gradients(change, Transformer)
    assert none == 0
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


class Spike(nn.Module):
    """Put a value into the first position."""

    value = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.pad(torch.full((1, 1), self.value), (0, x.shape[1] - 1, 0, len(x) - 1))


def test_a_cpu_examines_whatever_it_packs():
    """An infinity that comes later is found, because the site that packs first does not save as before."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 32), Spike(), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    encke.attach(model, Fixed(GroupQuant(bits=2)), min_bytes=1)
    for step in range(5):
        model[1].value = torch.inf if step == 4 else 0.0
        model.zero_grad()
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(step))
        model(x)[1:].square().mean().backward()
    # The row with the infinity takes no part in the loss, but its group holds other rows.
    assert model[2].weight.grad[:, 1:].isfinite().all()


def test_a_site_that_becomes_exact_does_not_save_as_before(monkeypatch):
    monkeypatch.setattr(encoding, "EXAMINED", ())  # as on a GPU
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    handle = encke.attach(model, Fixed(GroupQuant(bits=2)), min_bytes=1)

    def step() -> dict[int, Any]:
        model(torch.randn(64, 32)).square().mean().backward()
        return {id(record.facts): record for record in handle._capture.ledger.last}

    for _ in range(4):
        records = step()
    steady = [record.facts for record in records.values() if record.facts.steady is not None]
    assert steady
    for facts in steady:
        facts.become_exact()
    records = step()
    assert all(records[id(facts)].codec == "kept" or records[id(facts)].codec.exact for facts in steady)
