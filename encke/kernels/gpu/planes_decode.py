"""The decoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import float_bits, narrow, widen
from encke.kernels.gpu.tiles import (
    AS_IS,
    EVERY_BYTE,
    REPEATED,
    bits_before,
    count_ones,
    dither_of,
    floats_of,
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
def add_planes(number, payload, bit, count, n, width, shift, mask, moves):
    """Add numbers of any width under the mask of the moves, shifted, to a tile."""
    most = tl.max(width, 0)
    first = 0
    while first < most:
        at = bit + (first * n)[None, None, :]
        planes = get_chunk(payload, at, count, n, width - first, most - first, mask, moves)
        number += split_lanes(transpose(stack(*planes))) << of_block(shift + first)
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
def get_unary(payload, at, before, count, coded, fixed, moves):
    """Read unary codes: which quotients are larger than 0, 1, 2 and 3, and where the codes end."""
    alive = tl.where(fixed[None, None, :], 0, coded)
    word = get_words(payload, at[None, None, :] + before, tl.where(fixed[None, None, :], 0, count))
    more0 = spread(word, alive, moves)
    more1, at = get_round(payload, at + word_sum(count_ones(alive)), more0)
    more2, at = get_round(payload, at, more1)
    more3, at = get_round(payload, at, more2)
    return more0, more1, more2, more3, at


@triton.jit
def get_width(payload, at, some):
    """Read the width of what is left of the quotients of blocks that have `some`."""
    return (get_words(payload, at, tl.where(some > 0, 5, 0)) & 31).to(tl.int32)


@triton.jit
def get_bytes(payload, at, k, coded, fixed):
    """Read numbers below 256 from bit `at` of each block: words of four bytes, [half, word, block, slice]."""
    moves, count = moves_of(coded), count_ones(coded)
    n, before = word_sum(count), bits_before(count)
    planes = get_chunk(payload, at[None, None, :] + before, count, n, k, tl.max(k, 0), coded, moves)
    low = transpose(stack(*planes))
    more0, more1, more2, more3, at = get_unary(payload, at + n * k, before, count, coded, fixed, moves)
    q0, q1, q2 = (more0 ^ more1) | (more2 ^ more3), more1 ^ more3, more3
    q3 = tl.zeros((2, 4, 16), tl.uint32)
    q4, q5, q6, q7 = q3, q3, q3, q3
    count = count_ones(more3)
    n, before = word_sum(count), bits_before(count)
    width = get_width(payload, at, n)
    most = tl.max(width, 0)
    if most > 0:
        bit = (at + 5)[None, None, :] + before
        p0, p1, p2, p3, p4, p5, p6, p7 = get_chunk(payload, bit, count, n, width, most, more3, moves_of(more3))
        # Four more, plane by plane.
        q0, q1, q2, carry = q0 | p0, q1 | p1, more3 ^ p2, more3 & p2
        q3, carry = p3 ^ carry, p3 & carry
        q4, carry = p4 ^ carry, p4 & carry
        q5, carry = p5 ^ carry, p5 & carry
        q6, q7 = p6 ^ carry, p7 ^ (p6 & carry)
    return low | (transpose(stack(q0, q1, q2, q3, q4, q5, q6, q7)) << k.to(tl.uint32)[None, None, :, None])


@triton.jit
def get_numbers(payload, at, k, coded, fixed):
    """Read numbers of any size from bit `at` of each block: a tile."""
    moves, count = moves_of(coded), count_ones(coded)
    n, before = word_sum(count), bits_before(count)
    number = tl.zeros((2, 4, 16, 8, 4), tl.int32)
    number = add_planes(number, payload, at[None, None, :] + before, count, n, k, tl.zeros_like(k), coded, moves)
    more0, more1, more2, more3, at = get_unary(payload, at + n * k, before, count, coded, fixed, moves)
    number -= (split_bits(more0) + split_bits(more1) + split_bits(more2) + split_bits(more3)) << of_block(k)
    count = count_ones(more3)
    n, bit = word_sum(count), (at + 5)[None, None, :] + bits_before(count)
    return add_planes(number, payload, bit, count, n, get_width(payload, at, n), k, more3, moves_of(more3))


@triton.jit
def levels_of(payload, at, k, base, what, coded, wide, PLACE: tl.constexpr, WORK: tl.constexpr):
    """Read the levels of the values that are coded, plus PLACE; `wide`: some numbers may be larger than 255."""
    fixed, order = (what & 16) > 0, (what >> 5) & 3
    sign = tl.where(order == 2, -1, 1)
    bytes = get_bytes(payload, at, k, coded, fixed)
    # Zigzag: 127 more than the distance from the base, which is -h for 2h and h + 1 for 2h + 1.
    turned = ((bytes >> 1) & 0x7F7F7F7F) ^ 0x7F7F7F7F ^ ((bytes & EVERY_BYTE) * 255)
    zigzag = order > 0
    bytes = tl.where(zigzag[None, None, :, None], turned, bytes)
    zero = (base - sign * tl.where(zigzag, 32768 + 127, 32768)).to(WORK) + PLACE
    level = tl.fma(floats_of(bytes, WORK), of_block(sign.to(WORK)), of_block(zero))
    # Read again rather than instead: what stands in a branch takes more registers and instructions.
    if wide:
        number = get_numbers(payload, at, k, coded, fixed)
        half = (number + 1) >> 1
        distance = tl.where((number & 1) > 0, half, -half) * of_block(sign)
        level = (tl.where(of_block(order) == 0, number, distance) + of_block(base)).to(WORK) + PLACE
    return level


@triton.jit
def put_values(out, value, nonzero, mask, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Write values as they are stored, or whether they are not zero."""
    if MASK:
        tl.store(out, (nonzero != 0).to(tl.uint8), mask=mask)
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

    here = (i < left) & of_block(raw == 0)
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    if MASK:
        put_values(out + i, coded, split_bits(coded), here, DTYPE, MASK)
    else:
        eb = tl.load(meta.to(tl.pointer_type(tl.float64))).to(WORK)
        code = tl.load(meta + 16 + groups * 4 + group).to(tl.int32) & 15
        eb_c = shrink(eb, code, DTYPE)
        base = tl.where(second > 127, second - 256, second)
        base = tl.where(wide, get_words(payload, start * 8, tl.where(wide, 32, 0)).to(tl.int32, bitcast=True), base)
        k = tl.where(plain, tl.where(wide, second >> 3, what & 7), 0)
        level = levels_of(payload, at, k, base, what, coded, (total >> 21) > 0, 0.0 if DITHERED else 0.5, WORK)
        if DITHERED:
            seed = (meta + 8).to(tl.pointer_type(tl.int32))
            level += dither_of(tile_hash(group, tl.load(seed), tl.load(seed + 1)), WORK)
        # Not earlier: 32 registers.
        nonzero = split_bits(coded)
        bits = float_bits(level * (eb_c * 2.0))
        value = narrow((bits & nonzero.to(bits.dtype)).to(WORK, bitcast=True), DTYPE)
        put_values(out + i, value, nonzero, here, DTYPE, MASK)

    if ((total >> 16) & 31) > 0:
        get_raw(payload, start, out, raw, what == REPEATED, DTYPE, MASK)
