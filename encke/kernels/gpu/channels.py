"""Fixed-rate kernels in Triton for interleaved rows: the `stride` channels of a pixel are contiguous.

A program processes one group of each of several channels, as a tile [pair of bytes, byte of a pair, slice, channel]:
the two bytes that share third bits of 3-bit codes are in one thread. The field of a group has `length` bytes, at most
LENGTH. Groups stay within rows of `row` pixels, and a row has `count` groups. Bytes after the last one repeat it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.codes import (
    below_code,
    bits_of,
    codes_of,
    first_values,
    fixed_codes,
    flags_of,
    gated,
    inverted_random32,
    load_scales,
    origin_of,
    scales_at,
    signed_bits,
    slices_of,
    steps_of,
    store_scales,
    values_of,
)
from encke.kernels.gpu.common import narrow, random32, seed_of, widen
from encke.kernels.gpu.places import group_bytes


@triton.jit
def columns_of(stride, programs, CHANNELS: tl.constexpr):
    """Return the index of a program among the `programs` that share its channels, these channels, and which exist."""
    column = tl.program_id(0) // programs
    c = column * CHANNELS + tl.arange(0, CHANNELS)
    return tl.program_id(0) - column * programs, c, c < stride


@triton.jit
def block_places(block, stride, row, count, length, T: tl.constexpr):
    """Return the offset of the values of a block's groups, and the number of values in each of these groups."""
    line = block // count
    begin = (block - line * count).to(tl.int64) * (length * T)
    return (line * row + begin) * stride, tl.minimum(row - begin, length * T).to(tl.int32)


@triton.jit
def of_channel(v):
    """Broadcast one number for each channel to a tile."""
    return v[None, None, None, :]


@triton.jit
def channel_max(v):
    """Return the largest value of each group."""
    return tl.max(tl.max(tl.max(v, 2), 1), 0)


@triton.jit(do_not_specialize=["row", "count", "blocks", "length", "seed_low", "seed_high"])
def gq_encode_channels_kernel(
    x, data, seeds, stride: tl.int64, row: tl.int64, count: tl.int32, blocks: tl.int32, length: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    CHANNELS: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Encode one group of each of CHANNELS channels. WHOLE: the field of a group has LENGTH bytes."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    length = LENGTH if WHOLE else length
    block, c, here = columns_of(stride, blocks, CHANNELS)
    start, valid = block_places(block, stride, row, count, length, T)
    pair, half = tl.arange(0, LENGTH // 2)[:, None, None, None], tl.arange(0, 2)[None, :, None, None]
    j, t = tl.minimum(pair * 2 + half, length - 1), tl.arange(0, T)[None, None, :, None]
    if valid == length * T:
        v = widen(
            tl.load(x + start + ((t * length + j) * stride + of_channel(c)), mask=of_channel(here), other=0), DTYPE
        )
    else:
        # Fill the last group of a row with copies of its last value.
        i = tl.minimum(t * length + j, valid - 1)
        v = widen(tl.load(x + start + (i * stride + of_channel(c)), mask=of_channel(here), other=0), DTYPE)
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    lo, step, inverse, steps, signed, extra = steps_of(
        channel_max(bits), channel_max(signed_bits(size)), tl.min(tl.min(tl.min(size - 1, 2), 1), 0),
        first_values(x + start, c, here, DTYPE), DTYPE, BITS, SIGNS,
    )  # fmt: skip
    codes = block * group_bytes(length, BITS, 1) * stride
    byte = codes + (j * stride + of_channel(c))
    h = inverted_random32(byte.to(tl.uint32), seed_low, seed_high)
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h, t, FIELD)
    code = codes_of(
        v, hash, of_channel(lo), of_channel(inverse), of_channel(steps), of_channel(signed), of_channel(extra),
        BITS, SIGNS,
    )  # fmt: skip
    field = code & 3 if BITS == 3 else code
    packed = tl.sum(field << (t * FIELD).to(tl.uint32), 2).to(tl.uint8)
    j = tl.minimum(tl.arange(0, LENGTH // 2)[:, None, None] * 2 + tl.arange(0, 2)[None, :, None], length - 1)
    tl.store(data + codes + (j * stride + c[None, None, :]), packed, mask=here[None, None, :])
    if BITS == 3:
        third = tl.where(pair * 2 + half < length, (code >> 2) << (half * 4 + t).to(tl.uint32), 0)
        both = tl.sum(tl.sum(third, 2), 1).to(tl.uint8)
        at = tl.arange(0, LENGTH // 2)[:, None]
        to = data + codes + ((length + at) * stride + c[None, :])
        tl.store(to, both, mask=here[None, :] & (at * 2 < length))
    groups = blocks * stride
    at_lo = scales_at(data, groups, group_bytes(length, BITS, 1), WHOLE and LENGTH % 16 == 0)
    store_scales(at_lo, block * stride + c, here, groups, lo, step, signed, SIGNS)


@triton.jit
def load_channels(
    data, codes, first, stride, length, c, here, BITS: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    """Load BYTES bytes of groups from byte `first` on; return their indices, the bytes, and their third bits."""
    pair, half = tl.arange(0, BYTES // 2)[:, None, None, None], tl.arange(0, 2)[None, :, None, None]
    j = first + pair * 2 + half
    packed = tl.load(data + codes + (j * stride + of_channel(c)), mask=of_channel(here) & (j < length), other=0)
    third = packed.to(tl.uint32)
    if BITS == 3:
        at = first // 2 + pair
        both = tl.load(
            data + codes + ((length + at) * stride + of_channel(c)), mask=of_channel(here) & (at * 2 < length), other=0
        )
        third = both.to(tl.uint32) >> (half * 4).to(tl.uint32)
    return j, packed, third


@triton.jit
def decode_channels(
    data, seed_low, seed_high, stride, row, count, blocks, length, limit,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, LENGTH: tl.constexpr, CHANNELS: tl.constexpr,
    BYTES: tl.constexpr, MASK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Decode BYTES code bytes of each group to values, or with MASK to a mask; return them with their positions."""
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    PARTS: tl.constexpr = LENGTH // BYTES
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    program, c, here = columns_of(stride, blocks * PARTS, CHANNELS)
    block, part = program // PARTS, program % PARTS
    start, valid = block_places(block, stride, row, count, length, T)
    groups, codes = blocks * stride, block * group_bytes(length, BITS, 1) * stride
    at_lo = scales_at(data, groups, group_bytes(length, BITS, 1), WHOLE and LENGTH % 16 == 0)
    lo, step = load_scales(at_lo, data + codes + c, block * stride + c, here, groups, DTYPE, SIGNS)
    origin, unit = origin_of(lo, step)
    j, packed, third = load_channels(data, codes, part * BYTES, stride, length, c, here, BITS, BYTES)
    t = tl.arange(0, T)[None, None, :, None]
    if MASK:
        value = flags_of(slices_of(packed, third, t, BITS), of_channel(lo), of_channel(step), BITS, SIGNS)
    else:
        h = random32((codes + (j * stride + of_channel(c))).to(tl.uint32), seed_low, seed_high)
        if BITS == 3:
            fixed = below_code(slices_of(packed, third, t, BITS), h, t, FIELD)
        else:
            fixed = fixed_codes(packed, h, t, BITS)
        top = tl.full((), limit, tl.float64).to(WORK)
        value = values_of(
            fixed >> 24, fixed, of_channel(lo), of_channel(step), of_channel(origin), of_channel(unit), top, DTYPE,
            BITS, SIGNS,
        )  # fmt: skip
    return value, start, valid, j, t, c, here


@triton.jit
def store_channels(out, value, start, valid, j, t, c, here, stride, length, T: tl.constexpr, WHOLE: tl.constexpr):
    """Store the values that `decode_channels` returned."""
    to = out + start + ((t * length + j) * stride + of_channel(c))
    if WHOLE and valid == length * T:
        tl.store(to, value, mask=of_channel(here))
    else:
        tl.store(to, value, mask=of_channel(here) & (j < length) & (t * length + j < valid))


@triton.jit(do_not_specialize=["row", "count", "blocks", "length", "seed_low", "seed_high"])
def gq_decode_channels_kernel(
    data, out, seeds, stride: tl.int64, row: tl.int64, count: tl.int32, blocks: tl.int32, length: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    CHANNELS: tl.constexpr, BYTES: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode BYTES code bytes of each group. With MASK, write the mask of the non-zero values instead."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    length = LENGTH if WHOLE else length
    value, start, valid, j, t, c, here = decode_channels(
        data, seed_low, seed_high, stride, row, count, blocks, length, limit,
        DTYPE, BITS, SIGNS, LENGTH, CHANNELS, BYTES, MASK, WHOLE,
    )  # fmt: skip
    store_channels(out, value, start, valid, j, t, c, here, stride, length, 8 // (2 if BITS == 3 else BITS), WHOLE)


@triton.jit(do_not_specialize=["row", "count", "blocks", "length", "seed_low", "seed_high"])
def gq_normalise_channels_kernel(
    data, mean, invstd, weight, bias, out, seeds, stride: tl.int64, row: tl.int64, count: tl.int32, blocks: tl.int32,
    length: tl.int32, seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    CHANNELS: tl.constexpr, BYTES: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode BYTES code bytes of each group, the input of a batch norm, and write the norm's result."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    length = LENGTH if WHOLE else length
    value, start, valid, j, t, c, here = decode_channels(
        data, seed_low, seed_high, stride, row, count, blocks, length, limit,
        DTYPE, BITS, SIGNS, LENGTH, CHANNELS, BYTES, False, WHOLE,
    )  # fmt: skip
    slope = tl.load(invstd + c, mask=here, other=0.0) * tl.load(weight + c, mask=here, other=0.0)
    shift = tl.load(bias + c, mask=here, other=0.0) - tl.load(mean + c, mask=here, other=0.0) * slope
    value = narrow(widen(value, DTYPE) * of_channel(slope) + of_channel(shift), DTYPE)
    store_channels(out, value, start, valid, j, t, c, here, stride, length, 8 // (2 if BITS == 3 else BITS), WHOLE)


@triton.jit(do_not_specialize=["row", "count", "blocks", "length"])
def gq_gate_channels_kernel(
    data, x, other, out, stride: tl.int64, row: tl.int64, count: tl.int32, blocks: tl.int32, length: tl.int32,
    slope: tl.float32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    CHANNELS: tl.constexpr, BYTES: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write x, or x + other, where the packed values are not zero, else zero; see `gated`."""
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    PARTS: tl.constexpr = LENGTH // BYTES
    length = LENGTH if WHOLE else length
    program, c, here = columns_of(stride, blocks * PARTS, CHANNELS)
    block, part = program // PARTS, program % PARTS
    start, valid = block_places(block, stride, row, count, length, T)
    groups, codes = blocks * stride, block * group_bytes(length, BITS, 1) * stride
    at_lo = scales_at(data, groups, group_bytes(length, BITS, 1), WHOLE and LENGTH % 16 == 0)
    lo, step = load_scales(at_lo, data + codes + c, block * stride + c, here, groups, DTYPE, SIGNS)
    j, packed, third = load_channels(data, codes, part * BYTES, stride, length, c, here, BITS, BYTES)
    t = tl.arange(0, T)[None, None, :, None]
    code, lo, step = slices_of(packed, third, t, BITS), of_channel(lo), of_channel(step)
    at = start + ((t * length + j) * stride + of_channel(c))
    inside = of_channel(here) & (t * length + j < valid)
    if not WHOLE:
        inside = inside & (j < length)
    value = gated(x, other, at, inside, code, lo, step, slope, DTYPE, BITS, SIGNS, KIND)
    tl.store(out + at, value, mask=inside)
