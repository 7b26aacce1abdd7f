"""Decoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import float_bits, narrow, random32, widen
from encke.kernels.gpu.shared import get_words, load_words, read_words
from encke.kernels.gpu.tiles import (
    AS_IS,
    DITHERED,
    REPEATED,
    SIGNED,
    count_ones,
    dither_of,
    full_places,
    lane_floats,
    lane_masks,
    least_of,
    moves_of,
    of_block,
    places_of,
    random_of,
    shared_random,
    shrink,
    signed_values,
    slice_words,
    spread,
    tile_index,
    transpose,
    valid_bits,
)


@triton.jit
def get_plane(words, bit, count, n, p, width, mask, moves, dense):
    """Read plane p of the blocks that have it; planes are n bits apart. `dense`: the mask has all bits set."""
    here = (p < width)[None, None, :]
    word = get_words(words, bit + (p * n)[None, None, :], tl.where(here, count, 0))
    if not dense:
        word = spread(word, mask, moves)
    return tl.where(here, word, 0)


@triton.jit
def get_chunk(words, bit, count, n, width, most, mask, moves, dense):
    """Read the first `width` of eight planes for the bits under the mask of the moves; other planes are zero."""
    p0 = tl.zeros((2, 4, 16), tl.uint32)
    p1, p2, p3, p4, p5, p6, p7 = p0, p0, p0, p0, p0, p0, p0
    # Two at a time: fewer branches, and loads that do not wait for each other.
    if most > 0:
        p0 = get_plane(words, bit, count, n, 0, width, mask, moves, dense)
        p1 = get_plane(words, bit, count, n, 1, width, mask, moves, dense)
    if most > 2:
        p2 = get_plane(words, bit, count, n, 2, width, mask, moves, dense)
        p3 = get_plane(words, bit, count, n, 3, width, mask, moves, dense)
    if most > 4:
        p4 = get_plane(words, bit, count, n, 4, width, mask, moves, dense)
        p5 = get_plane(words, bit, count, n, 5, width, mask, moves, dense)
    if most > 6:
        p6 = get_plane(words, bit, count, n, 6, width, mask, moves, dense)
        p7 = get_plane(words, bit, count, n, 7, width, mask, moves, dense)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def tile_bits(word):
    """Return the 32 bits of each thread as a tile."""
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :, None]
    lane = tl.arange(0, 4).to(tl.uint32)[None, None, None, None, :]
    return ((word[:, :, :, None, None] >> (lane * 8 + slice)) & 1).to(tl.int32)


@triton.jit
def add_planes(number, words, bit, count, n, width, shift, mask):
    """Read numbers of any width under a mask, shift them left by `shift`, and add them to a tile."""
    moves, most = moves_of(mask), tl.max(width, 0)
    p = 0
    while p < most:
        number += tile_bits(get_plane(words, bit, count, n, p, width, mask, moves, False)) << of_block(shift + p)
        p += 1
    return number


@triton.jit
def get_flags(payload, at, sparse, left):
    """Read the mask of the non-zero values among the `left` ones of the group; all of them if a block is not sparse."""
    here = sparse[None, None, :]
    valid, count, place = tl.full((2, 4, 16), 0xFFFFFFFF, tl.uint32), tl.full((2, 4, 16), 32, tl.int32), full_places()
    if left < 4096:
        valid = valid_bits(left)
        count = count_ones(valid)
        place, _ = places_of(count)
    # Triton's own load from global memory sets the layout that the other tensors get.
    flags = load_words(payload, at[None, None, :] + place, tl.where(here, count, 0))
    if left < 4096:
        flags = spread(flags, valid, moves_of(valid))
    return tl.where(here, flags, valid)


@triton.jit
def get_round(words, at, alive):
    """Read the next bit of the unary codes that have not ended; return also the position after these bits."""
    count = count_ones(alive)
    place, total = places_of(count)
    word = get_words(words, at[None, None, :] + place, count)
    return spread(word, alive, moves_of(alive)), at + total


@triton.jit
def get_unary(words, at, place, count, n, coded, fixed, moves, dense):
    """Read unary codes: return which quotients are larger than 0, 1, 2 and 3, and the position after the codes."""
    alive = tl.where(fixed[None, None, :], 0, coded)
    word = get_words(words, at[None, None, :] + place, tl.where(fixed[None, None, :], 0, count))
    if not dense:
        word = spread(word, coded, moves)
    more0 = word & alive
    more1, at = get_round(words, at + tl.where(fixed, 0, n), more0)
    more2, at = get_round(words, at, more1)
    more3, at = get_round(words, at, more2)
    return more0, more1, more2, more3, at


@triton.jit
def get_width(words, at, some):
    """Read the width of the remainders of long quotients, for blocks that have `some`."""
    return tl.where(some > 0, get_words(words, at, tl.where(some > 0, 5, 0)) & 31, 0).to(tl.int32)


@triton.jit
def raise_planes(planes, k):
    """Return the planes of numbers below 256, multiplied by 2^k."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    one, two, four = (k & 1) > 0, (k & 2) > 0, (k & 4) > 0
    p7, p6, p5, p4 = tl.where(one, p6, p7), tl.where(one, p5, p6), tl.where(one, p4, p5), tl.where(one, p3, p4)
    p3, p2, p1, p0 = tl.where(one, p2, p3), tl.where(one, p1, p2), tl.where(one, p0, p1), tl.where(one, 0, p0)
    p7, p6, p5, p4 = tl.where(two, p5, p7), tl.where(two, p4, p6), tl.where(two, p3, p5), tl.where(two, p2, p4)
    p3, p2, p1, p0 = tl.where(two, p1, p3), tl.where(two, p0, p2), tl.where(two, 0, p1), tl.where(two, 0, p0)
    p7, p6, p5, p4 = tl.where(four, p3, p7), tl.where(four, p2, p6), tl.where(four, p1, p5), tl.where(four, p0, p4)
    return tl.where(four, 0, p0), tl.where(four, 0, p1), tl.where(four, 0, p2), tl.where(four, 0, p3), p4, p5, p6, p7


@triton.jit
def turn_planes(planes, zigzag):
    """Return the planes of numbers. Zigzag numbers become 127 + distance, which is -h for 2h and h + 1 for 2h + 1."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    even = p0 ^ 0xFFFFFFFF
    t0, t1, t2, t3 = (
        tl.where(zigzag, p1 ^ even, p0),
        tl.where(zigzag, p2 ^ even, p1),
        tl.where(zigzag, p3 ^ even, p2),
        tl.where(zigzag, p4 ^ even, p3),
    )
    t4, t5, t6 = tl.where(zigzag, p5 ^ even, p4), tl.where(zigzag, p6 ^ even, p5), tl.where(zigzag, p7 ^ even, p6)
    return t0, t1, t2, t3, t4, t5, t6, tl.where(zigzag, p0, p7)


@triton.jit
def get_bytes(words, at, k, coded, fixed, zigzag, dense):
    """Read numbers below 256 from bit `at` of each block, as four bytes in a word for each of eight slices.

    The numbers are those that `turn_planes` returns.
    """
    moves, count = (coded, coded, coded, coded, coded, coded), tl.full((2, 4, 16), 32, tl.int32)
    place, n = full_places(), tl.full((16,), 256, tl.int32)
    if not dense:
        moves, count = moves_of(coded), count_ones(coded)
        place, n = places_of(count)
    p0, p1, p2, p3, p4, p5, p6, p7 = get_chunk(
        words, at[None, None, :] + place, count, n, k, tl.max(k, 0), coded, moves, dense
    )
    more0, more1, more2, more3, at = get_unary(words, at + n * k, place, count, n, coded, fixed, moves, dense)
    q0, q1, q2 = (more0 ^ more1) | (more2 ^ more3), more1 ^ more3, more3
    q3 = tl.zeros((2, 4, 16), tl.uint32)
    q4, q5, q6, q7 = q3, q3, q3, q3
    count = count_ones(more3)
    place, n = places_of(count)
    width = get_width(words, at, n)
    most = tl.max(width, 0)
    if most > 0:
        bit = (at + 5)[None, None, :] + place
        r0, r1, r2, r3, r4, r5, r6, r7 = get_chunk(words, bit, count, n, width, most, more3, moves_of(more3), False)
        # Add four, plane by plane.
        q0, q1, q2, carry = q0 | r0, q1 | r1, more3 ^ r2, more3 & r2
        q3, carry = r3 ^ carry, r3 & carry
        q4, carry = r4 ^ carry, r4 & carry
        q5, carry = r5 ^ carry, r5 & carry
        q6, q7 = r6 ^ carry, r7 ^ (r6 & carry)
    q0, q1, q2, q3, q4, q5, q6, q7 = raise_planes((q0, q1, q2, q3, q4, q5, q6, q7), k[None, None, :])
    planes = (p0 | q0, p1 | q1, p2 | q2, p3 | q3, p4 | q4, p5 | q5, p6 | q6, p7 | q7)
    return transpose(turn_planes(planes, zigzag))


@triton.jit
def get_numbers(words, at, k, coded, fixed):
    """Read numbers of any size from bit `at` of each block, as a tile."""
    count = count_ones(coded)
    place, n = places_of(count)
    number = tl.zeros((2, 4, 16, 8, 4), tl.int32)
    number = add_planes(number, words, at[None, None, :] + place, count, n, k, tl.zeros_like(k), coded)
    more0, more1, more2, more3, at = get_unary(words, at + n * k, place, count, n, coded, fixed, moves_of(coded), False)
    number += (tile_bits(more0) + tile_bits(more1) + tile_bits(more2) + tile_bits(more3)) << of_block(k)
    count = count_ones(more3)
    place, n = places_of(count)
    return add_planes(number, words, (at + 5)[None, None, :] + place, count, n, get_width(words, at, n), k, more3)


@triton.jit
def slice_values(bytes, form, eb_c, least, hash, ROUNDING: tl.constexpr):
    """Decode the numbers of a slice, without setting zeros; return the bits of the values."""
    sign, zero = form
    level = tl.fma(lane_floats(bytes).to(eb_c.dtype), sign, zero)
    if ROUNDING == SIGNED:
        return float_bits(signed_values(level, hash, eb_c, least))
    if ROUNDING == DITHERED:
        level += dither_of(hash, eb_c.dtype)
    return float_bits(level * (eb_c * 2.0))


@triton.jit
def narrow_values(words, at, k, base, what, coded, step, dense, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Decode a group in which no number is larger than 255."""
    eb_c, least, group, seed_low, seed_high = step
    dtype = eb_c.dtype
    order = (what >> 5) & 3
    sign = tl.where(order == 2, -1, 1)
    zero = (base - sign * tl.where(order > 0, 32768 + 127, 32768)).to(dtype) + (0.0 if ROUNDING == DITHERED else 0.5)
    form = (sign.to(dtype)[None, None, :, None], zero[None, None, :, None])
    bytes = get_bytes(words, at, k, coded, (what & 16) > 0, (order > 0)[None, None, :], dense)
    values = ()
    for parity in tl.static_range(2):
        random = random32(slice_words(group, parity), seed_low, seed_high)
        for quarter in tl.static_range(4):
            hash = shared_random(random, quarter)
            bits = slice_values(bytes[2 * quarter + parity], form, eb_c, least, hash, ROUNDING)
            if not dense:
                bits &= lane_masks(coded << (7 - 2 * quarter - parity)).to(bits.dtype)
            values += (narrow(bits.to(dtype, bitcast=True), DTYPE),)  # type: ignore[assignment]
    # One tile for one store: Triton searches for the best layout of each store.
    even = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))  # type: ignore[misc]
    odd = tl.join(tl.join(values[4], values[6]), tl.join(values[5], values[7]))  # type: ignore[misc]
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 1, 2, 4, 5, 6, 3)), (2, 4, 16, 8, 4))


@triton.jit
def wide_values(words, at, k, base, what, coded, step, DTYPE: tl.constexpr, ROUNDING: tl.constexpr):
    """Decode a group with numbers of any size."""
    eb_c, least, group, seed_low, seed_high = step
    order = (what >> 5) & 3
    number = get_numbers(words, at, k, coded, (what & 16) > 0)
    half = (number + 1) >> 1
    distance = tl.where((number & 1) > 0, half, -half) * of_block(tl.where(order == 2, -1, 1))
    level = (tl.where(of_block(order) == 0, number, distance) + of_block(base)).to(eb_c.dtype)
    hash = random_of(group, tile_index(), seed_low, seed_high)
    if ROUNDING == SIGNED:
        values = signed_values(level + 0.5, hash, eb_c, least)
    else:
        values = (level + (dither_of(hash, eb_c.dtype) if ROUNDING == DITHERED else 0.5)) * (eb_c * 2.0)
    return narrow(tl.where(tile_bits(coded) > 0, values, 0.0), DTYPE)


@triton.jit
def get_raw(payload, start, out, grad, count, repeated, DTYPE: tl.constexpr, MASK: tl.constexpr, GATE: tl.constexpr):
    """Copy `count` raw values of each block from byte `start`; if `repeated`, copy one value `count` times.

    See `decode_kernel` for MASK and GATE.
    """
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    WHOLE: tl.constexpr = tl.int64 if SIZE == 8 else (tl.int32 if SIZE == 4 else tl.int16)
    first = 0
    while first < 256:
        i = (first + tl.arange(0, 16))[None, :]
        here = i < count[:, None]
        at = start[:, None] + tl.where(repeated[:, None], 0, i) * SIZE
        bits = tl.zeros((16, 16), WHOLE)
        part = 0
        while part < SIZE:
            bits |= (tl.load(payload + at + part, mask=here, other=0).to(WHOLE) << (8 * part)).to(WHOLE)
            part += 1
        value = bits if DTYPE == tl.bfloat16 else bits.to(DTYPE, bitcast=True)
        place = (tl.arange(0, 16) * 256)[:, None] + i
        if GATE:
            value = tl.where(widen(value, DTYPE) != 0, tl.load(grad + place, mask=here, other=0), 0)
        tl.store(out + place, (widen(value, DTYPE) != 0).to(tl.uint8) if MASK else value, mask=here)
        first += 16


@triton.jit(do_not_specialize=["capacity"])
def decode_kernel(
    meta, payload, out, grad, numel: tl.int64, capacity: tl.int64,
    DTYPE: tl.constexpr, MASK: tl.constexpr, GATE: tl.constexpr, ROUNDING: tl.constexpr,
):  # fmt: skip
    """Decode a group. A group that the encoder had no space for decodes to NaN, or with MASK to zeros.

    With MASK, write which values are not zero. With GATE, write `grad` where values are not zero, else zero.
    """
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    STORED: tl.constexpr = tl.int16 if DTYPE == tl.bfloat16 else DTYPE
    group = tl.program_id(0).to(tl.int64)
    groups = (numel + 4095) >> 12
    left = tl.minimum(numel - group * 4096, 4096).to(tl.int32)
    block = tl.arange(0, 16)
    inside = tl.minimum(tl.maximum(left - block * 256, 0), 256)
    heads = meta + 16 + groups * 5 + (group * 16 + block) * 3
    first = tl.load(heads, mask=inside > 0, other=0).to(tl.int32)
    second = tl.load(heads + 1, mask=inside > 0, other=0).to(tl.int32)
    what = tl.load(heads + 2, mask=inside > 0, other=0x60).to(tl.int32)
    plain = (what & 0x60) != 0x60
    wide = plain & (what >= 128)
    size = tl.where(wide, first | ((second & 7) << 8), first)
    size = tl.where(what == AS_IS, inside * SIZE, tl.where(what == REPEATED, SIZE, tl.where(plain, size, 0)))
    raw = tl.where((what == AS_IS) | (what == REPEATED), inside, 0)
    sparse = plain & ((what & 8) > 0)
    full = plain & (sparse == 0) & (inside == 256)
    # Sum of the sizes, and numbers of blocks that are raw, wide, and without zeros, as fields of one integer.
    sums = size | ((raw > 0).to(tl.int32) << 16) | (wide.to(tl.int32) << 21) | (full.to(tl.int32) << 26)
    sums = tl.cumsum(sums, 0)
    start = (sums & 65535) - size
    total = tl.max(sums, 0)
    offset = tl.load((meta + 16).to(tl.pointer_type(tl.uint32)) + group).to(tl.int64) * 4
    out += group * 4096
    grad += group * 4096
    if offset + (total & 65535) > capacity:
        i = tl.arange(0, 4096)
        lost = tl.full((4096,), 0x7FC0 if DTYPE == tl.bfloat16 else float("nan"), STORED)
        tl.store(out + i, tl.zeros((4096,), tl.uint8) if MASK else lost, mask=i < left)
        return
    payload += offset

    at = start * 8 + tl.where(wide, 32, 0)
    coded, dense = tl.full((2, 4, 16), 0xFFFFFFFF, tl.uint32), (total >> 26) == 16
    if not dense:
        coded = tl.where(plain[None, None, :], get_flags(payload, at, sparse, left), 0)
    at += tl.where(sparse, inside, 0)

    i = tile_index()
    here = (i < left) & of_block(raw == 0)
    if MASK:
        tl.store(out + i, tile_bits(coded).to(tl.uint8), mask=here)
    elif GATE:
        tl.store(out + i, tl.where(tile_bits(coded) > 0, tl.load(grad + i, mask=here, other=0), 0), mask=here)
    else:
        words = read_words(payload, ((total & 65535) + 3) >> 2, SIZE)
        eb = tl.load(meta.to(tl.pointer_type(tl.float64))).to(tl.float64 if DTYPE == tl.float64 else tl.float32)
        code = tl.load(meta + 16 + groups * 4 + group).to(tl.int32) & 15
        base = tl.where(second > 127, second - 256, second)
        base = tl.where(wide, get_words(words, start * 8, tl.where(wide, 32, 0)).to(tl.int32, bitcast=True), base)
        k = tl.where(plain, tl.where(wide, second >> 3, what & 7), 0)
        seed = (meta + 8).to(tl.pointer_type(tl.int32))
        step = (shrink(eb, code, DTYPE), least_of(eb, DTYPE), group, tl.load(seed), tl.load(seed + 1))
        any_wide = ((total >> 21) & 31) > 0
        # Not in a branch: there it would take more registers and instructions.
        values = narrow_values(words, at, k, base, what, coded, step, dense, DTYPE, ROUNDING)
        tl.store(out + i, values, mask=here & (any_wide == 0))
        if any_wide:
            values = wide_values(words, at, k, base, what, coded, step, DTYPE, ROUNDING)
            tl.store(out + i, values, mask=here)

    if ((total >> 16) & 31) > 0:
        get_raw(payload, start, out, grad, raw, what == REPEATED, DTYPE, MASK, GATE)
