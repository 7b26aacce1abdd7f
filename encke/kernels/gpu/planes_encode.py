"""The encoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import divide, exponent, float_bits, highest, widen
from encke.kernels.gpu.tiles import (
    ALL_ZERO,
    AS_IS,
    DITHERED,
    EVERY_BYTE,
    NEAREST,
    REPEATED,
    ROUNDS,
    STOCHASTIC,
    block_highest,
    block_max,
    block_min,
    block_sum,
    count_ones,
    gather,
    join_bits,
    join_lanes,
    join_slices,
    moves_of,
    of_block,
    places_of,
    shrink,
    tile_hash,
    tile_index,
    valid_bits,
    values_of,
    word_sum,
)

RANGE = tl.constexpr(4)  # where the keys of largest and smallest value stand among the sizes


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
def range_kernel(x, sizes, numel: tl.int64, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Write keys of the largest and the negated smallest finite value behind the sizes, by atomic maximum from zero."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    left = tl.minimum(numel - first, SIZE).to(tl.int32)
    i = tl.arange(0, SIZE)
    # After the end stands NaN, which is not finite either.
    v = widen(tl.load(x + first + i, mask=i < left, other=0x7FC0 if DTYPE == tl.bfloat16 else float("nan")), DTYPE)
    finite = tl.abs(v) < float("inf")
    high = tl.max(tl.where(finite, v, -float("inf")), 0)
    low = tl.min(tl.where(finite, v, float("inf")), 0)
    keys = (sizes + RANGE).to(tl.pointer_type(tl.uint64))
    if high >= low:
        tl.atomic_max(keys, key_of(high.to(tl.float64)), sem="relaxed")
        tl.atomic_max(keys + 1, key_of(-low.to(tl.float64)), sem="relaxed")


@triton.jit
def usable_bound(sizes, bound, rel, DTYPE: tl.constexpr, RELATIVE: tl.constexpr):
    """Round min(bound, rel * range) down, clamp it, zero where too small; the host has done that for `bound` alone."""
    eb = tl.full((), bound, tl.float64)
    if not RELATIVE:
        return eb if DTYPE == tl.float64 else eb.to(tl.float32)
    else:
        keys = (sizes + RANGE).to(tl.pointer_type(tl.uint64))
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
def wide_bits(stored):
    """Return the bits of stored values as integers of at least 32 bits."""
    bits = float_bits(stored)
    return bits if stored.dtype == tl.float64 else bits.to(tl.int32)


@triton.jit
def shrink_code(m, eb, DTYPE: tl.constexpr):
    """Return the shrink code of a group whose largest magnitude is m."""
    EMIN: tl.constexpr = -14 if DTYPE == tl.float16 else (-1022 if DTYPE == tl.float64 else -126)
    COST: tl.constexpr = (
        -8 if DTYPE == tl.bfloat16 else (-11 if DTYPE == tl.float16 else (-21 if DTYPE == tl.float32 else -50))
    )
    return tl.minimum(tl.maximum(exponent(eb) - tl.maximum(exponent(m + eb), EMIN) - COST, 0), 15)


@triton.jit
def levels_of(v, eb_c, hash, ROUNDING: tl.constexpr):
    """Return the levels of finite values that are not zero."""
    inverse = divide(tl.full((), 0.5, eb_c.dtype), eb_c)
    shifted = v - eb_c if ROUNDING == STOCHASTIC else v
    k = tl.floor(shifted * inverse)
    level = k.to(tl.int32)
    if ROUNDING != NEAREST:
        rest = (shifted - k * (eb_c * 2.0)) * inverse
        level += (hash < (rest * 16777216.0).to(tl.int32)).to(tl.int32)
    if ROUNDING != DITHERED:
        level = tl.where(v < 0, tl.minimum(level, -1), tl.maximum(level, 0))
    return level


@triton.jit
def bit_width(v):
    """Return how many bits an integer between 0 and 2^24 needs."""
    return tl.maximum((v.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def rice_parameter(n, total):
    """Return the number of low bits for n values with that sum, which is at most 2^31."""
    each = (n * 3).to(tl.uint32)
    k = tl.maximum(bit_width(total) - bit_width(each) - 1, 0)
    for _ in tl.static_range(3):
        k += (total > ((each << k.to(tl.uint32)) >> 1)).to(tl.int32)
    return k


@triton.jit
def estimate(n, total, k):
    """Return about how many bits n values with that sum take with k low bits each."""
    each, shift = n.to(tl.uint32), k.to(tl.uint32)
    half = ((each << shift) - each) >> 1
    return n * (k + 1) + (tl.where(total > half, total - half, 0) >> shift).to(tl.int32)


@triton.jit
def choose_forms(level, n):
    """Return the numbers to store and, for each block, base, order, number of low bits and whether that is all."""
    low, high, total = block_min(level), block_max(level), block_sum(level)
    mean = divide(total.to(tl.float32), tl.maximum(n, 1).to(tl.float32))
    centre = tl.floor(mean + 0.5)
    down = mean < centre
    centre = centre.to(tl.int32)
    # Order 2 is order 1 of negated levels.
    sign = tl.where(down, -1, 1)
    distance = level * of_block(sign) - of_block(centre * sign)
    turned = tl.maximum(distance * 2 - 1, distance * -2)
    of_zero = tl.maximum(centre * sign * -2 - 1, centre * sign * 2)
    sum_turned = block_sum(turned.to(tl.uint32)) - ((256 - n) * of_zero).to(tl.uint32)
    sum_plain = (total - n * low).to(tl.uint32)
    k_plain, k_turned = rice_parameter(n, sum_plain), rice_parameter(n, sum_turned)
    bits_plain, bits_turned = estimate(n, sum_plain, k_plain), estimate(n, sum_turned, k_turned)
    width = bit_width(high - low)
    fixed = n * width <= tl.minimum(bits_plain, bits_turned)
    zigzag = (fixed == 0) & (bits_turned < bits_plain)
    k = tl.where(fixed, width, tl.where(zigzag, k_turned, k_plain))
    base = tl.where(zigzag, centre, low)
    order = tl.where(zigzag, tl.where(down, 2, 1), 0)
    number = tl.where(of_block(zigzag), turned, level - of_block(low))
    return number, base, order, k, fixed


@triton.jit
def put_words(payload, at, word, count, fits):
    """Write the lowest `count` bits of each thread's word, which has no others, from bit `at` of each block on."""
    before, total = places_of(count)
    bit = at[None, None, :] + before
    words = payload.to(tl.pointer_type(tl.int32)) + (bit >> 5)
    shift = (bit & 31).to(tl.uint32)
    # Words are shared by threads, and bits are not: the order does not matter.
    low, high = (word << shift).to(tl.int32, bitcast=True), ((word >> 1) >> (31 - shift)).to(tl.int32, bitcast=True)
    tl.atomic_or(words, low, mask=(low != 0) & fits, sem="relaxed")
    tl.atomic_or(words + 1, high, mask=(high != 0) & fits, sem="relaxed")
    return at + total


@triton.jit
def put_number(payload, at, number, width, here):
    """Write a number of some bits for each block that is `here`."""
    words = payload.to(tl.pointer_type(tl.int32)) + (at >> 5)
    shift = (at & 31).to(tl.uint32)
    word = tl.where(here, number, 0).to(tl.uint32, bitcast=True)
    low, high = (word << shift).to(tl.int32, bitcast=True), ((word >> 1) >> (31 - shift)).to(tl.int32, bitcast=True)
    tl.atomic_or(words, low, mask=low != 0, sem="relaxed")
    tl.atomic_or(words + 1, high, mask=high != 0, sem="relaxed")
    return at + tl.where(here, width, 0)


@triton.jit
def put_planes(payload, at, number, width, mask, fits):
    """Write the lowest `width` bits of the numbers under the mask, one plane after the other."""
    one, two, four, eight, sixteen = moves_of(mask)
    count = count_ones(mask)
    most = tl.max(width, 0)
    first = 0
    while first < most:
        bytes = join_lanes((number >> first) & 255)
        p = first
        end = tl.minimum(first + 8, most)
        while p < end:
            here = (p < width)[None, None, :]
            word = gather(join_slices(bytes >> (p - first).to(tl.uint32)) & mask, one, two, four, eight, sixteen)  # type: ignore[attr-defined]
            at = put_words(payload, at, tl.where(here, word, 0), tl.where(here, count, 0), fits)
            p += 1
        first += 8
    return at


@triton.jit
def exceeding(bytes, mask, J: tl.constexpr):
    """Return which quotients under a mask are larger than J."""
    return join_slices((bytes + EVERY_BYTE * (127 - J)) >> 7) & mask


@triton.jit
def put_round(payload, at, alive, more, fits):
    """Write a bit of the unary codes that have not ended."""
    one, two, four, eight, sixteen = moves_of(alive)
    return put_words(payload, at, gather(more, one, two, four, eight, sixteen), count_ones(alive), fits)


@triton.jit
def put_raw(payload, start, x, mask, SIZE: tl.constexpr):
    """Copy stored values to byte `start` of each block, byte by byte."""
    bits = float_bits(tl.load(x + tile_index(), mask=mask, other=0))
    at = payload + of_block(start) + (tile_index() & 255) * SIZE
    for part in tl.static_range(SIZE):
        tl.store(at + part, ((bits >> (8 * part)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def put_tables(meta, group, groups, offset, code, first, second, what, inside):
    """Write the metadata of a group."""
    tl.store((meta + 16).to(tl.pointer_type(tl.int32)) + group, offset.to(tl.int32))
    tl.store(meta + 16 + groups * 4 + group, code.to(tl.uint8))
    heads = meta + 16 + groups * 5 + (group * 16 + tl.arange(0, 16)) * 3
    tl.store(heads, first.to(tl.uint8), mask=inside > 0)
    tl.store(heads + 1, second.to(tl.uint8), mask=inside > 0)
    tl.store(heads + 2, what.to(tl.uint8), mask=inside > 0)


@triton.jit
def put_zeros(payload, units):
    """Set the words of a group to zero."""
    at = 0
    while at < units:
        word = at + tl.arange(0, 1024)
        tl.store(payload.to(tl.pointer_type(tl.int32)) + word, 0, mask=word < units)
        at += 1024
    tl.debug_barrier()


@triton.jit(do_not_specialize=["capacity", "attempt", "seed_low", "seed_high"])
def encode_kernel(
    x, meta, payload, sizes, numel: tl.int64, capacity: tl.int64, attempt: tl.int32, bound: tl.float64, rel: tl.float64,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, RELATIVE: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Encode a group. It reserves its space with one addition to a counter, and is written only if it fits.

    Each attempt has a counter. One behind the first does nothing if the one before had enough space, or did nothing.
    """
    if (attempt > 0) & (tl.load(sizes + tl.maximum(attempt - 1, 0)) * 4 <= capacity):
        return
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    group = tl.program_id(0).to(tl.int64)
    groups = (numel + 4095) >> 12
    allowed = usable_bound(sizes, bound, rel, DTYPE, RELATIVE)
    eb = allowed * 0.5 if ROUNDING == STOCHASTIC else allowed
    if group == 0:
        tl.store(meta.to(tl.pointer_type(tl.float64)), eb.to(tl.float64))
        seed = (meta + 8).to(tl.pointer_type(tl.int32))
        tl.store(seed, seed_low)
        tl.store(seed + 1, seed_high)
    left = tl.minimum(numel - group * 4096, 4096).to(tl.int32)
    inside = tl.minimum(tl.maximum(left - tl.arange(0, 16) * 256, 0), 256)
    i = tile_index()
    x += group * 4096
    stored = tl.load(x + i, mask=i < left, other=0)
    v, bits = widen(stored, DTYPE), wide_bits(stored)
    MOST: tl.constexpr = 2**63 - 1 if SIZE == 8 else 2**31 - 1

    safe = tl.where(eb == 0, 1.0, eb).to(eb.dtype)
    limit = safe * 1048576.0
    largest = highest(block_highest(tl.abs(v)), 0)
    usual = v
    if (largest < limit) == 0:
        usual = tl.where(tl.abs(v) < limit, v, 0.0)
        largest = highest(block_highest(tl.abs(usual)), 0)
    code = tl.where(eb == 0, 0, shrink_code(largest, safe, DTYPE))
    eb_c = shrink(safe, code, DTYPE)
    hash = tile_hash(group, seed_low, seed_high)
    level = levels_of(usual, eb_c, hash, ROUNDING)
    # Zeros pass, and what is beyond the limit does not, as it is compared with a value near zero.
    decoded = widen(values_of(level, eb_c, hash, DTYPE, ROUNDING == DITHERED), DTYPE)
    error = block_highest(tl.abs(decoded - v))
    must_raw = (tl.where(eb == 0, float("inf"), error) <= allowed) == 0
    level = tl.where(v != 0, level, 0)
    mask = join_bits(v != 0)
    if eb == 0:
        mask = join_bits(bits != 0)
    n = word_sum(count_ones(mask))
    least, greatest = block_min(bits), block_max(bits)
    if left < 4096:
        here = of_block(tl.where(inside > 0, inside, 1)) > (i & 255)
        least, greatest = block_min(tl.where(here, bits, MOST)), block_max(tl.where(here, bits, -MOST - 1))
    same = least == greatest

    number, base, order, k, fixed = choose_forms(level, n)
    most = block_max(number)
    quotients = join_lanes(tl.minimum(number >> of_block(k), 127))
    alive = tl.where(fixed[None, None, :], 0, mask)
    more0 = exceeding(quotients, alive, 0)
    more1 = exceeding(quotients, alive, 1)
    more2 = exceeding(quotients, alive, 2)
    more3 = exceeding(quotients, alive, 3)
    # Two sums travel in one number.
    counts = count_ones(alive) + count_ones(more0) + count_ones(more1) + count_ones(more2)
    counts = word_sum(counts + (count_ones(more3) << 16))
    unary, escapes = counts & 65535, counts >> 16
    width = bit_width(tl.maximum((most >> k) - ROUNDS, 0))
    unary += tl.where(escapes > 0, 5 + escapes * width, 0)
    sparse = n < inside
    size = (n * k + unary + tl.where(sparse, inside, 0) + 7) >> 3
    wide = (base < -128) | (base > 127) | (k > 7) | (most > 255) | (size > 255)
    size += tl.where(wide, 4, 0)
    use_raw = must_raw | (size >= inside * SIZE)
    special = tl.where(n == 0, ALL_ZERO, tl.where(same, REPEATED, tl.where(use_raw, AS_IS, 0)))
    plain = special == 0
    size = tl.where(plain, size, tl.where(special == AS_IS, inside * SIZE, tl.where(special == REPEATED, SIZE, 0)))

    units = (tl.sum(size, 0) + 3) >> 2
    reserved = tl.atomic_add(sizes + attempt, units.to(tl.int64), sem="relaxed")
    fits = (reserved + units) * 4 <= capacity
    flags = (sparse.to(tl.int32) << 3) | (fixed.to(tl.int32) << 4) | (order << 5)
    second = tl.where(wide, (size >> 8) | (k << 3), base)
    what = tl.where(plain, flags | tl.where(wide, 128, k), special)
    put_tables(
        meta, group, groups, reserved, code, tl.where(plain, size, 0), tl.where(plain, second, 0), what, inside
    )  # fmt: skip
    payload += reserved * 4
    start = tl.cumsum(size, 0) - size
    plain = plain & fits
    put_zeros(payload, tl.where(fits, units, 0))

    at = put_number(payload, start * 8, base, 32, plain & wide)
    written = plain[None, None, :]
    mask = tl.where(written, mask, 0)
    sparse = sparse & plain
    if tl.max(sparse.to(tl.int32), 0) > 0:
        valid = tl.where(sparse[None, None, :], valid_bits(left), 0)
        one, two, four, eight, sixteen = moves_of(valid)
        at = put_words(payload, at, gather(mask & valid, one, two, four, eight, sixteen), count_ones(valid), fits)
    at = put_planes(payload, at, number, tl.where(plain, k, 0), mask, fits)
    alive = tl.where(written, alive, 0)
    at = put_round(payload, at, alive, tl.where(written, more0, 0), fits)
    at = put_round(payload, at, tl.where(written, more0, 0), tl.where(written, more1, 0), fits)
    at = put_round(payload, at, tl.where(written, more1, 0), tl.where(written, more2, 0), fits)
    at = put_round(payload, at, tl.where(written, more2, 0), tl.where(written, more3, 0), fits)
    escapes = tl.where(plain, escapes, 0)
    if tl.max(escapes, 0) > 0:
        at = put_number(payload, at, width, 5, escapes > 0)
        rest = tl.maximum((number >> of_block(k)) - ROUNDS, 0)
        at = put_planes(payload, at, rest, tl.where(escapes > 0, width, 0), tl.where(written, more3, 0), fits)
    raw = ((special == AS_IS) | (special == REPEATED)) & fits
    if tl.max(raw.to(tl.int32), 0) > 0:
        each = tl.where(special == AS_IS, inside, 1)
        put_raw(payload, start, x, of_block(raw) & ((i & 255) < of_block(each)), SIZE)
