"""Encoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.formats import COIN, MASK32
from encke.kernels.gpu.common import INTERPRETED, divide, exponent, float_bits, narrow, random32, widen
from encke.kernels.gpu.planes_forms import bit_width, choose_forms, integers_of, less_four, shift_planes
from encke.kernels.gpu.planes_put import (
    put_chunk,
    put_flags,
    put_number,
    put_planes,
    put_raw,
    put_round,
    put_tables,
)
from encke.kernels.gpu.shared import close_words, open_words, put_words, reserve, reserved_of
from encke.kernels.gpu.tiles import (
    ALL_ZERO,
    AS_IS,
    DITHERED,
    NEAREST,
    REPEATED,
    ROUNDS,
    SIGNED,
    STOCHASTIC,
    block_max,
    block_min,
    count_ones,
    dither_of,
    either,
    gather,
    join_bits,
    join_lanes,
    lanes_max,
    lanes_min,
    lanes_sum,
    least_of,
    moves_of,
    nonzero_bits,
    of_block,
    places_of,
    random_of,
    shared_random,
    shrink,
    signed_values,
    slice_words,
    split_tile,
    tile_index,
    transpose,
)

ORIGIN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding an integer puts it in the last bits of the float
COIN_LOW, COIN_HIGH = tl.constexpr(COIN & MASK32), tl.constexpr(COIN >> 32)
RANGE = tl.constexpr(4)  # index of the keys of largest and smallest value in `sizes`


@triton.jit
def key_of(v):
    """Return unsigned keys that are ordered like the float64 values."""
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
def usable_bound(sizes, bound, rel, DTYPE: tl.constexpr, RELATIVE: tl.constexpr):
    """Return min(bound, rel * range), rounded down, clamped, zero if too small. The host prepares absolute bounds."""
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
def ordered_bits(stored, v):
    """Return integers of at least 32 bits for stored values. Among values of one sign they order the magnitudes."""
    # Converting fp16 would change a NaN.
    return float_bits(stored).to(tl.int32) if stored.dtype == tl.float16 else float_bits(v)


@triton.jit
def ordered_value(bits, DTYPE: tl.constexpr):
    """Return the value of an integer from `ordered_bits`."""
    if DTYPE == tl.float16:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return bits.to(tl.float64 if DTYPE == tl.float64 else tl.float32, bitcast=True)


@triton.jit
def range_of(least, greatest, unsigned, DTYPE: tl.constexpr):
    """Return smallest and largest value, and the largest magnitude as integer, from three extremes of the integers.

    Args:
        least: The smallest integer.
        greatest: The largest integer.
        unsigned: The largest as an unsigned integer: the smallest negative value, if there are negative values.
        DTYPE: Dtype of the values.
    """
    SIGN: tl.constexpr = 2**63 if DTYPE == tl.float64 else (2**15 if DTYPE == tl.float16 else 2**31)
    negative = unsigned.to(least.dtype, bitcast=True)
    low = ordered_value(tl.where(least < 0, negative, least), DTYPE)
    high = ordered_value(tl.where(greatest < 0, least, greatest), DTYPE)
    return low, high, tl.maximum(greatest & (SIGN - 1), negative & (SIGN - 1))


@triton.jit
def without_sign(bits):
    """Return integers bitcast to unsigned ones."""
    return bits.to(tl.uint64 if bits.dtype == tl.int64 else tl.uint32, bitcast=True)


@triton.jit
def range_kernel(x, sizes, numel: tl.int64, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """Write keys of the largest and the negated smallest finite value after the sizes, by atomic maximum from zero."""
    # From the end, which was written last and may still be in the cache, to the beginning, which is encoded first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * SIZE
    left = tl.minimum(numel - first, SIZE).to(tl.int32)
    i = tl.arange(0, SIZE)
    x += first
    if left < SIZE:
        # Fill up with copies of the first value.
        stored = tl.load(x + i, mask=i < left, other=tl.load(x))
    else:
        stored = tl.load(x + i)
    v = widen(stored, DTYPE)
    bits = ordered_bits(stored, v)
    low, high, top = range_of(tl.min(bits, 0), tl.max(bits, 0), tl.max(without_sign(bits), 0), DTYPE)
    # Rare: ignore infinities and NaN.
    if (ordered_value(top, DTYPE) < float("inf")) == 0:
        finite = tl.abs(v) < float("inf")
        high = tl.max(tl.where(finite, v, -float("inf")), 0)
        low = tl.min(tl.where(finite, v, float("inf")), 0)
    keys = (sizes + RANGE).to(tl.pointer_type(tl.uint64))
    if high >= low:
        tl.atomic_max(keys, key_of(high.to(tl.float64)), sem="relaxed")
        tl.atomic_max(keys + 1, key_of(-low.to(tl.float64)), sem="relaxed")


@triton.jit
def shrink_code(m, eb, DTYPE: tl.constexpr):
    """Return the shrink code of a group whose largest magnitude is m."""
    EMIN: tl.constexpr = -14 if DTYPE == tl.float16 else (-1022 if DTYPE == tl.float64 else -126)
    COST: tl.constexpr = (
        -8 if DTYPE == tl.bfloat16 else (-11 if DTYPE == tl.float16 else (-21 if DTYPE == tl.float32 else -50))
    )
    return tl.minimum(tl.maximum(exponent(eb) - tl.maximum(exponent(m + eb), EMIN) - COST, 0), 15)


@triton.jit
def floor_of(v):
    """Return ORIGIN + floor(v) for values smaller than 2^22."""
    if INTERPRETED or v.dtype == tl.float64:
        return tl.floor(v).to(tl.float32) + ORIGIN
    else:
        # Add ORIGIN and round down.
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def usable_values(v, limit, eb, ROUNDING: tl.constexpr):
    """Replace values without a level by zero, and avoid products with 0.5 / eb that would be rounded to zero.

    With bounds below 1 no product is rounded to zero. With others, negative values next to zero become -2^-28, which
    has the same level and error.
    """
    v = tl.where(tl.abs(v) < limit, v, 0.0)
    if ROUNDING == NEAREST:
        v = tl.where(v < 0, tl.minimum(v, tl.where(eb < 1.0, 0.0, -(2.0**-28)).to(v.dtype)), v)
    return v


@triton.jit
def rest_of(v, level, eb_c, inverse, DTYPE: tl.constexpr):
    """Return the distance of values from the level below, in steps. With fp32 the product is exact."""
    level = (level - ORIGIN).to(v.dtype)
    rest = tl.fma(-level, eb_c * 2.0, v) if DTYPE == tl.float32 else v - level * (eb_c * 2.0)
    return rest * inverse


@triton.jit
def levels_of(v, eb_c, inverse, hash, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Return ORIGIN plus the levels of finite values in fp32: the last bits are the level, without a conversion."""
    shifted = v - eb_c if ROUNDING == STOCHASTIC else v
    level = floor_of(shifted * inverse)
    if ROUNDING != NEAREST:
        # hash < int(rest * 2^24), without the slow conversion.
        most = tl.fma(hash.to(v.dtype), 5.9604644775390625e-08, 5.9604644775390625e-08)
        level = tl.where(most <= rest_of(shifted, level, eb_c, inverse, DTYPE), level + 1.0, level)
    if ROUNDING == STOCHASTIC:
        level = tl.where(v < 0, tl.minimum(level, ORIGIN - 1.0), tl.maximum(level, ORIGIN))
        level = tl.where(v != 0, level, ORIGIN)
    return level


@triton.jit
def signed_levels_of(v, step, hash, coin, DTYPE: tl.constexpr):
    """Return ORIGIN plus the levels of finite values for SIGNED rounding; zeros have level 0. See the reference."""
    eb_c, inverse, least = step
    size = tl.abs(v)
    cell = floor_of(size * inverse)
    more = ((rest_of(size, cell, eb_c, inverse, DTYPE) * 16777216.0).to(tl.int32) - hash + 25165823) >> 24
    above = tl.minimum((size - least) * inverse, 0.5)
    kept = coin.to(v.dtype) * 5.9604644775390625e-08 * ((above + 0.5) * (above + 0.5)) < above * 2.0
    cell = tl.where(kept, (cell.to(tl.int32, bitcast=True) + more).to(tl.float32, bitcast=True), ORIGIN)
    return tl.where(v < 0, (ORIGIN - 1.0) - (cell - ORIGIN), cell)


@triton.jit
def random_levels(v, step, hash, coin, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Return ORIGIN plus the levels of finite values, rounded with their random numbers."""
    eb_c, inverse, _ = step
    if ROUNDING == SIGNED:
        return signed_levels_of(v, step, hash, coin, DTYPE)
    return levels_of(v, eb_c, inverse, hash, DTYPE, ROUNDING)


@triton.jit
def difference(a, b):
    """Return |a - b|, rounded up: it is at most a bound if and only if the exact difference is."""
    if INTERPRETED:
        near = a - b
        part = near - a
        rest = (a - (near - part)) - (b + part)
        bits = float_bits(tl.abs(near)) + tl.where(near < 0, rest < 0, rest > 0).to(float_bits(near).dtype)
        return bits.to(near.dtype, bitcast=True)
    else:
        UP: tl.constexpr = "sub.rp.f64 $0, $1, $2;" if a.dtype == tl.float64 else "sub.rp.f32 $0, $1, $2;"
        KIND: tl.constexpr = "=d,d,d" if a.dtype == tl.float64 else "=f,f,f"
        up = tl.inline_asm_elementwise(UP, KIND, [a, b], dtype=a.dtype, is_pure=True, pack=1)
        return tl.maximum(up, tl.inline_asm_elementwise(UP, KIND, [b, a], dtype=a.dtype, is_pure=True, pack=1))


@triton.jit
def decoded_of(level, step, hash, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the values that levels decode to."""
    eb_c, _, least = step
    level = level.to(eb_c.dtype)
    if ROUNDING == SIGNED:
        value = signed_values(level + 0.5, hash, eb_c, least)
    elif ROUNDING == DITHERED:
        value = (level + dither_of(hash, eb_c.dtype)) * (eb_c * 2.0)
    elif DTYPE == tl.float32:
        # All digits fit, so nothing is rounded: equal to (level + 0.5) * 2 eb_c.
        value = tl.fma(level, eb_c * 2.0, eb_c)
    else:
        value = (level + 0.5) * (eb_c * 2.0)
    return widen(narrow(value, DTYPE), DTYPE)


@triton.jit
def quotient_bytes(levels, form, k):
    """Return the quotients of numbers, clamped to 255: a word of four bytes for each of eight slices."""
    slope, shift = form
    bytes, down = (), tl.minimum(k + 9, 31).to(tl.uint32)[None, None, :, None]
    for slice in tl.static_range(8):
        number = integers_of(levels[slice], slope[None, None, :, None], shift[None, None, :, None])
        quotient = (number << 9).to(tl.uint32, bitcast=True) >> down
        bytes += (join_lanes(quotient.to(tl.int32), True),)  # type: ignore[assignment]
    return bytes


@triton.jit
def far_numbers(x, group, left, limits, step, seed, form, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Recompute the numbers of a tile from its values, for the few groups whose numbers do not fit in bytes."""
    limit, eb = limits
    slope, shift = form
    i = tile_index()
    v = usable_values(widen(tl.load(x + i, mask=i < left, other=0), DTYPE), limit, eb, ROUNDING)
    hash, coin = random_of(group, i, seed[0], seed[1]), random_of(group, i, seed[0] ^ COIN_LOW, seed[1] ^ COIN_HIGH)
    level = random_levels(v, step, hash, coin, DTYPE, ROUNDING)
    return integers_of(level - ORIGIN, of_block(slope), of_block(shift)) & 0x7FFFFF


@triton.jit(do_not_specialize=["capacity", "attempt", "seed_low", "seed_high"])
def encode_kernel(
    x, meta, payload, sizes, numel: tl.int64, capacity: tl.int64, attempt: tl.int32, bound: tl.float64, rel: tl.float64,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, RELATIVE: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Encode a group. The program reserves space by one atomic addition to a counter, and writes only if it fits.

    Each attempt has a counter. A later attempt does nothing if the one before had enough space or did nothing.
    """
    done = False
    if attempt > 0:
        done = tl.load(sizes + attempt - 1) * 4 <= capacity
    if done:
        return
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    group = tl.program_id(0).to(tl.int64)
    groups = (numel + 4095) >> 12
    allowed = usable_bound(sizes, bound, rel, DTYPE, RELATIVE)
    eb = allowed * 0.5 if ROUNDING == STOCHASTIC else allowed
    if group == 0:
        tl.store(meta.to(tl.pointer_type(tl.float64)), eb.to(tl.float64))
        seeds = (meta + 8).to(tl.pointer_type(tl.int32))
        tl.store(seeds, seed_low)
        tl.store(seeds + 1, seed_high)
    left = tl.minimum(numel - group * 4096, 4096).to(tl.int32)
    inside = tl.minimum(tl.maximum(left - tl.arange(0, 16) * 256, 0), 256)
    i = tile_index()
    x += group * 4096
    # Zeros for missing values take as many instructions as the loads, so only the last group has a mask.
    if left < 4096:
        stored = tl.load(x + i, mask=i < left, other=0)
    else:
        stored = tl.load(x + i)
    v = widen(stored, DTYPE)
    bits = ordered_bits(stored, v)
    mask = nonzero_bits(v)
    if eb == 0:
        mask = join_bits(bits != 0)
    place, n = places_of(count_ones(mask))
    least, greatest = block_min(bits), block_max(bits)
    lowest, highest, top = range_of(least, greatest, block_max(without_sign(bits)), DTYPE)
    repeated = least == greatest
    if left < 4096:
        here = of_block(tl.where(inside > 0, inside, 1)) > (i & 255)
        MOST: tl.constexpr = 2**63 - 1 if SIZE == 8 else 2**31 - 1
        repeated = block_min(tl.where(here, bits, MOST)) == block_max(tl.where(here, bits, -MOST - 1))

    safe = tl.where(eb == 0, 1.0, eb).to(eb.dtype)
    limit = safe * 1048576.0
    beyond = (ordered_value(top, DTYPE) < limit) == 0
    largest = ordered_value(tl.max(top, 0), DTYPE)
    if ((largest < limit) == 0) | (eb >= 1.0):
        v = usable_values(v, limit, eb, ROUNDING)
        lowest, highest = block_min(v), block_max(v)
        largest = tl.max(tl.maximum(tl.abs(lowest), tl.abs(highest)), 0)
    code = tl.where(eb == 0, 0, shrink_code(largest, safe, DTYPE))
    eb_c = shrink(safe, code, DTYPE)
    inverse = divide(tl.full((), 0.5, eb_c.dtype), eb_c)
    step = (eb_c, inverse, least_of(safe, DTYPE))
    # Slice by slice (even ones, then odd ones), so that no thread has to keep all values, levels and errors.
    slices, found = split_tile(v), ()
    level_sum, error = tl.zeros((2, 4, 16, 4), tl.int32), tl.zeros((2, 4, 16, 4), eb.dtype)
    least, most = level_sum + 0x7FFFFFFF, level_sum
    for parity in tl.static_range(2):
        word = slice_words(group, parity)
        random = random32(word, seed_low, seed_high)
        coins = random32(word, seed_low ^ COIN_LOW, seed_high ^ COIN_HIGH)
        for quarter in tl.static_range(4):
            value, hash = slices[2 * quarter + parity], shared_random(random, quarter)
            level = random_levels(value, step, hash, shared_random(coins, quarter), DTYPE, ROUNDING)
            level_bits = level.to(tl.int32, bitcast=True)
            level_sum += level_bits
            if ROUNDING != NEAREST:
                least, most = tl.minimum(least, level_bits), tl.maximum(most, level_bits)
            level -= ORIGIN
            # Zeros pass this check.
            back = decoded_of(level, step, hash, DTYPE, ROUNDING)
            # If the decoder knows a random number, the error of a value next to zero might be rounded to the bound.
            exactly = ROUNDING == DITHERED or ROUNDING == SIGNED
            error = tl.maximum(error, difference(back, value) if exactly else tl.abs(back - value))
            found += (level,)  # type: ignore[assignment]
    levels = (found[0], found[4], found[1], found[5], found[2], found[6], found[3], found[7])  # type: ignore[misc]
    if ROUNDING == NEAREST:
        # Levels are monotonic in the values.
        low = levels_of(lowest, eb_c, inverse, 0, DTYPE, ROUNDING).to(tl.int32, bitcast=True) - 0x4B400000
        high = levels_of(highest, eb_c, inverse, 0, DTYPE, ROUNDING).to(tl.int32, bitcast=True) - 0x4B400000
    else:
        low, high = lanes_min(least) - 0x4B400000, lanes_max(most) - 0x4B400000
    # 256 times 0x4B400000, modulo 2^32.
    level_sum = lanes_sum(level_sum) - 0x40000000
    must_raw = beyond | ((tl.where(eb == 0, float("inf"), lanes_max(error)) <= allowed) == 0)

    slope, shift, most, base, order, k, fixed = choose_forms(levels, low, high, level_sum, n)
    limits, seed, form = (limit, eb), (seed_low, seed_high), (slope, shift)
    bytes = ()
    for slice in tl.static_range(8):
        slice_numbers = integers_of(levels[slice], slope[None, None, :, None], shift[None, None, :, None])
        bytes += (join_lanes(slice_numbers, False),)  # type: ignore[assignment]
    planes = transpose(bytes)
    # Flags of all blocks: planes in use (0 to 7; 8: more), numbers above 255 (9), quotients above 255 (10), zeros (11).
    some = ((1 << tl.minimum(k, 9)) - 1) | ((most > 255).to(tl.int32) << 9) | (((most >> k) > 255).to(tl.int32) << 10)
    some = tl.reduce(some | ((n < 256).to(tl.int32) << 11), 0, either)
    far, dense = (some & 0x500) > 0, some < 2048
    if (some & 512) > 0:
        q0, q1, q2, q3, q4, q5, q6, q7 = transpose(quotient_bytes(levels, form, k))
    else:
        q0, q1, q2, q3, q4, q5, q6, q7 = shift_planes(planes, k[None, None, :])
    alive = tl.where((fixed | ((k > 7) & (most < 256)))[None, None, :], 0, mask)
    more3 = (q2 | q3 | q4 | q5 | q6 | q7) & alive
    more2 = more3 | (q0 & q1 & alive)
    more1 = more3 | (q1 & alive)
    more0 = more1 | (q0 & alive)
    place0, count0 = places_of(count_ones(more0))
    place1, count1 = places_of(count_ones(more1))
    place2, count2 = places_of(count_ones(more2))
    place3, escapes = places_of(count_ones(more3))
    unary = tl.where(fixed, 0, n) + count0 + count1 + count2
    width = tl.where(escapes > 0, bit_width(tl.maximum((most >> k) - ROUNDS, 0)), 0)
    sparse = n < inside
    size = (n * k + unary + tl.where(escapes > 0, 5 + escapes * width, 0) + tl.where(sparse, inside, 0) + 7) >> 3
    wide = (base < -128) | (base > 127) | (k > 7) | (most > 255) | (size > 255)
    size += tl.where(wide, 4, 0)
    use_raw = must_raw | (size >= inside * SIZE)
    special = tl.where(n == 0, ALL_ZERO, tl.where(repeated, REPEATED, tl.where(use_raw, AS_IS, 0)))
    plain = special == 0
    raw = tl.where(special == AS_IS, inside, tl.where(special == REPEATED, 1, 0))
    size = tl.where(plain, size, raw * SIZE)
    k, width, wide, sparse = tl.where(plain, k, 0), tl.where(plain, width, 0), wide & plain, sparse & plain

    # Sum of the sizes, and numbers of blocks that are raw, are wide, and have escapes, as fields of one integer.
    sums = size | ((raw > 0).to(tl.int32) << 16) | (wide.to(tl.int32) << 21) | ((width > 0).to(tl.int32) << 26)
    sums = tl.cumsum(sums, 0)
    start, total = (sums & 65535) - size, tl.max(sums, 0)
    units = ((total & 65535) + 3) >> 2
    reservation = reserve(sizes + attempt, units)
    flags = (sparse.to(tl.int32) << 3) | (fixed.to(tl.int32) << 4) | (order << 5)
    second = tl.where(wide, (size >> 8) | (k << 3), base)
    what = tl.where(plain, flags | tl.where(wide, 128, k), special)
    head = tl.where(plain, (size & 255) | ((second & 255) << 8), 0) | (what << 16)
    words = open_words(payload, reservation, units, capacity, SIZE)

    at = start * 8
    if ((total >> 21) & 31) > 0:
        put_number(words, at, tl.where(wide, base, 0))
    at += tl.where(wide, 32, 0)
    put_flags(words, at, tl.where(sparse[None, None, :], mask, 0), left)
    at += tl.where(sparse, inside, 0)
    mask = tl.where(plain[None, None, :], mask, 0)
    more0, more1, more2, more3 = more0 & mask, more1 & mask, more2 & mask, more3 & mask
    last = at + n * k + unary + 5
    if far:
        number = far_numbers(x, group, left, limits, step, seed, form, DTYPE, ROUNDING)
        put_planes(words, at[None, None, :] + place, n, number, 8, k, mask)
        rest = (number >> of_block(k)) - ROUNDS
        put_planes(words, last[None, None, :] + place3, escapes, rest, 0, width, more3)

    word, moves = more0, (mask, mask, mask, mask, mask, mask)
    if not dense:
        moves = moves_of(mask)
        word = gather(more0, moves)
    put_chunk(words, at[None, None, :] + place, n, k, some & 255, planes, mask, moves, dense)
    at += n * k
    put_words(words, at[None, None, :] + place, word)
    at += tl.where(fixed, 0, n)
    put_round(words, at[None, None, :] + place0, more0, more1)
    at += count0
    put_round(words, at[None, None, :] + place1, more1, more2)
    at += count1
    put_round(words, at[None, None, :] + place2, more2, more3)
    if (total >> 26) > 0:
        put_number(words, last - 5, width)
        if far == 0:
            rests = less_four((q0, q1, q2, q3, q4, q5, q6, q7))
            some = (1 << tl.max(width, 0)) - 1
            put_chunk(words, last[None, None, :] + place3, escapes, width, some, rests, more3, moves_of(more3), False)

    reserved = reserved_of(reservation)
    put_tables(meta, group, groups, reserved, code, head, inside)
    if (reserved + units) * 4 > capacity:
        return
    payload += reserved * 4
    close_words(payload, words, units)
    if ((total >> 16) & 31) > 0:
        tl.debug_barrier()
        put_raw(payload, start, x, raw, SIZE)
