"""The fixed-rate kernels in Triton: group quantisation and the packing of small integers, as in docs/design.md."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.codecs import base
from encke.kernels.gpu.common import INTERPRETED, divide, nan_max, nan_min, narrow, random32, seed_of, turned, widen

START = tl.constexpr(base.START)


@triton.jit
def byte_index(ROWS: tl.constexpr, LENGTH: tl.constexpr, LANES: tl.constexpr):
    """Where each byte of a tile's codes stands: [word, group, further words, lane], 32 bytes a row of words.

    In this order of dimensions Triton gives as many threads to a group as there are words, and each thread all the
    slices of its bytes, in accesses of 16 bytes.
    """
    w = tl.arange(0, 32 // LANES)[:, None, None, None]
    g = tl.arange(0, ROWS)[None, :, None, None]
    u = tl.arange(0, LENGTH // 32)[None, None, :, None]
    return g * LENGTH + u * 32 + w * LANES + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def value_index(ROWS: tl.constexpr, LENGTH: tl.constexpr, T: tl.constexpr, LANES: tl.constexpr):
    """Where each value of a tile stands: [word, group, further words, slice, lane]; the T slices share bytes."""
    w = tl.arange(0, 32 // LANES)[:, None, None, None, None]
    g = tl.arange(0, ROWS)[None, :, None, None, None]
    u = tl.arange(0, LENGTH // 32)[None, None, :, None, None]
    t = tl.arange(0, T)[None, None, None, :, None]
    return g * (LENGTH * T) + t * LENGTH + u * 32 + w * LANES + tl.arange(0, LANES)[None, None, None, None, :]


@triton.jit
def of_group(v):
    return v[None, :, None, None, None]


@triton.jit
def bits_of(v):
    """A float's bits as an unsigned integer."""
    return v.to(tl.uint64, bitcast=True) if v.dtype == tl.float64 else v.to(tl.uint32, bitcast=True)


@triton.jit
def signed_bits(bits):
    return bits.to(tl.int64, bitcast=True) if bits.dtype == tl.uint64 else bits.to(tl.int32, bitcast=True)


@triton.jit
def step_up(step, spread):
    """The step as it is stored: bf16 rounded up (fp64 as it is), not too small where there is a spread at all."""
    if step.dtype == tl.float64:
        step = tl.maximum(step, 2.0**-990)
    else:
        step = ((step.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
        step = tl.maximum(step, 2.0**-100)
    return tl.where(spread > 0, step, 0.0)


@triton.jit
def lo_down(lo, signed, SIGNS: tl.constexpr):
    """A group's lo as it is stored: bf16 rounded down (fp64 as it is), finite; not zero where its sign is a mark."""
    if lo.dtype == tl.float64:
        return lo
    else:  # without it the compiler would go on after the return
        size = lo.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        away = tl.minimum((size + 0xFFFF) & -0x10000, 0x7F7F0000).to(tl.float32, bitcast=True)
        near = size & -0x10000
        if SIGNS:
            near = tl.where(signed, tl.maximum(near, 0x10000), near)
        return tl.where(lo < 0, -away, near.to(tl.float32, bitcast=True))


@triton.jit
def inverse_of(step):
    """2^24 / step rounded to nearest, of a positive step as step_up gives it."""
    if INTERPRETED or step.dtype == tl.float64:
        return divide(tl.full(step.shape, 16777216.0, step.dtype), step)
    else:
        # A quotient by eight bits is never near the middle between two floats: one iteration rounds correctly.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .f32 unit, near, rest;
                mul.rn.f32 unit, $1, 0f33800000;
                rcp.approx.ftz.f32 near, unit;
                neg.f32 unit, unit;
                fma.rn.f32 rest, unit, near, 0f3F800000;
                fma.rn.f32 $0, near, rest, near;
            }
            """,
            "=r,r", [step], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def steps_of(largest, highest, least, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """For each group: lo, step, 2^24 / step, number of steps, and whether it has negative values.

    From its values' bits: `largest` as unsigned integers (negative values are the larger ones, by magnitude), `highest`
    as signed ones, and `least` of bits minus one, unsigned, in which zero is the largest. With SIGNS the last two are
    those of magnitudes.
    """
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    bottom, top, small = largest.to(WORK, bitcast=True), highest.to(WORK, bitcast=True), least + 1
    return scales_of(bottom, top, small.to(WORK, bitcast=True), highest < 0, DTYPE, BITS, SIGNS)


@triton.jit
def scales_of(bottom, top, small, negative, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """steps_of from the values themselves, and whether all are `negative`."""
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    # Plus 0.0: where -0.0 is all there is, the result is +0.0.
    small += 0.0
    signed = bottom < 0
    lo, hi = small, top + 0.0
    if not SIGNS:
        # Where everything is negative, the smallest magnitude is the highest value.
        lo, hi = tl.where(signed, bottom, small), tl.where(signed & negative, small, hi)
    if SIGNS or DTYPE != tl.bfloat16:
        lo = lo_down(lo, signed, SIGNS)
    steps = tl.where(signed, 2.0 ** (BITS - 1) - 2 if SIGNS else 2.0**BITS - 1, 2.0**BITS - 2).to(WORK)
    share = tl.where(
        signed,
        tl.full(signed.shape, 1 / (2.0 ** (BITS - 1) - 2) if SIGNS else 1 / (2.0**BITS - 1), WORK),
        tl.full(signed.shape, 1 / (2.0**BITS - 2), WORK),
    )
    step = step_up(hi * share - lo * share, hi - lo)
    finite = (tl.abs(bottom) < float("inf")) & (tl.abs(top) < float("inf"))
    lo, step = tl.where(finite, lo, 0.0), tl.where(finite, step, float("nan"))
    inverse = tl.where(step > 0, inverse_of(step), 0.0)
    return lo, step, inverse, steps * 16777216.0, signed


@triton.jit
def fixed_point(t):
    """A float as an unsigned integer, zero below zero."""
    if INTERPRETED or t.dtype == tl.float64:
        return tl.maximum(t, 0.0).to(tl.uint32)
    else:
        # The instruction itself goes to zero there.
        return tl.inline_asm_elementwise("cvt.rzi.u32.f32 $0, $1;", "=r,r", [t], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def random_left(index, seed_low, seed_high):
    """All bits of random32 the other way round, so that it is added instead of compared."""
    if INTERPRETED:
        return random32(index, seed_low, seed_high) ^ 0xFFFFFFFF
    else:
        h = (index ^ seed_low.to(tl.uint32)) * (seed_high.to(tl.uint32) | 1)
        h = (h ^ (h >> 15)) * 0x846CA68B
        # Left to itself the compiler makes two instructions of it.
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $1, 0xC3;", "=r,r,r", [h, h >> 16], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def below_code(code, h, t, BITS: tl.constexpr):
    """code * 2^24 plus the upper 24 bits of h turned right by 4 BITS t: bytes that stand elsewhere."""
    if INTERPRETED:
        return (code << 24) | (turned(h, (t * (BITS * 4)).to(tl.uint32)) >> 8)
    else:
        first = t * (BITS // 2)
        choice = 0x4000 | (((first + 3) & 3) << 8) | (((first + 2) & 3) << 4) | ((first + 1) & 3)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [h, code, choice], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def fixed_codes(packed, h, t, BITS: tl.constexpr):
    """below_code of the codes in bytes."""
    if INTERPRETED or BITS == 8:
        return below_code((packed.to(tl.uint32) >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1), h, t, BITS)
    else:
        # Four bytes are shifted in one word, from which the last instruction takes them: left to itself the compiler
        # takes them apart first. Where the four have one `t`, as they do in the kernels, the first two are done once.
        shift = t * BITS
        first = t * (BITS // 2)
        choice = 0x4000 | (((first + 3) & 3) << 8) | (((first + 2) & 3) << 4) | ((first + 1) & 3)
        if BITS == 2:
            return tl.inline_asm_elementwise(
                """
            {
                .reg .b32 code, choice;
                shr.b32 code, $4, $9;
                and.b32 code, code, 0x03030303;
                add.u32 choice, $13, 0x0000;
                prmt.b32 $0, $5, code, choice;
                shr.b32 code, $4, $10;
                and.b32 code, code, 0x03030303;
                add.u32 choice, $14, 0x1000;
                prmt.b32 $1, $6, code, choice;
                shr.b32 code, $4, $11;
                and.b32 code, code, 0x03030303;
                add.u32 choice, $15, 0x2000;
                prmt.b32 $2, $7, code, choice;
                shr.b32 code, $4, $12;
                and.b32 code, code, 0x03030303;
                add.u32 choice, $16, 0x3000;
                prmt.b32 $3, $8, code, choice;
            }
            """,
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r", [packed, h, shift, choice], dtype=tl.uint32, is_pure=True,
                pack=4,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """
            {
                .reg .b32 code, choice;
                shr.b32 code, $4, $9;
                and.b32 code, code, 0x0F0F0F0F;
                add.u32 choice, $13, 0x0000;
                prmt.b32 $0, $5, code, choice;
                shr.b32 code, $4, $10;
                and.b32 code, code, 0x0F0F0F0F;
                add.u32 choice, $14, 0x1000;
                prmt.b32 $1, $6, code, choice;
                shr.b32 code, $4, $11;
                and.b32 code, code, 0x0F0F0F0F;
                add.u32 choice, $15, 0x2000;
                prmt.b32 $2, $7, code, choice;
                shr.b32 code, $4, $12;
                and.b32 code, code, 0x0F0F0F0F;
                add.u32 choice, $16, 0x3000;
                prmt.b32 $3, $8, code, choice;
            }
            """,
                "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r", [packed, h, shift, choice], dtype=tl.uint32, is_pure=True,
                pack=4,
            )  # fmt: skip


@triton.jit
def codes_of(v, hash, lo, inverse, steps, signed, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """The code of each value; what belongs to its group has been spread over it, and `hash` is its random number."""
    from_lo = tl.abs(v) if SIGNS else v
    # Below lo are zeros, which are replaced further down, and values beyond bf16's largest.
    fixed = fixed_point(tl.minimum((from_lo - lo) * inverse, steps))
    # q + (hash < fraction * 2^24) in fixed point, the whole part above bit 24.
    extra = 1 << 24 if SIGNS else tl.where(signed, 0, 1 << 24).to(tl.uint32)
    code = (fixed + hash + extra) >> 24
    if SIGNS:
        return tl.where(v != 0, code | ((v < 0).to(tl.uint32) << (BITS - 1)), 0)
    else:
        return tl.where((v != 0) | signed, code, 0)


@triton.jit
def origin_of(lo, step):
    """Where a group's values begin when what was added by chance is taken off again, and 2^-24 of its step."""
    return lo - tl.where(lo < 0, 0.5, 1.5).to(lo.dtype) * step, step * 5.9604644775390625e-08


@triton.jit
def narrow_finite(v, top, DTYPE: tl.constexpr):
    """narrow of values that are first brought between -top and top, the dtype's largest finite value; NaN stays."""
    if INTERPRETED or (DTYPE == tl.float32 or DTYPE == tl.float64):
        return narrow(nan_min(nan_max(v, -top), top), DTYPE)
    elif DTYPE == tl.bfloat16:
        # The instruction itself stays there.
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def values_of(code, fixed, lo, step, origin, unit, top, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """The value of each code, as it is stored; `fixed` has the random number below the code."""
    signed, known = lo < 0, step == step
    if SIGNS:
        size = code & tl.where(signed, (1 << (BITS - 1)) - 1, (1 << BITS) - 1).to(tl.uint32)
        value = tl.abs(lo) + (size.to(tl.int32) - 1).to(lo.dtype) * step
        value = tl.where((size == 0) & known, 0.0, value)
        return narrow_finite(tl.where(code != size, -value, value), top, DTYPE)
    else:
        value = origin + fixed.to(lo.dtype) * unit
        return narrow_finite(tl.where((code == 0) & (known & (signed == 0)), 0.0, value), top, DTYPE)


@triton.jit
def flags_of(code, lo, step, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Whether each value is not zero, as far as its code tells."""
    signed, known = lo < 0, step == step
    if SIGNS:
        size = code & tl.where(signed, (1 << (BITS - 1)) - 1, (1 << BITS) - 1).to(tl.uint32)
        return ((size != 0) | (known == 0)).to(tl.uint8)
    else:
        return ((code != 0) | (known == 0) | signed).to(tl.uint8)


@triton.jit
def store_scales(at_lo, g, here, groups, lo, step, signed, SIGNS: tl.constexpr):
    """lo and step of the groups `g`, as they are kept."""
    if SIGNS:
        lo = tl.where(signed, -lo, lo)
    if lo.dtype == tl.float64:
        tl.store(at_lo.to(tl.pointer_type(tl.float64)) + g, lo, mask=here)
        tl.store((at_lo + groups * 8).to(tl.pointer_type(tl.float64)) + g, step, mask=here)
    else:
        lo_bits = (lo.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        step_bits = (step.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(at_lo.to(tl.pointer_type(tl.int16)) + g, lo_bits, mask=here)
        tl.store((at_lo + groups * 2).to(tl.pointer_type(tl.int16)) + g, step_bits, mask=here)


@triton.jit
def load_scales(at_lo, g, here, groups, DTYPE: tl.constexpr):
    if DTYPE == tl.float64:
        lo = tl.load(at_lo.to(tl.pointer_type(tl.float64)) + g, mask=here, other=0.0)
        step = tl.load((at_lo + groups * 8).to(tl.pointer_type(tl.float64)) + g, mask=here, other=0.0)
    else:
        lo = widen(tl.load(at_lo.to(tl.pointer_type(tl.int16)) + g, mask=here, other=0), tl.bfloat16)
        step = widen(tl.load((at_lo + groups * 2).to(tl.pointer_type(tl.int16)) + g, mask=here, other=0), tl.bfloat16)
    return lo, step


@triton.jit
def group_max(v):
    return tl.max(tl.max(tl.max(tl.max(v, 4), 3), 2), 0)


@triton.jit
def group_min(v):
    return tl.min(tl.min(tl.min(tl.min(v, 4), 3), 2), 0)


@triton.jit(do_not_specialize=["numel", "groups", "seed_low", "seed_high"])
def gq_encode_kernel(
    x, data, seeds, numel: tl.int64, groups: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIGNS: tl.constexpr,
    LANES: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    first = g0 * GROUP
    i = value_index(ROWS, LENGTH, T, LANES)
    if first + ROWS * GROUP <= numel:
        v = widen(tl.load(x + first + i), DTYPE)
    else:
        v = widen(tl.load(x + first + i, mask=i < (numel - first).to(tl.int32), other=0), DTYPE)
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    lo, step, inverse, steps, signed = steps_of(
        group_max(bits), group_max(signed_bits(size)), group_min(size - 1), DTYPE, BITS, SIGNS
    )
    # The values of a byte share one hash.
    byte = byte_index(ROWS, LENGTH, LANES)
    h = random_left((g0 * LENGTH).to(tl.uint32) + byte.to(tl.uint32), seed_low, seed_high)
    t = tl.arange(0, T)[None, None, None, :, None]
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h[:, :, :, None, :], t, BITS)
    code = codes_of(v, hash, of_group(lo), of_group(inverse), of_group(steps), of_group(signed), BITS, SIGNS)
    packed = tl.sum(code << (t * BITS).to(tl.uint32), 3).to(tl.uint8)
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
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
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
    lo, step = load_scales(data + groups * LENGTH, g, here, groups, DTYPE)
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
    """Groups of one channel each where the `stride` channels of a pixel lie together: [byte, slice, channel]."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    block, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    j, t = tl.arange(0, LENGTH)[:, None, None], tl.arange(0, T)[None, :, None]
    there = c[None, None, :] < stride
    first = x + block * GROUP * stride
    i = (t * LENGTH + j) * stride + c[None, None, :]
    if block * GROUP + GROUP <= pixels:
        v = widen(tl.load(first + i, mask=there, other=0), DTYPE)
    else:
        v = widen(tl.load(first + i, mask=there & (block * GROUP + t * LENGTH + j < pixels), other=0), DTYPE)
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    largest = tl.max(tl.max(bits, 1), 0)
    highest = tl.max(tl.max(signed_bits(size), 1), 0)
    least = tl.min(tl.min(size - 1, 1), 0)
    lo, step, inverse, steps, signed = steps_of(largest, highest, least, DTYPE, BITS, SIGNS)
    byte = (block * LENGTH + tl.arange(0, LENGTH)[:, None]) * stride + c[None, :]
    h = random_left(byte.to(tl.uint32), seed_low, seed_high)
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h[:, None, :], t, BITS)
    code = codes_of(
        v, hash, lo[None, None, :], inverse[None, None, :], steps[None, None, :], signed[None, None, :], BITS, SIGNS
    )
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
    """BYTES of the code bytes of each group at a time, in the order of gq_encode_channels_kernel."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    PARTS: tl.constexpr = LENGTH // BYTES
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    block, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < stride
    groups = tl.cdiv(pixels, GROUP) * stride
    lo, step = load_scales(data + groups * LENGTH, block * stride + c, there, groups, DTYPE)
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
    """x where the packed values are not zero, else zero: ReLU's gradient."""
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    g0 = tl.program_id(0).to(tl.int64) * ROWS
    g = g0 + tl.arange(0, ROWS)
    here = g < groups
    lo, step = load_scales(data + groups * LENGTH, g, here, groups, DTYPE)
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
    """The same where groups have one channel each."""
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = GROUP // T
    PARTS: tl.constexpr = LENGTH // BYTES
    block, part = (tl.program_id(0) // PARTS).to(tl.int64), tl.program_id(0) % PARTS
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < stride
    groups = tl.cdiv(pixels, GROUP) * stride
    lo, step = load_scales(data + groups * LENGTH, block * stride + c, there, groups, DTYPE)
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


@triton.jit
def dither(i, seed_low, seed_high):
    """A random number between 0 and 1 for each index."""
    return (random32(i, seed_low, seed_high) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["numel", "seed_low", "seed_high"])
def lp_encode_kernel(
    x, data, numel: tl.int64, seed_low: tl.int32, seed_high: tl.int32, inverse: tl.float32, far: tl.float32,
    bend: tl.float32, DTYPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * SIZE
    j = tl.arange(0, SIZE)
    left = numel - first
    v = widen(tl.load(x + first + j) if left >= SIZE else tl.load(x + first + j, mask=j < left, other=0), DTYPE)
    u = dither(first.to(tl.uint32) + j.to(tl.uint32), seed_low, seed_high)
    steps = tl.minimum(tl.maximum(tl.maximum(v * inverse, v * far - bend) + u, 0.0), 254.0)
    code = tl.where(v == v, steps, 255.0).to(tl.int32).to(tl.uint8)
    if left >= SIZE:
        tl.store(data + first + j, code)
    else:
        tl.store(data + first + j, code, mask=j < left)


@triton.jit(do_not_specialize=["numel", "seed_low", "seed_high"])
def lp_decode_kernel(
    data, out, numel: tl.int64, seed_low: tl.int32, seed_high: tl.int32, step: tl.float32, far: tl.float32,
    bend: tl.float32, shift: tl.float32, DTYPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * SIZE
    j = tl.arange(0, SIZE)
    left = numel - first
    code = (tl.load(data + first + j) if left >= SIZE else tl.load(data + first + j, mask=j < left, other=0)).to(
        tl.int32
    )
    u = dither(first.to(tl.uint32) + j.to(tl.uint32), seed_low, seed_high)
    t = code.to(tl.float32) + 0.5 - u
    v = narrow(tl.where(code == 255, float("nan"), tl.maximum(t * step, (t + bend) * far) - shift), DTYPE)
    if left >= SIZE:
        tl.store(out + first + j, v)
    else:
        tl.store(out + first + j, v, mask=j < left)


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


@triton.jit
def stirred(h):
    """splitmix64's last steps."""
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit(do_not_specialize=["count", "step", "rank"])
def seeds_kernel(
    sites, salts, seeds, count: tl.int32, step: tl.int64, rank: tl.int64, SIZE: tl.constexpr
):  # fmt: skip
    """mix(salt, mix(step, site, rank)) of codecs/base.py for each site, and the salt beside it."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = i < count
    site = tl.load(sites + i, mask=here, other=0).to(tl.uint64)
    salt = tl.load(salts + i, mask=here, other=0).to(tl.uint64)
    nothing = tl.zeros_like(site)
    first = (nothing + step.to(tl.uint64)) * 0xD1342543DE82EF95 + site + START
    inner = stirred(first * 0xD1342543DE82EF95 + (nothing + rank.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    found = stirred(salt * 0xD1342543DE82EF95 + inner + START)
    tl.store(seeds + i, found.to(tl.int64, bitcast=True), mask=here)
