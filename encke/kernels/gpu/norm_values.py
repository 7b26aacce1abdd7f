"""Backward of batch norm from decoded values, for codecs whose codes the kernels cannot read.

The steps are those of norm_backward.py: sums of g and g * (x - mean), the coefficients of each channel, and
grad_x = g * k1 + x * k2 + k3. Gradient and values are read twice, and the result is written once.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.gpu.common import narrow, widen
from encke.kernels.gpu.launch import TYPES, Launch, power_of_two
from encke.kernels.gpu.norm_backward import PROGRAMS, NormPlan
from encke.kernels.gpu.norm_planes import Planes, countable, plane_gradient_kernel

TILE = 2048  # values that a program reads at a time in channels_last memory, with four warps
CHANNELS = 64  # largest number of channels in such a tile


@triton.jit(do_not_specialize=["samples", "channels", "chunks", "splits"])
def plane_sums_kernel(
    grad, values, mean, sums, units: tl.int32, samples: tl.int32, channels: tl.int32, chunks: tl.int32,
    splits: tl.int32, DTYPE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum g and g * (x - mean) for one channel over every `splits`-th tile, in NCHW memory.

    The channel's planes are cut into `chunks` parts of WIDTH values; a tile is one part of the planes of ROWS samples.
    """
    plane = units * UNIT
    c = tl.program_id(0) % channels
    split = tl.program_id(0) // channels
    middle = tl.load(mean + c)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    sum_g = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_gx = tl.zeros((ROWS, WIDTH), tl.float32)
    tile = split
    while tile < tl.cdiv(samples, ROWS) * chunks:
        n = tile // chunks * ROWS + row
        j = tile % chunks * WIDTH + column
        there = (n < samples) & (j < plane)
        at = (n.to(tl.int64) * channels + c) * plane + j
        v = widen(tl.load(grad + at, mask=there, other=0), DTYPE)
        x = widen(tl.load(values + at, mask=there, other=0), DTYPE)
        sum_g += v
        sum_gx = tl.fma(v, x - middle, sum_gx)
        tile += splits
    out = sums + split.to(tl.int64) * 2 * channels + c
    tl.store(out, tl.sum(tl.sum(sum_g, 1), 0))
    tl.store(out + channels, tl.sum(tl.sum(sum_gx, 1), 0))


@triton.jit(do_not_specialize=["pixels", "tiles", "splits"])
def last_sums_kernel(
    grad, values, mean, sums, units: tl.int32, pixels: tl.int64, tiles: tl.int32, splits: tl.int32,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Sum g and g * (x - mean) for WIDTH channels over every `splits`-th ROWS pixels, in channels_last memory."""
    channels = units * UNIT
    c = tl.program_id(0) % tiles * WIDTH + tl.arange(0, WIDTH)
    here, split = c < channels, tl.program_id(0) // tiles
    middle = tl.load(mean + c, mask=here, other=0.0)
    row = tl.arange(0, ROWS)[:, None]
    sum_g = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_gx = tl.zeros((ROWS, WIDTH), tl.float32)
    first = split.to(tl.int64) * ROWS
    while first < pixels:
        there = (first + row < pixels) & here[None, :]
        at = (first + row) * channels + c[None, :]
        v = widen(tl.load(grad + at, mask=there, other=0), DTYPE)
        x = widen(tl.load(values + at, mask=there, other=0), DTYPE)
        sum_g += v
        sum_gx = tl.fma(v, x - middle[None, :], sum_gx)
        first += splits.to(tl.int64) * ROWS
    out = sums + split.to(tl.int64) * 2 * channels + c
    tl.store(out, tl.sum(sum_g, 0), mask=here)
    tl.store(out + channels, tl.sum(sum_gx, 0), mask=here)


@triton.jit(do_not_specialize=["pixels"])
def last_gradient_kernel(
    grad, values, line, out, units: tl.int32, pixels: tl.int64,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write g * k1 + x * k2 + k3 for ROWS pixels of WIDTH channels."""
    channels = units * UNIT
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    here = c < channels
    k1 = tl.load(line + c, mask=here, other=0.0)
    k2 = tl.load(line + channels + c, mask=here, other=0.0)
    k3 = tl.load(line + 2 * channels + c, mask=here, other=0.0)
    there = (pixel < pixels) & here
    at = pixel * channels + c
    v = widen(tl.load(grad + at, mask=there, other=0), DTYPE)
    x = widen(tl.load(values + at, mask=there, other=0), DTYPE)
    tl.store(out + at, narrow(tl.fma(v, k1, tl.fma(x, k2, k3)), DTYPE), mask=there)


class ValuesPlan(NormPlan):
    """Plan of batch norm's backward from values with the memory format of the gradients."""

    def __init__(
        self, size: tuple[int, ...], dtype: torch.dtype, channels_last: bool, weight_dtype: torch.dtype | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        numel, channels = math.prod(size), size[1]
        if channels_last:
            unit = math.gcd(channels, 16 // dtype.itemsize)
            width = min(power_of_two(channels), CHANNELS)
            rows, chunks = TILE // width, -(-channels // width)
            constants = (TYPES[dtype], unit, rows, width)
            pixels = numel // channels
            blocks = -(-pixels // rows)
            splits = min(blocks, -(-PROGRAMS // chunks))
            self.numbers: tuple[tuple, ...] = ((channels // unit, pixels, chunks, splits), (channels // unit, pixels))
            self.reduce = Launch(last_sums_kernel, chunks * splits, constants, 4, 1)
            self.write = Launch(last_gradient_kernel, (blocks, chunks), constants, 4, 1)
        else:
            planes = Planes(size, dtype)
            splits, self.numbers = planes.splits, (planes.tile_numbers, planes.unit_numbers)
            self.reduce = Launch(plane_sums_kernel, *planes.tiles, 4, 1)
            self.write = Launch(plane_gradient_kernel, *planes.units, 4, 0)
        super().__init__(numel, channels, splits, weight_dtype, device)

    def sum_up(
        self, grad: Tensor, data: Tensor, mean: Tensor, seed: tuple[Tensor, int, int], gate: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if sums is None:
            sums = torch.empty(self.sums_numel, dtype=torch.float32, device=self.device)
        self.reduce((grad, data, mean, sums), self.numbers[0])
        return sums

    def apply(
        self, grad: Tensor, data: Tensor, line: Tensor, out: Tensor, seed: tuple[Tensor, int, int],
        gate: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.write((grad, data, line, out), self.numbers[1])


@functools.lru_cache(maxsize=4096)
def values_plan(
    size: tuple[int, ...], dtype: torch.dtype, channels_last: bool, weight_dtype: torch.dtype | None,
    device: torch.device,
) -> ValuesPlan | None:  # fmt: skip
    """Return the plan for gradients and values of that size; None if the kernels do not support them."""
    numel, channels = math.prod(size), size[1]
    if dtype not in TYPES or dtype == torch.float64 or not numel:
        return None
    if numel // channels >= 1 << 31 if channels_last else not countable(size, dtype):
        return None
    if weight_dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
        return None
    return ValuesPlan(size, dtype, channels_last, weight_dtype, device)
