"""The error of one layer's weight gradient: as the theory predicts it, and as it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from encke.codecs import ErrorBounded
from encke.policies.comet.theory import Gain, error_std, nearest_power, paper_std, stochastic_power
from encke.study.distributions import sample
from encke.study.frozen import Layer, rms

Rounding = Literal["stochastic", "nearest"]
ENOUGH = 256
"""Errors by chance are drawn so often that this many inputs meet each output: the rms of fewer is itself uncertain."""
LOOPS = 4
CLOSE = 0.02
"""A closed loop ends when it is this close to its aim."""


@dataclass(frozen=True)
class Predicted:
    """The standard deviation of a weight gradient's error, said beforehand in four ways."""

    plain: float
    """From the bound and the share of non-zeros alone."""
    exact: float
    """From the codec's own mean square error, and from the part of the error that does not cancel, on average."""
    certain: float | None
    """Of stochastic rounding: the part of the error that is not left to chance goes through the product itself."""
    paper: float
    """COMET's own formula, with the mean absolute value of the output gradient."""


def error(layer: Layer, bound: float, rounding: Rounding, seed: int = 0) -> Tensor:
    """What the codec does to this layer's input."""
    return ErrorBounded(bound, rounding=rounding, seed=seed).encode(layer.x).decode() - layer.x


def certain_part(x: Tensor, bound: float) -> Tensor:
    """The error of stochastic rounding that is not left to chance: what is below half a step becomes half a step."""
    half = bound / 2
    return torch.where((x != 0) & (x.abs() < half), x.sign() * half - x, 0.0)


def predict(layer: Layer, bound: float, rounding: Rounding, wrong: Tensor) -> Predicted:
    """The theory's say, given an absolute bound; `wrong` is the codec's error in the layer's input."""
    product, gradient_rms = layer.product, rms(layer.g)
    inside = product.terms / product.positions
    one = stochastic_power if rounding == "stochastic" else nearest_power
    assumed = one(bound, layer.share)
    power = rms(wrong) ** 2
    certain: float | None = None
    sums = layer.planes(layer.g).sum(-1)
    if rounding == "stochastic":
        known = certain_part(layer.x, bound)
        means = layer.planes(known).mean(-1)
        coherent = float((means.t() @ sums).square().mean()) * inside**2
        left = max(power - rms(means) ** 2, 0.0)
        certain = error_std(
            max(power - rms(known) ** 2, 0.0), gradient_rms, product.terms, rms(layer.error_of(known)) ** 2
        )
    elif layer.kind == "linear":
        means = layer.planes(wrong).mean(-1)
        coherent = float((means.t() @ sums).square().mean())
        left = max(power - rms(means) ** 2, 0.0)
    else:
        coherent = (float(wrong.mean()) * inside) ** 2 * rms(sums.sum(0)) ** 2
        left = power
    return Predicted(
        plain=error_std(assumed, gradient_rms, product.terms),
        exact=error_std(left, gradient_rms, product.terms, coherent),
        certain=certain,
        paper=paper_std(assumed, float(layer.g.abs().mean()), product.positions),
    )


@dataclass(frozen=True)
class Measured:
    """A weight gradient's true error."""

    rms: float
    std: float
    draws: int
    sample: Tensor
    """The errors of some weights, of the last draw."""
    by_output: Tensor
    """The same in units of the rms of each output's own errors: outputs differ in their gradients."""


def measure(layer: Layer, bound: float, rounding: Rounding, first: Tensor, seed: int) -> Measured:
    """The error through the gradient's own product; by chance several times where few weights would tell little.

    `first` is the codec's error in the input at `seed`.
    """
    fan_in = layer.weight[0].numel()
    draws = -(-ENOUGH // fan_in) if rounding == "stochastic" else 1
    squares, variances, wrong = [], [], first
    for draw in range(draws):
        wrong = layer.error_of(first if draw == 0 else error(layer, bound, rounding, seed + draw))
        squares.append(rms(wrong) ** 2)
        variances.append(squares[-1] - float(wrong.mean(dtype=torch.float64)) ** 2)
    outputs = wrong.flatten(1)
    scale = outputs.square().mean(1, keepdim=True).sqrt()
    by_output = (outputs / scale)[scale.flatten() > 0]
    found_rms, found_std = (math.sqrt(sum(values) / draws) for values in (squares, variances))
    return Measured(found_rms, found_std, draws, sample(wrong), sample(by_output))


@dataclass(frozen=True)
class Loop:
    """Where a closed loop ended: it aims at an error of the gradient and corrects the bound by what it measures."""

    bound: float
    rounds: int
    ratio: float
    """Measured error over the aim."""


def close_loop(layer: Layer, bound: float, target: float, measured: float, unit: float) -> Loop:
    """Corrects the bound of nearest levels by what was measured, as `Comet` does, until the gradient's error is right.

    `target` is the error aimed at, `measured` the one at `bound`, and `unit` what theory predicts for a bound of one.
    """
    gain, rounds = Gain(), 0
    while rounds < LOOPS and target > 0 and measured > 0 and abs(measured / target - 1) > CLOSE:
        gain.learn(bound, measured / (unit * bound))
        bound = gain.bound_for(target, unit)
        measured = rms(layer.error_of(error(layer, bound, "nearest")))
        rounds += 1
    return Loop(bound, rounds, measured / target if target else math.nan)
