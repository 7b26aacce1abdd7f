"""Codes of groups in numba: scales, rounding and decoding, shared by the fixed-rate kernels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from encke.kernels.cpu.scalars import (
    as_float,
    choose,
    f32,
    f64,
    i32,
    i64,
    implement,
    inline,
    lo_down,
    narrow,
    random32,
    rotate_right,
    step_up,
    u8,
    u32,
    u64,
    widen,
)

# Bits of v as a signed and as an unsigned integer, and back.
signed_bits = choose(lambda v: f32(v).view(i32), lambda v: f64(v).view(i64))
plain_bits = choose(lambda v: f32(v).view(u32), lambda v: f64(v).view(u64))
from_bits = choose(lambda b: u32(b).view(f32), lambda b: u64(b).view(f64))
# Unsigned integers, with wrap-around.
less_one = choose(lambda b: u32(b - u32(1)), lambda b: u64(b - u64(1)))
more_one = choose(lambda b: u32(b + u32(1)), lambda b: u64(b + u64(1)))
# Bits of v that bf16 drops; none for fp64, which is stored unchanged.
rest_of = choose(lambda v: u32(f32(v).view(u32) & u32(0xFFFF)), lambda v: u32(0))


def top_half(v: Any, like: Any) -> Any:
    """Return the upper half of fp32 as bf16; return fp64 unchanged."""


def low_half(v: Any, like: Any) -> Any:
    """Return the lower half of fp32 without its last bit, with the mark of a constant group."""


def marks_constant(step: Any) -> Any:
    """Return whether a stored step has the mark of a constant group."""


def constant_of(lo: Any, step: Any, byte: Any, signs: Any) -> Any:
    """Return the value of a constant group from its scales and the first byte of its codes, which has the last bit."""


@implement(top_half)
def _top_half(v, like):
    if like == types.uint16:
        return lambda v, like: np.uint16(f32(v).view(u32) >> u32(16))
    return lambda v, like: v


@implement(low_half)
def _low_half(v, like):
    if like == types.uint16:
        return lambda v, like: np.uint16(u32(f32(v).view(u32) >> u32(1)) | u32(0x8000))
    return lambda v, like: v


@implement(marks_constant)
def _marks_constant(step):
    if step == types.uint16:
        return lambda step: step >= np.uint16(0x8000)
    return lambda step: False


@implement(constant_of)
def _constant_of(lo, step, byte, signs):
    if lo == types.uint16:

        def from_halves(lo, step, byte, signs):
            last = u32(byte) if lo >= np.uint16(0x8000) and not signs else u32(byte) >> u32(1)
            return u32(u32(u32(lo) << u32(16)) | u32(u32(step) << u32(1) & u32(0xFFFE)) | last & u32(1)).view(f32)

        return from_halves
    return lambda lo, step, byte, signs: lo


@inline
def size_of(x, signs):
    """Return the magnitude of a value if signs are stored apart, else the value: this is divided into steps."""
    return abs(x) if signs else x


@inline
def is_finite(top, deep):
    """Return whether all values of a group are finite."""
    infinite = as_float(math.inf, from_bits(deep))
    return top < signed_bits(infinite) and deep < plain_bits(-infinite)


@inline
def divide(top, deep, least, signed, bits, signs, first):
    """Divide the range of a group into steps: (lo, step, factor to fixed point, largest result), the first two rounded.

    `top` and `deep` are the largest bits as signed and unsigned integers, `least` the smallest bits of a non-zero
    value. If all non-zero values are equal, and the group's first value `first` is not zero, lo is that value exactly.
    """
    zero = as_float(0, from_bits(least))
    affine, finite = signed and not signs, is_finite(top, deep)
    if affine:
        lo, hi = from_bits(deep), from_bits(plain_bits(from_bits(top)) if top >= 0 else least)
    else:
        lo, hi = from_bits(least) if top > 0 else zero, from_bits(top) if top > 0 else zero
    n = as_float(((1 << bits - 1) - 2 if signs else (1 << bits) - 1) if signed else (1 << bits) - 2, zero)
    step, factor = zero, zero
    if not finite:
        lo, step = zero, as_float(math.nan, zero)
    elif hi != lo or first == 0:
        lo = lo_down(signed and signs, lo)
    if hi > lo and finite:
        step = step_up(hi * (f32(1.0) / n) - lo * (f32(1.0) / n))
        factor = f32(1.0) / step * f32(2.0**24)
    return lo, step, factor, n * f32(2.0**24)


@inline
def store_scales(g, lo, step, los, steps):
    """Store lo and step of group g, or the first 31 bits of a constant group whose value does not fit bf16.

    Return the last bit of that value, which is added to all codes.
    """
    los[g], steps[g] = top_half(lo, los[g]), top_half(step, steps[g])
    if rest_of(lo) == 0:
        return u32(0)
    steps[g] = low_half(lo, steps[g])
    return u32(rest_of(lo) & 1)


@inline
def load_scales(lo, step, byte, signs):
    """Return lo and step of a group from the stored ones and the first byte of its codes."""
    if not marks_constant(step):
        return widen(lo), widen(step)
    return constant_of(lo, step, byte, signs), as_float(0, widen(lo))


@inline
def code_of(x, bits, signs, one, first, lo, factor, most, h):
    """Return a value's code. `first` is lo's code; if `one`, zero has a code below it. `h` is the rotated hash."""
    s = (size_of(x, signs) - lo) * factor
    s = s if s > 0 else as_float(0, s)
    s = s if s < most else most
    fixed = u32(s) if bits == 8 else u32(i32(s))
    code = u32(u32(fixed + u32(u32(~h) >> u32(8))) >> u32(24)) + first
    if signs:
        code |= u32(x < 0) << u32(bits - 1)
    return u32(code) if one == 0 or size_of(x, signs) > 0 else u32(0)


@inline
def value_of(code, h, bits, signs, one, lo, unit, limit):
    """Decode a code to a value and subtract the random number. With `signs`, `one` is the sign bit."""
    if signs:
        size = i32(code & u32(one - 1))
        value = lo + as_float(size - 1, lo) * unit
        value = limit if value > limit else value
        value = value if size > 0 else as_float(0, lo)
        return -value if code & u32(one) else value
    fixed = u32(u32(code << u32(24)) | u32(h >> u32(8)))
    value = lo + (as_float(fixed, lo) if bits == 8 else as_float(i32(fixed), lo)) * unit
    value = limit if value > limit else value
    value = -limit if value < -limit else value
    return value if code >= u32(one) else as_float(0, lo)


@inline
def terms_of(lo, step, bits, signs):
    """Return the arguments of `value_of` for a group: (1 if zero has a code, or sign bit; offset; unit)."""
    if signs:
        return i32(1 << bits - 1 if lo < 0 else 256), abs(lo), step
    one = i32(0 if lo < 0 else 1)
    return one, lo - (f32(0.5) + as_float(one, lo)) * step, step * f32(2.0**-24)


@inline
def any_negative(v):
    """Return whether a group with non-finite values has negative ones."""
    negative = False
    for x in v.flat:
        negative |= widen(x) < 0
    return negative


@inline
def field_of(bits):
    """Return the number of bits of a code in its group's field. The third bits of 3-bit codes follow the field."""
    return 2 if bits == 3 else bits


@inline
def slices_of(bits):
    """Return the number of values that share a byte of the field."""
    return 4 if bits == 3 else 8 // bits


@inline
def put_code(code, t, bits):
    """Return the bits of slice t's code in its byte; the third bit is above the byte."""
    if bits == 3:
        return u32(u32(code & u32(3)) << u32(2 * t) | u32(code >> u32(2)) << u32(8 + t))
    return u32(code << u32(bits * t))


@inline
def code_in(word, t, bits):
    """Return slice t's code from its byte, with the third bits above it."""
    if bits == 3:
        return u32(word >> u32(2 * t) & u32(3) | u32(word >> u32(8 + t) & u32(1)) << u32(2))
    return u32(u8(word) >> u8(bits * t) & u8((1 << bits) - 1))


@inline
def put_word(word, j, bits, out, third):
    """Write byte j of a group, and its four third bits to `third` if codes have three bits."""
    out[j] = u8(word)
    if bits == 3:
        third[j] = u8(word >> u32(8))


@inline
def word_at(codes, third, j, bits):
    """Read the result of `put_word`."""
    return u32(codes[j]) | u32(third[j]) << u32(8) if bits == 3 else u32(codes[j])


@inline
def join_thirds(third, length, out):
    """Write the third bits after the field, those of two bytes into one byte.

    This is a separate loop, so that the loop over the bytes of the field has no branch for odd bytes and vectorises.
    """
    for k in range(out.size - length):
        out[length + k] = third[2 * k] | u8(third[2 * k + 1] << u8(4))


@inline
def split_thirds(codes, length, third):
    """Unpack the result of `join_thirds`."""
    for k in range(codes.size - length):
        third[2 * k], third[2 * k + 1] = codes[length + k] & u8(15), codes[length + k] >> u8(4)


@inline
def byte_of(v, j, bits, length, signs, one, first, lo, factor, most, h):
    """Return byte j of a group, whose hash is h. The third bits of 3-bit codes are above the byte.

    The bodies of all loops over bytes are functions: LLVM peels a loop with variables of its own, and the rest does not
    fill its vectors.
    """
    word = u32(0)
    for t in range(slices_of(bits)):
        turned = rotate_right(h, u32(4 * field_of(bits) * t))
        code = code_of(widen(v[t * length + j]), bits, signs, one, first, lo, factor, most, turned)
        word |= put_code(code, t, bits)
    return word


@inline
def quantize_slices(v, bits, length, signs, one, first, lo, factor, most, word, seed_low, seed_high, out, third):
    """Write the bytes of a group. `word` is the index of the first one, `third` has room for `length` + 1 bytes."""
    for j in range(length):
        h = random32(u32(word + j), seed_low, seed_high)
        put_word(byte_of(v, j, bits, length, signs, one, first, lo, factor, most, h), j, bits, out, third)
    if bits == 3:
        join_thirds(third, length, out)


@inline
def put_values(word, to, j, bits, length, signs, one, lo, unit, h, nan, limit):
    """Decode the values of a group that share byte j, whose hash is h, to `to`."""
    for t in range(slices_of(bits)):
        code = code_in(word, t, bits)
        value = value_of(code, rotate_right(h, u32(4 * field_of(bits) * t)), bits, signs, one, lo, unit, limit)
        to[t * length + j] = narrow(value, nan)
