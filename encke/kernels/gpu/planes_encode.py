"""The encoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import INTERPRETED, divide, exponent, float_bits, highest, narrow, widen
from encke.kernels.gpu.tiles import (
    ALL_ZERO,
    AS_IS,
    DITHERED,
    NEAREST,
    REPEATED,
    ROUNDS,
    STOCHASTIC,
    block_highest,
    block_max,
    block_min,
    block_sum,
    count_ones,
    dither_of,
    either,
    first_thread,
    gather,
    join_bits,
    join_lanes,
    moves_of,
    of_block,
    places_of,
    random_of,
    shrink,
    split_slices,
    tile_index,
    transpose,
    valid_bits,
)

ORIGIN = tl.constexpr(12582912.0)  # 1.5 * 2^23: a float that is larger by an integer has it in its last bits
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
def floor_of(v):
    """Return 1.5 * 2^23 plus the integers below values smaller than 2^22."""
    if INTERPRETED or v.dtype == tl.float64:
        return tl.floor(v).to(tl.float32) + ORIGIN
    else:
        # The sum, rounded down.
        return tl.inline_asm_elementwise(
            "add.rm.f32 $0, $1, 0f4B400000;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def levels_of(v, eb_c, hash, ROUNDING: tl.constexpr):
    """Return ORIGIN plus the levels of finite values, fp32: the last bits are the level, without a conversion."""
    inverse = divide(tl.full((), 0.5, eb_c.dtype), eb_c)
    shifted = v - eb_c if ROUNDING == STOCHASTIC else v
    level = floor_of(shifted * inverse)
    if ROUNDING != NEAREST:
        rest = (shifted - (level - ORIGIN).to(v.dtype) * (eb_c * 2.0)) * inverse
        level = tl.where(hash < (rest * 16777216.0).to(tl.int32), level + 1.0, level)
    if ROUNDING == STOCHASTIC:
        level = tl.where(v < 0, tl.minimum(level, ORIGIN - 1.0), tl.maximum(level, ORIGIN))
    if ROUNDING == NEAREST:
        # With smaller steps no product of a negative value is rounded to zero.
        if eb_c >= 1.0:
            level = tl.where(v < 0, tl.minimum(level, ORIGIN - 1.0), level)
    return level if ROUNDING == NEAREST else tl.where(v != 0, level, ORIGIN)


@triton.jit
def decoded_of(level, eb_c, hash, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Return the values that levels decode to."""
    level = level.to(eb_c.dtype)
    if ROUNDING == DITHERED:
        value = (level + dither_of(hash, eb_c.dtype)) * (eb_c * 2.0)
    elif DTYPE == tl.float32:
        # All digits fit: nothing is rounded, as in (level + 0.5) * 2 eb_c.
        value = tl.fma(level, eb_c * 2.0, eb_c)
    else:
        value = (level + 0.5) * (eb_c * 2.0)
    return widen(narrow(value, DTYPE), DTYPE)


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
def number_of(level, slope, shift):
    """Return the numbers of levels: distances from a base of one kind, or zigzag. All is exact in fp32."""
    return tl.abs(level * slope + shift) - 0.5


@triton.jit
def tile_numbers(level, slope, shift):
    """Return the numbers of a tile as int32 with 75 in the highest byte, without a conversion."""
    return (tl.abs(tl.fma(level, of_block(slope), of_block(shift))) + 8388607.5).to(tl.int32, bitcast=True)


@triton.jit
def choose_forms(level, low, high, total, n):
    """Return slope and shift of the numbers to store, their largest, base, order, low bits and whether that is all."""
    mean = divide(total.to(tl.float32), tl.maximum(n, 1).to(tl.float32))
    centre = tl.floor(mean + 0.5)
    down = mean < centre
    # Order 2 is order 1 of negated levels.
    slope = tl.where(down, -2.0, 2.0)
    shift = centre * -slope - 0.5
    of_zero = number_of(0.0, slope, shift).to(tl.int32)
    turned = tile_numbers(level, slope, shift) - 0x4B000000
    sum_turned = (block_sum(turned) - (256 - n) * of_zero).to(tl.uint32)
    sum_plain = (total - n * low).to(tl.uint32)
    k_plain, k_turned = rice_parameter(n, sum_plain), rice_parameter(n, sum_turned)
    bits_plain, bits_turned = estimate(n, sum_plain, k_plain), estimate(n, sum_turned, k_turned)
    width = bit_width(high - low)
    fixed = n * width <= tl.minimum(bits_plain, bits_turned)
    zigzag = (fixed == 0) & (bits_turned < bits_plain)
    k = tl.where(fixed, width, tl.where(zigzag, k_turned, k_plain))
    base = tl.where(zigzag, centre.to(tl.int32), low)
    order = tl.where(zigzag, tl.where(down, 2, 1), 0)
    slope, shift = tl.where(zigzag, slope, 1.0), tl.where(zigzag, shift, 0.5 - low.to(tl.float32))
    ends = tl.maximum(number_of(low.to(tl.float32), slope, shift), number_of(high.to(tl.float32), slope, shift))
    return slope, shift, ends.to(tl.int32), base, order, k, fixed


@triton.jit
def less_four(planes):
    """Return planes of numbers from 4 on, less four: bit 2 is inverted, and what lies above takes the borrow."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    some3, none = p2 | p3, 0xFFFFFFFF
    some4 = some3 | p4
    some5 = some4 | p5
    some6 = some5 | p6
    p7, p6, p5 = p7 ^ some6 ^ none, p6 ^ some5 ^ none, p5 ^ some4 ^ none
    return p0, p1, p2 ^ none, p3 ^ p2 ^ none, p4 ^ some3 ^ none, p5, p6, p7


@triton.jit
def put_words(payload, bit, word):
    """Write words that end with their highest bit that is set, from a bit of the payload on."""
    words = payload.to(tl.pointer_type(tl.int32)) + (bit >> 5)
    moved = word.to(tl.uint64) << (bit & 31).to(tl.uint64)
    low, high = moved.to(tl.int32), (moved >> 32).to(tl.int32)
    # Words are shared by threads, and bits are not: the order does not matter.
    if INTERPRETED:
        tl.atomic_or(words, low, mask=low != 0, sem="relaxed")
        tl.atomic_or(words + 1, high, mask=high != 0, sem="relaxed")
    else:
        # Triton looks for a layout of each of its own.
        tl.inline_asm_elementwise(
            "{.reg .pred p, q; setp.ne.b32 p, $2, 0; setp.ne.b32 q, $3, 0; mov.b32 $0, 0;"
            "@p red.relaxed.gpu.global.or.b32 [$1], $2; @q red.relaxed.gpu.global.or.b32 [$1+4], $3;}",
            "=r,l,r,r", [words.to(tl.int64), low, high], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def put_number(payload, bit, number):
    """Write a number of each block."""
    word = tl.where(first_thread(), number[None, None, :], 0)
    put_words(payload, bit[None, None, :] + tl.zeros_like(word), word.to(tl.uint32, bitcast=True))


@triton.jit
def put_chunk(payload, bit, count, planes, width, some, mask, moves):
    """Write the first `width` of eight planes under the mask of the moves, `count` bits apart.

    `some` has a bit for each plane that any block has.
    """
    for p in tl.static_range(8):
        if ((some >> p) & 1) > 0:
            word = tl.where((p < width)[None, None, :], planes[p] & mask, 0)
            put_words(payload, bit + (p * count)[None, None, :], gather(word, moves))


@triton.jit
def put_planes(payload, bit, count, number, FIRST: tl.constexpr, width, mask):
    """Write bits FIRST to `width` of the numbers under the mask, one plane after the other."""
    moves, most = moves_of(mask), tl.max(width, 0)
    p = tl.full((), FIRST, tl.int32)
    while p < most:
        word = tl.where((p < width)[None, None, :], join_bits((number >> p) & 1) & mask, 0)
        put_words(payload, bit + (p * count)[None, None, :], gather(word, moves))
        p += 1


@triton.jit
def put_round(payload, bit, alive, more):
    """Write a bit of the unary codes that have not ended."""
    put_words(payload, bit, gather(more, moves_of(alive)))


@triton.jit
def put_flags(payload, at, mask, left):
    """Write the bits of the values that there are; `left` remain in the group."""
    valid = valid_bits(left)
    if left < 4096:
        mask = gather(mask & valid, moves_of(valid))
    place, _ = places_of(count_ones(valid))
    put_words(payload, at[None, None, :] + place, mask)


@triton.jit
def put_raw(payload, start, x, count, SIZE: tl.constexpr):
    """Copy the first `count` stored values of each block to byte `start`, byte by byte."""
    first = 0
    while first < 256:
        i = (first + tl.arange(0, 16))[None, :]
        here = i < count[:, None]
        bits = float_bits(tl.load(x + (tl.arange(0, 16) * 256)[:, None] + i, mask=here, other=0))
        part = 0
        while part < SIZE:
            tl.store(payload + start[:, None] + i * SIZE + part, ((bits >> (8 * part)) & 255).to(tl.uint8), mask=here)
            part += 1
        first += 16


@triton.jit
def put_tables(meta, group, groups, offset, code, head, inside):
    """Write the metadata of a group."""
    tl.store((meta + 16).to(tl.pointer_type(tl.int32)) + group, offset.to(tl.int32))
    tl.store(meta + 16 + groups * 4 + group, code.to(tl.uint8))
    # The first thread of a block writes its head: a tensor of one number for each block would go to other threads.
    head = head[None, None, :] + tl.zeros((2, 4, 16), tl.int32)
    heads = meta + 16 + groups * 5 + (group * 16 + tl.arange(0, 16)[None, None, :] + tl.zeros_like(head)) * 3
    here = first_thread() & (inside > 0)[None, None, :]
    byte = 0
    while byte < 3:
        tl.store(heads + byte, ((head >> (8 * byte)) & 255).to(tl.uint8), mask=here)
        byte += 1


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
    mask = join_bits(v != 0)
    if eb == 0:
        mask = join_bits(bits != 0)
    place, n = places_of(count_ones(mask))
    least, greatest = block_min(bits), block_max(bits)
    if left < 4096:
        here = of_block(tl.where(inside > 0, inside, 1)) > (i & 255)
        MOST: tl.constexpr = 2**63 - 1 if SIZE == 8 else 2**31 - 1
        least, greatest = block_min(tl.where(here, bits, MOST)), block_max(tl.where(here, bits, -MOST - 1))

    safe = tl.where(eb == 0, 1.0, eb).to(eb.dtype)
    limit = safe * 1048576.0
    top = block_highest(tl.abs(v))
    beyond = (top < limit) == 0
    largest = highest(top, 0)
    if (largest < limit) == 0:
        v = tl.where(tl.abs(v) < limit, v, 0.0)
        largest = highest(block_highest(tl.abs(v)), 0)
    code = tl.where(eb == 0, 0, shrink_code(largest, safe, DTYPE))
    eb_c = shrink(safe, code, DTYPE)
    hash = random_of(group, i, seed_low, seed_high)
    level = levels_of(v, eb_c, hash, ROUNDING)
    level_bits = level.to(tl.int32, bitcast=True)
    low, high = block_min(level_bits) - 0x4B400000, block_max(level_bits) - 0x4B400000
    level_sum = block_sum(level_bits - 0x4B400000)
    level -= ORIGIN
    # Zeros pass.
    error = block_highest(tl.abs(decoded_of(level, eb_c, hash, DTYPE, ROUNDING) - v))
    must_raw = beyond | ((tl.where(eb == 0, float("inf"), error) <= allowed) == 0)

    slope, shift, most, base, order, k, fixed = choose_forms(level, low, high, level_sum, n)
    number = tile_numbers(level, slope, shift)
    planes = transpose(split_slices(join_lanes(number, False)))
    quotient = (number << 9).to(tl.uint32, bitcast=True) >> of_block(tl.minimum(k + 9, 31)).to(tl.uint32)
    quotients = transpose(split_slices(join_lanes(quotient.to(tl.int32), True)))
    q0, q1, q2, q3, q4, q5, q6, q7 = quotients
    alive = tl.where(fixed[None, None, :], 0, mask)
    more3 = (q2 | q3 | q4 | q5 | q6 | q7) & alive
    more2 = more3 | (q0 & q1 & alive)
    more1 = more3 | (q1 & alive)
    more0 = more1 | (q0 & alive)
    place0, count0 = places_of(count_ones(more0))
    place1, count1 = places_of(count_ones(more1))
    place2, count2 = places_of(count_ones(more2))
    place3, escapes = places_of(count_ones(more3))
    unary = tl.where(fixed, 0, n) + count0 + count1 + count2
    furthest = most >> k
    width = tl.where(escapes > 0, bit_width(tl.maximum(furthest - ROUNDS, 0)), 0)
    sparse = n < inside
    size = (n * k + unary + tl.where(escapes > 0, 5 + escapes * width, 0) + tl.where(sparse, inside, 0) + 7) >> 3
    wide = (base < -128) | (base > 127) | (k > 7) | (most > 255) | (size > 255)
    size += tl.where(wide, 4, 0)
    use_raw = must_raw | (size >= inside * SIZE)
    special = tl.where(n == 0, ALL_ZERO, tl.where(least == greatest, REPEATED, tl.where(use_raw, AS_IS, 0)))
    plain = special == 0
    raw = tl.where(special == AS_IS, inside, tl.where(special == REPEATED, 1, 0))
    size = tl.where(plain, size, raw * SIZE)
    k, width = tl.where(plain, k, 0), tl.where(plain, width, 0)

    # Which planes any block has, more than eight, and whether any is raw.
    far = (width > 0) & (furthest > 255)
    some = ((1 << tl.minimum(k, 9)) - 1) | (((1 << tl.minimum(width, 8)) - 1) << 9)
    some |= (far.to(tl.int32) << 17) | ((raw > 0).to(tl.int32) << 18)
    some = tl.reduce(some, 0, either)
    ends = tl.cumsum(size, 0)
    start = ends - size
    units = (tl.max(ends, 0) + 3) >> 2
    reserved = tl.atomic_add(sizes + attempt, units.to(tl.int64), sem="relaxed")
    flags = (sparse.to(tl.int32) << 3) | (fixed.to(tl.int32) << 4) | (order << 5)
    second = tl.where(wide, (size >> 8) | (k << 3), base)
    what = tl.where(plain, flags | tl.where(wide, 128, k), special)
    head = tl.where(plain, (size & 255) | ((second & 255) << 8), 0) | (what << 16)
    put_tables(meta, group, groups, reserved, code, head, inside)
    if (reserved + units) * 4 > capacity:
        return
    payload += reserved * 4
    put_zeros(payload, units)

    at = start * 8
    put_number(payload, at, tl.where(wide & plain, base, 0))
    at += tl.where(wide, 32, 0)
    put_flags(payload, at, tl.where((sparse & plain)[None, None, :], mask, 0), left)
    at += tl.where(sparse, inside, 0)
    mask = tl.where(plain[None, None, :], mask, 0)
    more = (more0 & mask, more1 & mask, more2 & mask, more3 & mask)
    last = at + n * k + unary + 5
    # Rare, and first: these need the numbers, which then are no longer kept.
    if (some & (1 << 8)) > 0:
        put_planes(payload, at[None, None, :] + place, n, number & 0x7FFFFF, 8, k, mask)
    if (some & (1 << 17)) > 0:
        rest = ((number & 0x7FFFFF) >> of_block(k)) - ROUNDS
        put_planes(payload, last[None, None, :] + place3, escapes, rest, 0, width, more[3])

    moves = moves_of(mask)
    put_chunk(payload, at[None, None, :] + place, n, planes, k, some, mask, moves)
    at += n * k
    put_words(payload, at[None, None, :] + place, gather(more[0], moves))
    at += tl.where(fixed, 0, n)
    put_round(payload, at[None, None, :] + place0, more[0], more[1])
    at += count0
    put_round(payload, at[None, None, :] + place1, more[1], more[2])
    at += count1
    put_round(payload, at[None, None, :] + place2, more[2], more[3])
    put_number(payload, last - 5, width)
    if (((some >> 9) & 255) > 0) & ((some & (1 << 17)) == 0):
        rests = less_four(quotients)
        put_chunk(payload, last[None, None, :] + place3, escapes, rests, width, some >> 9, more[3], moves_of(more[3]))
    if (some & (1 << 18)) > 0:
        put_raw(payload, start, x, raw, SIZE)
