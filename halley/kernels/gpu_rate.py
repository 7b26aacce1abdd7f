"""The fixed-rate kernels in Triton: group quantisation and the packing of small integers, as in docs/design.md."""

from __future__ import annotations

import triton
import triton.language as tl

from halley.kernels.gpu_common import divide, highest, lowest, nan_max, nan_min, narrow, random32, turned, widen


@triton.jit
def byte_index(ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """Where each byte of a tile's codes stands: [word 8, group, further words, lane 4].

    In this order of dimensions Triton gives eight threads to a group, and each thread all the slices of its bytes.
    """
    w = tl.arange(0, 8)[:, None, None, None]
    g = tl.arange(0, ROWS)[None, :, None, None]
    u = tl.arange(0, LENGTH // 32)[None, None, :, None]
    return g * LENGTH + u * 32 + w * 4 + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def value_index(ROWS: tl.constexpr, LENGTH: tl.constexpr, T: tl.constexpr):
    """Where each value of a tile stands: [word 8, group, further words, slice, lane 4]; the T slices share bytes."""
    w = tl.arange(0, 8)[:, None, None, None, None]
    g = tl.arange(0, ROWS)[None, :, None, None, None]
    u = tl.arange(0, LENGTH // 32)[None, None, :, None, None]
    t = tl.arange(0, T)[None, None, None, :, None]
    return g * (LENGTH * T) + t * LENGTH + u * 32 + w * 4 + tl.arange(0, 4)[None, None, None, None, :]


@triton.jit
def value_place(g0, groups, positions, stride, ROWS: tl.constexpr, LENGTH: tl.constexpr, T: tl.constexpr):
    """Where the values of a tile's groups lie in memory when they are `stride` apart, and which of them there are."""
    g = g0 + tl.arange(0, ROWS).to(tl.int64)
    block = g // stride
    within = value_index(1, LENGTH, T)
    place = of_group(block * (LENGTH * T * stride) + (g - block * stride)) + within * stride
    return place, (of_group(block * (LENGTH * T)) + within < positions) & of_group(g < groups)


@triton.jit
def slice_shift(T: tl.constexpr, BITS: tl.constexpr):
    return (tl.arange(0, T) * BITS).to(tl.uint32)[None, None, None, :, None]


@triton.jit
def group_highest(v):
    return highest(highest(highest(highest(v, 4), 3), 2), 0)


@triton.jit
def of_group(v):
    return v[None, :, None, None, None]


@triton.jit
def group_lowest(v):
    return lowest(lowest(lowest(lowest(v, 4), 3), 2), 0)


@triton.jit
def least_positive(v):
    """The smallest value above zero in each group, or zero: in unsigned bits minus one, zero is the largest."""
    if v.dtype == tl.float64:
        bits = v.to(tl.uint64, bitcast=True) - 1
    else:
        bits = v.to(tl.uint32, bitcast=True) - 1
    bits = tl.min(tl.min(tl.min(tl.min(bits, 4), 3), 2), 0) + 1
    # Plus 0.0: where -0.0 is all there is, the result is +0.0.
    return bits.to(v.dtype, bitcast=True) + 0.0


@triton.jit
def step_up(step, spread):
    """The step as it is stored: bf16 rounded up (fp64 as it is), normal where there is a spread at all."""
    if step.dtype == tl.float64:
        step = tl.maximum(step, 2.0**-1022)
    else:
        step = ((step.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
        step = tl.maximum(step, 2.0**-126)
    return tl.where(spread > 0, step, 0.0)


@triton.jit
def lo_down(lo, signed, SIGNS: tl.constexpr):
    """A group's lo as it is stored: bf16 rounded down (fp64 as it is), finite; not zero where its sign is a mark."""
    if lo.dtype == tl.float64:
        return lo
    size = lo.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    away = tl.minimum((size + 0xFFFF) & -0x10000, 0x7F7F0000).to(tl.float32, bitcast=True)
    near = size & -0x10000
    if SIGNS:
        near = tl.where(signed, tl.maximum(near, 0x10000), near)
    return tl.where(lo < 0, -away, near.to(tl.float32, bitcast=True))


@triton.jit
def steps_of(v, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """For each group: lo, step, number of steps, and whether it has negative values."""
    top, bottom = group_highest(v), group_lowest(v)
    signed = bottom < 0
    lo, hi = least_positive(tl.abs(v) if SIGNS else v), tl.maximum(top, -bottom)
    if not SIGNS:
        lo, hi = tl.where(signed, bottom, lo), tl.where(signed, top, hi)
    lo = lo_down(lo, signed, SIGNS)
    steps = tl.where(signed, 2.0 ** (BITS - 1) - 2 if SIGNS else 2.0**BITS - 1, 2.0**BITS - 2).to(v.dtype)
    step = step_up(divide(hi, steps) - divide(lo, steps), hi - lo)
    finite = nan_max(top, -bottom) < float("inf")
    return tl.where(finite, lo, 0.0), tl.where(finite, step, float("nan")), steps, signed


@triton.jit(do_not_specialize=["groups", "stride", "seed_low", "seed_high"])
def gq_encode_kernel(
    x, data, numel: tl.int64, groups: tl.int64, stride: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, STRIDED: tl.constexpr,
    SIGNS: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    if STRIDED:
        place, there = value_place(g0, groups, numel // stride, stride, ROWS, LENGTH, T)
        v = widen(tl.load(x + place, mask=there, other=0), DTYPE)
    else:
        first = g0 * GROUP
        left = tl.minimum(numel - first, ROWS * GROUP).to(tl.int32)
        i = value_index(ROWS, LENGTH, T)
        v = widen(tl.load(x + first + i, mask=i < left, other=0), DTYPE)
    lo, step, steps, signed = steps_of(v, BITS, SIGNS)
    inverse = tl.where(step > 0, divide(tl.full(step.shape, 1.0, step.dtype), step), 0.0)
    from_lo = tl.abs(v) if SIGNS else v
    # Below lo are zeros, which are replaced further down, and values beyond bf16's largest.
    t = tl.minimum(tl.maximum((from_lo - of_group(lo)) * of_group(inverse), 0.0), of_group(steps))
    # q + (hash < fraction * 2^24) in fixed point, the whole part above bit 24.
    fixed = (t * 16777216.0).to(tl.uint32)
    # The values of a byte share one hash.
    word = (g0 * LENGTH).to(tl.uint32) + byte_index(ROWS, LENGTH).to(tl.uint32)
    hash = turned(random32(word, seed_low, seed_high)[:, :, :, None, :], slice_shift(T, BITS * 4))
    extra = tl.full(signed.shape, 1 << 24, tl.int32) if SIGNS else tl.where(signed, 0, 1 << 24)
    code = (fixed + ((hash ^ 0xFFFFFFFF) >> 8) + of_group(extra).to(tl.uint32)) >> 24
    if SIGNS:
        code = tl.where(v != 0, code | ((v < 0).to(tl.uint32) << (BITS - 1)), 0)
        lo = tl.where(signed, -lo, lo)
    else:
        code = tl.where((v != 0) | of_group(signed), code, 0)
    byte = tl.sum(code << slice_shift(T, BITS), 3)
    here = g0 + tl.arange(0, ROWS) < groups
    tl.store(data + g0 * LENGTH + byte_index(ROWS, LENGTH), byte.to(tl.uint8), mask=here[None, :, None, None])
    g = g0 + tl.arange(0, ROWS)
    at_lo = data + groups * LENGTH
    if DTYPE == tl.float64:
        tl.store(at_lo.to(tl.pointer_type(WORK)) + g, lo, mask=here)
        tl.store((at_lo + groups * 8).to(tl.pointer_type(WORK)) + g, step, mask=here)
    else:
        lo_bits = (lo.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        step_bits = (step.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(at_lo.to(tl.pointer_type(tl.int16)) + g, lo_bits, mask=here)
        tl.store((at_lo + groups * 2).to(tl.pointer_type(tl.int16)) + g, step_bits, mask=here)


@triton.jit(do_not_specialize=["groups", "stride", "seed_low", "seed_high"])
def gq_decode_kernel(
    data, out, numel: tl.int64, groups: tl.int64, stride: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    limit: tl.float64, DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    STRIDED: tl.constexpr, SIGNS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
    at_lo = data + groups * LENGTH
    if DTYPE == tl.float64:
        lo = tl.load(at_lo.to(tl.pointer_type(WORK)) + g, mask=here, other=0.0)
        step = tl.load((at_lo + groups * 8).to(tl.pointer_type(WORK)) + g, mask=here, other=0.0)
    else:
        lo = widen(tl.load(at_lo.to(tl.pointer_type(tl.int16)) + g, mask=here, other=0), tl.bfloat16)
        step = widen(tl.load((at_lo + groups * 2).to(tl.pointer_type(tl.int16)) + g, mask=here, other=0), tl.bfloat16)
    at = data + g0 * LENGTH + byte_index(ROWS, LENGTH)
    byte = tl.load(at, mask=here[None, :, None, None], other=0).to(tl.uint32)
    code = ((byte[:, :, :, None, :] >> slice_shift(T, BITS)) & ((1 << BITS) - 1)).to(tl.int32)

    signed, zeros = lo < 0, step == step
    top = tl.full((), limit, tl.float64).to(WORK)
    if MASK:
        size = code & of_group(tl.where(signed, (1 << (BITS - 1)) - 1, (1 << BITS) - 1)) if SIGNS else code
        unknown = zeros == 0 if SIGNS else (zeros == 0) | signed
        value = ((size != 0) | of_group(unknown)).to(tl.uint8)
    elif not SIGNS:
        # What was added by chance before rounding is known, and taken off again.
        word = (g0 * LENGTH).to(tl.uint32) + byte_index(ROWS, LENGTH).to(tl.uint32)
        hash = turned(random32(word, seed_low, seed_high)[:, :, :, None, :], slice_shift(T, BITS * 4))
        q = (code - of_group(tl.where(signed, 0, 1))).to(WORK) + ((hash >> 8).to(WORK) * 5.9604644775390625e-08 - 0.5)
        value = nan_min(nan_max(of_group(lo) + q * of_group(step), -top), top)
        value = tl.where((code == 0) & of_group(zeros & (signed == 0)), 0.0, value)
        value = narrow(value, DTYPE)
    else:
        size = code & of_group(tl.where(signed, (1 << (BITS - 1)) - 1, (1 << BITS) - 1))
        value = nan_min(of_group(tl.abs(lo)) + (size - 1).to(WORK) * of_group(step), top)
        value = tl.where((size == 0) & of_group(zeros), 0.0, value)
        value = narrow(tl.where(code != size, -value, value), DTYPE)
    if STRIDED:
        place, there = value_place(g0, groups, numel // stride, stride, ROWS, LENGTH, T)
        tl.store(out + place, value, mask=there)
    else:
        first = g0 * GROUP
        i = value_index(ROWS, LENGTH, T)
        tl.store(out + first + i, value, mask=i < tl.minimum(numel - first, ROWS * GROUP).to(tl.int32))


@triton.jit
def bits_encode_kernel(x, data, numel: tl.int64, length: tl.int64, BITS: tl.constexpr, SIZE: tl.constexpr):
    T: tl.constexpr = 8 // BITS
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.zeros((SIZE,), tl.uint8)
    for t in tl.static_range(T):
        at = j + t * length
        byte |= tl.load(x + at, mask=(j < length) & (at < numel), other=0) << (t * BITS)
    tl.store(data + j, byte, mask=j < length)


@triton.jit
def bits_decode_kernel(data, out, numel: tl.int64, length: tl.int64, BITS: tl.constexpr, SIZE: tl.constexpr):
    T: tl.constexpr = 8 // BITS
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.load(data + j, mask=j < length, other=0)
    for t in tl.static_range(T):
        at = j + t * length
        tl.store(out + at, (byte >> (t * BITS)) & ((1 << BITS) - 1), mask=(j < length) & (at < numel))
