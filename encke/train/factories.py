"""Optimizer, learning-rate schedule and policy, made from the settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from encke import policies
from encke.policies.presets import FIXED, PRESETS
from encke.tools.errors import UsageError
from encke.train.settings import Optimizer, Policy, Schedule


def optimizer_for(model: nn.Module, settings: Optimizer, fused: bool) -> torch.optim.Optimizer:
    """Make the optimizer for a model's parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, object]] = [{"params": parameters}]
    if not settings.decay_norms:
        groups = [
            {"params": [p for p in parameters if p.dim() > 1]},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
    lr, decay = settings.lr, settings.weight_decay
    if settings.name == "sgd":
        nesterov = settings.nesterov and settings.momentum > 0
        return torch.optim.SGD(groups, lr, settings.momentum, 0.0, decay, nesterov=nesterov, fused=fused)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, lr, settings.betas, weight_decay=decay, fused=fused)


def lr_factor(schedule: Schedule, steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """Return the factor of the learning rate as a function of the step."""
    warmup = schedule.warmup * steps_per_epoch
    if schedule.name == "one-cycle":
        rise = warmup or 0.3 * steps
        return lambda step: one_cycle(step, rise, steps, schedule.final)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule.name == "cosine":
            return half_cosine((step - warmup) / max(steps - warmup, 1), schedule.final)
        if schedule.name == "step":
            return schedule.gamma ** sum(step >= epoch * steps_per_epoch for epoch in schedule.milestones)
        return 1.0

    return factor


def half_cosine(done: float, final: float) -> float:
    """Fall from 1 to `final` along half a cosine."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))


def one_cycle(step: int, rise: float, steps: int, final: float) -> float:
    """Rise from 1/25 to 1 and fall to `final`."""
    if step < rise:
        return 1 / 25 + (1 - 1 / 25) * (1 - half_cosine(step / rise, 0.0))
    return half_cosine((step - rise) / max(steps - rise, 1), final)


def policy_for(settings: Policy, seed: int) -> policies.Policy | None:
    """Make the policy to attach; None for plain training."""
    if settings.name == "none":
        return None
    policy: Any = (PRESETS | FIXED)[settings.name]
    target = policy.codec if settings.name in FIXED else policy
    own = {field.name for field in fields(target) if field.init}
    if settings.name.startswith("group"):
        own -= {"bits"}  # the name says it
    given = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name != "name"}
    changes = {name: value for name, value in given.items() if value is not None}
    for name in changes:
        if name not in own:
            raise UsageError(f"policy.{name} is not a setting of the policy {settings.name}")
    if "seed" in own:
        changes["seed"] = seed
    changed = replace(target, **changes)
    return replace(policy, codec=changed) if settings.name in FIXED else changed
