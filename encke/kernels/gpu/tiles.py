"""Tiles of the kernels for error-bounded values: a group of 4096 values, and bit planes as one word for each thread.

A tile has the shape [half 2, word 4, block 16, slice 8, lane 4]. An element is value 8 * slice + 4 * half + lane of the
64 values in word `word` of a block of 256. With this order of dimensions, Triton gives each thread the four lanes of
all eight slices: a thread has 32 values, whose bits form one word by shift and or, and a warp has four blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import INTERPRETED, exponent, float_bits, power, random32, rotate_right

ROUNDS = tl.constexpr(4)
ALL_ZERO, AS_IS, REPEATED = tl.constexpr(0x60), tl.constexpr(0x61), tl.constexpr(0x62)
NEAREST, STOCHASTIC, DITHERED, SIGNED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
EVERY_BYTE = tl.constexpr(0x01010101)
PICK_BYTES = tl.constexpr(
    "{.reg .b32 a, b; prmt.b32 a, $1, $2, 0x0040; prmt.b32 b, $3, $4, 0x0040; prmt.b32 $0, a, b, 0x5410;}"
)
SATURATE_BYTES = tl.constexpr(
    "{.reg .b32 a; cvt.pack.sat.u8.s32.b32 a, $4, $3, 0; cvt.pack.sat.u8.s32.b32 $0, $2, $1, a;}"
)
# Sum of the bytes of a word, of which the upper three are multiplied by one factor each.
MULTIPLY_BYTES = tl.constexpr(
    "{.reg .b32 a, b, c, d; and.b32 a, $1, 255; prmt.b32 b, $1, 0, 0x4441; prmt.b32 c, $1, 0, 0x4442;"
    "shr.u32 d, $1, 24; mad.lo.u32 a, b, $2, a; mad.lo.u32 a, c, $3, a; mad.lo.u32 $0, d, $4, a;}"
)
# Upper three bytes of a word that is rotated right by zero, one, two and three bytes.
UPPER_0, UPPER_1 = tl.constexpr("prmt.b32 $0, $1, 0, 0x4321;"), tl.constexpr("prmt.b32 $0, $1, 0, 0x4032;")
UPPER_2, UPPER_3 = tl.constexpr("prmt.b32 $0, $1, 0, 0x4103;"), tl.constexpr("prmt.b32 $0, $1, 0, 0x4210;")
# Non-zero flags of eight floats, added up in the last bits of a float.
PICK_NONZERO = tl.constexpr(
    "{.reg .pred p; .reg .f32 a; mov.f32 a, 0f4B000000;"
    + "".join(f"setp.neu.f32 p, ${1 + s}, 0f00000000; @p add.f32 a, a, 0f{(127 + s) << 23:08X};" for s in range(8))
    + "mov.b32 $0, a;}"
)


@triton.jit
def tile_index():
    """Return the index of each value of a tile in its group."""
    half = tl.arange(0, 2)[:, None, None, None, None]
    word = tl.arange(0, 4)[None, :, None, None, None]
    block = tl.arange(0, 16)[None, None, :, None, None]
    slice = tl.arange(0, 8)[None, None, None, :, None]
    return block * 256 + word * 64 + slice * 8 + half * 4 + tl.arange(0, 4)[None, None, None, None, :]


@triton.jit
def slice_index(slice):
    """Return the index of each value of a slice in its group: [half, word, block, lane]."""
    half = tl.arange(0, 2)[:, None, None, None]
    word = tl.arange(0, 4)[None, :, None, None]
    block = tl.arange(0, 16)[None, None, :, None]
    return block * 256 + word * 64 + slice * 8 + half * 4 + tl.arange(0, 4)[None, None, None, :]


@triton.jit
def of_block(v):
    """Broadcast one number for each block to a tile."""
    return v[None, None, :, None, None]


@triton.jit
def block_max(v):
    """Return the largest value of each block of a tile."""
    return tl.max(tl.max(tl.max(tl.max(v, 4), 3), 1), 0)


@triton.jit
def block_min(v):
    """Return the smallest value of each block of a tile."""
    return tl.min(tl.min(tl.min(tl.min(v, 4), 3), 1), 0)


@triton.jit
def lanes_sum(v):
    """Return the sum of each block of a slice."""
    return tl.sum(tl.sum(tl.sum(v, 3), 1), 0)


@triton.jit
def lanes_max(v):
    """Return the largest value of each block of a slice."""
    return tl.max(tl.max(tl.max(v, 3), 1), 0)


@triton.jit
def lanes_min(v):
    """Return the smallest value of each block of a slice."""
    return tl.min(tl.min(tl.min(v, 3), 1), 0)


@triton.jit
def shrink(eb, code, DTYPE: tl.constexpr):
    """Return the shrunk bound eb_c of docs/design.md."""
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
def least_of(eb, DTYPE: tl.constexpr):
    """Return the smallest magnitude that a non-zero value decodes to with SIGNED rounding: a power of two."""
    e = exponent(eb) - 12
    return power(tl.minimum(tl.maximum(e, -24), 15) if DTYPE == tl.float16 else e, eb)


@triton.jit
def random_of(group, i, seed_low, seed_high):
    """Return the 24 random bits of value i of a group. Values 16 apart share a hash: the compiler computes it once."""
    word = group.to(tl.uint32) * 1024 + ((i >> 6) * 16 + (i & 15)).to(tl.uint32)
    count = ((i >> 4) & 3).to(tl.uint32) * 8
    return (rotate_right(random32(word, seed_low, seed_high), count) >> 8).to(tl.int32)


@triton.jit
def slice_words(group, parity):
    """Return the indices of the hashes that the even or the odd slices share: [half, word, block, lane].

    The compiler would recompute them for each slice if it saw slices one by one.
    """
    place = slice_index(parity)
    return group.to(tl.uint32) * 1024 + ((place >> 6) * 16 + (place & 15)).to(tl.uint32)


@triton.jit
def shared_random(hash, quarter: tl.constexpr):
    """Return the 24 random bits of one of the four values that share a hash."""
    if INTERPRETED:
        return (rotate_right(hash, (hash & 0) + quarter * 8) >> 8).to(tl.int32)
    else:
        UPPER: tl.constexpr = UPPER_0 if quarter == 0 else UPPER_1 if quarter == 1 else UPPER_2
        return tl.inline_asm_elementwise(
            UPPER_3 if quarter == 3 else UPPER, "=r,r", [hash], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def dither_of(hash, WORK: tl.constexpr):
    """Return random numbers between -1/2 and 1/2, from 24 random bits."""
    return tl.fma(hash.to(WORK), 5.9604644775390625e-08, -0.5)


@triton.jit
def signed_values(level, hash, eb_c, least):
    """Decode levels (plus 1/2) of SIGNED rounding: dithered magnitudes with exact signs."""
    size = tl.abs(level) - 0.5 + tl.fma(hash.to(eb_c.dtype), 5.9604644775390625e-08, -1.0)
    size = tl.maximum(size * (eb_c * 2.0), least)
    return tl.where(level < 0, -size, size)


@triton.jit
def count_ones(word):
    """Return the number of set bits as int32."""
    if INTERPRETED:
        word = word - ((word >> 1) & 0x55555555)
        word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
        word = (word + (word >> 4)) & 0x0F0F0F0F
        return ((word * EVERY_BYTE) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def join_bits(flags):
    """Pack the 32 flags of each thread, 0 or 1, into a word: [half, word, block]."""
    slice = tl.arange(0, 8).to(tl.uint32)[None, None, None, :, None]
    lane = tl.arange(0, 4).to(tl.uint32)[None, None, None, None, :]
    return tl.sum(tl.sum(flags.to(tl.uint32) << (lane * 8 + slice), 4), 3)


@triton.jit
def split_tile(v):
    """Return the eight slices of a tile: [half, word, block, lane] each."""
    even, odd = tl.split(tl.reshape(tl.permute(v, (0, 1, 2, 4, 3)), (2, 4, 16, 4, 2, 2, 2)))
    even0, even2 = tl.split(even)
    odd0, odd2 = tl.split(odd)
    s0, s4 = tl.split(even0)
    s2, s6 = tl.split(even2)
    s1, s5 = tl.split(odd0)
    s3, s7 = tl.split(odd2)
    return s0, s1, s2, s3, s4, s5, s6, s7


@triton.jit
def pick_bytes(first, second, third, fourth, SATURATED: tl.constexpr):
    """Pack four words into one: their lowest bytes or, with SATURATED, their values clamped to 255."""
    if INTERPRETED:
        if SATURATED:
            first, second = tl.minimum(first, 255), tl.minimum(second, 255)
            third, fourth = tl.minimum(third, 255), tl.minimum(fourth, 255)
        low = (first & 255) | ((second & 255) << 8)
        return (low | ((third & 255) << 16) | ((fourth & 255) << 24)).to(tl.uint32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            SATURATE_BYTES if SATURATED else PICK_BYTES, "=r,r,r,r,r", [first, second, third, fourth],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def join_lanes(v, SATURATED: tl.constexpr):
    """Pack four lanes into one word, as `pick_bytes` does: [half, word, block]."""
    even, odd = tl.split(tl.reshape(v, (2, 4, 16, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return pick_bytes(first, second, third, fourth, SATURATED)


@triton.jit
def nonzero_bits(v):
    """Return the non-zero flags of each thread's values as a word: [half, word, block]."""
    if INTERPRETED or v.dtype == tl.float64:
        return join_bits(v != 0)
    else:
        # Two instructions for a value, one of them an addition; `join_bits` takes three, none of them an addition.
        v0, v1, v2, v3, v4, v5, v6, v7 = split_tile(v)
        lanes = tl.inline_asm_elementwise(
            PICK_NONZERO, "=r,f,f,f,f,f,f,f,f", [v0, v1, v2, v3, v4, v5, v6, v7], dtype=tl.uint32, is_pure=True, pack=1
        )
        return join_lanes(lanes, False)


@triton.jit
def choose_bits(first, second, KEPT: tl.constexpr):
    """Return the bits of the first word under KEPT, and the other bits of the second word."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xE4;", "=r,r,r,r", [first, second, tl.full((), KEPT, tl.uint32)],
        dtype=tl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def exchange(first, second, DISTANCE: tl.constexpr, KEPT: tl.constexpr):
    """Exchange bits between words that are DISTANCE slices apart: one step of a transposition."""
    low, high = second << DISTANCE, first >> DISTANCE
    if INTERPRETED:
        return (first & KEPT) | (low & (KEPT ^ 0xFFFFFFFF)), (high & KEPT) | (second & (KEPT ^ 0xFFFFFFFF))
    else:
        # One instruction each; the compiler would use two or three.
        return choose_bits(first, low, KEPT), choose_bits(high, second, KEPT)


@triton.jit
def transpose(words):
    """Transpose slices and the bits of bytes: bytes of eight slices become eight planes, and planes become bytes."""
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    w0, w4 = exchange(w0, w4, 4, 0x0F0F0F0F)
    w1, w5 = exchange(w1, w5, 4, 0x0F0F0F0F)
    w2, w6 = exchange(w2, w6, 4, 0x0F0F0F0F)
    w3, w7 = exchange(w3, w7, 4, 0x0F0F0F0F)
    w0, w2 = exchange(w0, w2, 2, 0x33333333)
    w1, w3 = exchange(w1, w3, 2, 0x33333333)
    w4, w6 = exchange(w4, w6, 2, 0x33333333)
    w5, w7 = exchange(w5, w7, 2, 0x33333333)
    w0, w1 = exchange(w0, w1, 1, 0x55555555)
    w2, w3 = exchange(w2, w3, 1, 0x55555555)
    w4, w5 = exchange(w4, w5, 1, 0x55555555)
    w6, w7 = exchange(w6, w7, 1, 0x55555555)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def lane_floats(bytes):
    """Return 2^15 plus each byte of words: [half, word, block, lane]. A byte is placed in a mantissa, not converted."""
    lane = tl.arange(0, 4)[None, None, None, :]
    if INTERPRETED:
        return ((bytes[:, :, :, None] >> (lane * 8).to(tl.uint32)) & 255).to(tl.float32) + 32768.0
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0x47000000, $2;", "=r,r,r", [bytes[:, :, :, None], 0x7404 + lane * 0x10],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def lane_masks(bytes):
    """Return -1 for each byte of words whose highest bit is set, else 0: [half, word, block, lane]."""
    lane = tl.arange(0, 4)[None, None, None, :]
    if INTERPRETED:
        return -((bytes[:, :, :, None] >> (lane * 8 + 7).to(tl.uint32)) & 1).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [bytes[:, :, :, None], 0x8888 + lane * 0x1111],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def next_move(left, mask, DISTANCE: tl.constexpr):
    """Return which bits under a mask move by DISTANCE in `gather`, and the state for the next distance."""
    odd = left ^ ((left << 1) & 0xFEFEFEFE)
    odd ^= (odd << 2) & 0xFCFCFCFC
    odd ^= (odd << 4) & 0xF0F0F0F0
    move = odd & mask
    return move, left & (odd ^ 0xFFFFFFFF), (mask ^ move) | (move >> DISTANCE)


@triton.jit
def moves_of(mask):
    """Return the moves that gather the bits under a mask: within bytes, then of the second to fourth byte.

    The bits that move by 1 and 2 within bytes are found as in Hacker's Delight 7-4. Then the upper half of a byte moves
    by 4, unless the lower half is full.
    """
    second, third = count_ones(mask & 0xFF).to(tl.uint32), count_ones(mask & 0xFFFF).to(tl.uint32)
    fourth = count_ones(mask & 0xFFFFFF).to(tl.uint32)
    left = ((mask ^ 0xFFFFFFFF) << 1) & 0xFEFEFEFE
    one, left, mask = next_move(left, mask, 1)
    two, left, mask = next_move(left, mask, 2)
    full = mask & (mask >> 1)
    full &= (full >> 2) & EVERY_BYTE
    four = mask & 0xF0F0F0F0 & ((full * 0xF0) ^ 0xFFFFFFFF)
    return one, two, four, second, third, fourth


@triton.jit
def gather(word, moves):
    """Move the bits of a word to the lowest positions. It must have none outside the mask of the moves."""
    one, two, four, second, third, fourth = moves
    # A bit that moves by two loses 3/4 of its value. Products and sums run in a pipeline of their own.
    word -= (word & one) >> 1
    word -= ((word & two) >> 2) * 3
    word -= ((word & four) >> 4) * 15
    unit = tl.full((), 1, tl.uint32)
    second, third, fourth = unit << second, unit << third, unit << fourth
    if INTERPRETED:
        low = (word & 255) + ((word >> 8) & 255) * second
        return low + ((word >> 16) & 255) * third + (word >> 24) * fourth
    else:
        return tl.inline_asm_elementwise(
            MULTIPLY_BYTES, "=r,r,r,r,r", [word, second, third, fourth], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def spread(word, mask, moves):
    """Move the lowest bits of a word to the positions under the mask of the moves."""
    one, two, four, second, third, fourth = moves
    word = pick_bytes(word, word >> second, word >> third, word >> fourth, False)
    word = (word & (four ^ 0xFFFFFFFF)) | ((word << 4) & four)
    word = (word & (two ^ 0xFFFFFFFF)) | ((word << 2) & two)
    word = (word & (one ^ 0xFFFFFFFF)) | ((word << 1) & one)
    return word & mask


@triton.jit
def places_of(count):
    """Return the number of bits of the block before those of each thread, and the number of bits of each block.

    The sums of the four words of a block are bytes of one number: none is larger than 64.
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
def full_places():
    """Return the number of bits of the block before those of each thread if all threads have 32."""
    return tl.arange(0, 2)[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 64 + tl.zeros((2, 4, 16), tl.int32)


@triton.jit
def first_thread():
    """Return which threads are the first of a block."""
    index = tl.arange(0, 2)[:, None, None] + tl.arange(0, 4)[None, :, None] + tl.zeros((2, 4, 16), tl.int32)
    return index == 0


@triton.jit
def valid_bits(left):
    """Return flags of each thread's values that exist, as a word; `left` values remain in the group."""
    word = tl.arange(0, 4)[None, :, None] * 64 + tl.arange(0, 16)[None, None, :] * 256
    left = left - (word + tl.arange(0, 2)[:, None, None] * 4)
    valid = tl.zeros((2, 4, 16), tl.uint32)
    for lane in tl.static_range(4):
        slices = tl.minimum(tl.maximum((left - lane + 7) >> 3, 0), 8)
        valid |= ((1 << slices) - 1).to(tl.uint32) << (8 * lane)
    return valid


@triton.jit
def either(a, b):
    """Return the union of two sets of flags."""
    return a | b
