"""Codes of groups in numba: scales, rounding and decoding, shared by the kernels of the fixed rate."""

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

# The bits of v as an integer with and without a sign, and back.
signed_bits = choose(lambda v: f32(v).view(i32), lambda v: f64(v).view(i64))
plain_bits = choose(lambda v: f32(v).view(u32), lambda v: f64(v).view(u64))
from_bits = choose(lambda b: u32(b).view(f32), lambda b: u64(b).view(f64))
# Unsigned integers, wrapping around.
less_one = choose(lambda b: u32(b - u32(1)), lambda b: u64(b - u64(1)))
more_one = choose(lambda b: u32(b + u32(1)), lambda b: u64(b + u64(1)))
# The bits of v that bf16 does not have; fp64 is stored as it is.
rest_of = choose(lambda v: u32(f32(v).view(u32) & u32(0xFFFF)), lambda v: u32(0))


def top_half(v: Any, like: Any) -> Any:
    """Return the upper half of fp32 as bf16; fp64 as it is."""


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
    """Return what is divided into steps: the magnitude of a value if signs are stored apart, else the value."""
    return abs(x) if signs else x


@inline
def is_finite(top, deep):
    """Return whether all values of a group are finite."""
    infinite = as_float(math.inf, from_bits(deep))
    return top < signed_bits(infinite) and deep < plain_bits(-infinite)


@inline
def divide(top, deep, least, signed, bits, signs, first):
    """Divide the range of a group: (lo, step, factor to fixed point, largest result), the first two as stored.

    `top` and `deep` are the largest bits with and without a sign, `least` the smallest of a value that is not zero. If
    all values but zeros are one and `first`, the group's first value, is none of these, lo is that value as it is.
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
    """Store lo and step of group g, or of a group with one value the first 31 bits of that value.

    Return the last bit, which is added to all codes.
    """
    los[g], steps[g] = top_half(lo, los[g]), top_half(step, steps[g])
    if rest_of(lo) == 0:
        return u32(0)
    steps[g] = low_half(lo, steps[g])
    return u32(rest_of(lo) & 1)


@inline
def load_scales(lo, step, byte, signs):
    """Return lo and step of a group from what is stored of it: both, and the first byte of its codes."""
    if not marks_constant(step):
        return widen(lo), widen(step)
    return constant_of(lo, step, byte, signs), as_float(0, widen(lo))


@inline
def code_of(x, bits, signs, one, first, lo, factor, most, h):
    """Return a value's code. `one`: zero has a code of its own, below that of lo, `first`. `h` is the rotated hash."""
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
    """Return a code's value, less the random number that was added. With `signs`, `one` is the bit of the sign."""
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
    """Return what `value_of` takes of a group: (zero code or sign bit, offset, step)."""
    if signs:
        return i32(1 << bits - 1 if lo < 0 else 256), abs(lo), step
    one = i32(0 if lo < 0 else 1)
    return one, lo - (f32(0.5) + as_float(one, lo)) * step, step * f32(2.0**-24)


@inline
def any_negative(v):
    """Return whether a group with values that are not finite has negative ones."""
    negative = False
    for x in v.flat:
        negative |= widen(x) < 0
    return negative


@inline
def field_of(bits):
    """Return the bits of a code in its group's field; a third one follows the field."""
    return 2 if bits == 3 else bits


@inline
def slices_of(bits):
    """Return how many values share a byte of the field."""
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
    """Return what `put_word` wrote."""
    return u32(codes[j]) | u32(third[j]) << u32(8) if bits == 3 else u32(codes[j])


@inline
def join_thirds(third, length, out):
    """Write the third bits behind the field, those of two bytes in each byte.

    (A loop of its own, so that the one over the bytes of the field has no branch for odd ones and fills its vectors.)
    """
    for k in range(out.size - length):
        out[length + k] = third[2 * k] | u8(third[2 * k + 1] << u8(4))


@inline
def split_thirds(codes, length, third):
    """Read what `join_thirds` wrote."""
    for k in range(codes.size - length):
        third[2 * k], third[2 * k + 1] = codes[length + k] & u8(15), codes[length + k] >> u8(4)


@inline
def byte_of(v, j, bits, length, signs, one, first, lo, factor, most, h):
    """Return byte j of a group, whose hash is h; above it the third bits of its codes, if they have three.

    (A function, as are all bodies of loops over bytes: LLVM peels a loop that has variables of its own, and the rest
    does not fill its vectors.)
    """
    word = u32(0)
    for t in range(slices_of(bits)):
        turned = rotate_right(h, u32(4 * field_of(bits) * t))
        code = code_of(widen(v[t * length + j]), bits, signs, one, first, lo, factor, most, turned)
        word |= put_code(code, t, bits)
    return word


@inline
def quantize_slices(v, bits, length, signs, one, first, lo, factor, most, word, seed_low, seed_high, out, third):
    """Write the bytes of a group; `word` is the place of the first one, `third` has room for one more byte."""
    for j in range(length):
        h = random32(u32(word + j), seed_low, seed_high)
        put_word(byte_of(v, j, bits, length, signs, one, first, lo, factor, most, h), j, bits, out, third)
    if bits == 3:
        join_thirds(third, length, out)


@inline
def put_values(word, to, j, bits, length, signs, one, lo, unit, h, nan, limit):
    """Write the values of a group that share byte j, whose hash is h."""
    for t in range(slices_of(bits)):
        code = code_in(word, t, bits)
        value = value_of(code, rotate_right(h, u32(4 * field_of(bits) * t)), bits, signs, one, lo, unit, limit)
        to[t * length + j] = narrow(value, nan)
