"""Kernels of the fixed rate in Triton for groups that stay within rows of any width.

A program takes some neighbouring groups, [group, slice, byte]; where the groups of several rows lie side by side (SIDE)
[byte, slice, group]. LENGTH is a power of two from the number of a group's bytes on.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.codes import (
    below_code,
    bits_of,
    codes_of,
    first_values,
    flags_of,
    inverted_random32,
    load_scales,
    origin_of,
    scales_at,
    signed_bits,
    steps_of,
    store_scales,
    values_of,
)
from encke.kernels.gpu.common import random32, seed_of, widen


@triton.jit
def groups_of(groups, GROUPS: tl.constexpr):
    """Return the numbers of a program's groups, those after the last one as that one, and which there are."""
    g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    return tl.minimum(g, groups - 1), g < groups


@triton.jit
def places_of(g, row, stride, length, count, T: tl.constexpr):
    """Return where the values and the codes of groups begin, and how many values they have."""
    block = g // stride
    line = block // count
    begin = (block - line * count) * (length * T)
    c = g - block * stride
    values = (line.to(tl.int64) * row + begin) * stride + c
    return values, block.to(tl.int64) * length * stride + c, tl.minimum(row - begin, length * T)


@triton.jit
def spread(v, SIDE: tl.constexpr):
    """Spread one number for each group over a tile."""
    return v[None, None, :] if SIDE else v[:, None, None]


@triton.jit
def bytes_and_slices(LENGTH: tl.constexpr, T: tl.constexpr, SIDE: tl.constexpr):
    """Return the numbers of bytes and slices along a tile."""
    j = tl.arange(0, LENGTH)
    return j[:, None, None] if SIDE else j[None, None, :], tl.arange(0, T)[None, :, None]


@triton.jit
def largest_of(v, SIDE: tl.constexpr):
    """Return the largest number of each group."""
    return tl.max(tl.max(v, 1), 0) if SIDE else tl.max(tl.max(v, 2), 1)


@triton.jit(do_not_specialize=["count", "groups", "seed_low", "seed_high"])
def gq_encode_rows_kernel(
    x, data, seeds, row: tl.int32, stride: tl.int32, length: tl.int32, count: tl.int32, groups: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    SIDE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Encode GROUPS groups."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    g, here = groups_of(groups, GROUPS)
    values, codes, valid = places_of(g, row, stride, length, count, T)
    j, t = bytes_and_slices(LENGTH, T, SIDE)
    # Bytes after the last one, and the end of an incomplete group, are copies of the group's last value.
    i = tl.minimum(t * length + j, spread(valid, SIDE) - 1)
    v = widen(tl.load(x + (spread(values, SIDE) + i.to(tl.int64) * stride)), DTYPE)
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    least = size - 1
    least = tl.min(tl.min(least, 1), 0) if SIDE else tl.min(tl.min(least, 2), 1)
    lo, step, inverse, steps, signed, extra = steps_of(
        largest_of(bits, SIDE), largest_of(signed_bits(size), SIDE), least, first_values(x, values, here, DTYPE),
        DTYPE, BITS, SIGNS,
    )  # fmt: skip
    byte = spread(codes, SIDE) + j * stride
    h = inverted_random32(byte.to(tl.uint32), seed_low, seed_high)
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h, t, BITS)
    code = codes_of(
        v, hash, spread(lo, SIDE), spread(inverse, SIDE), spread(steps, SIDE), spread(signed, SIDE),
        spread(extra, SIDE), BITS, SIGNS,
    )  # fmt: skip
    packed = tl.sum(code << (t * BITS).to(tl.uint32), 1).to(tl.uint8)
    there = (spread(here, SIDE) & (j < length)).reshape(packed.shape)
    tl.store(data + byte.reshape(packed.shape), packed, mask=there)
    store_scales(scales_at(data, groups, length), g, here, groups.to(tl.int64), lo, step, signed, SIGNS)


@triton.jit(do_not_specialize=["count", "groups", "seed_low", "seed_high"])
def gq_decode_rows_kernel(
    data, out, seeds, row: tl.int32, stride: tl.int32, length: tl.int32, count: tl.int32, groups: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    SIDE: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode GROUPS groups, or write their MASK."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    g, here = groups_of(groups, GROUPS)
    values, codes, valid = places_of(g, row, stride, length, count, T)
    at_lo = scales_at(data, groups, length)
    lo, step = load_scales(at_lo, data + codes, g, here, groups.to(tl.int64), DTYPE, SIGNS)
    origin, unit = origin_of(lo, step)
    lo, step, origin, unit = spread(lo, SIDE), spread(step, SIDE), spread(origin, SIDE), spread(unit, SIDE)
    j, t = bytes_and_slices(LENGTH, T, SIDE)
    byte = spread(codes, SIDE) + j * stride
    packed = tl.load(data + byte, mask=spread(here, SIDE) & (j < length), other=0).to(tl.uint32)
    code = (packed >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    if MASK:
        value = flags_of(code, lo, step, BITS, SIGNS)
    else:
        fixed = below_code(code, random32(byte.to(tl.uint32), seed_low, seed_high), t, BITS)
        top = tl.full((), limit, tl.float64).to(WORK)
        value = values_of(code, fixed, lo, step, origin, unit, top, DTYPE, BITS, SIGNS)
    i = t * length + j
    there = spread(here, SIDE) & (j < length) & (i < spread(valid, SIDE))
    tl.store(out + (spread(values, SIDE) + i.to(tl.int64) * stride), value, mask=there)


@triton.jit(do_not_specialize=["count", "groups"])
def gq_gate_rows_kernel(
    data, x, out, row: tl.int32, stride: tl.int32, length: tl.int32, count: tl.int32, groups: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Write x where the packed values are not zero, else zero: ReLU's gradient."""
    T: tl.constexpr = 8 // BITS
    g, here = groups_of(groups, GROUPS)
    values, codes, valid = places_of(g, row, stride, length, count, T)
    at_lo = scales_at(data, groups, length)
    lo, step = load_scales(at_lo, data + codes, g, here, groups.to(tl.int64), DTYPE, SIGNS)
    j, t = bytes_and_slices(LENGTH, T, SIDE)
    byte = spread(codes, SIDE) + j * stride
    packed = tl.load(data + byte, mask=spread(here, SIDE) & (j < length), other=0).to(tl.uint32)
    code = (packed >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    flag = flags_of(code, spread(lo, SIDE), spread(step, SIDE), BITS, SIGNS)
    i = t * length + j
    at = spread(values, SIDE) + i.to(tl.int64) * stride
    there = spread(here, SIDE) & (j < length) & (i < spread(valid, SIDE))
    tl.store(out + at, tl.where(flag != 0, tl.load(x + at, mask=there, other=0), 0), mask=there)
