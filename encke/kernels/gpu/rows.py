"""Kernels of the fixed rate in Triton for groups that stay within rows of any width.

A program takes some neighbouring groups, [group, slice, byte]; where the groups of several rows lie side by side (SIDE)
[byte, slice, group]. LENGTH is a power of two from the number of bytes of a group's field on. They also take 3-bit
codes, whose third bits stand behind the field, four for each of its bytes.
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
def group_bytes(length, BITS: tl.constexpr):
    """Return the code bytes of a group whose field has `length`."""
    return length + (length + 1) // 2 if BITS == 3 else length


@triton.jit
def places_of(g, row, stride, length, count, T: tl.constexpr, BITS: tl.constexpr):
    """Return where the values and the codes of groups begin, and how many values they have."""
    block = g // stride
    line = block // count
    begin = (block - line * count) * (length * T)
    c = g - block * stride
    values = (line.to(tl.int64) * row + begin) * stride + c
    codes = block.to(tl.int64) * group_bytes(length, BITS) * stride + c
    return values, codes, tl.minimum(row - begin, length * T)


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


@triton.jit
def store_thirds(
    data, codes, third, stride, length, here, LENGTH: tl.constexpr, GROUPS: tl.constexpr, SIDE: tl.constexpr
):  # fmt: skip
    """Store the third bits of 3-bit codes: those of two bytes of the field share a byte behind it."""
    k = tl.arange(0, 2)
    pair = tl.arange(0, LENGTH // 2)
    if SIDE:
        both = tl.sum(third.reshape(LENGTH // 2, 2, GROUPS) << (k * 4).to(tl.uint32)[None, :, None], 1)
        at, there = codes[None, :] + (length + pair[:, None]) * stride, here[None, :] & (pair[:, None] * 2 < length)
    else:
        both = tl.sum(third.reshape(GROUPS, LENGTH // 2, 2) << (k * 4).to(tl.uint32)[None, None, :], 2)
        at, there = codes[:, None] + (length + pair[None, :]) * stride, here[:, None] & (pair[None, :] * 2 < length)
    tl.store(data + at, both.to(tl.uint8), mask=there)


@triton.jit
def load_codes(data, codes, byte, j, t, stride, length, inside, BITS: tl.constexpr, SIDE: tl.constexpr):
    """Load the codes of all slices."""
    packed = tl.load(data + byte, mask=inside, other=0).to(tl.uint32)
    if BITS == 3:
        third = tl.load(data + (spread(codes, SIDE) + (length + j // 2) * stride), mask=inside, other=0).to(tl.uint32)
        third = (third >> (j % 2 * 4 + t).to(tl.uint32)) & 1
        return ((packed >> (t * 2).to(tl.uint32)) & 3) | (third << 2)
    else:
        return (packed >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)


@triton.jit(do_not_specialize=["count", "groups", "seed_low", "seed_high"])
def gq_encode_rows_kernel(
    x, data, seeds, row: tl.int32, stride: tl.int32, length: tl.int32, count: tl.int32, groups: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    SIDE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Encode GROUPS groups."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    g, here = groups_of(groups, GROUPS)
    values, codes, valid = places_of(g, row, stride, length, count, T, BITS)
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
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h, t, FIELD)
    code = codes_of(
        v, hash, spread(lo, SIDE), spread(inverse, SIDE), spread(steps, SIDE), spread(signed, SIDE),
        spread(extra, SIDE), BITS, SIGNS,
    )  # fmt: skip
    low = code & 3 if BITS == 3 else code
    packed = tl.sum(low << (t * FIELD).to(tl.uint32), 1).to(tl.uint8)
    inside = spread(here, SIDE) & (j < length)
    tl.store(data + byte.reshape(packed.shape), packed, mask=inside.reshape(packed.shape))
    if BITS == 3:
        third = tl.sum(tl.where(j < length, (code >> 2) << t.to(tl.uint32), 0), 1)
        store_thirds(data, codes, third, stride, length, here, LENGTH, GROUPS, SIDE)
    at_lo = scales_at(data, groups, group_bytes(length, BITS))
    store_scales(at_lo, g, here, groups.to(tl.int64), lo, step, signed, SIGNS)


@triton.jit(do_not_specialize=["count", "groups", "seed_low", "seed_high"])
def gq_decode_rows_kernel(
    data, out, seeds, row: tl.int32, stride: tl.int32, length: tl.int32, count: tl.int32, groups: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUPS: tl.constexpr, LENGTH: tl.constexpr,
    SIDE: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode GROUPS groups, or write their MASK."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    g, here = groups_of(groups, GROUPS)
    values, codes, valid = places_of(g, row, stride, length, count, T, BITS)
    at_lo = scales_at(data, groups, group_bytes(length, BITS))
    lo, step = load_scales(at_lo, data + codes, g, here, groups.to(tl.int64), DTYPE, SIGNS)
    origin, unit = origin_of(lo, step)
    lo, step, origin, unit = spread(lo, SIDE), spread(step, SIDE), spread(origin, SIDE), spread(unit, SIDE)
    j, t = bytes_and_slices(LENGTH, T, SIDE)
    byte = spread(codes, SIDE) + j * stride
    inside = spread(here, SIDE) & (j < length)
    code = load_codes(data, codes, byte, j, t, stride, length, inside, BITS, SIDE)
    if MASK:
        value = flags_of(code, lo, step, BITS, SIGNS)
    else:
        fixed = below_code(code, random32(byte.to(tl.uint32), seed_low, seed_high), t, FIELD)
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
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    g, here = groups_of(groups, GROUPS)
    values, codes, valid = places_of(g, row, stride, length, count, T, BITS)
    at_lo = scales_at(data, groups, group_bytes(length, BITS))
    lo, step = load_scales(at_lo, data + codes, g, here, groups.to(tl.int64), DTYPE, SIGNS)
    j, t = bytes_and_slices(LENGTH, T, SIDE)
    byte = spread(codes, SIDE) + j * stride
    inside = spread(here, SIDE) & (j < length)
    code = load_codes(data, codes, byte, j, t, stride, length, inside, BITS, SIDE)
    flag = flags_of(code, spread(lo, SIDE), spread(step, SIDE), BITS, SIGNS)
    i = t * length + j
    at = spread(values, SIDE) + i.to(tl.int64) * stride
    there = spread(here, SIDE) & (j < length) & (i < spread(valid, SIDE))
    tl.store(out + at, tl.where(flag != 0, tl.load(x + at, mask=there, other=0), 0), mask=there)
