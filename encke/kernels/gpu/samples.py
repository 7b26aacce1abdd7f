"""Sums over a sample of values and of the scales of their groups: one launch instead of some twenty operations.

Each program writes the sums of its own part, so results do not depend on the order in which programs end.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import SampledUnits
from encke.kernels.gpu.common import widen
from encke.kernels.gpu.launch import TYPES, Launch

LANES, VALUES = 64, 4096
"""Number of columns or units of a program, and number of values that it processes at a time."""
FIGURES = tl.constexpr(7)
"""Number of sums that a program writes."""


@triton.jit(
    do_not_specialize=["units", "row", "columns", "unit_stride", "groups", "at_lo", "at_step", "scale_stride", "across"]
)
def sample_kernel(
    x, scales, out, units: tl.int32, row: tl.int32, columns: tl.int32, unit_stride: tl.int64, groups: tl.int32,
    at_lo: tl.int64, at_step: tl.int64, scale_stride: tl.int64, across: tl.int32,
    DTYPE: tl.constexpr, COLUMNAR: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Write the sums of L columns of a unit (COLUMNAR) or of L units of one column; see `GroupPlan.sample_sums`."""
    lane, program = tl.arange(0, L), tl.program_id(0)
    if COLUMNAR:
        unit = (program // across).to(tl.int64)
        column = program % across * L + lane
        here = column < columns
        first, at = unit * unit_stride + program % across * L, unit * unit_stride + column
        at_scale = unit * scale_stride + column
    else:
        unit = program.to(tl.int64) * L + lane
        here = unit < units
        first, at = program.to(tl.int64) * L * unit_stride, unit * unit_stride
        at_scale = unit * scale_stride
    shift = widen(tl.load(x + first), DTYPE)
    nonzeros = tl.zeros((L,), tl.float32)
    total = tl.zeros((L,), tl.float32)
    squares = tl.zeros((L,), tl.float32)
    r = tl.arange(0, R)
    start = row * 0
    while start < row:
        there = here[:, None] & (start + r < row)[None, :]
        v = widen(tl.load(x + at[:, None] + (start + r)[None, :].to(tl.int64) * columns, mask=there, other=0), DTYPE)
        difference = tl.where(there, v - shift, 0.0)
        nonzeros += tl.sum(tl.where(there & (v != 0), 1.0, 0.0), 1)
        total += tl.sum(difference, 1)
        squares += tl.sum(difference * difference, 1)
        start += R
    share = nonzeros / row
    signed = tl.zeros((L,), tl.float32)
    others = tl.zeros((L,), tl.float32)
    group = groups * 0
    while group < groups:
        place = at_scale + group * columns
        lo = tl.load(scales + at_lo + place, mask=here, other=0)
        # Constant groups are marked by the sign bit, so they are negative here; their other bits are arbitrary.
        step = tl.maximum(tl.load(scales + at_step + place, mask=here, other=0), 0)
        step = widen(step, tl.bfloat16)
        signed += tl.where(lo < 0, step * step, 0.0)
        others += tl.where(lo < 0, 0.0, step * step * share)
        group += 1
    out += program * FIGURES
    tl.store(out, tl.sum(here.to(tl.float32), 0) * row)
    tl.store(out + 1, tl.sum(nonzeros, 0))
    tl.store(out + 2, shift)
    tl.store(out + 3, tl.sum(total, 0))
    tl.store(out + 4, tl.sum(squares, 0))
    tl.store(out + 5, tl.sum(signed, 0))
    tl.store(out + 6, tl.sum(others, 0))


@functools.lru_cache(maxsize=4096)
def sample_launch(units: SampledUnits, dtype: torch.dtype) -> tuple[Launch, tuple[int, ...]]:
    """Return the launch for a sample, and the integer arguments of the kernel."""
    (count, row, columns), (unit_stride, _, _) = units.values
    (_, _, groups, _), (between, scale_stride, _, _), at_lo = units.scales
    across = -(-columns // LANES)
    columnar = columns > 1
    programs = count * across if columnar else -(-count // LANES)
    launch = Launch(sample_kernel, programs, (TYPES[dtype], columnar, LANES, VALUES // LANES), 4, 0)
    return launch, (count, row, columns, unit_stride, groups, at_lo, at_lo + between, scale_stride, across)


def sample_sums(flat: Tensor, data: Tensor, units: SampledUnits) -> Tensor:
    """Return a row of sums for each program; see `GroupPlan.sample_sums`."""
    launch, numbers = sample_launch(units, flat.dtype)
    out = torch.empty(launch.grid[0], FIGURES.value, dtype=torch.float32, device=flat.device)
    launch((flat, data.view(torch.int16), out), numbers)
    return out
