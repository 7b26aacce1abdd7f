"""What the settings name, made: optimizer, learning rate, policy."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Comet, Division, Fixed
from encke.train.settings import Optimizer, Policy, Schedule


def optimizer_for(model: nn.Module, settings: Optimizer, fused: bool) -> torch.optim.Optimizer:
    """The optimizer for a model's parameters."""
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


def rate(schedule: Schedule, steps: int, steps_an_epoch: int) -> Callable[[int], float]:
    """What the learning rate is multiplied by at each step."""
    warmup = schedule.warmup * steps_an_epoch
    if schedule.name == "one-cycle":
        rise = warmup or 0.3 * steps
        return lambda step: one_cycle(step, rise, steps, schedule.final)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule.name == "cosine":
            return half_cosine((step - warmup) / max(steps - warmup, 1), schedule.final)
        if schedule.name == "step":
            return schedule.gamma ** sum(step >= epoch * steps_an_epoch for epoch in schedule.milestones)
        return 1.0

    return factor


def half_cosine(done: float, final: float) -> float:
    """From one down to `final`."""
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(max(done, 0.0), 1.0)))


def one_cycle(step: int, rise: float, steps: int, final: float) -> float:
    """From a 25th up to one, and down again."""
    if step < rise:
        return 1 / 25 + (1 - 1 / 25) * (1 - half_cosine(step / rise, 0.0))
    return half_cosine((step - rise) / max(steps - rise, 1), final)


def policy_for(settings: Policy, seed: int) -> Comet | Division | Fixed | None:
    """The policy to attach; None for plain training."""
    if settings.name == "none":
        return None
    if settings.name == "division":
        return Division(settings.block, settings.bits)
    if settings.name == "group":
        return Fixed(GroupQuant(settings.bits, seed=seed))
    if settings.name == "bounded":
        return Fixed(ErrorBounded(settings.bound, settings.mode, settings.rounding, seed=seed))
    return Comet(settings.sigma, rounding=settings.rounding, seed=seed)
