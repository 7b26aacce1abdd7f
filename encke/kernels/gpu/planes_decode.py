"""The decoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import narrow, widen
from encke.kernels.gpu.tiles import (
    AS_IS,
    REPEATED,
    bits_before,
    count_ones,
    moves_of,
    of_block,
    shrink,
    split_bits,
    split_lanes,
    spread,
    stack,
    tile_hash,
    tile_index,
    transpose,
    valid_bits,
    values_of,
    word_sum,
)


@triton.jit
def get_words(payload, bit, count):
    """Read `count` bits from a bit of the payload on; others come along."""
    words = payload.to(tl.pointer_type(tl.uint32)) + (bit >> 5)
    low = tl.load(words, mask=count > 0, other=0).to(tl.uint64)
    high = tl.load(words + 1, mask=(bit & 31) + count > 32, other=0).to(tl.uint64)
    return ((low | (high << 32)) >> (bit & 31).to(tl.uint64)).to(tl.uint32)


@triton.jit
def get_plane(payload, bit, count, n, P: tl.constexpr, width, mask, moves):
    """Read plane P of the blocks that have one."""
    here = (P < width)[None, None, :]
    word = get_words(payload, bit + (P * n)[None, None, :], tl.where(here, count, 0))
    return spread(word, tl.where(here, mask, 0), moves)


@triton.jit
def get_chunk(payload, bit, count, n, width, most, mask, moves):
    """Read the first `width` of eight planes under the mask of the moves, n bits apart; others are zero."""
    p0 = tl.zeros((2, 4, 16), tl.uint32)
    p1, p2, p3, p4, p5, p6, p7 = p0, p0, p0, p0, p0, p0, p0
    # By twos: a branch less, and loads that wait for each other no longer.
    if most > 0:
        p0 = get_plane(payload, bit, count, n, 0, width, mask, moves)
        p1 = get_plane(payload, bit, count, n, 1, width, mask, moves)
    if most > 2:
        p2 = get_plane(payload, bit, count, n, 2, width, mask, moves)
        p3 = get_plane(payload, bit, count, n, 3, width, mask, moves)
    if most > 4:
        p4 = get_plane(payload, bit, count, n, 4, width, mask, moves)
        p5 = get_plane(payload, bit, count, n, 5, width, mask, moves)
    if most > 6:
        p6 = get_plane(payload, bit, count, n, 6, width, mask, moves)
        p7 = get_plane(payload, bit, count, n, 7, width, mask, moves)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def get_high(payload, bit, count, n, width, most, mask, moves):
    """Read what `width` planes say from the ninth on, as integers."""
    number = tl.zeros((2, 4, 16, 8, 4), tl.int32)
    first = 8
    while first < most:
        p0, p1, p2, p3, p4, p5, p6, p7 = get_chunk(
            payload, bit + (first * n)[None, None, :], count, n, width - first, most - first,
            mask, moves,
        )  # fmt: skip
        number |= split_lanes(transpose(stack(p0, p1, p2, p3, p4, p5, p6, p7))) << first
        first += 8
    return number


@triton.jit
def get_flags(payload, at, sparse, left):
    """Read which values are not zero, of the `left` ones in the group: all where a block is not sparse."""
    valid, here = valid_bits(left), sparse[None, None, :]
    count = count_ones(valid)
    flags = get_words(payload, at[None, None, :] + bits_before(count), tl.where(here, count, 0))
    if left < 4096:
        flags = spread(flags, valid, moves_of(valid))
    return tl.where(here, flags, valid)


@triton.jit
def get_round(payload, at, alive):
    """Read a bit of the unary codes that have not ended, and return where it ends."""
    moves = moves_of(alive)
    count = count_ones(alive)
    word = get_words(payload, at[None, None, :] + bits_before(count), count)
    return spread(word, alive, moves), at + word_sum(count)


@triton.jit
def get_numbers(payload, at, k, fixed, coded, wide):
    """Read the numbers of the values that are coded, from bit `at` of each block; `wide`: if any is larger than 255."""
    moves = moves_of(coded)
    count = count_ones(coded)
    n, before, most = word_sum(count), bits_before(count), tl.max(k, 0)
    bit = at[None, None, :] + before
    p0, p1, p2, p3, p4, p5, p6, p7 = get_chunk(
        payload, bit, count, n, k, most, coded, moves
    )
    bytes = transpose(stack(p0, p1, p2, p3, p4, p5, p6, p7))
    high = tl.zeros((2, 4, 16, 8, 4), tl.int32)
    if wide:
        high = get_high(payload, bit, count, n, k, most, coded, moves)

    at += n * k
    unary = fixed[None, None, :] == 0
    word = get_words(payload, at[None, None, :] + before, tl.where(unary, count, 0))
    more0 = spread(word, tl.where(unary, coded, 0), moves)
    more1, at = get_round(payload, at + tl.where(fixed, 0, n), more0)
    more2, at = get_round(payload, at, more1)
    more3, at = get_round(payload, at, more2)
    q0, q1 = (more0 ^ more1) | (more2 ^ more3), more1 ^ more3
    q2 = more3
    q3 = tl.zeros((2, 4, 16), tl.uint32)
    q4, q5, q6, q7 = q3, q3, q3, q3
    count = count_ones(more3)
    n = word_sum(count)
    far = high
    if tl.max(n, 0) > 0:
        width = (get_words(payload, at, tl.where(n > 0, 5, 0)) & 31).to(tl.int32)
        bit, most = (at + 5)[None, None, :] + bits_before(count), tl.max(width, 0)
        moves = moves_of(more3)
        p0, p1, p2, p3, p4, p5, p6, p7 = get_chunk(
            payload, bit, count, n, width, most, more3, moves
        )
        if wide:
            far = get_high(payload, bit, count, n, width, most, more3, moves)
            far += split_lanes(transpose(stack(p0, p1, p2, p3, p4, p5, p6, p7)))
        else:
            # Four more, plane by plane.
            q0, q1, q2, carry = q0 | p0, q1 | p1, more3 ^ p2, more3 & p2
            q3, carry = p3 ^ carry, p3 & carry
            q4, carry = p4 ^ carry, p4 & carry
            q5, carry = p5 ^ carry, p5 & carry
            q6, q7 = p6 ^ carry, p7 ^ (p6 & carry)
    quotients = transpose(stack(q0, q1, q2, q3, q4, q5, q6, q7))
    if wide:
        number = split_lanes(bytes) | high | ((split_lanes(quotients) + far) << of_block(k))
    else:
        number = split_lanes(bytes | (quotients << k.to(tl.uint32)[None, None, :, None]))
    return number


@triton.jit
def put_values(out, value, nonzero, mask, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Write values as they are stored, or whether they are not zero."""
    if MASK:
        tl.store(out, nonzero.to(tl.uint8), mask=mask)
    else:
        tl.store(out, value, mask=mask)


@triton.jit
def get_raw(payload, start, out, count, repeated, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Copy `count` stored values of each block from byte `start`, or one value so many times."""
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    WHOLE: tl.constexpr = tl.int64 if SIZE == 8 else (tl.int32 if SIZE == 4 else tl.int16)
    first = 0
    while first < 256:
        i = (first + tl.arange(0, 16))[None, :]
        here = i < count[:, None]
        at = start[:, None] + tl.where(repeated[:, None], 0, i) * SIZE
        bits = tl.zeros((16, 16), WHOLE)
        for part in tl.static_range(SIZE):
            bits |= tl.load(payload + at + part, mask=here, other=0).to(WHOLE) << (8 * part)
        value = bits if DTYPE == tl.bfloat16 else bits.to(DTYPE, bitcast=True)
        put_values(out + (tl.arange(0, 16) * 256)[:, None] + i, value, widen(value, DTYPE) != 0, here, DTYPE, MASK)
        first += 16


@triton.jit(do_not_specialize=["capacity"])
def decode_kernel(
    meta, payload, out, numel: tl.int64, capacity: tl.int64,
    DTYPE: tl.constexpr, MASK: tl.constexpr, DITHERED: tl.constexpr,
):  # fmt: skip
    """Decode a group. One that the encoder had no space for becomes NaN, or no mask."""
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
    # The sum of the sizes, and how many blocks are raw or wide.
    sums = tl.cumsum(size | ((raw > 0).to(tl.int32) << 16) | (wide.to(tl.int32) << 21), 0)
    start = (sums & 65535) - size
    total = tl.max(sums, 0)
    offset = tl.load((meta + 16).to(tl.pointer_type(tl.uint32)) + group).to(tl.int64) * 4
    i = tile_index()
    out += group * 4096
    if offset + (total & 65535) > capacity:
        lost = tl.full((2, 4, 16, 8, 4), 0x7FC0 if DTYPE == tl.bfloat16 else float("nan"), STORED)
        put_values(out + i, lost, i < 0, i < left, DTYPE, MASK)
        return
    payload += offset

    at = start * 8 + tl.where(wide, 32, 0)
    sparse = plain & ((what & 8) > 0)
    coded = tl.where(plain[None, None, :], get_flags(payload, at, sparse, left), 0)
    at += tl.where(sparse, inside, 0)

    nonzero = split_bits(coded) > 0
    here = (i < left) & of_block(raw == 0)
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    if MASK:
        put_values(out + i, nonzero, nonzero, here, DTYPE, MASK)
    else:
        eb = tl.load(meta.to(tl.pointer_type(tl.float64))).to(WORK)
        code = tl.load(meta + 16 + groups * 4 + group).to(tl.int32) & 15
        eb_c = shrink(eb, code, DTYPE)
        base = tl.where(second > 127, second - 256, second)
        base = tl.where(wide, get_words(payload, start * 8, tl.where(wide, 32, 0)).to(tl.int32, bitcast=True), base)
        k = tl.where(plain, tl.where(wide, second >> 3, what & 7), 0)
        number = get_numbers(payload, at, k, (what & 16) > 0, coded, (total >> 21) > 0)
        turned = tl.where((number & 1) > 0, (number + 1) >> 1, -(number >> 1))
        order = of_block((what >> 5) & 3)
        level = of_block(base) + tl.where(order == 0, number, tl.where(order == 2, -turned, turned))
        seed = (meta + 8).to(tl.pointer_type(tl.int32))
        hash = tile_hash(group, tl.load(seed), tl.load(seed + 1))
        zero = narrow(tl.zeros((2, 4, 16, 8, 4), WORK), DTYPE)
        value = tl.where(nonzero, values_of(level.to(WORK), eb_c, hash, DTYPE, DITHERED), zero)
        put_values(out + i, value, nonzero, here, DTYPE, MASK)

    if ((total >> 16) & 31) > 0:
        get_raw(payload, start, out, raw, what == REPEATED, DTYPE, MASK)
