"""Codes of groups in Triton: scales, rounding and decoding, shared by the fixed-rate kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import (
    INTERPRETED,
    divide,
    load_sum,
    nan_max,
    nan_min,
    narrow,
    random32,
    rotate_right,
    widen,
)

GATE, ADD, LEAK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Kinds of gradients that codes gate: of ReLU, of ReLU from the sum of two gradients, and of leaky ReLU."""


def _shifted_codes(bits: int) -> str:
    """Return PTX that shifts four bytes of codes as one word and separates them in its last instruction."""
    mask = f"0x{0x01010101 * ((1 << bits) - 1):08X}"
    lines = [".reg .b32 code, choice;"]
    for i in range(4):
        lines += [
            f"shr.b32 code, $4, ${9 + i};",
            f"and.b32 code, code, {mask};",
            f"add.u32 choice, ${13 + i}, 0x{i}000;",
            f"prmt.b32 ${i}, ${5 + i}, code, choice;",
        ]
    inner = "".join(f"                {line}\n" for line in lines)
    return f"\n            {{\n{inner}            }}\n            "


SHIFTED_CODES_2 = tl.constexpr(_shifted_codes(2))
SHIFTED_CODES_4 = tl.constexpr(_shifted_codes(4))


@triton.jit
def of_group(v):
    """Broadcast one number for each group to a tile."""
    return v[None, :, None, None, None]


@triton.jit
def bits_of(v):
    """Bitcast floats to unsigned integers."""
    return v.to(tl.uint64, bitcast=True) if v.dtype == tl.float64 else v.to(tl.uint32, bitcast=True)


@triton.jit
def signed_bits(bits):
    """Bitcast unsigned integers to signed ones."""
    return bits.to(tl.int64, bitcast=True) if bits.dtype == tl.uint64 else bits.to(tl.int32, bitcast=True)


@triton.jit
def step_up(step, spread):
    """Round a step up to bf16, in which it is stored (fp64 stays). The step is zero only if the spread is."""
    if step.dtype == tl.float64:
        step = tl.maximum(step, 2.0**-990)
    else:
        step = ((step.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
        step = tl.maximum(step, 2.0**-100)
    return tl.where(spread > 0, step, 0.0)


@triton.jit
def lo_down(lo, signed, SIGNS: tl.constexpr):
    """Round a group's lo down to bf16 (fp64 stays), to a finite value, and not to zero if its sign has a meaning."""
    if lo.dtype == tl.float64:
        return lo
    else:  # without the else, the compiler would continue after the return
        size = lo.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        away = tl.minimum((size + 0xFFFF) & -0x10000, 0x7F7F0000).to(tl.float32, bitcast=True)
        near = size & -0x10000
        if SIGNS:
            near = tl.where(signed, tl.maximum(near, 0x10000), near)
        return tl.where(lo < 0, -away, near.to(tl.float32, bitcast=True))


@triton.jit
def inverse_of(step):
    """Return 2^24 / step, rounded to nearest, for a positive step from `step_up`."""
    if INTERPRETED or step.dtype == tl.float64:
        return divide(tl.full(step.shape, 16777216.0, step.dtype), step)
    else:
        # A quotient by eight bits is never near the middle of two floats, so one iteration rounds correctly.
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
def first_values(x, at, here, DTYPE: tl.constexpr):
    """Return the first values of groups, at x + at; for bf16 and fp64, which need none, return `at`."""
    if DTYPE == tl.bfloat16 or DTYPE == tl.float64:
        return at
    else:
        return widen(tl.load(x + at, mask=here, other=0), DTYPE)


@triton.jit
def steps_of(largest, highest, least, first, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Return lo, step, 2^24 / step, number of steps, whether there are negative values, and lo's code, of each group.

    They are computed from extremes of the bits of a group's values: `largest` of the bits as unsigned integers (any
    negative value is larger, ordered by magnitude), `highest` of the bits as signed integers, and `least` of bits minus
    one, unsigned, where zero is the largest. With SIGNS, the last two are those of magnitudes. `first` is the group's
    first value.
    """
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    bottom, top, small = largest.to(WORK, bitcast=True), highest.to(WORK, bitcast=True), least + 1
    return scales_of(bottom, top, small.to(WORK, bitcast=True), highest < 0, first, DTYPE, BITS, SIGNS)


@triton.jit
def scales_of(bottom, top, small, negative, first, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Return the results of `steps_of` from values instead of bits, and from whether all values are `negative`."""
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    # Adding 0.0 turns -0.0 into +0.0, in case all values are -0.0.
    small += 0.0
    signed = bottom < 0
    lo, hi = small, top + 0.0
    if not SIGNS:
        # If all values are negative, the smallest magnitude is the highest value.
        lo, hi = tl.where(signed, bottom, small), tl.where(signed & negative, small, hi)
    if DTYPE == tl.float32 or DTYPE == tl.float16:
        # lo of a constant group keeps all its bits. Zeros in it do no harm after a first value that is not zero.
        lo = tl.where((hi == lo) & (first != 0), lo, lo_down(lo, signed, SIGNS))
    elif SIGNS:
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
    extra = tl.full(signed.shape, 1, tl.uint32) if SIGNS else tl.where(signed, 0, 1).to(tl.uint32)
    if DTYPE == tl.float32 or DTYPE == tl.float16:
        rest = lo.to(tl.uint32, bitcast=True)
        extra += tl.where((rest & 0xFFFF) != 0, rest & 1, 0)
    return lo, step, inverse, steps * 16777216.0, signed, extra


@triton.jit
def fixed_point(t):
    """Convert a float to an unsigned integer; negative numbers become zero."""
    if INTERPRETED or t.dtype == tl.float64:
        return tl.maximum(t, 0.0).to(tl.uint32)
    else:
        # The instruction itself returns zero for negative numbers.
        return tl.inline_asm_elementwise("cvt.rzi.u32.f32 $0, $1;", "=r,r", [t], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def inverted_random32(index, seed_low, seed_high):
    """Return `random32` with all bits inverted, so that it can be added instead of compared."""
    if INTERPRETED:
        return random32(index, seed_low, seed_high) ^ 0xFFFFFFFF
    else:
        h = (index ^ seed_low.to(tl.uint32)) * (seed_high.to(tl.uint32) | 1)
        h = (h ^ (h >> 15)) * 0x846CA68B
        # The compiler alone would emit two instructions.
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $1, 0xC3;", "=r,r,r", [h, h >> 16], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def below_code(code, h, t, BITS: tl.constexpr):
    """Return code * 2^24 plus the upper 24 bits of h rotated right by 4 BITS t: a permutation of bytes."""
    if INTERPRETED:
        return (code << 24) | (rotate_right(h, (t * (BITS * 4)).to(tl.uint32)) >> 8)
    else:
        first = t * (BITS // 2)
        choice = 0x4000 | (((first + 3) & 3) << 8) | (((first + 2) & 3) << 4) | ((first + 1) & 3)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [h, code, choice], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def fixed_codes(packed, h, t, BITS: tl.constexpr):
    """Extract the codes of slice t from bytes and return `below_code` of them."""
    if INTERPRETED or BITS == 8:
        return below_code((packed.to(tl.uint32) >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1), h, t, BITS)
    else:
        # The compiler alone would separate the four bytes before it shifts them. If the four have the same `t`, as in
        # the kernels, the first two instructions run once.
        shift = t * BITS
        first = t * (BITS // 2)
        choice = 0x4000 | (((first + 3) & 3) << 8) | (((first + 2) & 3) << 4) | ((first + 1) & 3)
        return tl.inline_asm_elementwise(
            SHIFTED_CODES_2 if BITS == 2 else SHIFTED_CODES_4,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r", [packed, h, shift, choice], dtype=tl.uint32, is_pure=True,
            pack=4,
        )  # fmt: skip


@triton.jit
def slices_of(packed, third, t, BITS: tl.constexpr):
    """Extract the codes of all slices from bytes and, for 3-bit codes, from the third bits, four for each byte."""
    if BITS == 3:
        return ((packed.to(tl.uint32) >> (t * 2).to(tl.uint32)) & 3) | (((third >> t.to(tl.uint32)) & 1) << 2)
    else:
        return (packed.to(tl.uint32) >> (t * BITS).to(tl.uint32)) & ((1 << BITS) - 1)


@triton.jit
def join_thirds(third):
    """Pack the third bits of two adjacent bytes of a field, four bits each, into one byte."""
    pairs = third.reshape(third.shape[0], third.shape[1], third.shape[2], third.shape[3] // 2, 2)
    return tl.sum(pairs << (tl.arange(0, 2) * 4).to(tl.uint32)[None, None, None, None, :], 4).to(tl.uint8)


@triton.jit
def split_thirds(both, SHAPE: tl.constexpr):
    """Unpack the result of `join_thirds`: the third bits are the lowest bits."""
    pairs = both.to(tl.uint32)[:, :, :, :, None] >> (tl.arange(0, 2) * 4).to(tl.uint32)[None, None, None, None, :]
    return pairs.reshape(SHAPE)


@triton.jit
def codes_of(v, hash, lo, inverse, steps, signed, extra, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Return the code of each value. `lo` to `extra` belong to its group, and `hash` is its random number."""
    from_lo = tl.abs(v) if SIGNS else v
    # Zeros, which are replaced further down, and values beyond bf16's largest are below lo.
    fixed = fixed_point(tl.minimum((from_lo - lo) * inverse, steps))
    # q + (hash < fraction * 2^24) in fixed point, the whole part above bit 24.
    code = (fixed + hash + (extra << 24)) >> 24
    if SIGNS:
        return tl.where(v != 0, code | ((v < 0).to(tl.uint32) << (BITS - 1)), 0)
    else:
        return tl.where((v != 0) | signed, code, 0)


@triton.jit
def origin_of(lo, step):
    """Return origin and unit of each group: a value is origin + fixed * unit, where the unit is 2^-24 steps.

    The origin includes the subtraction of the first code and of the random number; see `values_of`.
    """
    return lo - tl.where(lo < 0, 0.5, 1.5).to(lo.dtype) * step, step * 5.9604644775390625e-08


@triton.jit
def narrow_finite(v, top, DTYPE: tl.constexpr):
    """Clamp values between -top and top, the dtype's largest finite value, and narrow them; NaN stays."""
    if INTERPRETED or (DTYPE == tl.float32 or DTYPE == tl.float64):
        return narrow(nan_min(nan_max(v, -top), top), DTYPE)
    elif DTYPE == tl.bfloat16:
        # The instruction itself clamps.
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.bf16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.int16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def values_of(code, fixed, lo, step, origin, unit, top, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Decode codes to values of dtype DTYPE. `fixed` holds the code, and the random number in its lower 24 bits."""
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
    """Return which values are not zero. Groups whose codes cannot express zero count as non-zero."""
    signed, known = lo < 0, step == step
    if SIGNS:
        size = code & tl.where(signed, (1 << (BITS - 1)) - 1, (1 << BITS) - 1).to(tl.uint32)
        return ((size != 0) | (known == 0)).to(tl.uint8)
    else:
        return ((code != 0) | (known == 0) | signed).to(tl.uint8)


@triton.jit
def gated(
    x, other, at, there, code, lo, step, slope, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Return ReLU's gradient: that at x + at (with ADD, plus that at other + at) where values are not zero, else zero.

    With LEAK, return leaky ReLU's gradient: that at x + at where values are positive, else `slope` times that.
    """
    flag = flags_of(code, lo, step, BITS, SIGNS)
    value = load_sum(x, other, at, there, DTYPE, KIND == ADD)
    if KIND == LEAK:
        size = code & tl.where(lo < 0, (1 << (BITS - 1)) - 1, (1 << BITS) - 1).to(tl.uint32)
        passes = (flag != 0) & ((code == size) | (step != step))
        return tl.where(passes, value, narrow(widen(value, DTYPE) * slope, DTYPE))
    else:
        return tl.where(flag != 0, value, 0)


@triton.jit
def scales_at(data, groups, length, EIGHT: tl.constexpr = False):
    """Return the address of the scales: after the codes, at a multiple of 8. EIGHT: `length` is a multiple of 8."""
    if EIGHT:
        return data + groups.to(tl.int64) * length
    else:
        return data + (groups.to(tl.int64) * length + 7) // 8 * 8


@triton.jit
def store_scales(at_lo, g, here, groups, lo, step, signed, SIGNS: tl.constexpr):
    """Store lo and step of the groups `g`, or the first 31 bits of a constant group whose value does not fit bf16."""
    if SIGNS:
        lo = tl.where(signed, -lo, lo)
    if lo.dtype == tl.float64:
        tl.store(at_lo.to(tl.pointer_type(tl.float64)) + g, lo, mask=here)
        tl.store((at_lo + groups * 8).to(tl.pointer_type(tl.float64)) + g, step, mask=here)
    else:
        bits = lo.to(tl.int32, bitcast=True)
        half = step.to(tl.int32, bitcast=True) >> 16
        half = tl.where((bits & 0xFFFF) != 0, (bits >> 1) | 0x8000, half).to(tl.int16)
        tl.store(at_lo.to(tl.pointer_type(tl.int16)) + g, (bits >> 16).to(tl.int16), mask=here)
        tl.store((at_lo + groups * 2).to(tl.pointer_type(tl.int16)) + g, half, mask=here)


@triton.jit
def load_scales(at_lo, at_codes, g, here, groups, DTYPE: tl.constexpr, SIGNS: tl.constexpr):
    """Load lo and step of the groups `g`, whose codes begin at `at_codes`. Constant groups have step zero."""
    if DTYPE == tl.float64:
        lo = tl.load(at_lo.to(tl.pointer_type(tl.float64)) + g, mask=here, other=0.0)
        step = tl.load((at_lo + groups * 8).to(tl.pointer_type(tl.float64)) + g, mask=here, other=0.0)
    else:
        high = tl.load(at_lo.to(tl.pointer_type(tl.int16)) + g, mask=here, other=0)
        low = tl.load((at_lo + groups * 2).to(tl.pointer_type(tl.int16)) + g, mask=here, other=0)
        lo, step = join_scales(high, low, at_codes, here, DTYPE, SIGNS)
    return lo, step


@triton.jit
def join_scales(high, low, at_codes, here, DTYPE: tl.constexpr, SIGNS: tl.constexpr):
    """Return lo and step of groups from their two stored halves. The codes of the groups begin at `at_codes`."""
    lo, step = widen(high, tl.bfloat16), widen(low, tl.bfloat16)
    if DTYPE == tl.float32 or DTYPE == tl.float16:
        constant = low < 0
        last = tl.load(at_codes, mask=here & constant, other=0).to(tl.int32)
        last = last >> 1 if SIGNS else last >> tl.where(high < 0, 0, 1)
        bits = (high.to(tl.int32) << 16) | ((low.to(tl.int32) & 0x7FFF) << 1) | (last & 1)
        lo = tl.where(constant, bits.to(tl.float32, bitcast=True), lo)
        step = tl.where(constant, 0.0, step)
    return lo, step


@triton.jit
def group_max(v):
    """Return the largest value of each group of a tile."""
    return tl.max(tl.max(tl.max(tl.max(v, 4), 3), 2), 0)


@triton.jit
def group_min(v):
    """Return the smallest value of each group of a tile."""
    return tl.min(tl.min(tl.min(tl.min(v, 4), 3), 2), 0)
