"""The backward of batch norm from a packed input: `GroupQuant` codes are decoded in registers, never in memory.

Four steps, none of which the host waits for: sums of g and g * x for parts of the tensor, for planes in NCHW memory the
gathering of these parts by channel, the coefficients of each channel with the gradients of weight and bias, and
grad_x = g * k1 + x * k2 + k3.

A value comes from its code and its random number d as lo + (code - first - 0.5 + d) * step. Both stand next to each
other in the mantissa of one fp32 number, 2^bits + code + d, and one fused multiply-add with what its group has in
common makes the value: no conversion from integers. d keeps 23 - bits of its 24 bits.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.gpu.common import narrow, random32, seed_of, widen
from encke.kernels.gpu.launch import TYPES, Launch, Seed, _drawn
from encke.kernels.reference import gq_groups

GROUP = 128
WARPS = 1  # of a program in channels_last memory; eight threads have 16 bytes each of a pixel
PROGRAMS = 132 * 16  # programs that sum up, where there is enough to do
TILES = 1  # tiles of eight groups that a program sums up in NCHW memory, with one warp
LARGEST_TILE = 32  # groups of the largest tile in NCHW memory
GATHER = 1024  # sums that a program of the gathering reads at a time
SMALLEST_PLANE = 32
ROUND = False
"""Whether decoded values are rounded to the tensor's dtype before use, as when they are decoded to memory."""


@triton.jit
def marked(byte, h, SLICE: tl.constexpr, BITS: tl.constexpr):
    """2^bits + code + d of the values in one slice of their groups, as fp32, from their bytes and hashes."""
    KEEP: tl.constexpr = 23 - BITS
    TURN: tl.constexpr = (4 * BITS * SLICE + 9 + BITS) % 32
    d = h >> TURN
    if SLICE > 0:
        d = (d | (h << (32 - TURN))) & ((1 << KEEP) - 1)
    code = (byte << (KEEP - BITS * SLICE)) & (((1 << BITS) - 1) << KEEP)
    return (code | d | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def group_line(lo, step, BITS: tl.constexpr):
    """For groups: what is added to `marked * step` to get the values, and below which mark they are zero."""
    signed = lo < 0
    # What the dropped bits of d are on average is added back.
    first = 2.0**BITS + 0.5 - 2.0 ** (BITS - 24)
    base = tl.fma(step, -tl.where(signed, first, first + 1.0), lo)
    return base, tl.where(signed | (step != step), 0.0, 2.0**BITS + 1.0)


@triton.jit
def load_lo(data, groups, g, mask, LENGTH: tl.constexpr):
    """lo of the groups `g`; negative where the mask is false."""
    at = (data + groups * LENGTH).to(tl.pointer_type(tl.int16))
    return widen(tl.load(at + g, mask=mask, other=-0x4080), tl.bfloat16)


@triton.jit
def load_step(data, groups, g, mask, LENGTH: tl.constexpr):
    at = (data + groups * (LENGTH + 2)).to(tl.pointer_type(tl.int16))
    return widen(tl.load(at + g, mask=mask, other=0), tl.bfloat16)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """x as a tensor of that dtype would hold it, if asked for."""
    if ROUND and DTYPE != tl.float32:
        top = 65504.0 if DTYPE == tl.float16 else 3.3895313892515355e38
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -top), top), x)
        return widen(narrow(x, DTYPE), DTYPE)
    else:
        return x


# -- channels_last: a tile is R pixels x CH channels, of which a thread has a piece of a row; 128 pixels make a group --


@triton.jit
def column_groups(data, groups, g, there, BITS: tl.constexpr):
    """step, base and zero mark of the groups `g`, each repeated for all rows of the tile."""
    LENGTH: tl.constexpr = 16 * BITS
    lo, step = load_lo(data, groups, g, there, LENGTH), load_step(data, groups, g, there, LENGTH)
    base, zero = group_line(lo, step, BITS)
    return step, base, zero


@triton.jit(do_not_specialize=["pixels", "tiles", "splits", "seed_low", "seed_high"])
def last_reduce_kernel(
    grad, data, mean, sums, seeds, units: tl.int32, pixels: tl.int64, tiles: tl.int32, splits: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, DTYPE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, CH: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Sums of g and of g * (x - mean) for each channel over every `splits`-th block of pixels."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    channels = units * UNIT
    first_channel = (tl.program_id(0) % tiles) * CH
    row = tl.arange(0, R)[:, None]
    c = row * 0 + (first_channel + tl.arange(0, CH))[None, :]
    here = c < channels
    place = row * channels + c
    code_place = tl.max_contiguous(row * channels + c, [1, V])
    middle = tl.load(mean + c, mask=here, other=0.0)
    blocks = ((pixels + 127) // 128).to(tl.int32)
    groups = blocks.to(tl.int64) * channels
    sum_g = tl.zeros((R, CH), tl.float32)
    sum_gx = tl.zeros((R, CH), tl.float32)
    block = tl.program_id(0) // tiles
    while block < blocks:
        start = block.to(tl.int64) * channels
        step, base, zero = column_groups(data, groups, start + c, here, BITS)
        left = tl.minimum(pixels - block.to(tl.int64) * 128, 128).to(tl.int32)
        # Groups without a level for zero, as before a ReLU, are a straight line: group by group, not value by value.
        if ROUND or tl.max(tl.max((zero > 0).to(tl.int32), 1), 0) > 0:
            for u in range(LENGTH // R):
                at = start * LENGTH + u * R * channels
                byte = tl.load(data + at + code_place, mask=here, other=0).to(tl.uint32)
                h = random32(at.to(tl.uint32) + place.to(tl.uint32), seed_low, seed_high)
                for s in tl.static_range(T):
                    pixel = s * LENGTH + u * R
                    there = (row + pixel < left) & here
                    v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
                    mark = marked(byte, h, s, BITS)
                    x = tl.where(mark < zero, 0.0, tl.fma(mark, step, base))
                    sum_g += v
                    sum_gx = tl.fma(v, rounded(x, DTYPE, ROUND) - middle, sum_gx)
        else:
            block_g = tl.zeros((R, CH), tl.float32)
            block_gm = tl.zeros((R, CH), tl.float32)
            for u in range(LENGTH // R):
                at = start * LENGTH + u * R * channels
                byte = tl.load(data + at + code_place, mask=here, other=0).to(tl.uint32)
                h = random32(at.to(tl.uint32) + place.to(tl.uint32), seed_low, seed_high)
                for s in tl.static_range(T):
                    pixel = s * LENGTH + u * R
                    there = (row + pixel < left) & here
                    v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
                    block_g += v
                    block_gm = tl.fma(v, marked(byte, h, s, BITS), block_gm)
            sum_g += block_g
            sum_gx = tl.fma(block_gm, step, tl.fma(block_g, base - middle, sum_gx))
        block += splits
    c = first_channel + tl.arange(0, CH)
    out = sums + (tl.program_id(0) // tiles).to(tl.int64) * 2 * channels + c
    tl.store(out, tl.sum(sum_g, 0), mask=c < channels)
    tl.store(out + channels, tl.sum(sum_gx, 0), mask=c < channels)


@triton.jit(do_not_specialize=["pixels", "tiles", "seed_low", "seed_high"])
def last_apply_kernel(
    grad, data, line, out, seeds, units: tl.int32, pixels: tl.int64, tiles: tl.int32, seed_low: tl.int32,
    seed_high: tl.int32, DTYPE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    CH: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """g * k1 + x * k2 + k3 for one block of 128 pixels and CH channels."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    channels = units * UNIT
    row = tl.arange(0, R)[:, None]
    c = row * 0 + ((tl.program_id(0) % tiles) * CH + tl.arange(0, CH))[None, :]
    here = c < channels
    place = row * channels + c
    code_place = tl.max_contiguous(row * channels + c, [1, V])
    block = (tl.program_id(0) // tiles).to(tl.int64)
    k1 = tl.load(line + c, mask=here, other=0.0)
    k2 = tl.load(line + channels + c, mask=here, other=0.0)
    k3 = tl.load(line + 2 * channels + c, mask=here, other=0.0)
    start = block * channels
    step, base, zero = column_groups(data, (pixels + 127) // 128 * channels, start + c, here, BITS)
    slope, shift = step * k2, tl.fma(base, k2, k3)
    left = tl.minimum(pixels - block * 128, 128).to(tl.int32)
    for u in range(LENGTH // R):
        at = start * LENGTH + u * R * channels
        byte = tl.load(data + at + code_place, mask=here, other=0).to(tl.uint32)
        h = random32(at.to(tl.uint32) + place.to(tl.uint32), seed_low, seed_high)
        for s in tl.static_range(T):
            pixel = s * LENGTH + u * R
            there = (row + pixel < left) & here
            v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
            mark = marked(byte, h, s, BITS)
            if ROUND:
                x = tl.where(mark < zero, 0.0, tl.fma(mark, step, base))
                rest = tl.fma(rounded(x, DTYPE, ROUND), k2, k3)
            else:
                rest = tl.where(mark < zero, k3, tl.fma(mark, slope, shift))
            value = narrow(tl.fma(v, k1, rest), DTYPE)
            tl.store(out + start * 128 + pixel * channels + place, value, mask=there)


# -- NCHW: a tile is a few groups x their bytes; a group may reach into several planes ---------------------------------


@triton.jit
def times_high(a, b):
    """The upper half of a product of uint64."""
    return tl.umulhi(a.to(tl.uint64), b.to(tl.uint64))


@triton.jit
def planes_of(first, plane_size, channels, magic, plane_magic, channel_magic, G: tl.constexpr, BIG: tl.constexpr):
    """For G groups from value `first` on: the channel they begin in, not yet wrapped, and what is left of its plane."""
    plane = times_high(first, plane_magic).to(tl.int64)
    at = (first - plane * plane_size).to(tl.int32) + tl.arange(0, G) * 128
    if BIG:
        further = (at >= plane_size).to(tl.int32)
    else:
        further = tl.umulhi(at.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
    c = (plane - times_high(plane, channel_magic).to(tl.int64) * channels).to(tl.int32)
    return c + further, plane_size - (at - further * plane_size)


@triton.jit
def wrapped(c, channels, ONCE: tl.constexpr):
    if ONCE:
        return tl.where(c >= channels, c - channels, c)
    else:
        return c % channels


@triton.jit
def of_part(v, k, ends, plane_size, PART: tl.constexpr, PARTS: tl.constexpr):
    """v at the positions k that lie in the PART-th plane that a group meets, else 0; the first one ends at `ends`."""
    if PART < PARTS - 1:
        v = tl.where(k < ends[:, None] + PART * plane_size, v, 0.0)
    if PART > 0:
        v = tl.where(k < ends[:, None] + (PART - 1) * plane_size, 0.0, v)
    return v


@triton.jit
def zeros_of(like, COUNT: tl.constexpr):
    """A tuple of so many tensors of zeros."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.zeros(like.shape, tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def straight_sums(grads, byte, h, step, base, BITS: tl.constexpr):
    """Sums of g and g * x of groups that lie in one plane each and have no level for zero."""
    sum_g = tl.zeros(byte.shape, tl.float32)
    sum_gm = tl.zeros(byte.shape, tl.float32)
    for s in tl.static_range(8 // BITS):
        sum_g += grads[s]
        sum_gm = tl.fma(grads[s], marked(byte, h, s, BITS), sum_gm)
    group_g = tl.sum(sum_g, 1)
    return group_g, tl.fma(tl.sum(sum_gm, 1), step, group_g * base)


@triton.jit
def part_sums(
    grads, byte, h, step, base, zero, ends, plane_size, PARTS: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Sums of g and g * x of groups, apart for each of the planes that a group meets: two tuples."""
    T: tl.constexpr = 8 // BITS
    sums_g, sums_gx = zeros_of(byte, PARTS), zeros_of(byte, PARTS)
    for s in tl.static_range(T):
        k = tl.arange(0, 128 // T)[None, :] + s * (128 // T)
        mark = marked(byte, h, s, BITS)
        x = tl.where(mark < zero[:, None], 0.0, tl.fma(mark, step[:, None], base[:, None]))
        x = rounded(x, DTYPE, ROUND)
        more_g, more_gx = zeros_of(byte, 0), zeros_of(byte, 0)
        for part in tl.static_range(PARTS):
            v = of_part(grads[s], k, ends, plane_size, part, PARTS)
            more_g = more_g + (sums_g[part] + v,)
            more_gx = more_gx + (tl.fma(v, x, sums_gx[part]),)
        sums_g, sums_gx = more_g, more_gx
    return sums_g, sums_gx


@triton.jit(do_not_specialize=[
    "groups", "channels", "plane_size", "magic", "plane_magic", "channel_magic", "seed_low", "seed_high",
])  # fmt: skip
def flat_reduce_kernel(
    grad, data, mean, sums, seeds, numel: tl.int64, groups: tl.int64, channels: tl.int32, plane_size: tl.int32,
    magic: tl.int64, plane_magic: tl.int64, channel_magic: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, BIG: tl.constexpr, ONCE: tl.constexpr,
    ROUND: tl.constexpr, V: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Sums of g and of g * (x - mean) for each group, apart for each of the planes that it meets."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    j = tl.arange(0, LENGTH)[None, :]
    row = tl.arange(0, G)[:, None]
    at = tl.max_contiguous(row * LENGTH + j, [1, V])
    for tile in range(TILES):
        g0 = (tl.program_id(0).to(tl.int64) * TILES + tile) * G
        first = g0 * 128
        g = g0 + tl.arange(0, G)
        here = g < groups
        left = tl.minimum(numel - first, G * 128).to(tl.int32)
        byte = tl.load(data + g0 * LENGTH + at, mask=here[:, None], other=0).to(tl.uint32)
        grads = zeros_of(byte, 0)
        for s in tl.static_range(T):
            i = row * 128 + j + s * LENGTH
            grads = grads + (widen(tl.load(grad + first + i, mask=i < left, other=0), DTYPE),)
        lo, step = load_lo(data, groups, g, here, LENGTH), load_step(data, groups, g, here, LENGTH)
        base, zero = group_line(lo, step, BITS)
        c, ends = planes_of(first, plane_size, channels, magic, plane_magic, channel_magic, G, BIG)
        h = random32((g0 * LENGTH).to(tl.uint32) + (row * LENGTH + j).to(tl.uint32), seed_low, seed_high)
        hard = zero > 0
        if PARTS > 1:
            hard = hard | (ends < 128)
        out = sums + g
        if ROUND or tl.max(hard.to(tl.int32), 0) > 0:
            sums_g, sums_gx = part_sums(grads, byte, h, step, base, zero, ends, plane_size, PARTS, DTYPE, BITS, ROUND)
            for part in tl.static_range(PARTS):
                sum_g, sum_gx = tl.sum(sums_g[part], 1), tl.sum(sums_gx[part], 1)
                middle = tl.load(mean + wrapped(c + part, channels, ONCE))
                tl.store(out + 2 * part * groups, sum_g, mask=here)
                tl.store(out + (2 * part + 1) * groups, tl.fma(sum_g, -middle, sum_gx), mask=here)
        else:
            sum_g, sum_gx = straight_sums(grads, byte, h, step, base, BITS)
            middle = tl.load(mean + wrapped(c, channels, ONCE))
            tl.store(out, sum_g, mask=here)
            tl.store(out + groups, tl.fma(sum_g, -middle, sum_gx), mask=here)


@triton.jit(do_not_specialize=["samples", "channels", "plane_size", "groups", "splits"])
def gather_kernel(
    parts, sums, samples: tl.int32, channels: tl.int32, plane_size: tl.int32, groups: tl.int64, splits: tl.int32,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds up for one channel what flat_reduce_kernel found in every `splits`-th bundle of planes."""
    c = tl.program_id(0) % channels
    split = tl.program_id(0) // channels
    sum_g = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_gx = tl.zeros((ROWS, WIDTH), tl.float32)
    bundle = split
    while bundle * ROWS < samples:
        n = bundle * ROWS + tl.arange(0, ROWS)
        start = (n.to(tl.int64) * channels + c) * plane_size
        from_group, to_group = start // 128, (start + plane_size - 1) // 128
        # The plane's first group may have begun in planes before it; in all others it comes first.
        before = ((start % 128).to(tl.int32) + plane_size - 1) // plane_size
        column = 0
        while column * 128 < plane_size + 127:
            j = column + tl.arange(0, WIDTH)[None, :]
            g = from_group[:, None] + j
            there = (g <= to_group[:, None]) & (n < samples)[:, None]
            at = parts + tl.where(j == 0, 2 * before[:, None], 0) * groups + g
            sum_g += tl.load(at, mask=there, other=0.0)
            sum_gx += tl.load(at + groups, mask=there, other=0.0)
            column += WIDTH
        bundle += splits
    at = sums + split * 2 * channels + c
    tl.store(at, tl.sum(tl.sum(sum_g, 1), 0))
    tl.store(at + channels, tl.sum(tl.sum(sum_gx, 1), 0))


@triton.jit
def load_line(at, channels):
    """k1, k2 and k3 of a channel for each group."""
    return tl.load(at)[:, None], tl.load(at + channels)[:, None], tl.load(at + 2 * channels)[:, None]


@triton.jit(do_not_specialize=[
    "groups", "channels", "plane_size", "magic", "plane_magic", "channel_magic", "seed_low", "seed_high",
])  # fmt: skip
def flat_apply_kernel(
    grad, data, line, out, seeds, numel: tl.int64, groups: tl.int64, channels: tl.int32, plane_size: tl.int32,
    magic: tl.int64, plane_magic: tl.int64, channel_magic: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, BIG: tl.constexpr, ONCE: tl.constexpr,
    ROUND: tl.constexpr, V: tl.constexpr, G: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """g * k1 + x * k2 + k3 for G groups."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    g0 = tl.program_id(0).to(tl.int64) * G
    first = g0 * 128
    g = g0 + tl.arange(0, G)
    here = g < groups
    j = tl.arange(0, LENGTH)[None, :]
    row = tl.arange(0, G)[:, None]
    left = tl.minimum(numel - first, G * 128).to(tl.int32)
    lo, step = load_lo(data, groups, g, here, LENGTH), load_step(data, groups, g, here, LENGTH)
    base, zero = group_line(lo, step, BITS)
    c, ends = planes_of(first, plane_size, channels, magic, plane_magic, channel_magic, G, BIG)
    lines = zeros_of(step, 0)
    for part in tl.static_range(PARTS):
        lines = lines + (load_line(line + wrapped(c + part, channels, ONCE), channels),)
    at = tl.max_contiguous(row * LENGTH + j, [1, V])
    byte = tl.load(data + g0 * LENGTH + at, mask=here[:, None], other=0).to(tl.uint32)
    h = random32((g0 * LENGTH).to(tl.uint32) + (row * LENGTH + j).to(tl.uint32), seed_low, seed_high)
    for s in tl.static_range(T):
        k = j + s * LENGTH
        i = row * 128 + k
        v = widen(tl.load(grad + first + i, mask=i < left, other=0), DTYPE)
        mark = marked(byte, h, s, BITS)
        x = tl.where(mark < zero[:, None], 0.0, tl.fma(mark, step[:, None], base[:, None]))
        k1, k2, k3 = lines[0]
        for part in tl.static_range(1, PARTS):
            before = k < ends[:, None] + (part - 1) * plane_size
            k1 = tl.where(before, k1, lines[part][0])
            k2 = tl.where(before, k2, lines[part][1])
            k3 = tl.where(before, k3, lines[part][2])
        value = tl.fma(v, k1, tl.fma(rounded(x, DTYPE, ROUND), k2, k3))
        tl.store(out + first + i, narrow(value, DTYPE), mask=i < left)


# -- both --------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["splits", "channels"])
def finish_kernel(
    sums, mean, invstd, weight, grad_weight, grad_bias, line, splits: tl.int32, channels: tl.int32, share: tl.float32,
    AFFINE: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr, TOGETHER: tl.constexpr,
    BELOW: tl.constexpr,
):  # fmt: skip
    """From the sums: the gradients of weight and bias, and k1, k2, k3 of each channel; `share` is 1 / values of one.

    TOGETHER: the gradients are two further rows of `line`. BELOW: `invstd` is a second row of `mean`.
    """
    if BELOW:
        invstd = mean + channels
    if TOGETHER:
        grad_weight, grad_bias = line + 3 * channels, line + 4 * channels
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    here = c < channels
    row = tl.arange(0, ROWS)[:, None]
    total_g = tl.zeros((ROWS, CH), tl.float32)
    total_gx = tl.zeros((ROWS, CH), tl.float32)
    start = 0
    while start < splits:
        at = sums + (start + row) * 2 * channels + c[None, :]
        there = (start + row < splits) & here[None, :]
        total_g += tl.load(at, mask=there, other=0.0)
        total_gx += tl.load(at + channels, mask=there, other=0.0)
        start += ROWS
    sum_g, sum_gx = tl.sum(total_g, 0), tl.sum(total_gx, 0)
    middle = tl.load(mean + c, mask=here, other=0.0)
    inverse = tl.load(invstd + c, mask=here, other=0.0)
    k1 = inverse
    if AFFINE:
        k1 = inverse * widen(tl.load(weight + c, mask=here, other=0), WEIGHT)
        tl.store(grad_weight + c, narrow(sum_gx * inverse, WEIGHT), mask=here)
        tl.store(grad_bias + c, narrow(sum_g, WEIGHT), mask=here)
    k2 = -k1 * inverse * inverse * (sum_gx * share)
    tl.store(line + c, k1, mask=here)
    tl.store(line + channels + c, k2, mask=here)
    tl.store(line + 2 * channels + c, -k1 * (sum_g * share) - middle * k2, mask=here)


@functools.lru_cache(maxsize=4096)
def supported(size: tuple[int, ...], stride: int, last: bool, bits: int, group: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take a tensor of that size, packed with that stride, in channels_last memory or not."""
    values = size[0] * size[1]
    for extent in size[2:]:
        values *= extent
    if bits not in (2, 4, 8) or group != GROUP or dtype == torch.float64 or dtype not in TYPES or not values:
        return False
    if last:
        return stride == size[1] > 1
    return stride == 1 and size[1] > 1 and values // (size[0] * size[1]) >= SMALLEST_PLANE


class NormPlan:
    """All that does not change from one call to the next for gradients of one size: grids, numbers, constants.

    `parts` is the size of a work space; `sums` [splits, 2, channels] are what the channels' sums are gathered from.
    """

    __slots__ = (
        "channels",
        "device",
        "finish",
        "finish_below",
        "finish_together",
        "gather",
        "last",
        "line",
        "numbers",
        "parts",
        "reduce",
        "rest",
        "rounded",
        "sums",
        "table",
        "write",
    )

    def __init__(
        self, size: tuple[int, ...], dtype: torch.dtype, bits: int, last: bool, kind: torch.dtype | None,
        device: torch.device, rounded: bool, table: bool,
    ) -> None:  # fmt: skip
        self.channels, self.last, self.device, self.rounded = size[1], last, device, rounded
        self.table = table
        numel = math.prod(size)
        if last:
            splits = self._plan_last(numel, dtype, bits)
        else:
            splits = self._plan_flat(numel, size[0], dtype, bits)
        self.sums, self.line = splits * 2 * self.channels, 3 * self.channels
        self.rest = (splits, self.channels, self.channels / numel)
        weight = tl.float32 if kind is None else TYPES[kind]
        constants, programs = (kind is not None, weight, min(256, _power(splits)), 8), -(-self.channels // 8)
        self.finish, self.finish_below, self.finish_together = (
            Launch(finish_kernel, programs, (*constants, together, below), 4, 2)
            for together, below in ((False, False), (False, True), (True, False))
        )

    def _plan_last(self, numel: int, dtype: torch.dtype, bits: int) -> int:
        """The launches for channels_last memory; returns the number of partial sums."""
        channels = self.channels
        pixels = numel // channels
        unit, vector = 8 if channels % 8 == 0 else 1, 16 // dtype.itemsize
        columns = 8 * vector
        blocks, tiles = -(-pixels // GROUP), -(-channels // columns)
        splits = -(-blocks // -(-blocks // max(PROGRAMS // tiles, 1)))
        constants = (TYPES[dtype], bits, unit, vector, 4 * WARPS, columns, self.rounded, self.table)
        self.parts = 0
        self.numbers: tuple[tuple, ...] = ((channels // unit, pixels, tiles, splits), (channels // unit, pixels, tiles))
        self.reduce = Launch(last_reduce_kernel, tiles * splits, constants, WARPS, 2)
        self.write = Launch(last_apply_kernel, blocks * tiles, constants, WARPS, 2)
        return splits

    def _plan_flat(self, numel: int, samples: int, dtype: torch.dtype, bits: int) -> int:
        """The launches for NCHW memory; returns the number of partial sums."""
        channels = self.channels
        plane, groups = numel // (samples * channels), gq_groups(numel, GROUP, 1)
        parts = 1 if plane % GROUP == 0 else (GROUP + plane - 2) // plane + 1
        most, vector = LARGEST_TILE * GROUP, 16 // dtype.itemsize
        constants = (TYPES[dtype], bits, parts, plane >= most, most // plane + parts + 1 <= channels, self.rounded)
        width = min(_power(plane // GROUP + 2), 32)
        rows = GATHER // width
        splits = min(-(-samples // rows), -(-PROGRAMS // channels))
        self.parts = parts * 2 * groups
        numbers = (numel, groups, channels, plane, -(-(1 << 32) // plane), _magic(plane), _magic(channels))
        self.numbers = (numbers, numbers, (samples, channels, plane, groups, splits))
        self.reduce = Launch(flat_reduce_kernel, -(-groups // (8 * TILES)), (*constants, 8, 8, TILES, self.table), 1, 2)
        self.gather = Launch(gather_kernel, channels * splits, (rows, width), 4, 2)
        self.write = Launch(
            flat_apply_kernel, -(-groups // (4 * vector)), (*constants, vector, 4 * vector, self.table), 4, 2
        )
        return splits

    def sum_up(self, grad: Tensor, data: Tensor, mean: Tensor, drawn: tuple[Tensor, int, int]) -> Tensor:
        """For each channel sum(g) and sum(g (x - mean)), in a few parts."""
        sums = torch.empty(self.sums, dtype=torch.float32, device=self.device)
        if self.last:
            self.reduce((grad, data, mean, sums, drawn[0]), (*self.numbers[0], *drawn[1:]))
        else:
            apart = torch.empty(self.parts, dtype=torch.float32, device=self.device)
            self.reduce((grad, data, mean, apart, drawn[0]), (*self.numbers[0], *drawn[1:]))
            self.gather((apart, sums), self.numbers[2])
        return sums


@functools.lru_cache(maxsize=4096)
def norm_plan(
    size: tuple[int, ...], dtype: torch.dtype, bits: int, last: bool, kind: torch.dtype | None, device: torch.device,
    rounded: bool, table: bool = False,
) -> NormPlan:  # fmt: skip
    """The plan for gradients of that size, and a weight of dtype `kind` or none."""
    return NormPlan(size, dtype, bits, last, kind, device, rounded, table)


def norm_backward(
    grad: Tensor,
    data: Tensor,
    mean: Tensor,
    invstd: Tensor | None,
    weight: Tensor | None,
    bits: int,
    seed: int,
    last: bool,
    apply: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input (if `apply`), weight and bias of batch norm in training, from its packed input `data`.

    `grad` is the gradient of the result, of the input's dtype and in its memory format: `last` for channels_last,
    otherwise contiguous. Without `invstd` that is the second row of `mean`.
    """
    kind = None if weight is None else weight.dtype
    plan = norm_plan(grad.shape, grad.dtype, bits, last, kind, grad.device, ROUND)
    drawn = _drawn(seed, data)
    sums = plan.sum_up(grad, data, mean, drawn)
    line = torch.empty(plan.line, dtype=torch.float32, device=plan.device)
    finish = plan.finish_below if invstd is None else plan.finish
    spread = mean if invstd is None else invstd
    if weight is None:
        grad_weight = grad_bias = None
        finish((sums, mean, spread, mean, mean, mean, line), plan.rest)
    else:
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(weight)
        finish((sums, mean, spread, weight, grad_weight, grad_bias, line), plan.rest)
    if not apply:
        return None, grad_weight, grad_bias
    out = torch.empty_like(grad)
    plan.write((grad, data, line, out, drawn[0]), (*plan.numbers[1], *drawn[1:]))
    return out, grad_weight, grad_bias


def norm_sums(
    grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bits: int, seed: Seed, last: bool,
    out: Tensor,
) -> None:  # fmt: skip
    """The first part of `norm_backward`: writes [k1, k2, k3, grad_weight, grad_bias] of channels; weight is fp32."""
    table = type(seed) is tuple
    plan = norm_plan(grad.shape, grad.dtype, bits, last, weight.dtype, grad.device, ROUND, table)
    sums = plan.sum_up(grad, data, mean, _drawn(seed, data))
    plan.finish_together((sums, mean, invstd, weight, out, out, out), plan.rest)


def norm_apply(grad: Tensor, data: Tensor, line: Tensor, bits: int, seed: Seed, last: bool, out: Tensor) -> None:
    """The second part: writes the gradient of the input. `line` is what `norm_sums` wrote."""
    table = type(seed) is tuple
    plan = norm_plan(grad.shape, grad.dtype, bits, last, torch.float32, grad.device, ROUND, table)
    seeds, low, high = _drawn(seed, data)
    plan.write((grad, data, line, out, seeds), (*plan.numbers[1], low, high))


def _power(n: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (n - 1).bit_length()


def _magic(n: int) -> int:
    """2^64 / n rounded up, as int64 bits: its product with a number has the quotient in the upper half."""
    return (-(-(1 << 64) // n) ^ 1 << 63) - (1 << 63)
