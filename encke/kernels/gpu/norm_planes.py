"""Batch norm and instance norm in training for NCHW memory: the forward, and the traversal of planes.

cuDNN and torch process a whole channel with one thread block. Few channels with many values, as in instance norm of
volumes, leave most of a GPU idle. Here many programs share a channel. There are three steps, and the host waits for
none of them: count, mean and squared deviation of parts of each channel; the statistics of each channel; and
(x - mean) * scale + bias.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.gpu.common import narrow, widen
from encke.kernels.gpu.launch import TYPES, Launch, power_of_two
from encke.kernels.gpu.norm_forward import update_running
from encke.kernels.gpu.places import quotient, reciprocal

PROGRAMS = 132 * 16  # programs that compute moments, if there is enough work
TILE = 2048  # values that a program reads at a time, with four warps
WIDTH = 1024  # largest number of adjacent values in a tile with planes of several samples
NARROWEST = 32  # smallest number of adjacent values in a tile
WASTE = 0.05  # share of a tile's lanes that a wider tile may leave idle in addition
MERGED = 256  # largest number of partial moments of a channel that are merged at a time


@triton.jit
def unit_channels(units, magic, shift, channels, channel_magic, channel_shift, UNITS: tl.constexpr):
    """Return the indices of a program's units of adjacent values, which of them exist, and their channels.

    `magic` and `shift` divide by the number of units in a plane, the other two by the number of channels.
    """
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)[:, None]
    plane = quotient(unit, magic, shift)
    return unit, unit < units, plane - quotient(plane, channel_magic, channel_shift) * channels


@triton.jit(do_not_specialize=["samples", "channels", "chunks", "splits"])
def plane_moments_kernel(
    x, moments, units: tl.int32, samples: tl.int32, channels: tl.int32, chunks: tl.int32, splits: tl.int32,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write count, mean and squared deviation of one channel over every `splits`-th tile.

    The channel's planes are cut into `chunks` parts of WIDTH values; a tile is one part of the planes of ROWS samples.
    The mean of the first tile is subtracted from all values, which avoids cancellation if the mean is large.
    """
    plane = units * UNIT
    c = tl.program_id(0) % channels
    split = tl.program_id(0) // channels
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    count, offset = 0.0, 0.0
    sum_d = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_dd = tl.zeros((ROWS, WIDTH), tl.float32)
    tile = split
    while tile < tl.cdiv(samples, ROWS) * chunks:
        first_row, first_column = tile // chunks * ROWS, tile % chunks * WIDTH
        there = (first_row + row < samples) & (first_column + column < plane)
        at = ((first_row + row).to(tl.int64) * channels + c) * plane + (first_column + column)
        v = widen(tl.load(x + at, mask=there, other=0), DTYPE)
        more = (tl.minimum(samples - first_row, ROWS) * tl.minimum(plane - first_column, WIDTH)).to(tl.float32)
        if tile == split:
            offset = tl.sum(tl.sum(v, 1), 0) / more
        d = tl.where(there, v - offset, 0.0)
        sum_d += d
        sum_dd = tl.fma(d, d, sum_dd)
        count += more
        tile += splits
    total = tl.sum(tl.sum(sum_d, 1), 0)
    away = total / count
    out = moments + split.to(tl.int64) * 3 * channels + c
    tl.store(out, count)
    tl.store(out + channels, offset + away)
    tl.store(out + 2 * channels, tl.maximum(tl.sum(tl.sum(sum_dd, 1), 0) - total * away, 0.0, tl.PropagateNan.ALL))


@triton.jit(do_not_specialize=["splits", "channels"])
def plane_statistics_kernel(
    moments, weight, bias, running_mean, running_var, batches, kept, splits: tl.int32, channels: tl.int32,
    momentum: tl.float32, eps: tl.float32,
    AFFINE: tl.constexpr, WEIGHT: tl.constexpr, RUNNING: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Write mean, 1 / deviation, scale and bias of each channel to `kept`; update the running statistics."""
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    here = c < channels
    row = tl.arange(0, ROWS)[:, None]
    first = tl.load(moments + channels + c, mask=here, other=0.0)
    count = tl.zeros((ROWS, CH), tl.float32)
    away = tl.zeros((ROWS, CH), tl.float32)
    start = 0
    while start < splits:
        at = moments + (start + row) * 3 * channels + c[None, :]
        there = (start + row < splits) & here[None, :]
        n = tl.load(at, mask=there, other=0.0)
        count += n
        away += n * (tl.load(at + channels, mask=there, other=0.0) - first[None, :])
        start += ROWS
    total = tl.maximum(tl.sum(count, 0), 1.0)
    mean = first + tl.sum(away, 0) / total
    square = tl.zeros((ROWS, CH), tl.float32)
    start = 0
    while start < splits:
        at = moments + (start + row) * 3 * channels + c[None, :]
        there = (start + row < splits) & here[None, :]
        away = tl.load(at + channels, mask=there, other=0.0) - mean[None, :]
        n = tl.load(at, mask=there, other=0.0)
        square += tl.load(at + 2 * channels, mask=there, other=0.0) + tl.where(there, n * away * away, 0.0)
        start += ROWS
    var = tl.sum(square, 0) / total
    inverse = tl.div_rn(1.0, tl.sqrt_rn(var + eps))
    scale, shift = inverse, tl.zeros((CH,), tl.float32)
    if AFFINE:
        scale = inverse * widen(tl.load(weight + c, mask=here, other=0), WEIGHT)
        shift = widen(tl.load(bias + c, mask=here, other=0), WEIGHT)
    tl.store(kept + c, mean, mask=here)
    tl.store(kept + channels + c, inverse, mask=here)
    tl.store(kept + 2 * channels + c, scale, mask=here)
    tl.store(kept + 3 * channels + c, shift, mask=here)
    if RUNNING:
        update_running(running_mean, running_var, batches, c, here, mean, var, total, momentum)


@triton.jit(do_not_specialize=["units", "magic", "shift", "channels", "channel_magic", "channel_shift"])
def plane_normalise_kernel(
    x, kept, out, units: tl.int32, magic: tl.int32, shift: tl.int32, channels: tl.int32, channel_magic: tl.int32,
    channel_shift: tl.int32, DTYPE: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) * scale + bias."""
    unit, exists, c = unit_channels(units, magic, shift, channels, channel_magic, channel_shift, UNITS)
    mean = tl.load(kept + c, mask=exists, other=0.0)
    scale = tl.load(kept + 2 * channels + c, mask=exists, other=0.0)
    bias = tl.load(kept + 3 * channels + c, mask=exists, other=0.0)
    at = unit.to(tl.int64) * UNIT + tl.arange(0, UNIT)[None, :]
    v = widen(tl.load(x + at, mask=exists, other=0), DTYPE)
    tl.store(out + at, narrow(tl.fma(v - mean, scale, bias), DTYPE), mask=exists)


@triton.jit(do_not_specialize=["units", "magic", "shift", "channels", "channel_magic", "channel_shift"])
def plane_gradient_kernel(
    grad, values, line, out, units: tl.int32, magic: tl.int32, shift: tl.int32, channels: tl.int32,
    channel_magic: tl.int32, channel_shift: tl.int32, DTYPE: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Write g * k1 + x * k2 + k3."""
    unit, exists, c = unit_channels(units, magic, shift, channels, channel_magic, channel_shift, UNITS)
    k1 = tl.load(line + c, mask=exists, other=0.0)
    k2 = tl.load(line + channels + c, mask=exists, other=0.0)
    k3 = tl.load(line + 2 * channels + c, mask=exists, other=0.0)
    at = unit.to(tl.int64) * UNIT + tl.arange(0, UNIT)[None, :]
    v = widen(tl.load(grad + at, mask=exists, other=0), DTYPE)
    x = widen(tl.load(values + at, mask=exists, other=0), DTYPE)
    tl.store(out + at, narrow(tl.fma(v, k1, tl.fma(x, k2, k3)), DTYPE), mask=exists)


class Planes:
    """Traversal of planes of one size in NCHW memory."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype) -> None:
        samples, channels, plane = size[0], size[1], math.prod(size[2:])
        unit, units = units_of(size, dtype)
        width = tile_width(plane, max(WIDTH, TILE // power_of_two(samples)))
        rows = min(TILE // width, power_of_two(samples))
        chunks = -(-plane // width)
        self.splits = min(-(-samples // rows) * chunks, -(-PROGRAMS // channels))
        """Number of programs that share a channel."""
        self.tiles = channels * self.splits, (TYPES[dtype], unit, rows, width)
        """Number of programs that traverse the tiles of all channels, and their constants."""
        self.tile_numbers = (plane // unit, samples, channels, chunks, self.splits)
        self.units = -(-units // (TILE // unit)), (TYPES[dtype], unit, TILE // unit)
        """Number of programs that traverse all values in memory order, and their constants."""
        self.unit_numbers = (units, *reciprocal(plane // unit), channels, *reciprocal(channels))


def units_of(size: tuple[int, ...], dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of adjacent values of a plane that a thread loads at a time, and the number of such units."""
    unit = math.gcd(math.prod(size[2:]), 16 // dtype.itemsize)
    return unit, math.prod(size) // unit


def countable(size: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether 32-bit integers can index the units, and the values of a plane."""
    return units_of(size, dtype)[1] < 1 << 31 and math.prod(size[2:]) < 1 << 30


def tile_width(plane: int, most: int) -> int:
    """Return the width of a tile: the widest one that leaves hardly more lanes idle than the best one."""
    widths = [1 << n for n in range(most.bit_length()) if min(NARROWEST, plane) <= 1 << n <= most]
    used = {width: plane / (-(-plane // width) * width) for width in widths}
    return max(width for width in widths if used[width] >= max(used.values()) - WASTE)


class PlanesForward:
    """Plan of the norm's forward for values of one size in NCHW memory."""

    def __init__(
        self, size: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None, device: torch.device
    ) -> None:
        planes, channels = Planes(size, dtype), size[1]
        self.channels, self.device, self.splits = channels, device, planes.splits
        self.measure = Launch(plane_moments_kernel, *planes.tiles, 4, 1)
        self.apply = Launch(plane_normalise_kernel, *planes.units, 4, 0)
        self.numbers = planes.tile_numbers, planes.unit_numbers
        affine = (weight_dtype is not None, TYPES[weight_dtype or torch.float32])
        rows = min(MERGED, power_of_two(self.splits))
        self.gather = [
            Launch(plane_statistics_kernel, -(-channels // 8), (*affine, running, rows, 8), 4, 0)
            for running in (False, True)
        ]

    def run(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, running: tuple[Tensor, ...] | None,
        momentum: float, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the result, and [mean, 1 / deviation, scale, bias] of each channel.

        `running` has running mean, running variance and number of batches, which are updated.
        """
        moments = torch.empty(self.splits * 3 * self.channels, dtype=torch.float32, device=self.device)
        kept = torch.empty(4, self.channels, dtype=torch.float32, device=self.device)
        self.measure((x, moments), self.numbers[0])
        means = (moments, moments, moments) if running is None else running
        affine: Any = (moments, moments) if weight is None else (weight, bias)
        numbers = (self.splits, self.channels, momentum, eps)
        self.gather[running is not None]((moments, *affine, *means, kept), numbers)
        out = torch.empty_like(x)
        self.apply((x, kept, out), self.numbers[1])
        return out, kept


@functools.lru_cache(maxsize=4096)
def planes_forward(
    size: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None, device: torch.device
) -> PlanesForward | None:
    """Return the plan for values of that size in NCHW memory; None if the kernels do not support them."""
    if dtype not in TYPES or dtype == torch.float64 or len(size) < 3 or not math.prod(size):
        return None
    if weight_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        return None
    return PlanesForward(size, dtype, weight_dtype, device) if countable(size, dtype) else None
