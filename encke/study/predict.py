"""Error of one layer's weight gradient: predicted by the theory, and measured."""

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
MIN_INPUTS = 256
"""Fewest inputs per output in total over the draws of random errors: the rms of fewer is uncertain."""
MAX_ROUNDS = 4
TOLERANCE = 0.02
"""Relative distance from the target at which a closed loop ends."""


@dataclass(frozen=True)
class Predicted:
    """Standard deviation of a weight gradient's error, predicted in four ways."""

    plain: float
    """From the bound and the share of non-zeros alone."""
    exact: float
    """From the codec's mean square error, and from the part of the error that does not cancel, on average."""
    certain: float | None
    """For stochastic rounding, with the deterministic part of the error passed through the product itself."""
    paper: float
    """COMET's own formula, with the mean absolute value of the output gradient."""


def codec_error(layer: Layer, bound: float, rounding: Rounding, seed: int = 0) -> Tensor:
    """Return the codec's error in this layer's input."""
    return ErrorBounded(bound, rounding=rounding, seed=seed).encode(layer.x).decode() - layer.x


def deterministic_part(x: Tensor, bound: float) -> Tensor:
    """Return the deterministic error of stochastic rounding: values below half a step become half a step."""
    half = bound / 2
    return torch.where((x != 0) & (x.abs() < half), x.sign() * half - x, 0.0)


def predict(layer: Layer, bound: float, rounding: Rounding, input_error: Tensor) -> Predicted:
    """Predict the error at an absolute bound; `input_error` is the codec's error in the layer's input."""
    product, gradient_rms = layer.product, rms(layer.g)
    inside = product.terms / product.positions
    error_power = stochastic_power if rounding == "stochastic" else nearest_power
    assumed = error_power(bound, layer.share)
    power = rms(input_error) ** 2
    certain: float | None = None
    sums = layer.planes(layer.g).sum(-1)
    if rounding == "stochastic":
        deterministic = deterministic_part(layer.x, bound)
        means = layer.planes(deterministic).mean(-1)
        coherent = float((means.t() @ sums).square().mean()) * inside**2
        left = max(power - rms(means) ** 2, 0.0)
        certain = error_std(
            max(power - rms(deterministic) ** 2, 0.0),
            gradient_rms,
            product.terms,
            rms(layer.gradient_error(deterministic)) ** 2,
        )
    elif layer.kind == "linear":
        means = layer.planes(input_error).mean(-1)
        coherent = float((means.t() @ sums).square().mean())
        left = max(power - rms(means) ** 2, 0.0)
    else:
        coherent = (float(input_error.mean()) * inside) ** 2 * rms(sums.sum(0)) ** 2
        left = power
    return Predicted(
        plain=error_std(assumed, gradient_rms, product.terms),
        exact=error_std(left, gradient_rms, product.terms, coherent),
        certain=certain,
        paper=paper_std(assumed, float(layer.g.abs().mean()), product.positions),
    )


@dataclass(frozen=True)
class Measured:
    """Measured error of a weight gradient."""

    rms: float
    std: float
    draws: int
    sample: Tensor
    """Errors of some weights, of the last draw."""
    by_output: Tensor
    """Errors in units of the rms of each output's own errors, because gradients differ between outputs."""


def measure(layer: Layer, bound: float, rounding: Rounding, first: Tensor, seed: int) -> Measured:
    """Measure the error through the gradient's own product; random errors are drawn several times if weights are few.

    `first` is the codec's error in the input at `seed`.
    """
    fan_in = layer.weight[0].numel()
    draws = -(-MIN_INPUTS // fan_in) if rounding == "stochastic" else 1
    squares, variances, errors = [], [], first
    for draw in range(draws):
        errors = layer.gradient_error(first if draw == 0 else codec_error(layer, bound, rounding, seed + draw))
        squares.append(rms(errors) ** 2)
        variances.append(squares[-1] - float(errors.mean(dtype=torch.float64)) ** 2)
    outputs = errors.flatten(1)
    scale = outputs.square().mean(1, keepdim=True).sqrt()
    by_output = (outputs / scale)[scale.flatten() > 0]
    mean_rms, mean_std = (math.sqrt(sum(values) / draws) for values in (squares, variances))
    return Measured(mean_rms, mean_std, draws, sample(errors), sample(by_output))


@dataclass(frozen=True)
class Loop:
    """End of a closed loop, which corrects the bound by the measured error until the gradient's error is on target."""

    bound: float
    rounds: int
    ratio: float
    """Measured error over the target."""


def close_loop(layer: Layer, bound: float, target: float, measured: float, unit: float) -> Loop:
    """Correct the bound of nearest levels by the measured error, as `Comet` does, until the error is on target.

    `target` is the wanted error, `measured` the error at `bound`, and `unit` the predicted error at a bound of one.
    """
    gain, rounds = Gain(), 0
    while rounds < MAX_ROUNDS and target > 0 and measured > 0 and abs(measured / target - 1) > TOLERANCE:
        gain.learn(bound, measured / (unit * bound))
        bound = gain.bound_for(target, unit)
        measured = rms(layer.gradient_error(codec_error(layer, bound, "nearest")))
        rounds += 1
    return Loop(bound, rounds, measured / target if target else math.nan)
