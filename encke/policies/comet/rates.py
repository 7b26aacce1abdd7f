"""Error of the fixed rates at every number of bits, from the scales of what is packed: nothing is encoded again.

The dither of `GroupQuant` is subtracted when decoding, so an error is uniform within half a step of its group whatever
the value is: its mean square is step^2 / 12, and it has no bias. Zeros of groups without negative values have none. A
group's step is its range over a number of levels (docs/design.md), so the step in force tells that of other rates.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from encke.codecs import Packed
from encke.codecs.base import operations
from encke.kernels import GroupFormat, GroupPlan, SampledUnits

SAMPLE = 1 << 18
"""Values of a tensor that are measured, in whole rows or groups spread over all of it."""
LEAST = 8
"""Fewest rows, or groups of all channels, that are measured."""
GOLDEN = -0x61C88647
"""2^32 times the golden ratio, modulo 2^32: its multiples fill the integers of 32 bits evenly."""


@functools.cache
def steps_of_range(bits: int, signed: bool) -> int:
    """Return into how many steps a group's range is divided."""
    return 2**bits - (1 if signed else 2)


class Scales(NamedTuple):
    """A sample of values, [unit, row, column], and the scales of their groups, [unit, group, column]."""

    values: Tensor
    signed: Tensor
    """Whether the group has negative values, so that zeros are not exact."""
    steps: Tensor

    @staticmethod
    def of(flat: Tensor, packed: Packed) -> Scales:
        """Return a sample of a packed run of memory whose errors `follow_from_scales`."""
        plan: Any = packed.plan
        units, whole = units_of(plan.format, plan.numel), plan.format.scale_dtype == torch.float64
        lo, step = packed.buffers[0].view(torch.float64 if whole else torch.int16).as_strided(*units.scales)
        # Constant groups are marked by a sign bit, before other bits of any kind.
        steps = step if whole else step.clamp_min(0).view(torch.bfloat16).float()
        return Scales(flat.as_strided(*units.values, flat.storage_offset()), lo < 0, steps)

    def powers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the share of non-zeros, and the squared steps of groups with and without negative values.

        The squares are means over all values, each with those values alone that have an error.
        """
        share = (self.values != 0).mean(1, keepdim=True, dtype=self.steps.dtype)
        square = self.steps * self.steps
        signed = square * self.signed
        return share.mean(), signed.mean(), ((square - signed) * share).mean()

    def distortion(self, slope: Callable[[Tensor, Tensor], Tensor], bits: int, rates: Sequence[int]) -> Tensor:
        """Return the relative mean square error of a function's derivative, at each of `rates`.

        Args:
            slope: The function's backward, of a gradient and what it saved.
            bits: The rate in force.
            rates: Numbers of bits.
        """
        x, signed, steps = self.values.to(self.steps.dtype), self.signed[:, :, None], self.steps[:, :, None]
        (units, row, columns), groups = x.shape, signed.shape[1]
        length = -(-row // groups)
        if length * groups == row:
            x = x.view(units, groups, length, columns)
        else:
            x = x[:, None]
            signed, steps = (t.expand(-1, -1, length, -1).flatten(1, 2)[:, None, :row] for t in (signed, steps))
        integers = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape) * GOLDEN
        error = torch.where(signed | (x != 0), integers.to(x.dtype) * steps, 0)
        errors = error * torch.where(signed, *error_factors(bits, tuple(rates), x.dtype, x.device))
        one = x.new_ones(())
        right, wrong = (slope(one.expand_as(t), t) for t in (x, x + errors))
        return (wrong - right).square().flatten(1).mean(1) / right.square().mean()


@functools.lru_cache(maxsize=64)
def error_factors(bits: int, rates: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 2^-32 times the step of each rate over that at `bits`, in groups with and without negative values."""
    signed, others = (
        torch.tensor([2.0**-32 * steps_of_range(bits, kind) / steps_of_range(rate, kind) for rate in rates])
        .to(device, dtype)
        .view(-1, 1, 1, 1, 1)
        for kind in (True, False)
    )
    return signed, others


def follow_from_scales(plan: GroupPlan, group: int) -> bool:
    """Return whether the errors of rates with groups of so many values follow from the scales of what is packed."""
    return not plan.format.signs and plan.format.group == group and plan.numel > 0


class SampleFigures(NamedTuple):
    """Share of non-zeros, standard deviation, and the squared steps as `Scales.powers` returns them."""

    share: float
    std: float
    signed: float
    others: float

    @staticmethod
    def of(sums: Tensor, plan: GroupPlan) -> SampleFigures:
        """Return the figures of a sample from the sums of its parts, as `GroupPlan.sample_sums` returns them."""
        groups = math.prod(units_of(plan.format, plan.numel).scales[0][1:])
        count, nonzeros, shift, total, squares, signed, others = sums.numpy().T
        values, means = count.sum(), shift + total / count
        mean = (count * means).sum() / values
        with np.errstate(invalid="ignore"):
            square = (squares - total * total / count + count * (means - mean) ** 2).sum() / values
        # An infinity among the values leaves a NaN, and rounding may leave a number just below zero.
        std = math.sqrt(max(square, 0.0)) if square == square else math.nan
        return SampleFigures(nonzeros.sum() / values, std, signed.sum() / groups, others.sum() / groups)


@functools.lru_cache(maxsize=4096)
def units_of(format: GroupFormat, numel: int) -> SampledUnits:
    """Return what is measured of a run of so many values.

    The distance of units has no factor in common with their number, so that those measured do not all have one place
    in a plane.
    """
    row, stride = format.row or min(format.extent, numel // format.stride), format.stride
    groups = format.groups_in_row(numel) if format.row else 1
    units = numel // (row * stride)
    step = max(units // max(SAMPLE // (row * stride), LEAST), 1)
    while math.gcd(step, units) > 1:
        step -= 1
    count, (at_lo, at_step, _) = -(-units // step), format.places(numel)
    each = format.scale_dtype.itemsize
    strides = ((at_step - at_lo) // each, step * groups * stride, stride, 1)
    return SampledUnits(
        ((count, row, stride), (step * row * stride, stride, 1)),
        ((2, count, groups, stride), strides, at_lo // each),
    )


def decode_first(packed: Packed, count: int) -> Tensor | None:
    """Return the first values of a run, decoded without the others; None where the codes do not allow it."""
    plan = packed.plan
    if plan is None:
        return None
    format, data = plan.format, packed.buffers[0]
    unit = (format.row or format.extent) * format.stride
    numel = -(-count // unit) * unit
    if numel >= plan.numel:
        return packed.decode_flat()[:count]
    at_lo, at_step, _ = format.places(plan.numel)
    codes, scales = format.places(numel)[0], format.groups(numel) * format.scale_dtype.itemsize
    part = torch.cat([data[:codes], data[at_lo : at_lo + scales], data[at_step : at_step + scales]])
    return operations(data).group_plan(format, numel, data.device).decode(part, packed.seed)[:count]  # type: ignore[attr-defined]


def power_at(bits: int, rate: int, signed: float, others: float) -> float:
    """Return the mean square error at a rate from the squared steps at `bits`, as `Scales.powers` returns them."""
    of_signed, of_others = power_factors(bits, rate)
    return signed * of_signed + others * of_others


@functools.cache
def power_factors(bits: int, rate: int) -> tuple[float, float]:
    """Return the mean square error at a rate over the squared step at `bits`, of signed groups and of others."""
    ratios = [steps_of_range(bits, kind) / steps_of_range(rate, kind) for kind in (True, False)]
    return ratios[0] ** 2 / 12, ratios[1] ** 2 / 12
