"""Error of a weight's gradient from a lossy input: COMET's theory, with exact norms.

A weight gradient is a sum over positions of output gradient times input. An error in the input that is independent for
each value, with mean square `power`, therefore gives the gradient a normally distributed error with

    std = sqrt(power) * rms(output gradient) * sqrt(terms)

`terms` is how many positions meet a kernel tap inside the image, averaged over the taps. Exact zeros carry no error, so
`power` is the share of non-zeros times the power of a single one: bound^2 / 3 for levels rounded to nearest, step^2 / 6
for stochastic ones. A biased error adds a part that does not cancel: its mean times the sum of the output gradient over
all positions.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

PAPER_A = 0.72
"""COMET's own constant: rms over mean absolute value over sqrt(3), for normally distributed output gradients."""


def nearest_power(bound: float, share: float) -> float:
    """Return the mean square error of levels rounded to nearest: uniform within the bound, none for zeros."""
    return share * bound**2 / 3


def stochastic_power(step: float, share: float) -> float:
    """Return the mean square error of stochastic rounding between levels a step apart, averaged over all values."""
    return share * step**2 / 6


def taps_inside(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int) -> float:
    """Count output positions with a tap inside the input, in one dimension, averaged over the taps."""
    inside = 0
    for tap in range(kernel):
        first = tap * dilation - padding
        low = max(0, -(first // stride))
        high = min(out - 1, (size - 1 - first) // stride)
        inside += max(0, high - low + 1)
    return inside / kernel


@dataclass(frozen=True)
class Product:
    """Positions that a weight's gradient sums over. Linear layers have neither kernel nor plane."""

    rows: int
    """Samples of a convolution; tokens of a linear layer."""
    plane: tuple[int, ...] = ()
    """Height and width of the tensor that the weight slides over (a transposed convolution's output)."""
    out: tuple[int, ...] = ()
    """Height and width of the other tensor (a transposed convolution's input)."""
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()

    @property
    def positions(self) -> int:
        """Positions counted as COMET does, padding included."""
        return self.rows * math.prod(self.out)

    @functools.cached_property
    def terms(self) -> float:
        """Positions that meet a tap inside the image, averaged over the taps."""
        dimensions = zip(self.plane, self.out, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return self.rows * math.prod(taps_inside(*dimension) for dimension in dimensions)


def error_std(power: float, gradient_rms: float, terms: float, coherent: float = 0.0) -> float:
    """Return the standard deviation of a weight gradient's error.

    Args:
        power: Mean square of the input's error over all values, zeros included.
        gradient_rms: Root mean square of the output gradient.
        terms: Positions that meet a tap inside the image.
        coherent: Variance of the part that does not cancel between positions, such as the square of the error's mean
            times the output gradient's sum.
    """
    return math.sqrt(power * gradient_rms**2 * terms + coherent)


def paper_std(power: float, gradient_abs: float, positions: float) -> float:
    """Return COMET's own form of the deviation: a * bound * sqrt(share * positions) * mean absolute output gradient.

    The bound is taken from the power, share * bound^2 / 3, so that the form serves every codec.
    """
    return PAPER_A * math.sqrt(3 * power * positions) * gradient_abs


@dataclass
class Gain:
    """Ratio of measured to predicted error of a weight's gradient, and its growth with the bound."""

    value: float = 1.0
    """Measured over predicted, the last time it was measured."""
    at: float = 0.0
    """The bound in force at the last measurement; zero before the first one."""
    slope: float = 0.0
    """Exponent of the bound in the gain: coarse levels are biased, and bias does not cancel."""

    def learn(self, bound: float, ratio: float) -> None:
        """Update the gain from a measured `ratio` of measured to predicted error, at a bound."""
        ratio = min(max(ratio, 0.1), 10.0)
        if self.at > 0 and bound > 0 and abs(math.log(bound / self.at)) > 0.5:
            self.slope = min(max(math.log(ratio / self.value) / math.log(bound / self.at), 0.0), 2.0)
        self.value, self.at = ratio, bound

    def expect(self, bound: float, unit: float) -> float:
        """Return the expected error at a bound, given the theory's prediction `unit` for a bound of one."""
        grown = (bound / self.at) ** self.slope if self.at > 0 else 1.0
        return unit * bound * self.value * grown

    def bound_for(self, error: float, unit: float) -> float:
        """Return the bound at which that error is to be expected."""
        slope = self.slope if self.at > 0 else 0.0
        return (error / (unit * self.value) * self.at**slope) ** (1 / (1 + slope))
