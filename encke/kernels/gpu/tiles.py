"""Tiles of the kernels for error-bounded values: a group of 4096 values, and bit planes as one word for each thread.

A tile has the shape [half 2, word 4, block 16, slice 8, lane 4]: value 8 * slice + 4 * half + lane of 64, which are
`word` of a block of 256. In this order of dimensions Triton gives each thread four lanes of all eight slices, so a
thread has 32 values whose bits fill one word by shift and or, and a warp has four blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import INTERPRETED, exponent, float_bits, highest, narrow, power, random32, rotate_right

ROUNDS = tl.constexpr(4)
ALL_ZERO, AS_IS, REPEATED = tl.constexpr(0x60), tl.constexpr(0x61), tl.constexpr(0x62)
NEAREST, STOCHASTIC, DITHERED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
EVERY_BYTE = tl.constexpr(0x01010101)


@triton.jit
def tile_index():
    """Return the place of each value of a tile in its group."""
    half = tl.arange(0, 2)[:, None, None, None, None]
    word = tl.arange(0, 4)[None, :, None, None, None]
    block = tl.arange(0, 16)[None, None, :, None, None]
    slice = tl.arange(0, 8)[None, None, None, :, None]
    return block * 256 + word * 64 + slice * 8 + half * 4 + tl.arange(0, 4)[None, None, None, None, :]


@triton.jit
def of_block(v):
    """Spread one number for each block over a tile."""
    return v[None, None, :, None, None]


@triton.jit
def block_sum(v):
    """Return the sum of each block of a tile."""
    return tl.sum(tl.sum(tl.sum(tl.sum(v, 4), 3), 1), 0)


@triton.jit
def block_max(v):
    """Return the largest of each block of a tile."""
    return tl.max(tl.max(tl.max(tl.max(v, 4), 3), 1), 0)


@triton.jit
def block_highest(v):
    """Return the largest of each block of a tile, or NaN."""
    return highest(highest(highest(highest(v, 4), 3), 1), 0)


@triton.jit
def block_min(v):
    """Return the smallest of each block of a tile."""
    return tl.min(tl.min(tl.min(tl.min(v, 4), 3), 1), 0)


@triton.jit
def shrink(eb, code, DTYPE: tl.constexpr):
    """Return eb_c of docs/design.md."""
    unit = power(exponent(eb) - code, eb)
    if DTYPE == tl.float16 or DTYPE == tl.bfloat16:
        return tl.where(code == 0, eb * 0.5, eb - unit)
    elif DTYPE == tl.float64:
        kept = (float_bits(eb) >> (52 - code)) << (52 - code)
        return tl.where(code == 0, power(exponent(eb) - 1, eb), kept.to(tl.float64, bitcast=True) - unit)
    else:
        kept = (float_bits(eb) >> (23 - code)) << (23 - code)
        return tl.where(code == 0, power(exponent(eb) - 1, eb), kept.to(tl.float32, bitcast=True) - unit)


@triton.jit
def tile_hash(group, seed_low, seed_high):
    """Return the 24 random bits of each value. Values 16 apart share a hash, which the compiler computes once."""
    i = tile_index()
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :, None]
    word = group.to(tl.uint32) * 1024 + ((i >> 6) * 16 + (i & 15)).to(tl.uint32)
    return (rotate_right(random32(word, seed_low, seed_high), (slice >> 1) * 8) >> 8).to(tl.int32)


@triton.jit
def values_of(level, eb_c, hash, DTYPE: tl.constexpr, RANDOM: tl.constexpr):
    """Return the values of levels, as they are stored; RANDOM: levels were dithered with the hash."""
    u = hash.to(eb_c.dtype) * 5.9604644775390625e-08 - 0.5 if RANDOM else 0.5
    return narrow((level.to(eb_c.dtype) + u) * (eb_c * 2.0), DTYPE)


@triton.jit
def count_ones(word):
    """Return the number of bits that are set, int32."""
    if INTERPRETED:
        word = word - ((word >> 1) & 0x55555555)
        word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
        word = (word + (word >> 4)) & 0x0F0F0F0F
        return ((word * EVERY_BYTE) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def join_bits(flags):
    """Return 32 flags of each thread, 0 or 1, as a word: [half, word, block]."""
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :, None]
    lane = tl.arange(0, 4).to(tl.uint32)[None, None, None, None, :]
    return tl.sum(tl.sum(flags.to(tl.uint32) << (lane * 8 + slice), 4), 3)


@triton.jit
def join_lanes(v):
    """Join four lanes of a byte each to one word: [half, word, block, slice]."""
    return tl.sum(v.to(tl.uint32) << (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :], 4)


@triton.jit
def join_slices(bytes):
    """Return the lowest bit of each byte of eight words as one word: [half, word, block]."""
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :]
    return tl.sum((bytes & EVERY_BYTE) << slice, 3)


@triton.jit
def split_slices(word):
    """Return the bits of a word as the bytes of eight words: [half, word, block, slice]."""
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :]
    return (word[:, :, :, None] >> slice) & EVERY_BYTE


@triton.jit
def split_lanes(bytes):
    """Return the bytes of words as integers: a tile."""
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :]
    return ((bytes[:, :, :, :, None] >> shift) & 255).to(tl.int32)


@triton.jit
def next_move(left, mask, DISTANCE: tl.constexpr):
    """Return which bits under a mask move by DISTANCE when they are gathered, and the state for the next distance."""
    odd = left ^ (left << 1)
    odd ^= odd << 2
    odd ^= odd << 4
    odd ^= odd << 8
    odd ^= odd << 16
    move = odd & mask
    return move, left & (odd ^ 0xFFFFFFFF), (mask ^ move) | (move >> DISTANCE)


@triton.jit
def moves_of(mask):
    """Return which bits move by 1, 2, 4, 8 and 16 when the bits under a mask are gathered (Hacker's Delight 7-4)."""
    left = (mask ^ 0xFFFFFFFF) << 1
    one, left, mask = next_move(left, mask, 1)
    two, left, mask = next_move(left, mask, 2)
    four, left, mask = next_move(left, mask, 4)
    eight, left, mask = next_move(left, mask, 8)
    sixteen, left, mask = next_move(left, mask, 16)
    return one, two, four, eight, sixteen


@triton.jit
def gather(word, one, two, four, eight, sixteen):
    """Move the bits of a word, none outside the mask of the moves, to the lowest places."""
    word = (word ^ (word & one)) | ((word & one) >> 1)
    word = (word ^ (word & two)) | ((word & two) >> 2)
    word = (word ^ (word & four)) | ((word & four) >> 4)
    word = (word ^ (word & eight)) | ((word & eight) >> 8)
    return (word ^ (word & sixteen)) | ((word & sixteen) >> 16)


@triton.jit
def spread(word, mask, one, two, four, eight, sixteen):
    """Move the lowest bits of a word to the places under the mask of the moves."""
    word = (word & (sixteen ^ 0xFFFFFFFF)) | ((word << 16) & sixteen)
    word = (word & (eight ^ 0xFFFFFFFF)) | ((word << 8) & eight)
    word = (word & (four ^ 0xFFFFFFFF)) | ((word << 4) & four)
    word = (word & (two ^ 0xFFFFFFFF)) | ((word << 2) & two)
    word = (word & (one ^ 0xFFFFFFFF)) | ((word << 1) & one)
    return word & mask


@triton.jit
def places_of(count):
    """Return how many bits of its block stand before those of each thread, and how many a block has.

    Sums of the four words of a block travel as bytes of one number: none is larger than 64.
    """
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)[None, :, None]
    half = tl.sum(count.to(tl.uint32) << shift, 1)
    both = tl.sum(half, 0)
    before = both * 0x01010100
    other = ((both[None, :] - half)[:, None, :] >> shift) & 255
    first = (before[None, None, :] >> shift) & 255
    place = first + tl.where(tl.arange(0, 2)[:, None, None] > 0, other, 0)
    return place.to(tl.int32), ((before >> 24) + (both >> 24)).to(tl.int32)


@triton.jit
def word_sum(count):
    """Return the sum of one number for each thread over its block."""
    return tl.sum(tl.sum(count, 1), 0)


@triton.jit
def valid_bits(left):
    """Return which of the values that each thread would have there are, as a word; `left` remain in the group."""
    valid = tl.full((2, 4, 16), 0xFFFFFFFF, tl.uint32)
    if left < 4096:
        valid = join_bits(tile_index() < left)
    return valid
