"""Functions shared by the Triton kernels: casts, reductions and the hash."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter truncates fp32 -> bf16, and its reductions ignore NaN: the code works around both.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def nan_max(a, b):
    """Return the larger number, or NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_min(a, b):
    """Return the smaller number, or NaN if either is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(v, axis: tl.constexpr):
    """Return the maximum along an axis; NaN counts as larger than any number."""
    if INTERPRETED:
        return tl.max(tl.where(v == v, v, float("inf")), axis)
    else:
        return tl.reduce(v, axis, nan_max)


@triton.jit
def lowest(v, axis: tl.constexpr):
    """Return the minimum along an axis; NaN counts as smaller than any number."""
    if INTERPRETED:
        return tl.min(tl.where(v == v, v, -float("inf")), axis)
    else:
        return tl.reduce(v, axis, nan_min)


@triton.jit
def widen(bits, DTYPE: tl.constexpr):
    """Convert loaded values to fp32 (fp64 stays). bf16 values are passed as int16."""
    if DTYPE == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        return bits.to(tl.float32)
    else:
        return bits


@triton.jit
def narrow(v, DTYPE: tl.constexpr):
    """Round values to DTYPE, to nearest even. bf16 values are returned as int16."""
    if DTYPE != tl.bfloat16:
        return v.to(DTYPE)
    elif INTERPRETED:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(v == v, rounded, 0x7FC0).to(tl.int16)
    else:
        # Two at a time: the compiler alone would convert one by one.
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [v], dtype=tl.int16, is_pure=True, pack=2
        )


@triton.jit
def load_sum(x, other, at, there, DTYPE: tl.constexpr, ADD: tl.constexpr):
    """Load the values at x + at where `there` (None: all); with ADD, add those at other + at."""
    if there is None:
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=there, other=0)
    if ADD:
        added = tl.load(other + at) if there is None else tl.load(other + at, mask=there, other=0)
        value = narrow(widen(value, DTYPE) + widen(added, DTYPE), DTYPE)
    return value


@triton.jit
def divide(a, b):
    """Divide and round to nearest; Triton's `/` is only approximate in fp32."""
    return a / b if b.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def float_bits(v):
    """Bitcast stored values to integers of the same size."""
    if v.dtype == tl.float64:
        return v.to(tl.int64, bitcast=True)
    elif v.dtype == tl.float32:
        return v.to(tl.int32, bitcast=True)
    else:
        return v.to(tl.int16, bitcast=True)


@triton.jit
def exponent(v):
    """Return floor(log2 v) of positive normal values as int32."""
    if v.dtype == tl.float64:
        return ((float_bits(v) >> 52) - 1023).to(tl.int32)
    else:
        return (float_bits(v) >> 23) - 127


@triton.jit
def power(e, like):
    """Return 2^e in the dtype of `like`."""
    if like.dtype == tl.float64:
        return ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def seed_of(seeds, seed_low, seed_high, TABLE: tl.constexpr):
    """Return the halves of a seed: as given, or with TABLE those of row `seed_low` of the int64 tensor `seeds`."""
    if TABLE:
        at = seeds.to(tl.pointer_type(tl.int32)) + seed_low * 2
        return tl.load(at), tl.load(at + 1)
    else:
        return seed_low, seed_high


@triton.jit
def random32(index, seed_low, seed_high):
    """Return the hash of docs/design.md for each uint32 index, before rotation and shift."""
    h = (index ^ seed_low.to(tl.uint32)) * (seed_high.to(tl.uint32) | 1)
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def rotate_right(h, count):
    """Rotate 32 bits to the right."""
    return (h >> count) | (h << ((32 - count) & 31))
