"""Dual precision on the CPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.fields import pack, unpack
from encke.kernels.cpu.launch import decode, elements, nan_and_limit, run, seed_halves, task_size
from encke.kernels.cpu.scalars import (
    as_float,
    f32,
    from_ordered,
    i32,
    index,
    inline,
    jit,
    magnitude,
    narrow,
    ordered,
    random32,
    rotate_right24,
    step_up,
    u8,
    u32,
    widen,
)
from encke.kernels.formats import DualFormat


@jit
def average_tiles(v, height, width, tall, wide, sums, lows, at):
    """Store the averages of a plane's tiles, summing columns from top to bottom, then their sums from left to right."""
    zero = as_float(0, v[0])
    for top in range(0, height, tall):
        rows = min(tall, height - top)
        for x in range(width):
            sums[x] = zero
        for y in range(top, top + rows):
            first = index(y * width)
            for x in range(width):
                sums[x] += v[first + x]
        for left in range(0, width, wide):
            columns, total = min(wide, width - left), zero
            for x in range(columns):
                total += sums[index(left) + x]
            mean = f32(total / as_float(rows * columns, zero))
            kept = narrow(mean, np.uint16(0))
            lows[at] = kept if mean - mean == 0 and kept & 0x7F80 != 0x7F80 else np.uint16(0)
            at += 1


@inline
def spread_averages(lows, at, width, wide, row):
    """Repeat the averages of one row of tiles for a row of values."""
    for left in range(0, width, wide):
        mean = as_float(widen(lows[at]), row[0])
        for x in range(min(wide, width - left)):
            row[index(left) + x] = mean
        at += 1


@jit
def subtract_averages(v, height, width, tall, wide, lows, at, row):
    """Subtract the averages from a plane; return the smallest and the largest difference."""
    for top in range(0, height, tall):
        spread_averages(lows, at, width, wide, row)
        at += (width + wide - 1) // wide
        for y in range(top, min(top + tall, height)):
            first = index(y * width)
            for x in range(width):
                v[first + x] -= row[x]
    low, high = ordered(as_float(math.inf, v[0])), ordered(as_float(-math.inf, v[0]))
    for i in range(v.size):  # a separate loop: one over many values vectorises better than many over a row
        key = ordered(v[i])
        low, high = min(low, key), max(high, key)
    return from_ordered(low), from_ordered(high)


@jit
def quantize_plane(v, codes, bits, length, lo, inverse, hashes):
    """Write the codes of a plane's differences. The values of a byte share one hash."""
    zero, n = as_float(0, lo), as_float((1 << bits) - 1, lo)
    for t in range(8 // bits):
        first, rotation = index(t * length), u32(4 * bits * t)
        for j in range(min(length, v.size - t * length)):
            s = (v[first + j] - lo) * inverse
            s = s if s > 0 else zero
            s = s if s < n else n
            q = i32(s)
            chance = i32((s - as_float(q, s)) * f32(2.0**24))
            codes[first + j] = u8(q + (rotate_right24(hashes[j], rotation) < chance))


@jit
def dual_encode_task(
    task, size, x, height, width, tall, wide, bits, seed_low, seed_high, los, steps, lows, codes, masks
):
    """Encode the planes of a task."""
    values = height * width
    length, mask_length = (values * bits + 7) // 8, (values + 7) // 8
    v, flags, sums, row = np.full(values, los[0]), np.empty(values, u8), np.full(width, los[0]), np.full(width, los[0])
    hashes, tiles = np.empty(length, u32), lows.size // los.size
    zero, n = as_float(0, los[0]), as_float((1 << bits) - 1, los[0])
    for p in range(task * size // values, min((task + 1) * size // values, los.size)):
        mine = x[p * values : (p + 1) * values]
        for i in range(values):
            v[i] = widen(mine[i])
        if masks.size:
            for i in range(values):
                flags[i] = magnitude(v[i]) != 0
            pack(flags, 1, mask_length, 0, mask_length, masks[p * mask_length : (p + 1) * mask_length])
        average_tiles(v, height, width, tall, wide, sums, lows, p * tiles)
        lo, hi = subtract_averages(v, height, width, tall, wide, lows, p * tiles, row)
        lo += zero  # never -0.0
        step, inverse = zero, zero
        if not hi - lo < math.inf:
            lo, step = zero, as_float(math.nan, zero)
        elif hi > lo:
            step = step_up(hi / n - lo / n)
            inverse = f32(1.0) / step
        los[p], steps[p] = lo, narrow(step, steps[p])
        for j in range(length):
            hashes[j] = random32(u32(p * length + j), seed_low, seed_high)
        quantize_plane(v, flags, bits, length, lo, inverse, hashes)
        pack(flags, bits, length, 0, length, codes[p * length : (p + 1) * length])


@jit
def dual_decode_task(
    task, size, numel, out, first_out, height, width, tall, wide, bits, los, steps, lows, data, nan, limit
):
    """Decode the planes of a task to `out`, whose first element is value `first_out`."""
    values = height * width
    length, tiles = (values * bits + 7) // 8, lows.size // los.size
    codes, row = np.empty(values, u8), np.full(width, los[0])
    for p in range(task * size // values, min((task + 1) * size // values, los.size)):
        unpack(data[p * length : (p + 1) * length], bits, length, 0, length, codes)
        lo, step, at = los[p], widen(steps[p]), p * tiles
        to = out[p * values - first_out : (p + 1) * values - first_out]
        for top in range(0, height, tall):
            spread_averages(lows, at, width, wide, row)
            at += (width + wide - 1) // wide
            for y in range(top, min(top + tall, height)):
                first = index(y * width)
                for x in range(width):
                    value = row[x] + (lo + as_float(i32(codes[first + x]), lo) * step)
                    to[first + x] = narrow(min(max(value, -limit), limit), nan)
        if step != step:
            to[:] = nan


@jit
def dual_mask_task(task, size, values, masks, out):
    """Unpack the mask bits of the planes of a task to one byte each."""
    length = (values + 7) // 8
    for p in range(task * size // values, min((task + 1) * size, out.size) // values):
        mine = masks[p * length : (p + 1) * length]
        unpack(mine, 1, length, 0, length, out[p * values : (p + 1) * values])


def arrays_of(data: np.ndarray, format: DualFormat, numel: int) -> list[np.ndarray]:
    """Return the lo, step, average, code and mask arrays in a buffer."""
    lo, step = (np.float64, np.float64) if format.dtype == torch.float64 else (np.float32, np.uint16)
    kinds, places = (lo, step, np.uint16, np.uint8, np.uint8), format.places(numel)
    return [data[start:end].view(kind) for start, end, kind in zip((0, *places[:4]), places, kinds, strict=True)]


def dual_encode(x: Tensor, format: DualFormat, seed: int) -> Tensor:
    """Encode contiguous planes of height x width values into one buffer."""
    numel = x.numel()
    out = torch.empty(format.nbytes(numel), dtype=torch.uint8)
    if numel:
        size = task_size(numel, format.plane)
        shape = (format.height, format.width, *format.tile, format.bits)
        args = (size, elements(x), *shape, *seed_halves(seed), *arrays_of(out.numpy(), format, numel))
        run(dual_encode_task, -(-numel // size), *args)
    return out


def dual_decode(data: Tensor, format: DualFormat, numel: int, mask: bool) -> Tensor:
    """Decode the result of `dual_encode`.

    With `mask`, return the mask of the non-zero values instead. It is exact if the format is `masked`.
    """
    size = task_size(numel, format.plane)
    *arrays, masks = arrays_of(data.numpy(), format, numel)
    if mask and format.masked:
        flags = torch.empty(numel, dtype=torch.bool)
        run(dual_mask_task, -(-numel // size), size, format.plane, masks, flags.view(torch.uint8).numpy())
        return flags
    shape = (format.height, format.width, *format.tile, format.bits)
    return decode(dual_decode_task, size, numel, format.dtype, mask, *shape, *arrays, *nan_and_limit(format.dtype))
