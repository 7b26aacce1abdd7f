"""The error-bounded kernels in Triton. The format is explained in docs/design.md.

A tile is a few groups, shaped [slice 8, group, block 16, half 2, lane 4]: value 8 * slice + 4 * half + lane of a block. Each
thread owns four lanes of all eight slices of one block, so that packing shifts and ors registers, four bytes in one word.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# The interpreter truncates fp32 -> bf16 and its reductions ignore NaN: both are done by hand there.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
RAW = tl.constexpr(31)


@triton.jit
def nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def highest(v, axis: tl.constexpr):
    """The largest along an axis, where NaN counts as larger than anything."""
    if INTERPRETED:
        return tl.max(tl.where(v == v, v, float("inf")), axis)
    return tl.reduce(v, axis, nan_max)


@triton.jit
def widen(bits, DTYPE: tl.constexpr):
    """The computing value of what was loaded; bf16 travels as int16."""
    if DTYPE == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    if DTYPE == tl.float16:
        return bits.to(tl.float32)
    return bits


@triton.jit
def narrow(v, DTYPE: tl.constexpr):
    """The value as it is stored, rounded to nearest even; bf16 travels as int16."""
    if DTYPE == tl.bfloat16:
        if INTERPRETED:
            bits = v.to(tl.uint32, bitcast=True)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return tl.where(v == v, rounded, 0x7FC0).to(tl.int16)
        return v.to(tl.bfloat16).to(tl.int16, bitcast=True)
    return v.to(DTYPE)


@triton.jit
def float_bits(v):
    return v.to(tl.int64, bitcast=True) if v.dtype == tl.float64 else v.to(tl.int32, bitcast=True)


@triton.jit
def exponent(v):
    """floor(log2 v) of positive normal values, int32."""
    if v.dtype == tl.float64:
        return ((float_bits(v) >> 52) - 1023).to(tl.int32)
    return (float_bits(v) >> 23) - 127


@triton.jit
def power(e, like):
    """2^e in the dtype of `like`."""
    if like.dtype == tl.float64:
        return ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def random24(index, seed_low, seed_high):
    """24 random bits for each uint32 index: the hash of docs/design.md."""
    h = (index ^ seed_low.to(tl.uint32)) * (seed_high.to(tl.uint32) | 1)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return ((h ^ (h >> 16)) >> 8).to(tl.int32)


@triton.jit
def tile_index(G: tl.constexpr):
    """Where each value of a tile stands in its groups' memory."""
    s = tl.arange(0, 8)[:, None, None, None, None]
    g = tl.arange(0, G)[None, :, None, None, None]
    b = tl.arange(0, 16)[None, None, :, None, None]
    h = tl.arange(0, 2)[None, None, None, :, None]
    return g * 1024 + b * 64 + s * 8 + h * 4 + tl.arange(0, 4)[None, None, None, None, :]


@triton.jit
def of_group(v):
    return v[None, :, None, None, None]


@triton.jit
def of_block(v):
    return v[None, :, :, None, None]


@triton.jit
def key_of(v):
    """An unsigned key in the order of float64 values."""
    bits = v.to(tl.int64, bitcast=True)
    flip = (bits >> 63) | tl.full((), -(2**63), tl.int64)
    return (bits ^ flip).to(tl.uint64, bitcast=True)


@triton.jit
def value_of(key):
    bits = key.to(tl.int64, bitcast=True)
    flip = ((bits ^ -1) >> 63) | tl.full((), -(2**63), tl.int64)
    return (bits ^ flip).to(tl.float64, bitcast=True)


@triton.jit
def range_kernel(x, meta, numel: tl.int64, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Keys of the largest and (complemented) of the smallest finite value, by atomic maximum from zero, into meta[16:32]."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = widen(tl.load(x + at, mask=at < numel, other=0), DTYPE)
    good = (at < numel) & (tl.abs(v) < float("inf"))
    high = tl.max(tl.where(good, v, -float("inf")), 0)
    low = tl.min(tl.where(good, v, float("inf")), 0)
    keys = (meta + 16).to(tl.pointer_type(tl.uint64))
    if high >= low:
        tl.atomic_max(keys, key_of(high.to(tl.float64)), sem="relaxed")
        tl.atomic_max(keys + 1, ~key_of(low.to(tl.float64)), sem="relaxed")


@triton.jit
def usable_bound(meta, bound, rel, DTYPE: tl.constexpr, RELATIVE: tl.constexpr):
    """min(bound, rel * range) rounded down to the computing dtype, clamped, zero where too small."""
    eb = tl.full((), bound, tl.float64)
    if RELATIVE:
        keys = (meta + 16).to(tl.pointer_type(tl.uint64))
        high, low = tl.load(keys), tl.load(keys + 1)
        spread = tl.where(high == 0, 0.0, value_of(high) - value_of(~low))
        eb = tl.minimum(eb, spread * tl.full((), rel, tl.float64))
    eb = tl.minimum(eb, 2.0**120)
    if DTYPE == tl.float64:
        return tl.where(eb < 2.0**-900, 0.0, eb)
    near = eb.to(tl.float32)
    near = (near.to(tl.int32, bitcast=True) - (near.to(tl.float64) > eb)).to(tl.float32, bitcast=True)
    return tl.where(eb < 2.0**-100, 0.0, near)


@triton.jit
def shrink_code(m, eb, DTYPE: tl.constexpr):
    """The shrink code of groups whose largest magnitude is m."""
    EMIN: tl.constexpr = -14 if DTYPE == tl.float16 else (-1022 if DTYPE == tl.float64 else -126)
    COST: tl.constexpr = (
        -8 if DTYPE == tl.bfloat16 else (-11 if DTYPE == tl.float16 else (-21 if DTYPE == tl.float32 else -50))
    )
    r = tl.maximum(exponent(m + eb), EMIN) + COST
    e0 = exponent(eb) - 1
    return tl.where(r > e0, 0, tl.minimum(e0 - r + 1, 15))


@triton.jit
def shrink(eb, code):
    """eb_c of docs/design.md."""
    return tl.where(code == 0, eb * 0.5, eb - power(exponent(eb) - code, eb))


@triton.jit
def level_size(a, inverse, index, seed_low, seed_high, STOCHASTIC: tl.constexpr):
    """The magnitude of the level of magnitude a, in floating point."""
    if STOCHASTIC:
        q = a * inverse + 0.5
        k = tl.floor(q)
        k += (random24(index, seed_low, seed_high) < ((q - k) * 16777216.0).to(tl.int32)).to(a.dtype)
    else:
        k = tl.ceil(a * inverse)
    # Never zero, even where the product is too small for the dtype.
    return tl.where(a > 0, tl.maximum(k, 1.0), 0.0)


@triton.jit
def with_sign(k, v):
    """k as an integer with the sign of v."""
    if k.dtype == tl.float64:
        sign = v.to(tl.int64, bitcast=True) & tl.full((), -(2**63), tl.int64)
        return (k.to(tl.int64, bitcast=True) | sign).to(tl.float64, bitcast=True).to(tl.int32)
    sign = v.to(tl.int32, bitcast=True) & -0x80000000
    return (k.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit
def bits_of(v):
    """How many bits an integer between 0 and 2^24 + 2^20 needs."""
    return tl.maximum((v.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def narrow_bytes(n, width):
    """Bytes that the fields of n values of `width` bits take."""
    part = tl.where((width & 4) > 0, (n * 4 + 7) >> 3, 0) + tl.where((width & 2) > 0, (n * 2 + 7) >> 3, 0)
    return (width >> 3) * n + part + tl.where((width & 1) > 0, (n + 7) >> 3, 0)
