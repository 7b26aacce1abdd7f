"""The policy contract: what capture calls on a policy, and on one that measures the training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import encke
from encke import AdaptivePolicy, Codec, Policy, Site
from encke.codecs import GroupQuant
from encke.policies import Comet, Division, Fixed


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3), nn.Conv2d(8, 8, 3))


def step(model: nn.Module) -> None:
    model(torch.randn(8, 3, 32, 32)).square().mean().backward()


class Middle(Policy):
    """The least that a policy needs: more bits for one layer."""

    def choose(self, site: Site) -> Codec:
        return GroupQuant(bits=8 if site.layer == "1" else 2)


class Growing(AdaptivePolicy):
    """An adaptive policy that is its own schedule and collector: one bit width more in every third pass."""

    def __init__(self) -> None:
        self.passes, self.requested, self.bits = 0, False, [2]
        self.shown: list[str] = []
        self.walked = 0
        self.stopped = False

    def bind(self, model: nn.Module | None, optimizer: Optimizer | None) -> Growing:
        return Growing()

    @property
    def schedule(self) -> Growing:
        return self

    @property
    def history(self) -> list[dict[str, Any]]:
        return [{"step": i, "bits": bits} for i, bits in enumerate(self.bits)]

    def choose(self, site: Site) -> Codec:
        return GroupQuant(bits=self.bits[-1])

    def begin_pass(self) -> Growing | None:
        collects = self.collects_next()
        self.passes, self.requested = self.passes + 1, False
        return self if collects else None

    def collects_next(self) -> bool:
        return self.requested or (self.passes + 1) % 3 == 0

    def collect_now(self) -> None:
        self.requested = True

    def stop(self) -> None:
        self.stopped = True

    def saved(self, saved: Any, cell: Any, flat: Tensor) -> None:
        assert cell.packed is not None and flat.numel() == torch.Size(saved.layout.size).numel()
        self.shown.append(saved.site.layer)

    def walk(self, nodes: Iterable[Any], saved_by: Callable[[Any], Iterable[tuple[str, Any]]]) -> None:
        slots = [(slot, saved.site.layer) for node in nodes for slot, saved in saved_by(node)]
        assert slots == [("input", "2")]
        self.walked += 1
        self.observe(self.shown)
        self.update()

    def observe(self, sample: list[str]) -> None:
        assert set(sample) == {"0", "1", "2"}

    def update(self) -> bool:
        self.bits.append(min(2 * self.bits[-1], 8))
        return True


def test_choose_is_all_that_a_policy_needs() -> None:
    model = net()
    handle = encke.attach(model, Middle())
    step(model)
    assert [row.bound for row in handle.report().sites] == ["2 bits", "8 bits", "2 bits"]
    handle.load_state_dict(handle.state_dict())
    with pytest.raises(ValueError, match="Middle has no state"):
        handle.policy.load_state_dict({"a": 1})
    with pytest.raises(TypeError, match="abstract"):
        Policy()  # type: ignore[abstract]


def test_our_policies_are_policies() -> None:
    assert isinstance(Comet(), AdaptivePolicy)
    for policy in (Fixed(GroupQuant(bits=2)), Division()):
        assert isinstance(policy, Policy) and not isinstance(policy, AdaptivePolicy)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_adaptive_policy_of_ones_own(compiled: bool) -> None:
    policy, model = Growing(), net()
    model = torch.compile(model, backend="aot_eager") if compiled else model
    handle = encke.attach(model, policy)
    bound = handle.policy
    assert isinstance(bound, Growing) and bound is not policy
    for number in range(1, 5):
        if number == 2:
            assert handle.collect_now()
        step(model)
    assert bound.bits == [2, 4, 8] == [row["bits"] for row in handle.history] and bound.walked == 2
    assert policy.bits == [2] and not bound.stopped
    assert [row.bound for row in handle.report().sites if row.layer == "1"] == ["8 bits"]
    handle.detach()
    assert bound.stopped


def test_an_unbound_comet_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"Comet\(\) is not bound to a training"):
        _ = Comet().schedule
    assert Comet().history == [] and hash(Comet()) == hash(Comet())
