"""The error-bounded encoder in Triton. docs/design.md explains the format, common.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import (
    INTERPRETED,
    RAW,
    base_bytes,
    block_index,
    block_sum,
    blocks_of_group,
    divide,
    exponent,
    field_bytes,
    float_bits,
    highest,
    lowest,
    nan_max,
    narrow,
    of_block,
    of_group,
    random32,
    rank_of,
    rotate_right,
    shrink,
    tile_index,
    tile_max,
    unit_pointer,
    widen,
    word_index,
)


@triton.jit
def key_of(v):
    """Return an unsigned key in the order of float64 values."""
    bits = v.to(tl.int64, bitcast=True)
    flip = (bits >> 63) | tl.full((), -(2**63), tl.int64)
    return (bits ^ flip).to(tl.uint64, bitcast=True)


@triton.jit
def value_of(key):
    """Return the value of a key."""
    bits = key.to(tl.int64, bitcast=True)
    flip = ((bits ^ -1) >> 63) | tl.full((), -(2**63), tl.int64)
    return (bits ^ flip).to(tl.float64, bitcast=True)


@triton.jit
def range_kernel(x, meta, numel: tl.int64, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Write keys of the largest and the negated smallest finite value to meta[16:32], by atomic maximum from zero."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    left = tl.minimum(numel - first, SIZE).to(tl.int32)
    i = tl.arange(0, SIZE)
    # After the end stands NaN, which is not finite either.
    v = widen(tl.load(x + first + i, mask=i < left, other=0x7FC0 if DTYPE == tl.bfloat16 else float("nan")), DTYPE)
    finite = tl.abs(v) < float("inf")
    high = tl.max(tl.where(finite, v, -float("inf")), 0)
    low = tl.min(tl.where(finite, v, float("inf")), 0)
    keys = (meta + 16).to(tl.pointer_type(tl.uint64))
    if high >= low:
        tl.atomic_max(keys, key_of(high.to(tl.float64)), sem="relaxed")
        tl.atomic_max(keys + 1, key_of(-low.to(tl.float64)), sem="relaxed")


@triton.jit
def usable_bound(meta, bound, rel, DTYPE: tl.constexpr, RELATIVE: tl.constexpr):
    """Round min(bound, rel * range) down, clamp it, zero where too small; the host has done that for `bound` alone."""
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
    """Return the shrink code of groups whose largest magnitude is m."""
    EMIN: tl.constexpr = -14 if DTYPE == tl.float16 else (-1022 if DTYPE == tl.float64 else -126)
    COST: tl.constexpr = (
        -8 if DTYPE == tl.bfloat16 else (-11 if DTYPE == tl.float16 else (-21 if DTYPE == tl.float32 else -50))
    )
    r = tl.maximum(exponent(m + eb), EMIN) + COST
    e0 = exponent(eb) - 1
    return tl.where(r > e0, 0, tl.minimum(e0 - r + 1, 15))


@triton.jit
def tile_hash(block, seed_low, seed_high, G: tl.constexpr):
    """Return the random bits of a tile. Values 16 apart share a hash, which the compiler computes once."""
    i = tile_index(G).to(tl.uint32)
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :, None]
    word = block.to(tl.uint32) * 16 + (i >> 6) * 16 + (slice & 1) * 8 + (i & 7)
    return rotate_right(random32(word, seed_low, seed_high), (slice >> 1) * 8)


@triton.jit
def round_up(v):
    """Round up to a whole number: the language's own function takes denormal fp32 values for zero."""
    if INTERPRETED or v.dtype == tl.float64:
        return tl.ceil(v)
    else:
        return tl.inline_asm_elementwise("cvt.rpi.f32.f32 $0, $1;", "=r,r", [v], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def level_size(a, inverse, block, seed_low, seed_high, STOCHASTIC: tl.constexpr):
    """Return the level of magnitude a, in floating point; `block` is the number of the tile's first block."""
    if STOCHASTIC:
        q = a * inverse + 0.5
        k = tl.floor(q)
        hash = (tile_hash(block, seed_low, seed_high, a.shape[2]) >> 8).to(tl.int32)
        k += (hash < ((q - k) * 16777216.0).to(tl.int32)).to(a.dtype)
    else:
        k = round_up(a * inverse)
    return k


@triton.jit
def at_least_one(k, a):
    """Raise levels to one, except that of zero, even where the product was too small for the dtype."""
    return tl.where(a > 0, tl.maximum(k, 1.0), 0.0)


@triton.jit
def decode_error(k, a, half, DTYPE: tl.constexpr):
    """Return |decoded - a| for magnitudes; zero counts as -half."""
    return tl.abs(widen(narrow(tl.fma(k, 2.0, -1.0) * half, DTYPE), DTYPE) - a)


@triton.jit
def with_sign(k, v):
    """Return k as an integer with the sign of v."""
    if k.dtype == tl.float64:
        sign = v.to(tl.int64, bitcast=True) & tl.full((), -(2**63), tl.int64)
        return (k.to(tl.int64, bitcast=True) | sign).to(tl.float64, bitcast=True).to(tl.int32)
    else:
        sign = v.to(tl.int32, bitcast=True) & -0x80000000
        return (k.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True).to(tl.int32)


@triton.jit
def bit_width(v):
    """Return how many bits an integer between 0 and 2^24 + 2^20 needs."""
    return tl.maximum((v.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def block_highest(v):
    """Return the largest of each block of a tile, or NaN: [block, group]."""
    return highest(highest(highest(v, 4), 3), 0)


@triton.jit
def block_lowest(v):
    """Return the smallest of each block of a tile, or NaN."""
    return lowest(lowest(lowest(v, 4), 3), 0)


@triton.jit
def block_max(v):
    """Return the largest of each block of a tile."""
    return tl.max(tl.max(tl.max(v, 4), 3), 0)


@triton.jit
def block_min(v):
    """Return the smallest of each block of a tile."""
    return tl.min(tl.min(tl.min(v, 4), 3), 0)


@triton.jit
def forms_of(KIND: tl.constexpr, must_raw, raw_size, low, high, count, low_nz, high_nz, BITMAP: tl.constexpr):
    """Return size, head and base of each block under a base kind."""
    base = tl.zeros_like(low) if KIND == 0 else low
    head = bit_width(tl.maximum(high - base, 0))
    size = head * 8
    if KIND == 0:
        unfit = low < 0
    elif KIND == 1:
        unfit = (low < -128) | ((low_nz if BITMAP else low) > 127)
    else:
        unfit = low != low
    if BITMAP:
        map_base = tl.full(low.shape, 1, tl.int32) if KIND == 0 else low_nz
        map_width = bit_width(tl.maximum(high_nz - map_base, 0))
        map_size = 8 + field_bytes(count, map_width)
        use_map = map_size < size
        size = tl.where(use_map, map_size, size)
        head = tl.where(use_map, map_width + 32, head)
        base = tl.where(use_map, map_base, base)
    use_raw = must_raw | unfit | (raw_size < size)
    return tl.where(use_raw, raw_size, size), tl.where(use_raw, RAW, head), base


@triton.jit
def join_lanes(v):
    """Join four lanes of a byte each to one word: [half, block, group, slice]."""
    return tl.sum(v.to(tl.uint32) << (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :], 4)


@triton.jit
def merge(word, BITS: tl.constexpr, G: tl.constexpr):
    """Or the slices that share a field's bytes: 8 slices of words -> BITS slices."""
    T: tl.constexpr = 8 // BITS
    shift = (tl.arange(0, T) * BITS).to(tl.uint32)[None, None, None, :, None]
    return tl.sum(tl.reshape(word, (2, 16, G, T, BITS)) << shift, 3)


@triton.jit
def put_aligned(at, rest, width, most, G: tl.constexpr):
    """Write the fields of all 64 values of each block at the word pointers `at` [block, group]."""
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
def put_raw(payload, start, raw, x, left, SIZE: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr):
    """Copy the values of raw blocks to byte `start` of the payload, UNIT bytes at a time."""
    i = tile_index(G)
    mask = of_block(raw) & (i < left)
    bits = tl.load(unit_pointer(x, SIZE) + i, mask=mask, other=0)
    at = unit_pointer(payload, UNIT) + of_block(start // UNIT) + (i & 63) * (SIZE // UNIT)
    for part in tl.static_range(SIZE // UNIT):
        tl.store(at + part, bits >> (8 * UNIT * part), mask=mask)


@triton.jit
def put_field(at, words, n, shift, present, BITS: tl.constexpr, G: tl.constexpr):
    """Write one field of the n values whose bytes stand in the scratch `words`, at byte pointers `at`."""
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
    """Write bitmaps and fields at byte pointers `at`; a scratch brings the n values of a block together."""
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
    """Write the fields that hold the bits 8 * plane and up."""
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
def find_levels(v, bits, eb, block, seed_low, seed_high, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Return levels of a tile, their range for each block, the shrink codes, and which blocks must be raw."""
    limit = eb * 4194304.0
    top, bottom = block_highest(v), block_lowest(v)
    largest = nan_max(top, -bottom)
    fits = largest < limit
    m = highest(largest, 0)
    if (highest(m, 0) < limit) == 0:
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
    size = level_size(a, of_group(inverse), block, seed_low, seed_high, STOCHASTIC)
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
        high = with_sign(at_least_one(round_up(tl.abs(top) * inverse[None, :]), tl.abs(top)), top)
        low = with_sign(at_least_one(round_up(tl.abs(bottom) * inverse[None, :]), tl.abs(bottom)), bottom)
    return k, tl.where(must_raw, 0, low), tl.where(must_raw, 0, high), code, must_raw


@triton.jit
def choose_kind(must_raw, raw_size, low, high, count, low_nz, high_nz, blocks, BITMAP: tl.constexpr):
    """Return the base kind with the smallest total for each group, and size, head and base of each block."""
    # Blocks after the end are all zero: their size and width are 0 under every kind.
    size, head, base = forms_of(0, must_raw, raw_size, low, high, count, low_nz, high_nz, BITMAP)
    total = tl.sum(size, 0)
    kind = tl.zeros_like(total)
    for KIND in tl.static_range(1, 3):
        size_k, head_k, base_k = forms_of(KIND, must_raw, raw_size, low, high, count, low_nz, high_nz, BITMAP)
        total_k = tl.sum(size_k, 0) + (((blocks + 3) & -4) if KIND == 1 else blocks * 4)
        better = total_k < total
        total, kind = tl.where(better, total_k, total), tl.where(better, KIND, kind)
        size = tl.where(better[None, :], size_k, size)
        head = tl.where(better[None, :], head_k, head)
        base = tl.where(better[None, :], base_k, base)
    return kind, (total + 3) >> 2, size, head, base


@triton.jit
def put_tables(meta, tile, numel, exists, offset, info, head, G: tl.constexpr):
    """Write the metadata of a tile."""
    groups, g0 = (numel + 1023) >> 10, tile.to(tl.int64) * G
    group = g0 + tl.arange(0, G)
    tl.store((meta + 32).to(tl.pointer_type(tl.int32)) + group, offset.to(tl.int32), mask=group < groups)
    tl.store(meta + 32 + groups * 4 + group, info.to(tl.uint8), mask=group < groups)
    tl.store(meta + 32 + groups * 5 + g0 * 16 + block_index(G), head.to(tl.uint8), mask=exists)


@triton.jit
def put_bases(groups_at, base, kind, exists):
    """Write the bases of each group at its byte pointer."""
    column, kind, at = tl.arange(0, 16)[:, None], kind[None, :], groups_at[None, :]
    if tile_max(kind) > 0:
        tl.store(at + column, base.to(tl.uint8), mask=exists & (kind == 1))
        tl.store(unit_pointer(at, 4) + column, base, mask=exists & (kind == 2))


@triton.jit
def encode_tile(
    tile, x, meta, payload, scratch, numel, capacity, eb, seed_low, seed_high,
    DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, BITMAP: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    first = tile.to(tl.int64) * (G * 1024)
    x += first
    left = tl.minimum(numel - first, G * 1024).to(tl.int32)
    i = tile_index(G)
    bits = tl.load(x + i, mask=i < left, other=0)
    v, block = widen(bits, DTYPE), tile.to(tl.int64) * (G * 16)
    k, low, high, code, must_raw = find_levels(v, float_bits(bits), eb, block, seed_low, seed_high, DTYPE, STOCHASTIC)

    flags = (k != 0).to(tl.int32)
    count, low_nz, high_nz = low, low, high
    if BITMAP:
        count = tl.where(must_raw, 0, block_sum(flags))
        low_nz = tl.where(count > 0, block_min(tl.where(k != 0, k, 1 << 30)), 1)
        high_nz = tl.where(count > 0, block_max(tl.where(k != 0, k, -(1 << 30))), 1)
    valid = tl.minimum(tl.maximum(left - block_index(G) * 64, 0), 64)
    blocks = blocks_of_group(left, G)
    kind, units, size, head, base = choose_kind(
        must_raw, valid * SIZE, low, high, count, low_nz, high_nz, blocks, BITMAP
    )

    needed = tl.sum(units, 0)
    reserved = tl.atomic_add((meta + 8).to(tl.pointer_type(tl.int64)), needed.to(tl.int64), sem="relaxed")
    fits = (reserved + needed) * 4 <= capacity
    before = tl.cumsum(units, 0) - units
    put_tables(meta, tile, numel, valid > 0, reserved + before, code + kind * 16, head, G)

    payload += reserved * 4
    put_bases(payload + before * 4, base, kind, (valid > 0) & fits)
    start = (before * 4 + base_bytes(kind, blocks))[None, :] + tl.cumsum(size, 0) - size
    raw, is_map = (head == RAW) & fits, (head >= 32) & fits
    width = tl.where((head != RAW) & fits, head & 31, 0)
    most = tile_max(tl.where(raw, 32, width))
    rest = k - of_block(base)
    if BITMAP:
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
    DTYPE: tl.constexpr, RELATIVE: tl.constexpr, STOCHASTIC: tl.constexpr, BITMAP: tl.constexpr, G: tl.constexpr,
):  # fmt: skip
    """Encode tiles. Each reserves its space with one addition to the counter in meta, and writes only what fits."""
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
                tile, x, meta, payload, scratch, numel, capacity, eb, seed_low, seed_high, DTYPE, STOCHASTIC, BITMAP, G
            )
            tile += tl.num_programs(0)
    else:
        encode_tile(
            pid, x, meta, payload, scratch, numel, capacity, eb, seed_low, seed_high, DTYPE, STOCHASTIC, BITMAP, G
        )
