"""Kernels of the fixed rate in Triton, as in docs/design.md: encode, decode and gate groups of values."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.codes import (
    below_code,
    bits_of,
    byte_index,
    codes_of,
    first_values,
    fixed_codes,
    flags_of,
    group_max,
    group_min,
    inverted_random32,
    load_scales,
    of_group,
    origin_of,
    signed_bits,
    steps_of,
    store_scales,
    value_index,
    values_of,
)
from encke.kernels.gpu.common import random32, seed_of, widen


@triton.jit(do_not_specialize=["numel", "groups", "seed_low", "seed_high"])
def gq_encode_kernel(
    x, data, seeds, numel: tl.int64, groups: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIGNS: tl.constexpr,
    LANES: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Encode ROWS groups of neighbouring values."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    first = g0 * GROUP
    i = value_index(ROWS, LENGTH, T, LANES)
    if first + ROWS * GROUP <= numel:
        v = widen(tl.load(x + first + i), DTYPE)
    else:
        # The last group is filled with copies of its last value.
        v = widen(tl.load(x + first + tl.minimum(i, (numel - first).to(tl.int32) - 1)), DTYPE)
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    lo, step, inverse, steps, signed, extra = steps_of(
        group_max(bits), group_max(signed_bits(size)), group_min(size - 1),
        first_values(x + first, tl.arange(0, ROWS) * GROUP, here, DTYPE),
        DTYPE, BITS, SIGNS,
    )  # fmt: skip
    # The values of a byte share one hash.
    byte = byte_index(ROWS, LENGTH, LANES)
    h = inverted_random32((g0 * LENGTH).to(tl.uint32) + byte.to(tl.uint32), seed_low, seed_high)
    t = tl.arange(0, T)[None, None, None, :, None]
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h[:, :, :, None, :], t, BITS)
    code = codes_of(
        v, hash, of_group(lo), of_group(inverse), of_group(steps), of_group(signed), of_group(extra), BITS, SIGNS
    )
    packed = tl.sum(code << (t * BITS).to(tl.uint32), 3).to(tl.uint8)
    if g0 + ROWS <= groups:
        tl.store(data + g0 * LENGTH + byte, packed)
    else:
        tl.store(data + g0 * LENGTH + byte, packed, mask=here[None, :, None, None])
    store_scales(data + groups * LENGTH, g, here, groups, lo, step, signed, SIGNS)


@triton.jit(do_not_specialize=["numel", "groups", "seed_low", "seed_high"])
def gq_decode_kernel(
    data, out, seeds, numel: tl.int64, groups: tl.int64, seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIGNS: tl.constexpr,
    LANES: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode ROWS groups of neighbouring values, or write their MASK."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
    codes = data + g0 * LENGTH + tl.arange(0, ROWS) * LENGTH
    lo, step = load_scales(data + groups * LENGTH, codes, g, here, groups, DTYPE, SIGNS)
    origin, unit = origin_of(lo, step)
    byte = byte_index(ROWS, LENGTH, LANES)
    packed = tl.load(data + g0 * LENGTH + byte, mask=here[None, :, None, None], other=0)
    t = tl.arange(0, T)[None, None, None, :, None]
    code = (packed.to(tl.uint32)[:, :, :, None, :] >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    if MASK:
        value = flags_of(code, of_group(lo), of_group(step), BITS, SIGNS)
    else:
        h = random32((g0 * LENGTH).to(tl.uint32) + byte.to(tl.uint32), seed_low, seed_high)
        fixed = fixed_codes(packed[:, :, :, None, :], h[:, :, :, None, :], t, BITS)
        if not SIGNS:
            code = fixed >> 24
        top = tl.full((), limit, tl.float64).to(WORK)
        value = values_of(
            code, fixed, of_group(lo), of_group(step), of_group(origin), of_group(unit), top, DTYPE, BITS, SIGNS
        )
    first = g0 * GROUP
    i = value_index(ROWS, LENGTH, T, LANES)
    if first + ROWS * GROUP <= numel:
        tl.store(out + first + i, value)
    else:
        tl.store(out + first + i, value, mask=i < (numel - first).to(tl.int32))


@triton.jit(do_not_specialize=["pixels", "seed_low", "seed_high"])
def gq_encode_channels_kernel(
    x, data, seeds, stride: tl.int64, pixels: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SIGNS: tl.constexpr, CHANNELS: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Encode groups of one channel each where the `stride` channels of a pixel lie together: [byte, slice, channel]."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    block, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    j, t = tl.arange(0, LENGTH)[:, None, None], tl.arange(0, T)[None, :, None]
    there = c[None, None, :] < stride
    first = x + block * GROUP * stride
    if block * GROUP + GROUP <= pixels:
        i = (t * LENGTH + j) * stride + c[None, None, :]
        v = widen(tl.load(first + i, mask=there, other=0), DTYPE)
    else:
        i = tl.minimum(t * LENGTH + j, pixels - block * GROUP - 1) * stride + c[None, None, :]
        v = widen(tl.load(first + i, mask=there, other=0), DTYPE)
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    largest = tl.max(tl.max(bits, 1), 0)
    highest = tl.max(tl.max(signed_bits(size), 1), 0)
    least = tl.min(tl.min(size - 1, 1), 0)
    first_value = first_values(first, c, c < stride, DTYPE)
    lo, step, inverse, steps, signed, extra = steps_of(largest, highest, least, first_value, DTYPE, BITS, SIGNS)
    byte = (block * LENGTH + tl.arange(0, LENGTH)[:, None]) * stride + c[None, :]
    h = inverted_random32(byte.to(tl.uint32), seed_low, seed_high)
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h[:, None, :], t, BITS)
    code = codes_of(
        v, hash, lo[None, None, :], inverse[None, None, :], steps[None, None, :], signed[None, None, :],
        extra[None, None, :], BITS, SIGNS,
    )  # fmt: skip
    packed = tl.sum(code << (t * BITS).to(tl.uint32), 1).to(tl.uint8)
    tl.store(data + byte, packed, mask=c[None, :] < stride)
    groups = tl.cdiv(pixels, GROUP) * stride
    store_scales(data + groups * LENGTH, block * stride + c, c < stride, groups, lo, step, signed, SIGNS)


@triton.jit(do_not_specialize=["pixels", "seed_low", "seed_high"])
def gq_decode_channels_kernel(
    data, out, seeds, stride: tl.int64, pixels: tl.int64, seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SIGNS: tl.constexpr, CHANNELS: tl.constexpr,
    BYTES: tl.constexpr, MASK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode BYTES code bytes of each group, in the order of gq_encode_channels_kernel."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    PARTS: tl.constexpr = LENGTH // BYTES
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    block, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < stride
    groups = tl.cdiv(pixels, GROUP) * stride
    g, codes = block * stride + c, data + block * LENGTH * stride + c
    lo, step = load_scales(data + groups * LENGTH, codes, g, there, groups, DTYPE, SIGNS)
    origin, unit = origin_of(lo, step)
    lo, step, origin, unit = lo[None, None, :], step[None, None, :], origin[None, None, :], unit[None, None, :]
    j = part * BYTES + tl.arange(0, BYTES)
    byte = (block * LENGTH + j[:, None]) * stride + c[None, :]
    packed = tl.load(data + byte, mask=there[None, :], other=0)
    t = tl.arange(0, T)[None, :, None]
    code = (packed.to(tl.uint32)[:, None, :] >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    if MASK:
        value = flags_of(code, lo, step, BITS, SIGNS)
    else:
        h = random32(byte.to(tl.uint32), seed_low, seed_high)
        fixed = fixed_codes(packed[:, None, :], h[:, None, :], t, BITS)
        if not SIGNS:
            code = fixed >> 24
        top = tl.full((), limit, tl.float64).to(WORK)
        value = values_of(code, fixed, lo, step, origin, unit, top, DTYPE, BITS, SIGNS)
    first = out + block * GROUP * stride
    i = (t * LENGTH + j[:, None, None]) * stride + c[None, None, :]
    if block * GROUP + GROUP <= pixels:
        tl.store(first + i, value, mask=there[None, None, :])
    else:
        tl.store(first + i, value, mask=there[None, None, :] & (block * GROUP + t * LENGTH + j[:, None, None] < pixels))


@triton.jit(do_not_specialize=["numel", "groups"])
def gq_gate_kernel(
    data, x, out, numel: tl.int64, groups: tl.int64, DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, SIGNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write x where the packed values are not zero, else zero: ReLU's gradient."""
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
    codes = data + g0 * LENGTH + tl.arange(0, ROWS) * LENGTH
    lo, step = load_scales(data + groups * LENGTH, codes, g, here, groups, DTYPE, SIGNS)
    byte = byte_index(ROWS, LENGTH, LANES)
    packed = tl.load(data + g0 * LENGTH + byte, mask=here[None, :, None, None], other=0).to(tl.uint32)
    t = tl.arange(0, T)[None, None, None, :, None]
    code = (packed[:, :, :, None, :] >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    flag = flags_of(code, of_group(lo), of_group(step), BITS, SIGNS)
    first = g0 * GROUP
    i = value_index(ROWS, LENGTH, T, LANES)
    if first + ROWS * GROUP <= numel:
        tl.store(out + first + i, tl.where(flag != 0, tl.load(x + first + i), 0))
    else:
        there = i < (numel - first).to(tl.int32)
        tl.store(out + first + i, tl.where(flag != 0, tl.load(x + first + i, mask=there, other=0), 0), mask=there)


@triton.jit(do_not_specialize=["pixels"])
def gq_gate_channels_kernel(
    data, x, out, stride: tl.int64, pixels: tl.int64, DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    SIGNS: tl.constexpr, CHANNELS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Do what gq_gate_kernel does where groups have one channel each."""
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    PARTS: tl.constexpr = LENGTH // BYTES
    block, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < stride
    groups = tl.cdiv(pixels, GROUP) * stride
    g, codes = block * stride + c, data + block * LENGTH * stride + c
    lo, step = load_scales(data + groups * LENGTH, codes, g, there, groups, DTYPE, SIGNS)
    j = part * BYTES + tl.arange(0, BYTES)
    byte = (block * LENGTH + j[:, None]) * stride + c[None, :]
    packed = tl.load(data + byte, mask=there[None, :], other=0).to(tl.uint32)
    t = tl.arange(0, T)[None, :, None]
    code = (packed[:, None, :] >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)
    flag = flags_of(code, lo[None, None, :], step[None, None, :], BITS, SIGNS)
    first = block * GROUP * stride
    i = (t * LENGTH + j[:, None, None]) * stride + c[None, None, :]
    inside = there[None, None, :] & (block * GROUP + t * LENGTH + j[:, None, None] < pixels)
    tl.store(out + first + i, tl.where(flag != 0, tl.load(x + first + i, mask=inside, other=0), 0), mask=inside)
