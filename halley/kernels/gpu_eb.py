"""The error-bounded kernels in Triton. The format is explained in docs/design.md.

A tile is a few groups, shaped [half 2, block 16, group, slice 8, lane 4]: value 8 * slice + 4 * half + lane of a block.
In this order of dimensions Triton gives each thread four lanes of all eight slices of one block, and each warp a group:
packing then shifts and ors registers, four bytes in one word, and what is known of a block is known to its two threads.
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
    else:
        return tl.reduce(v, axis, nan_max)


@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lowest(v, axis: tl.constexpr):
    """The smallest along an axis, where NaN counts as smaller than anything."""
    if INTERPRETED:
        return tl.min(tl.where(v == v, v, -float("inf")), axis)
    else:
        return tl.reduce(v, axis, nan_min)


@triton.jit
def widen(bits, DTYPE: tl.constexpr):
    """The computing value of what was loaded; bf16 travels as int16."""
    if DTYPE == tl.bfloat16:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == tl.float16:
        return bits.to(tl.float32)
    else:
        return bits


@triton.jit
def narrow(v, DTYPE: tl.constexpr):
    """The value as it is stored, rounded to nearest even; bf16 travels as int16."""
    if DTYPE != tl.bfloat16:
        return v.to(DTYPE)
    elif INTERPRETED:
        bits = v.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(v == v, rounded, 0x7FC0).to(tl.int16)
    else:
        return v.to(tl.bfloat16).to(tl.int16, bitcast=True)


@triton.jit
def divide(a, b):
    """a / b rounded to nearest: fp32's own operator is only approximate."""
    return a / b if b.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def float_bits(v):
    """The bits of what is stored, as an integer of the same size."""
    if v.dtype == tl.float64:
        return v.to(tl.int64, bitcast=True)
    elif v.dtype == tl.float32:
        return v.to(tl.int32, bitcast=True)
    else:
        return v.to(tl.int16, bitcast=True)


@triton.jit
def exponent(v):
    """floor(log2 v) of positive normal values, int32."""
    if v.dtype == tl.float64:
        return ((float_bits(v) >> 52) - 1023).to(tl.int32)
    else:
        return (float_bits(v) >> 23) - 127


@triton.jit
def power(e, like):
    """2^e in the dtype of `like`."""
    if like.dtype == tl.float64:
        return ((e.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    else:
        return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def random32(index, seed_low, seed_high):
    """The hash of docs/design.md for each uint32 index, before its last shift by 8."""
    h = (index ^ seed_low.to(tl.uint32)) * (seed_high.to(tl.uint32) | 1)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def tile_index(G: tl.constexpr):
    """Where each value of a tile stands in its groups' memory."""
    h = tl.arange(0, 2)[:, None, None, None, None]
    b = tl.arange(0, 16)[None, :, None, None, None]
    g = tl.arange(0, G)[None, None, :, None, None]
    s = tl.arange(0, 8)[None, None, None, :, None]
    return g * 1024 + b * 64 + s * 8 + h * 4 + tl.arange(0, 4)[None, None, None, None, :]


@triton.jit
def block_index(G: tl.constexpr):
    """The number of each block of a tile: [block, group]."""
    return tl.arange(0, 16)[:, None] + tl.arange(0, G)[None, :] * 16


@triton.jit
def of_group(v):
    return v[None, None, :, None, None]


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
    """Keys of the largest and of the negated smallest finite value, by atomic maximum from zero, into meta[16:32]."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    v = widen(tl.load(x + at, mask=at < numel, other=0), DTYPE)
    good = (at < numel) & (tl.abs(v) < float("inf"))
    high = tl.max(tl.where(good, v, -float("inf")), 0)
    low = tl.min(tl.where(good, v, float("inf")), 0)
    keys = (meta + 16).to(tl.pointer_type(tl.uint64))
    if high >= low:
        tl.atomic_max(keys, key_of(high.to(tl.float64)), sem="relaxed")
        tl.atomic_max(keys + 1, key_of(-low.to(tl.float64)), sem="relaxed")


@triton.jit
def usable_bound(meta, bound, rel, DTYPE: tl.constexpr, RELATIVE: tl.constexpr):
    """min(bound, rel * range) rounded down, clamped, zero where too small; the host has done that for `bound` alone."""
    eb = tl.full((), bound, tl.float64)
    if not RELATIVE:
        return eb if DTYPE == tl.float64 else eb.to(tl.float32)
    else:
        keys = (meta + 16).to(tl.pointer_type(tl.uint64))
        high, low = tl.load(keys), tl.load(keys + 1)
        spread = tl.where(high == 0, 0.0, value_of(high) + value_of(low))
        eb = tl.minimum(tl.minimum(eb, spread * tl.full((), rel, tl.float64)), 2.0**120)
        SMALLEST: tl.constexpr = 2.0**-900 if DTYPE == tl.float64 else (2.0**-22 if DTYPE == tl.float16 else 2.0**-100)
        if DTYPE == tl.float64:
            return tl.where(eb < SMALLEST, 0.0, eb)
        else:
            near = eb.to(tl.float32)
            near = (near.to(tl.int32, bitcast=True) - (near.to(tl.float64) > eb)).to(tl.float32, bitcast=True)
            return tl.where(eb < SMALLEST, 0.0, near)


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
        hash = (random32(index, seed_low, seed_high) >> 8).to(tl.int32)
        k += (hash < ((q - k) * 16777216.0).to(tl.int32)).to(a.dtype)
    else:
        k = tl.ceil(a * inverse)
    return k


@triton.jit
def at_least_one(k, a):
    """No level is zero but that of zero, even where the product was too small for the dtype."""
    return tl.where(a > 0, tl.maximum(k, 1.0), 0.0)


@triton.jit
def decode_error(k, a, half, DTYPE: tl.constexpr):
    """|decoded - a| for magnitudes; zero counts as -half."""
    return tl.abs(widen(narrow(tl.fma(k, 2.0, -1.0) * half, DTYPE), DTYPE) - a)


@triton.jit
def with_sign(k, v):
    """k as an integer with the sign of v."""
    if k.dtype == tl.float64:
        sign = v.to(tl.int64, bitcast=True) & tl.full((), -(2**63), tl.int64)
        return (k.to(tl.int64, bitcast=True) | sign).to(tl.float64, bitcast=True).to(tl.int32)
    else:
        sign = v.to(tl.int32, bitcast=True) & -0x80000000
        return (k.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit
def bits_of(v):
    """How many bits an integer between 0 and 2^24 + 2^20 needs."""
    return tl.maximum((v.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def field_bytes(n, width):
    """Bytes that the fields of n values of `width` bits take."""
    part = tl.where((width & 4) > 0, (n * 4 + 7) >> 3, 0) + tl.where((width & 2) > 0, (n * 2 + 7) >> 3, 0)
    return (width >> 3) * n + part + tl.where((width & 1) > 0, (n + 7) >> 3, 0)


@triton.jit
def block_highest(v):
    """The largest of each block of a tile: [block, group]."""
    return highest(highest(highest(v, 4), 3), 0)


@triton.jit
def block_lowest(v):
    return lowest(lowest(lowest(v, 4), 3), 0)


@triton.jit
def block_max(v):
    return tl.max(tl.max(tl.max(v, 4), 3), 0)


@triton.jit
def block_min(v):
    return tl.min(tl.min(tl.min(v, 4), 3), 0)


@triton.jit
def block_sum(v):
    return tl.sum(tl.sum(tl.sum(v, 4), 3), 0)


@triton.jit
def tile_max(v):
    """The largest of [block, group], a scalar."""
    return tl.max(tl.max(v, 0), 0)


@triton.jit
def plan(KIND: tl.constexpr, must_raw, raw_size, low, high, count, low_nz, high_nz, BITMAP: tl.constexpr):
    """Size, head and base of each block under a base kind."""
    base = tl.zeros_like(low) if KIND == 0 else low
    head = bits_of(tl.maximum(high - base, 0))
    size = head * 8
    if KIND == 0:
        unfit = low < 0
    elif KIND == 1:
        unfit = (low < -128) | ((low_nz if BITMAP else low) > 127)
    else:
        unfit = low != low
    if BITMAP:
        map_base = tl.full(low.shape, 1, tl.int32) if KIND == 0 else low_nz
        map_width = bits_of(tl.maximum(high_nz - map_base, 0))
        map_size = 8 + field_bytes(count, map_width)
        use_map = map_size < size
        size = tl.where(use_map, map_size, size)
        head = tl.where(use_map, map_width + 32, head)
        base = tl.where(use_map, map_base, base)
    use_raw = must_raw | unfit | (raw_size < size)
    return tl.where(use_raw, raw_size, size), tl.where(use_raw, RAW, head), base


@triton.jit
def join_lanes(v):
    """Four lanes of a byte each as one word: [half, block, group, slice]."""
    return tl.sum(v.to(tl.uint32) << (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :], 4)


@triton.jit
def word_index(N: tl.constexpr):
    """Where the words of N slices of a field stand: [half, 1, 1, slice]."""
    return tl.arange(0, N)[None, None, None, :] * 2 + tl.arange(0, 2)[:, None, None, None]


@triton.jit
def merge(word, BITS: tl.constexpr, G: tl.constexpr):
    """Ors the slices that share a field's bytes: 8 slices of words -> BITS slices."""
    T: tl.constexpr = 8 // BITS
    shift = (tl.arange(0, T) * BITS).to(tl.uint32)[None, None, None, :, None]
    return tl.sum(tl.reshape(word, (2, 16, G, T, BITS)) << shift, 3)


@triton.jit
def put_aligned(at, rest, width, most, G: tl.constexpr):
    """Writes the fields of all 64 values of each block at the word pointers `at` [block, group]."""
    at, width = at[None, :, :, None], width[None, :, :, None]
    if most >= 8:
        for plane in tl.static_range(3):
            word = join_lanes((rest >> (8 * plane)) & 255)
            tl.store(at + (16 * plane + word_index(8)), word, mask=width >= 8 * (plane + 1))
        rest = rest >> (width & 24)[:, :, :, :, None]
        at += (width & 24) * 2
    word = join_lanes(rest)
    shift = (width & 4).to(tl.uint32)
    tl.store(at + word_index(4), merge(word & 0x0F0F0F0F, 4, G), mask=(width & 4) > 0)
    tl.store(at + (width & 4) * 2 + word_index(2), merge((word >> shift) & 0x03030303, 2, G), mask=(width & 2) > 0)
    shift = (width & 6).to(tl.uint32)
    tl.store(at + (width & 6) * 2 + word_index(1), merge((word >> shift) & 0x01010101, 1, G), mask=(width & 1) > 0)


@triton.jit
def unit_pointer(p, BYTES: tl.constexpr):
    """The same address as a pointer to integers of that size."""
    if BYTES == 1:
        return p.to(tl.pointer_type(tl.uint8))
    elif BYTES == 2:
        return p.to(tl.pointer_type(tl.int16))
    elif BYTES == 4:
        return p.to(tl.pointer_type(tl.int32))
    else:
        return p.to(tl.pointer_type(tl.int64))


@triton.jit
def put_raw(payload, start, raw, x, left, SIZE: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr):
    """Copies the values of raw blocks to byte `start` of the payload, UNIT bytes at a time."""
    i = tile_index(G)
    mask = of_block(raw) & (i < left)
    bits = tl.load(unit_pointer(x, SIZE) + i, mask=mask, other=0)
    at = unit_pointer(payload, UNIT) + of_block(start // UNIT) + (i & 63) * (SIZE // UNIT)
    for part in tl.static_range(SIZE // UNIT):
        tl.store(at + part, bits >> (8 * UNIT * part), mask=mask)


@triton.jit
def rank_of(flags):
    """How many flags of its block stand before each one."""
    lanes = tl.sum(flags, 4)
    slices = tl.sum(lanes, 0)
    before_slice = tl.cumsum(slices, 2) - slices
    before_half = (slices[None, :, :, :] - lanes) * tl.arange(0, 2)[:, None, None, None]
    before = before_slice[None, :, :, :] + before_half
    return before[:, :, :, :, None] + tl.cumsum(flags, 4) - flags


@triton.jit
def put_field(at, words, n, shift, present, BITS: tl.constexpr, G: tl.constexpr):
    """Writes one field of the n values whose bytes stand in the scratch `words` at byte pointers `at` [block, group]."""
    length = ((n * BITS + 7) >> 3)[None, :, :, None]
    word = tl.zeros((2, 16, G, BITS), tl.uint32)
    for t in tl.static_range(8 // BITS):
        # Four bytes that start anywhere: from two words.
        skip = t * length
        here = words + (block_index(G)[None, :, :, None] * 16 + (skip >> 2) + word_index(BITS))
        low = tl.load(here, mask=present[None, :, :, None], other=0).to(tl.uint32)
        high = tl.load(here + 1, mask=present[None, :, :, None], other=0).to(tl.uint32)
        bits = ((skip & 3) * 8).to(tl.uint32)
        piece = (low >> bits) | ((high << 1) << (31 - bits))
        piece = (piece >> shift[None, :, :, None].to(tl.uint32)) & (0x01010101 * ((1 << BITS) - 1))
        word |= piece << (t * BITS)
    # Through & 63 Triton does not see that bytes are neighbours, and keeps each thread's words in its registers.
    j = (word_index(BITS)[:, :, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]) & 63
    byte = (word[:, :, :, :, None] >> (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :]).to(tl.uint8)
    tl.store(of_block(at) + j, byte, mask=of_block(present) & (j < length[:, :, :, :, None]))


@triton.jit
def put_bytes(at, rest, flags, is_map, n, width, most, scratch, G: tl.constexpr):
    """Writes bitmaps and fields at byte pointers `at` [block, group]; a scratch brings the n values of a block together."""
    s = tl.arange(0, 8)[None, None, None, :, None]
    lane = (tl.arange(0, 2)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]) & 63
    tl.store(at[None, :, :, None] + lane, tl.sum(flags << s, 3).to(tl.uint8), mask=is_map[None, :, :, None])
    at += tl.where(is_map, 8, 0)
    i = tile_index(G)
    rank = rank_of(flags)
    # Zeros follow the n values, so that every byte of the scratch is written.
    slot = tl.where(of_block(is_map), tl.where(flags > 0, rank, of_block(n) + (i & 63) - rank), i & 63)
    rest = tl.where(of_block(is_map) & (flags == 0), 0, rest)
    plane = 0
    while plane * 8 < most:
        tl.debug_barrier()
        tl.store(scratch + (i - (i & 63)) + slot, ((rest >> (plane * 8)) & 255).to(tl.uint8))
        tl.debug_barrier()
        put_plane(at + plane * n, unit_pointer(scratch, 4), n, width, plane, G)
        plane += 1


@triton.jit
def put_plane(at, words, n, width, plane, G: tl.constexpr):
    """Writes the fields that hold the bits 8 * plane and up."""
    full = width >= (plane + 1) * 8
    if tile_max(full.to(tl.int32)) > 0:
        put_field(at, words, n, width & 0, full, 8, G)
    left = tl.where((width >> 3) == plane, width & 7, 0)
    if tile_max(left & 4) > 0:
        put_field(at, words, n, left & 0, (left & 4) > 0, 4, G)
        at += tl.where((left & 4) > 0, (n * 4 + 7) >> 3, 0)
    if tile_max(left & 2) > 0:
        put_field(at, words, n, left & 4, (left & 2) > 0, 2, G)
        at += tl.where((left & 2) > 0, (n * 2 + 7) >> 3, 0)
    if tile_max(left & 1) > 0:
        put_field(at, words, n, left & 6, (left & 1) > 0, 1, G)


@triton.jit
def find_levels(probe, v, bits, eb, index, seed_low, seed_high, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Levels of a tile, their smallest and largest for each block, the shrink codes, and which blocks must be raw."""
    limit = eb * 4194304.0
    top, bottom = block_highest(v), block_lowest(v)
    largest = nan_max(top, -bottom)
    fits = largest < limit
    m = highest(largest, 0)
    if ((highest(m, 0) < limit) & (probe < limit)) == 0:
        v = tl.where(tl.abs(v) < limit, v, 0.0)
        top, bottom = block_highest(v), block_lowest(v)
        m = highest(nan_max(top, -bottom), 0)
        fits = fits | (block_max((bits != 0).to(tl.int32)) + (eb != 0).to(tl.int32) == 0)
    safe = tl.where(eb == 0, 1.0, eb).to(eb.dtype)
    code = tl.where(eb == 0, 0, shrink_code(m, safe, DTYPE))
    eb_c = shrink(safe, code)
    inverse = divide(tl.full(eb_c.shape, 1.0 if STOCHASTIC else 0.5, eb_c.dtype), eb_c)
    half = eb_c * 0.5 if STOCHASTIC else eb_c
    a = tl.abs(v)
    size = level_size(a, of_group(inverse), index, seed_low, seed_high, STOCHASTIC)
    if STOCHASTIC or eb > 0.5:
        size = at_least_one(size, a)
        error = block_highest(tl.where(a > 0, decode_error(size, a, of_group(half), DTYPE), 0.0))
    else:
        # Nothing underflows, and half is within the bound after the cast too: two operations less.
        error = block_highest(decode_error(size, a, of_group(half), DTYPE))
    must_raw = (fits & (error <= safe)) == 0
    k = with_sign(size, v)
    if STOCHASTIC:
        low, high = block_min(k), block_max(k)
    else:
        # Rounding to nearest keeps the order, so the extremes have the extreme levels.
        high = with_sign(at_least_one(tl.ceil(tl.abs(top) * inverse[None, :]), tl.abs(top)), top)
        low = with_sign(at_least_one(tl.ceil(tl.abs(bottom) * inverse[None, :]), tl.abs(bottom)), bottom)
    return k, tl.where(must_raw, 0, low), tl.where(must_raw, 0, high), code, must_raw


@triton.jit
def encode_tile(
    tile, x, meta, payload, scratch, numel, capacity, eb, seed_low, seed_high,
    DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, BITMAP: tl.constexpr, G: tl.constexpr, PROBE: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    first = tile.to(tl.int64) * (G * 1024)
    x += first
    left = tl.minimum(numel - first, G * 1024).to(tl.int32)
    i = tile_index(G)
    STEP: tl.constexpr = 32 // SIZE
    if PROBE:
        j = tl.arange(0, G * 1024 // STEP) * STEP
        probe = tl.max(tl.abs(widen(tl.load(x + j, mask=j < left, other=0), DTYPE)), 0)
    else:
        probe = eb * 0
    if HINT == 1:
        bits = tl.load(x + i, mask=i < left, other=0, eviction_policy="evict_first")
    else:
        bits = tl.load(x + i, mask=i < left, other=0)
    index = first.to(tl.uint32) + i.to(tl.uint32)
    v = widen(bits, DTYPE)
    k, low, high, code, must_raw = find_levels(probe, v, float_bits(bits), eb, index, seed_low, seed_high, DTYPE, STOCHASTIC)

    flags = (k != 0).to(tl.int32)
    count, low_nz, high_nz = low, low, high
    if BITMAP:
        count = block_sum(flags)
        some = (count > 0) & (must_raw == 0)
        low_nz = tl.where(some, block_min(tl.where(k != 0, k, 1 << 30)), 1)
        high_nz = tl.where(some, block_max(tl.where(k != 0, k, -(1 << 30))), 1)
        count = tl.where(some, count, 0)

    group = tl.arange(0, G)
    block = block_index(G)
    valid = tl.minimum(tl.maximum(left - block * 64, 0), 64)
    per_group = tl.minimum(tl.maximum((left - group * 1024 + 63) >> 6, 0), 16)
    # Blocks after the end are all zero: their size and width are 0 under every kind.
    size, head, base = plan(0, must_raw, valid * SIZE, low, high, count, low_nz, high_nz, BITMAP)
    total = tl.sum(size, 0)
    kind = tl.zeros_like(total)
    for KIND in tl.static_range(1, 3):
        size_k, head_k, base_k = plan(KIND, must_raw, valid * SIZE, low, high, count, low_nz, high_nz, BITMAP)
        total_k = tl.sum(size_k, 0) + (((per_group + 3) & -4) if KIND == 1 else per_group * 4)
        better = total_k < total
        total, kind = tl.where(better, total_k, total), tl.where(better, KIND, kind)
        size = tl.where(better[None, :], size_k, size)
        head = tl.where(better[None, :], head_k, head)
        base = tl.where(better[None, :], base_k, base)

    units = (total + 3) >> 2
    needed = tl.sum(units, 0)
    reserved = tl.atomic_add((meta + 8).to(tl.pointer_type(tl.int64)), needed.to(tl.int64), sem="relaxed")
    fits = (reserved + needed) * 4 <= capacity
    before = tl.cumsum(units, 0) - units
    groups, g0 = (numel + 1023) >> 10, tile.to(tl.int64) * G
    here = g0 + group < groups
    tl.store((meta + 32).to(tl.pointer_type(tl.int32)) + g0 + group, (reserved + before).to(tl.int32), mask=here)
    tl.store(meta + 32 + groups * 4 + g0 + group, (code + kind * 16).to(tl.uint8), mask=here)
    tl.store(meta + 32 + groups * 5 + g0 * 16 + block, head.to(tl.uint8), mask=valid > 0)

    payload += reserved * 4
    raw = (head == RAW) & fits
    width = tl.where((head != RAW) & fits, head & 31, 0)
    based = (valid > 0) & fits
    column = tl.arange(0, 16)[:, None]
    if tl.max(kind, 0) > 0:
        tl.store(payload + before[None, :] * 4 + column, base.to(tl.uint8), mask=based & (kind == 1)[None, :])
        words = unit_pointer(payload, 4)
        tl.store(words + before[None, :] + column, base, mask=based & (kind == 2)[None, :])
    base_size = tl.where(kind == 1, (per_group + 3) & -4, tl.where(kind == 2, per_group * 4, 0))
    start = (before * 4 + base_size)[None, :] + tl.cumsum(size, 0) - size
    rest = k - of_block(base)
    most = tile_max(tl.where(raw, 32, width))
    if BITMAP:
        is_map = (head >= 32) & fits
        n = tl.where(head >= 32, count, 64)
        put_bytes(payload + start, rest, flags, is_map, n, width, tl.minimum(most, 31), scratch, G)
    else:
        put_aligned(unit_pointer(payload, 4) + (start >> 2), rest, width, most, G)
    if most > 31:
        put_raw(payload, start, raw, x, left, SIZE, 1 if BITMAP else (2 if SIZE == 2 else 4), G)


@triton.jit(do_not_specialize=["capacity", "seed_low", "seed_high", "tiles"])
def encode_kernel(
    x, meta, payload, scratch, numel: tl.int64, capacity: tl.int64, bound: tl.float64, rel: tl.float64,
    seed_low: tl.int32, seed_high: tl.int32, tiles: tl.int32,
    DTYPE: tl.constexpr, RELATIVE: tl.constexpr, STOCHASTIC: tl.constexpr, BITMAP: tl.constexpr, G: tl.constexpr, PROBE: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    eb = usable_bound(meta, bound, rel, DTYPE, RELATIVE)
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(meta.to(tl.pointer_type(tl.float64)), (-eb if STOCHASTIC else eb).to(tl.float64))
    if BITMAP:
        # Few programs with many tiles each, so that the scratch is small and stays in the cache.
        scratch += pid * (G * 1024)
        tile = pid
        while tile < tiles:
            encode_tile(
                tile, x, meta, payload, scratch, numel, capacity, eb, seed_low, seed_high, DTYPE, STOCHASTIC, BITMAP, G, PROBE, HINT
            )
            tile += tl.num_programs(0)
    else:
        encode_tile(
            pid, x, meta, payload, scratch, numel, capacity, eb, seed_low, seed_high, DTYPE, STOCHASTIC, BITMAP, G, PROBE, HINT
        )


@triton.jit
def expand(word, BITS: tl.constexpr, G: tl.constexpr):
    """The slices that share a field's bytes: BITS slices of words -> 8 slices."""
    T: tl.constexpr = 8 // BITS
    shift = (tl.arange(0, T) * BITS).to(tl.uint32)[None, None, None, :, None]
    return tl.reshape(word[:, :, :, None, :] >> shift, (2, 16, G, 8))


@triton.jit
def split_lanes(word):
    """The four bytes of each word: [half, block, group, slice, lane]."""
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :]
    return ((word[:, :, :, :, None] >> shift) & 255).to(tl.int32)


@triton.jit
def get_aligned(at, width, most, G: tl.constexpr):
    """Reads what put_aligned wrote."""
    at, width = at[None, :, :, None], width[None, :, :, None]
    top = at + (width & 24) * 2
    four = tl.load(top + word_index(4), mask=(width & 4) > 0, other=0).to(tl.uint32)
    two = tl.load(top + (width & 4) * 2 + word_index(2), mask=(width & 2) > 0, other=0).to(tl.uint32)
    one = tl.load(top + (width & 6) * 2 + word_index(1), mask=(width & 1) > 0, other=0).to(tl.uint32)
    word = expand(four, 4, G) & 0x0F0F0F0F
    word |= (expand(two, 2, G) & 0x03030303) << (width & 4).to(tl.uint32)
    word |= (expand(one, 1, G) & 0x01010101) << (width & 6).to(tl.uint32)
    rest = split_lanes(word)
    if most >= 8:
        rest = rest << (width & 24)[:, :, :, :, None]
        for plane in tl.static_range(3):
            word = tl.load(at + (16 * plane + word_index(8)), mask=width >= 8 * (plane + 1), other=0).to(tl.uint32)
            rest |= split_lanes(word) << (8 * plane)
    return rest


@triton.jit
def get_raw(payload, start, raw, left, SIZE: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr):
    """Reads what put_raw wrote, as integers."""
    i = tile_index(G)
    mask = of_block(raw) & (i < left)
    at = unit_pointer(payload, UNIT) + of_block(start // UNIT) + (i & 63) * (SIZE // UNIT)
    WHOLE: tl.constexpr = tl.int64 if SIZE == 8 else (tl.int32 if SIZE == 4 else tl.int16)
    bits = tl.zeros((2, 16, G, 8, 4), WHOLE)
    for part in tl.static_range(SIZE // UNIT):
        piece = tl.load(at + part, mask=mask, other=0).to(WHOLE)
        # The sign of a lower part must not reach the higher ones.
        bits |= (piece & 0xFFFFFFFF if SIZE == 8 and UNIT == 4 else piece) << (8 * UNIT * part)
    return bits


@triton.jit
def map_starts(payload, cursor, heads, g0, groups, numel, SIZE: tl.constexpr, G: tl.constexpr):
    """Where each block starts: a bitmap's size is known only after its bitmap, so one slot after the other."""
    group = tl.arange(0, G)
    column = tl.arange(0, 16)[:, None]
    start = tl.zeros((16, G), tl.int32)
    slot = 0
    while slot < 16:
        start = tl.where(column == slot, cursor[None, :], start)
        block = (g0 + group) * 16 + slot
        left = tl.minimum(tl.maximum(numel - block * 64, 0), 64).to(tl.int32)
        head = tl.load(heads + block, mask=left > 0, other=0).to(tl.int32)
        is_map, width = head >= 32, head & 31
        j = tl.arange(0, 8)[None, :]
        byte = tl.load((payload + cursor)[:, None] + j, mask=is_map[:, None], other=0).to(tl.int32)
        byte = (byte & 0x55) + ((byte >> 1) & 0x55)
        byte = (byte & 0x33) + ((byte >> 2) & 0x33)
        n = tl.where(is_map, tl.sum((byte & 15) + (byte >> 4), 1), 64)
        cursor += tl.where(head == RAW, left * SIZE, tl.where(is_map, 8, 0) + field_bytes(n, width))
        slot += 1
    return start


@triton.jit
def get_field(at, rank, n, keep, BITS: tl.constexpr):
    """Bits of the values with that rank among n, from the field at byte pointers `at`."""
    length = tl.maximum((n * BITS + 7) >> 3, 1)
    # rank // length by a multiplication: exact for ranks below 64.
    t = (rank * of_block(65536 // length + 1)) >> 16
    byte = tl.load(of_block(at) + (rank - t * of_block(length)), mask=keep, other=0).to(tl.int32)
    return (byte >> (t * BITS)) & ((1 << BITS) - 1)


@triton.jit
def get_bytes(at, is_map, width, base, most, G: tl.constexpr):
    """Levels of blocks of which some have bitmaps, at byte pointers `at` [block, group]."""
    # Through & 63 Triton does not see that bytes are neighbours, and keeps the tile's layout.
    j = (tl.arange(0, 2)[:, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]) & 63
    byte = tl.load(of_block(at) + j, mask=of_block(is_map), other=255).to(tl.int32)
    flags = (byte >> tl.arange(0, 8)[None, None, None, :, None]) & 1
    rank = rank_of(flags)
    n = block_sum(flags)
    at += tl.where(is_map, 8, 0)
    keep = flags > 0
    rest = tl.zeros((2, 16, G, 8, 4), tl.int32)
    plane = 0
    while (plane + 1) * 8 <= most:
        full = width >= (plane + 1) * 8
        rest |= get_field(at, rank, n, keep & of_block(full), 8) << (plane * 8)
        at += tl.where(full, n, 0)
        plane += 1
    shift = width & 24
    if tile_max(width & 4) > 0:
        rest |= get_field(at, rank, n, keep & of_block((width & 4) > 0), 4) << of_block(shift)
        at += tl.where((width & 4) > 0, (n * 4 + 7) >> 3, 0)
        shift += width & 4
    if tile_max(width & 2) > 0:
        rest |= get_field(at, rank, n, keep & of_block((width & 2) > 0), 2) << of_block(shift)
        at += tl.where((width & 2) > 0, (n * 2 + 7) >> 3, 0)
        shift += width & 2
    if tile_max(width & 1) > 0:
        rest |= get_field(at, rank, n, keep & of_block((width & 1) > 0), 1) << of_block(shift)
    return tl.where(keep, rest + of_block(base), 0)


@triton.jit
def decode_levels(k, half):
    """(2|k| - 1) * half with the sign of k, and zero for zero."""
    f = k.to(half.dtype)
    sign = tl.minimum(tl.maximum(f, -1.0), 1.0)
    return tl.fma(f, 2.0, -sign) * half


@triton.jit
def group_table(meta, g0, left, groups, G: tl.constexpr):
    """Of each group: payload offset in bytes, shrink code, base kind, bytes of its bases."""
    group = tl.arange(0, G)
    here = g0 + group < groups
    offsets, infos = (meta + 32).to(tl.pointer_type(tl.uint32)) + g0, meta + 32 + groups * 4 + g0
    if G == 1:
        # One value for all threads: a scalar needs no exchange between them.
        offset, info = tl.full((1,), tl.load(offsets), tl.uint32), tl.full((1,), tl.load(infos), tl.int32)
    else:
        offset = tl.load(offsets + group, mask=here, other=0)
        info = tl.load(infos + group, mask=here, other=0).to(tl.int32)
    kind = info >> 4
    per_group = tl.minimum(tl.maximum((left - group * 1024 + 63) >> 6, 0), 16)
    base_size = tl.where(kind == 1, (per_group + 3) & -4, tl.where(kind == 2, per_group * 4, 0))
    return offset.to(tl.int64) * 4, info & 15, kind, base_size


@triton.jit
def bases_of(groups_at, kind, is_map, exists):
    """The base of each block: [block, group]."""
    column, kind = tl.arange(0, 16)[:, None], kind[None, :]
    base = tl.where(is_map, 1, 0)
    if tile_max(kind) > 0:
        at = groups_at[None, :]
        one = tl.load(at + column, mask=exists & (kind == 1), other=0).to(tl.int8, bitcast=True).to(tl.int32)
        four = tl.load(unit_pointer(at, 4) + column, mask=exists & (kind == 2), other=0)
        base = tl.where(kind == 0, base, tl.where(kind == 1, one, four))
    return base


@triton.jit
def put_values(out, value, mask, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Writes what is stored for a tile's values, or whether they are not zero."""
    if MASK:
        value = (widen(value, DTYPE) != 0).to(tl.uint8)
    tl.store(out, value, mask=mask)


@triton.jit
def decode_tile(
    meta, payload, out, g0, numel, DTYPE: tl.constexpr, MASK: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr
):
    """Decodes a tile if it has bitmaps (MAPPED) or if it has none (not MAPPED)."""
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    eb = tl.load(meta.to(tl.pointer_type(tl.float64))).to(tl.float64 if DTYPE == tl.float64 else tl.float32)
    groups = (numel + 1023) >> 10
    left = tl.minimum(numel - g0 * 1024, G * 1024).to(tl.int32)
    exists = block_index(G) * 64 < left
    heads = meta + 32 + groups * 5
    head = tl.load(heads + g0 * 16 + block_index(G), mask=exists, other=0).to(tl.int32)
    offset, code, kind, base_size = group_table(meta, g0, left, groups, G)
    groups_at = payload + offset
    is_map, raw = head >= 32, head == RAW
    width = tl.where(raw, 0, head & 31)
    i = tile_index(G)
    out += g0 * 1024 + i
    # 31 or more: there may be raw blocks; 32 or more: there are bitmaps.
    most = tile_max(head)
    if (most >= 32) == MAPPED:
        base = bases_of(groups_at, kind, is_map, exists)
        if MAPPED:
            start = map_starts(groups_at, base_size, heads, g0, groups, numel, SIZE, G)
            k = get_bytes(groups_at[None, :] + start, is_map, width, base, tile_max(width), G)
        else:
            size = tl.where(raw, 64 * SIZE, width * 8)
            start = base_size[None, :] + tl.cumsum(size, 0) - size
            k = get_aligned(unit_pointer(groups_at, 4)[None, :] + (start >> 2), width, most, G) + of_block(base)
        half = shrink(tl.abs(eb), code)
        half = tl.where(eb < 0, half * 0.5, half)
        value = narrow(decode_levels(k, of_group(half)), DTYPE)
        put_values(out, value, (i < left) & of_block(raw == 0), DTYPE, MASK)
        if tile_max(raw.to(tl.int32)) > 0:
            bits = get_raw(of_group(groups_at), start, raw, left, SIZE, 1 if MAPPED else (2 if SIZE == 2 else 4), G)
            put_values(out, bits.to(value.dtype, bitcast=True), (i < left) & of_block(raw), DTYPE, MASK)


@triton.jit
def decode_kernel(meta, payload, out, numel: tl.int64, DTYPE: tl.constexpr, MASK: tl.constexpr, G: tl.constexpr):
    """Decodes the tiles without bitmaps."""
    decode_tile(meta, payload, out, tl.program_id(0).to(tl.int64) * G, numel, DTYPE, MASK, False, G)


@triton.jit
def decode_maps_kernel(
    meta, payload, out, numel: tl.int64, DTYPE: tl.constexpr, MASK: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr
):
    """Decodes the tiles with bitmaps, if there are any among the TILES of a program."""
    groups = (numel + 1023) >> 10
    blocks = (numel + 63) >> 6
    g0 = tl.program_id(0).to(tl.int64) * (G * TILES)
    at = g0 * 16 + tl.arange(0, 16 * G * TILES)
    if tl.max(tl.load(meta + 32 + groups * 5 + at, mask=at < blocks, other=0).to(tl.int32), 0) >= 32:
        end = tl.minimum(g0 + G * TILES, groups)
        while g0 < end:
            decode_tile(meta, payload, out, g0, numel, DTYPE, MASK, True, G)
            g0 += G
