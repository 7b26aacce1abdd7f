"""Distributions of errors: samples, kurtosis, and the distance from a known distribution."""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 200_000
"""Size of a sample."""


def sample(values: Tensor) -> Tensor:
    """Return a random sample of the values, always the same; all of them if there are few."""
    flat = values.detach().flatten()
    if flat.numel() <= SAMPLE:
        return flat.cpu()
    chosen = torch.randint(flat.numel(), (SAMPLE,), generator=torch.Generator().manual_seed(0))
    return flat[chosen.to(flat.device)].cpu()


def kurtosis(values: Tensor) -> float:
    """Return the excess kurtosis: 0 for normal values, 3 for Laplace."""
    v = values.double()
    v = v - v.mean()
    return float(v.pow(4).mean() / v.square().mean().square()) - 3


def normal(values: Tensor) -> Tensor:
    """Return the standard normal distribution function."""
    return torch.special.ndtr(values)


def uniform(values: Tensor) -> Tensor:
    """Return the uniform distribution function on [-1, 1]: nearest levels, in units of the bound."""
    return (values.clamp(-1, 1) + 1) / 2


def triangle(values: Tensor) -> Tensor:
    """Return the triangular distribution function on [-1, 1]: stochastic rounding, in units of the step."""
    v = values.clamp(-1, 1)
    return torch.where(v < 0, (1 + v).square() / 2, 1 - (1 - v).square() / 2)


def standardised(values: Tensor) -> Tensor:
    """Return values with mean 0 and standard deviation 1."""
    v = values.double()
    return (v - v.mean()) / v.std()


def distance(values: Tensor, distribution: Tensor) -> float:
    """Return the Kolmogorov-Smirnov distance; `distribution` is the known one at the sorted values."""
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return float(torch.maximum((distribution - steps[:-1]).abs().max(), (distribution - steps[1:]).abs().max()))


def ks_normal(values: Tensor) -> float:
    """Return the distance of the standardised values from the normal distribution."""
    v = standardised(values).sort().values
    return distance(v, normal(v))
