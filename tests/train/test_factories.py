"""Optimizer, learning rate and policy, as the settings name them."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
from torch import nn

from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Comet, Division, Fixed
from encke.policies.presets import FIXED, PRESETS
from encke.tools.errors import UsageError
from encke.train.factories import lr_factor, optimizer_for, policy_for
from encke.train.settings import Optimizer, Policy, Schedule


def test_cosine_goes_from_one_to_its_final_share_behind_the_warmup():
    factor = lr_factor(Schedule("cosine", warmup=1, final=0.1), steps=100, steps_per_epoch=10)
    rising = [factor(step) for step in range(10)]
    assert rising == sorted(rising) and 0 < rising[0] < rising[-1] < 1
    assert factor(10) == 1 and factor(55) == pytest.approx(0.55) and factor(100) == pytest.approx(0.1)


def test_step_multiplies_at_each_milestone():
    factor = lr_factor(Schedule("step", milestones=(3, 6), gamma=0.1), steps=90, steps_per_epoch=10)
    assert [factor(step) for step in (0, 29, 30, 59, 60)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_one_cycle_rises_to_one_and_ends_at_zero():
    factor = lr_factor(Schedule("one-cycle"), steps=100, steps_per_epoch=10)
    values = [factor(step) for step in range(101)]
    assert values[0] == pytest.approx(1 / 25) and max(values) == values[30] == 1 and values[100] == pytest.approx(0)
    early = lr_factor(Schedule("one-cycle", warmup=1), steps=100, steps_per_epoch=10)
    assert max(range(101), key=early) == 10


def test_constant_stays():
    assert {lr_factor(Schedule("constant"), 10, 5)(step) for step in range(10)} == {1.0}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (Optimizer("sgd", lr=0.2, momentum=0.5, nesterov=True, weight_decay=0.1), torch.optim.SGD),
        (Optimizer("adam", lr=0.2, betas=(0.5, 0.6), weight_decay=0.1), torch.optim.Adam),
        (Optimizer("adamw", lr=0.2, betas=(0.5, 0.6), weight_decay=0.1), torch.optim.AdamW),
    ],
)
def test_the_optimizer_has_the_settings(settings, kind):
    made = optimizer_for(nn.Linear(2, 2), settings, fused=False)
    (group,) = made.param_groups
    assert type(made) is kind and group["lr"] == 0.2 and group["weight_decay"] == 0.1
    assert group.get("nesterov", True) and group.get("momentum", 0.5) == 0.5
    assert group.get("betas", (0.5, 0.6)) == (0.5, 0.6)


def test_weight_decay_may_leave_biases_and_norms_alone():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    made = optimizer_for(model, Optimizer(weight_decay=0.1, decay_norms=False), fused=False)
    decayed = {id(p) for group in made.param_groups for p in group["params"] if group["weight_decay"]}
    assert decayed == {id(model[0].weight)}
    assert sum(len(group["params"]) for group in made.param_groups) == 4


@pytest.mark.parametrize(
    ("settings", "policy"),
    [
        (Policy("none"), None),
        (Policy(), Comet(seed=3)),
        (Policy("careful"), Comet(sigma=0.05, seed=3)),
        (Policy("comet"), Comet(sigma=0.01, rounding="nearest", formula="paper", seed=3)),
        (Policy("default", sigma=0.01, rounding="nearest"), Comet(sigma=0.01, rounding="nearest", seed=3)),
        (Policy("division", bits=4, block=4), Division(4, 4)),
        (Policy("group8"), Fixed(GroupQuant(8, seed=3))),
        (Policy("bounded", bound=0.1, mode="abs"), Fixed(ErrorBounded(0.1, "abs", seed=3))),
        (Policy("bounded", rounding="stochastic"), Fixed(ErrorBounded(0.01, "rel", "stochastic", seed=3))),
    ],
)
def test_the_policy_has_the_settings(settings, policy):
    assert policy_for(settings, seed=3) == policy


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (Policy("division", sigma=0.1), "sigma"),
        (Policy("group2", bits=4), "bits"),
        (Policy("default", bound=0.1), "bound"),
        (Policy("bounded", block=4), "block"),
    ],
)
def test_a_setting_of_another_policy_is_named(settings, name):
    with pytest.raises(UsageError, match=f"policy.{name} is not a setting of the policy {settings.name}"):
        policy_for(settings, seed=0)


def test_every_policy_name_makes_a_policy():
    names = get_args(get_type_hints(Policy)["name"])
    assert set(names) == {"none", *PRESETS, *FIXED}
    assert all(policy_for(Policy(name), seed=0) is not None for name in names[1:])
