"""Encoder of error-bounded values on the CPU. docs/design.md explains the format."""

from __future__ import annotations

import math

import numpy as np

from encke.kernels.cpu.planes_decode import WORDS, fill_steps, value_of
from encke.kernels.cpu.scalars import (
    as_float,
    bit_width,
    exponent,
    f32,
    from_magnitude,
    i32,
    i64,
    index,
    inline,
    jit,
    magnitude,
    random24,
    u8,
    u32,
    u64,
    widen,
)
from encke.kernels.cpu.words import copy_bytes, count_ones, gather, get_plane, put_bits, turn_block
from encke.kernels.formats import (
    ALL_ZERO,
    AS_IS,
    COIN,
    DITHERED,
    MASK32,
    NEAREST,
    PLANE_BLOCK,
    PLANE_GROUP,
    PLANE_HEADER,
    PLANE_WORD,
    REPEATED,
    ROUNDS,
    SIGNED,
    STOCHASTIC,
)

COIN_LOW, COIN_HIGH = u32(COIN & MASK32), u32(COIN >> 32)


@inline
def load_group(x, first, v, limit):
    """Widen a group to `v`, padded with zeros; return the largest magnitude below the limit."""
    first, size = index(first), min(x.size - first, PLANE_GROUP)
    zero = magnitude(as_float(0, v[0]))
    largest = zero
    for i in range(size):
        v[i] = widen(x[first + i])
        m = magnitude(v[i])
        largest = max(largest, m if m < limit else zero)
    for i in range(size, PLANE_GROUP):
        v[i] = 0
    return from_magnitude(largest)


@inline
def usable(value, limit, eb):
    """Return a value, or zero if its magnitude reaches the limit."""
    return value if magnitude(value) < limit else as_float(0, eb)


@inline
def misses(v, back, limit, allowed):
    """Return whether the error of a decoded value exceeds `allowed`; zeros are not decoded."""
    return i32((magnitude(v) >= limit) | ((v != 0) & (not abs(back - v) <= allowed)))


@inline
def misses_little(v, back, allowed):
    """Return whether the error exceeds `allowed` but is rounded to it; zeros are not decoded."""
    near = back - v
    part = near - back
    rest = (back - (near - part)) - (v + part)
    return i32((v != 0) & (abs(near) == allowed) & ((rest < 0) if near < 0 else (rest > 0)))


@inline
def signed_level(x, cell, extra, least, factor, coin):
    """Return the level of SIGNED from the cell below the magnitude and dithering's increment; see the reference."""
    above = min((abs(x) - least) * factor, as_float(0.5, factor))
    kept = as_float(coin, factor) * f32(2.0**-24) * ((above + f32(0.5)) * (above + f32(0.5))) < above * f32(2.0)
    cell = i32(cell + extra) if kept else i32(0)
    return i32(-1 - cell) if x < 0 else cell


@inline
def find_levels(v, at, k, like, limit, eb, eb_c, allowed, least, rounding, start, seed_low, seed_high):
    """Round the values of a block to levels; return whether any error would exceed `allowed`."""
    bad, factor, step = i32(0), f32(0.5) / eb_c, eb_c * f32(2.0)
    for w in range(WORDS):
        for i in range(PLANE_WORD):
            j = index(at) + w * PLANE_WORD + i
            x = usable(v[j], limit, eb)
            shifted = x - eb_c if rounding == STOCHASTIC else abs(x) if rounding == SIGNED else x
            q = shifted * factor
            level = i32(q)
            level = i32(level - (as_float(level, q) > q))
            random = i32(1 << 24)
            if rounding != NEAREST:
                word, turn = u32(start // 4 + w * 16 + (i & 15)), u32(i >> 4 << 3)
                random = random24(word, turn, seed_low, seed_high)
                rest = i32((shifted - as_float(level, q) * step) * factor * f32(2.0**24))
                if rounding == SIGNED:
                    coin = random24(word, turn, u32(seed_low ^ COIN_LOW), u32(seed_high ^ COIN_HIGH | u32(1)))
                    level = signed_level(x, level, i32(rest - random + 3 * 2**23 - 1 >> 24), least, factor, coin)
                else:
                    level = i32(level + (random < rest))
            if rounding < DITHERED:
                random = i32(1 << 24)
                level = min(level, i32(-1)) if x < 0 else max(level, i32(0))
            k[w * PLANE_WORD + i] = level
            back = widen(value_of(level, random, eb_c, least, rounding, like))
            bad |= misses(v[j], back, limit, allowed)
            if rounding >= DITHERED:
                # Not needed without a random number: values next to zero decode to the middle of their cell.
                bad |= misses_little(v[j], back, allowed)
    return bad


@inline
def measure_block(v, at, k, flags):
    """Set the levels of zeros to zero and flag other values; return their number, and range and sum of the levels."""
    low, high, n, total = i32(1 << 30), i32(-(1 << 30)), i32(0), i32(0)
    for i in range(PLANE_BLOCK):
        coded = v[index(at) + i] != 0
        flags[i] = coded
        k[i] = k[i] if coded else i32(0)
        low, high = min(low, k[i]), max(high, k[i])
        n, total = i32(n + coded), i32(total + k[i])
    return i64(n), i64(low), i64(high), i64(total)


@inline
def turn(k, base, down):
    """Map the distance from the base to a non-negative number: zigzag, upwards or downwards first."""
    distance = i32(base - k) if down else i32(k - base)
    return i32(2 * distance - 1) if distance > 0 else i32(-2 * distance)


@inline
def sum_turned(k, flags, base, down):
    """Return the sum of the numbers to which `turn` maps the levels, each at most 2^23."""
    total = u32(0)
    for i in range(PLANE_BLOCK):
        total = u32(total + u32(turn(k[i], base, down) if flags[i] else i32(0)))
    return i64(total)


@inline
def map_levels(k, base, order):
    """Replace levels by the numbers to store; return the largest number."""
    largest = i32(0)
    for i in range(PLANE_BLOCK):
        k[i] = i32(k[i] - base) if order == 0 else turn(k[i], base, order == 2)
        largest = max(largest, k[i])
    return i64(largest)


@inline
def rice_parameter(n, total):
    """Return the number of low bits for n values with that sum."""
    k = 0
    while total > 3 * n << k >> 1:
        k += 1
    return k


@inline
def estimate(n, total, k):
    """Estimate the number of bits of n values with that sum, with k low bits each."""
    return n * (k + 1) + (max(total - ((n << k) - n >> 1), 0) >> k)


@inline
def fill_bytes(k, shift, bytes_):
    """Write eight bits of each number, from bit `shift` on, to `bytes_`."""
    for i in range(PLANE_BLOCK):
        bytes_[i] = u8(k[i] >> shift)


@inline
def fill_unary(k, shift, quotients, bytes_):
    """Write the quotients, clamped to a byte, and their unary codes: as many set bits, at most ROUNDS."""
    for i in range(PLANE_BLOCK):
        quotients[i] = u8(min(i32(k[i] >> shift), i32(255)))
    for i in range(PLANE_BLOCK):
        bytes_[i] = u8(0)
        for j in range(ROUNDS):
            bytes_[i] |= u8(u8(quotients[i] > j) << j)


@inline
def fill_escaped(quotients, bytes_):
    """Write the remainders of the quotients after the unary code."""
    for i in range(PLANE_BLOCK):
        bytes_[i] = u8(max(quotients[i], u8(ROUNDS)) - u8(ROUNDS))


@inline
def put_plane(stream, at, carry, rows, shift, masks):
    """Write one bit of each byte under the masks."""
    for w in range(WORDS):
        word = gather(get_plane(rows, 8 * w, shift), masks[w])
        at, carry = put_bits(stream, at, carry, word, count_ones(masks[w]))
    return at, carry


@inline
def put_planes(stream, at, carry, k, width, rows, bytes_, masks):
    """Write the lowest `width` bits of the numbers under the masks, plane by plane."""
    for p in range(width):
        if p & 7 == 0:
            fill_bytes(k, i32(p), bytes_)
            turn_block(rows)
        at, carry = put_plane(stream, at, carry, rows, u64(p & 7), masks)
    return at, carry


@inline
def put_block(stream, k, flags, rows, bytes_, quotients, masks, valid, sparse, low_bits, fixed, largest):
    """Write a block to the stream and return its size in bits."""
    at, carry = i64(0), u64(0)
    for i in range(PLANE_BLOCK):
        bytes_[i] = flags[i]
    turn_block(rows)
    for w in range(WORDS):
        masks[w] = get_plane(rows, 8 * w, u64(0))
    if sparse and valid == PLANE_BLOCK:
        for w in range(WORDS):
            at, carry = put_bits(stream, at, carry, masks[w], u64(PLANE_WORD))
    elif sparse:
        for i in range(PLANE_BLOCK):
            bytes_[i] = i < valid
        turn_block(rows)
        for w in range(WORDS):
            inside = get_plane(rows, 8 * w, u64(0))
            at, carry = put_bits(stream, at, carry, gather(masks[w], inside), count_ones(inside))
    at, carry = put_planes(stream, at, carry, k, low_bits, rows, bytes_, masks)
    if fixed:
        return at
    fill_unary(k, i32(low_bits), quotients, bytes_)
    turn_block(rows)
    escaped = u64(0)
    for j in range(ROUNDS):
        escaped = u64(0)
        for w in range(WORDS):
            more = get_plane(rows, 8 * w, u64(j)) & masks[w]
            at, carry = put_bits(stream, at, carry, gather(more, masks[w]), count_ones(masks[w]))
            masks[w] = more
            escaped |= more
    if escaped:
        rest = (largest >> low_bits) - ROUNDS
        width = bit_width(rest)
        at, carry = put_bits(stream, at, carry, u64(width), u64(5))
        if rest <= 255 - ROUNDS:
            fill_escaped(quotients, bytes_)
            turn_block(rows)
            for p in range(width):
                at, carry = put_plane(stream, at, carry, rows, u64(p), masks)
        else:
            for i in range(PLANE_BLOCK):
                k[i] = max(i32(k[i] >> low_bits) - i32(ROUNDS), i32(0))
            at, carry = put_planes(stream, at, carry, k, width, rows, bytes_, masks)
    return at


@inline
def repeats(raw, at, itemsize, valid):
    """Return whether a block is one repeated value, bit for bit."""
    different, here, there = u8(0), index(at), index(at + itemsize)
    for i in range((valid - 1) * itemsize):
        different |= raw[here + i] ^ raw[there + i]
    return different == 0


@inline
def has_bits(raw, at, n):
    """Return whether any bit of n bytes is set."""
    found = u8(0)
    for i in range(n):
        found |= raw[index(at) + i]
    return found != 0


@inline
def encode_block(
    v, at, raw, raw_at, itemsize, valid, bad, eb, k, flags, rows, bytes_, quotients, masks, stream, heads, head, out, to
):
    """Write a block, whose levels are given in `k`, and its head; return its size in bytes."""
    n, low, high, total = measure_block(v, at, k, flags)
    size = valid * itemsize
    heads[head], heads[head + 1] = u8(0), u8(0)
    if n == 0 and (eb != 0 or not has_bits(raw, raw_at, size)):
        heads[head + 2] = u8(ALL_ZERO)
        return 0
    if (bad or v[index(at)] == v[index(at + valid - 1)]) and repeats(raw, raw_at, itemsize, valid):
        heads[head + 2] = u8(REPEATED)
        copy_bytes(raw, raw_at, itemsize, out, to)
        return itemsize
    if not bad and eb != 0:
        mean = f32(total) / f32(n)
        centre = i64(math.floor(mean + f32(0.5)))
        down = mean < f32(centre)
        plain, turned = total - n * low, sum_turned(k, flags, i32(centre), down)
        k_plain, k_turned = rice_parameter(n, plain), rice_parameter(n, turned)
        bits_plain, bits_turned = estimate(n, plain, k_plain), estimate(n, turned, k_turned)
        width = bit_width(high - low)
        fixed = n * width <= min(bits_plain, bits_turned)
        zigzag = not fixed and bits_turned < bits_plain
        order = 0 if not zigzag else 2 if down else 1
        low_bits = width if fixed else k_turned if zigzag else k_plain
        base = centre if zigzag else low
        largest = map_levels(k, i32(base), order)
        sparse = n < valid
        bits = put_block(stream, k, flags, rows, bytes_, quotients, masks, valid, sparse, low_bits, fixed, largest)
        coded = bits + 7 >> 3
        wide = base < -128 or base > 127 or low_bits > 7 or largest > 255 or coded > 255
        coded += 4 if wide else 0
        if coded < size:
            if wide:
                for byte in range(4):
                    out[index(to) + byte] = u8(base >> 8 * byte)
                to += 4
            copy_bytes(stream.view(u8), 0, bits + 7 >> 3, out, to)
            what = sparse << 3 | fixed << 4 | order << 5
            if wide:
                heads[head], heads[head + 1] = u8(coded), u8(coded >> 8 | low_bits << 3)
                heads[head + 2] = u8(what | 128)
            else:
                heads[head], heads[head + 1], heads[head + 2] = u8(coded), u8(base), u8(what | low_bits)
            return coded
    heads[head + 2] = u8(AS_IS)
    copy_bytes(raw, raw_at, size, out, to)
    return size


@jit
def encode_task(
    task, size, x, raw, meta, scratch, slot, units,
    eb, allowed, least, mant, emin, extra, rounding, seed_low, seed_high,
):  # fmt: skip
    """Encode the groups of a task to its slot of `scratch`. Offsets are relative to the slot."""
    like, itemsize, groups = x[0], x.itemsize, (x.size + PLANE_GROUP - 1) // PLANE_GROUP
    offsets, codes = meta[PLANE_HEADER : PLANE_HEADER + 4 * groups].view(u32), meta[PLANE_HEADER + 4 * groups :]
    heads = meta[PLANE_HEADER + 5 * groups :]
    v, steps, k = np.full(PLANE_GROUP, eb), np.full(16, eb), np.empty(PLANE_BLOCK, i32)
    rows, masks, flags = np.empty(PLANE_BLOCK // 8, u64), np.empty(WORDS, u64), np.empty(PLANE_BLOCK, u8)
    bytes_, quotients, stream = rows.view(u8), np.empty(PLANE_BLOCK, u8), np.empty(PLANE_BLOCK + 128, u64)
    fill_steps(steps, eb, itemsize)
    limit, e = magnitude(eb * f32(2.0**20)), exponent(eb)
    begin = at = task * slot
    for group in range(task * size // PLANE_GROUP, min((task + 1) * size // PLANE_GROUP, groups)):
        first = group * PLANE_GROUP
        largest = load_group(x, first, v, limit)
        r = max(exponent(largest + eb), emin) - mant - 1 + extra
        code = 0 if eb == 0 else min(max(e - r, 0), 15)
        eb_c = steps[code]
        offsets[group], codes[group] = (at - begin) // 4, code
        for b in range(min((x.size - first + PLANE_BLOCK - 1) // PLANE_BLOCK, PLANE_GROUP // PLANE_BLOCK)):
            here, start = b * PLANE_BLOCK, first + b * PLANE_BLOCK
            bad, bounds, random = i32(1), (limit, eb, eb_c, allowed, least), (start, seed_low, seed_high)
            if eb != 0 and rounding == NEAREST:
                bad = find_levels(v, here, k, like, *bounds, NEAREST, *random)
            elif eb != 0 and rounding == STOCHASTIC:
                bad = find_levels(v, here, k, like, *bounds, STOCHASTIC, *random)
            elif eb != 0 and rounding == DITHERED:
                bad = find_levels(v, here, k, like, *bounds, DITHERED, *random)
            elif eb != 0:
                bad = find_levels(v, here, k, like, *bounds, SIGNED, *random)
            at += encode_block(
                v, here, raw, start * itemsize, itemsize, min(x.size - start, PLANE_BLOCK), bad != 0, eb, k, flags,
                rows, bytes_, quotients, masks, stream, heads, start // PLANE_BLOCK * 3, scratch, at,
            )  # fmt: skip
        while at & 3:
            scratch[index(at)] = u8(0)
            at += 1
    units[task] = (at - begin) // 4
