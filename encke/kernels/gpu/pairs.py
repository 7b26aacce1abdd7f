"""Group quantisation of 16-bit values in Triton, two values in a word: half the instructions of group.py's encoders.

The codes are identical. Packed (SIMD) instructions are inline PTX, with equivalent code for Triton's interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.codes import (
    below_code,
    first_values,
    fixed_point,
    inverted_random32,
    of_group,
    scales_at,
    scales_of,
    store_scales,
)
from encke.kernels.gpu.common import INTERPRETED, seed_of
from encke.kernels.gpu.places import all_groups, byte_places, group_bytes, group_places

# Kinds of reductions over the halves of words: unsigned maximum, signed maximum, unsigned minimum.
LARGEST = tl.constexpr(0)
HIGHEST = tl.constexpr(1)
LEAST = tl.constexpr(2)

# Work that an encoder does in addition to encoding.
PLAIN = tl.constexpr(0)
RELU = tl.constexpr(1)
MOMENTS = tl.constexpr(2)


@triton.jit
def largest16(a, b):
    """Return the unsigned maximum of both halves."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def highest16(a, b):
    """Return the signed maximum of both halves."""
    return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def least16(a, b):
    """Return the unsigned minimum of both halves."""
    return tl.inline_asm_elementwise("min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def reduce16(words, axis: tl.constexpr, KIND: tl.constexpr):
    """Return the largest (unsigned), highest (signed) or least (unsigned) of each half of words along an axis."""
    if INTERPRETED:
        low, high = words & 0xFFFF, words >> 16
        if KIND == LEAST:
            return tl.min(low, axis) | (tl.min(high, axis) << 16)
        elif KIND == LARGEST:
            return tl.max(low, axis) | (tl.max(high, axis) << 16)
        else:
            return (tl.max(low ^ 0x8000, axis) | (tl.max(high ^ 0x8000, axis) << 16)) ^ 0x80008000
    elif KIND == LEAST:
        return tl.reduce(words, axis, least16)
    elif KIND == LARGEST:
        return tl.reduce(words, axis, largest16)
    else:
        return tl.reduce(words, axis, highest16)


@triton.jit
def less_one16(words):
    """Subtract one in both halves, modulo 2^16."""
    if INTERPRETED:
        return ((words - 1) & 0xFFFF) | ((words & 0xFFFF0000) - 0x10000)
    else:
        return tl.inline_asm_elementwise(
            "add.u16x2 $0, $1, $2;", "=r,r,r", [words, tl.full(words.shape, 0xFFFFFFFF, tl.uint32)], dtype=tl.uint32,
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def zero16(words, DTYPE: tl.constexpr):
    """Set all bits of the halves that are zero, of either sign."""
    if INTERPRETED:
        low, high = (words & 0x7FFF) == 0, (words & 0x7FFF0000) == 0
        return tl.where(low, 0xFFFF, 0).to(tl.uint32) | tl.where(high, 0xFFFF0000, 0).to(tl.uint32)
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "set.eq.u32.bf16x2 $0, $1, $2;", "=r,r,r", [words, tl.zeros_like(words)], dtype=tl.uint32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "set.eq.u32.f16x2 $0, $1, $2;", "=r,r,r", [words, tl.zeros_like(words)], dtype=tl.uint32, is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def relu16(words, DTYPE: tl.constexpr):
    """Apply ReLU to both halves; NaN stays NaN."""
    if INTERPRETED:
        top = 0x7F80 if DTYPE == tl.bfloat16 else 0x7C00
        low, high = words & 0xFFFF, words >> 16
        low = tl.where((low >= 0x8000) & ((low & 0x7FFF) <= top), 0, low)
        high = tl.where((high >= 0x8000) & ((high & 0x7FFF) <= top), 0, high)
        return (low | (high << 16)).to(tl.uint32)
    elif DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [words, tl.zeros_like(words)], dtype=tl.uint32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [words, tl.zeros_like(words)], dtype=tl.uint32, is_pure=True,
            pack=1,
        )  # fmt: skip


@triton.jit
def half_of(words, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Return one half of each word as fp32."""
    if DTYPE == tl.bfloat16:
        return (words & 0xFFFF0000 if HIGH else words << 16).to(tl.float32, bitcast=True)
    else:
        return (words >> 16 if HIGH else words).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def upper_bytes(low, high, BITS: tl.constexpr):
    """Pack low >> 24 and high >> 24 into the two halves of a word; both are below 2^BITS."""
    if INTERPRETED or BITS == 8:
        return (low >> 24) | ((high >> 24) << 16)
    else:
        # The zero bytes are copies of the codes' sign bit.
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0xF7B3;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def bytes_of(words):
    """Pack the low bytes of both halves into 16 bits."""
    if INTERPRETED:
        return (words | (words >> 8)).to(tl.uint16)
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $1, 0x4420;", "=r,r", [words], dtype=tl.uint32, is_pure=True, pack=1
        ).to(tl.uint16)


@triton.jit
def signed_point(t):
    """Convert a float to an integer, at most 2^31. Only zeros are negative here, and their codes are replaced."""
    if INTERPRETED:
        return tl.minimum(tl.maximum(t, 0.0), 2147483520.0).to(tl.uint32)
    else:
        return tl.inline_asm_elementwise("cvt.rzi.s32.f32 $0, $1;", "=r,r", [t], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def raised_codes(v, h, lo, inverse, steps, extra, t, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Return the code of each value in the highest byte, and its fraction below. `extra` is the lowest value's code."""
    from_lo = tl.abs(v) if SIGNS else v
    scaled = (from_lo - lo) * inverse
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    if BITS == 8:
        return fixed_point(tl.minimum(scaled, steps)) + below_code(extra, h, t, BITS)
    else:
        # A code may exceed the highest one, by a rounding error or if the spread overflows fp32.
        most = (steps.to(tl.uint32) + (extra << 24)) | 0xFFFFFF
        return tl.minimum(signed_point(scaled) + below_code(extra, h, t, FIELD), most)


@triton.jit
def masked_codes(code, words, exact, DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr):
    """Add signs to the codes in halves of words. Set the codes of zeros to zero in groups where zeros are `exact`."""
    zero = zero16(words, DTYPE)
    if SIGNS:
        return (code | ((words & 0x80008000) >> (16 - BITS))) & (zero ^ 0xFFFFFFFF)
    elif INTERPRETED:
        return code & ((zero & exact) ^ 0xFFFFFFFF)
    else:
        # The compiler alone would emit three instructions.
        return tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0x70;", "=r,r,r,r", [code, zero, exact], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def half_steps(largest, highest, least, first, HIGH: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
               SIGNS: tl.constexpr):  # fmt: skip
    """Return the scales of one half of words; see `steps_of`."""
    top = half_of(highest, HIGH, DTYPE)
    return scales_of(
        half_of(largest, HIGH, DTYPE), top, half_of(least, HIGH, DTYPE), top.to(tl.int32, bitcast=True) < 0, first,
        DTYPE, BITS, SIGNS,
    )  # fmt: skip


@triton.jit
def add_one16(words):
    """Add one in both halves, modulo 2^16."""
    return ((words + 1) & 0xFFFF) | ((words & 0xFFFF0000) + 0x10000)


@triton.jit
def swap16(words):
    """Swap both halves."""
    return (words >> 16) | (words << 16)


@triton.jit
def larger16(a, b, KIND: tl.constexpr):
    """Return the largest, highest or least of two values, in both halves."""
    if INTERPRETED:
        if KIND == LEAST:
            return tl.minimum(a & 0xFFFF, b & 0xFFFF) | tl.minimum(a & 0xFFFF0000, b & 0xFFFF0000)
        elif KIND == LARGEST:
            return tl.maximum(a & 0xFFFF, b & 0xFFFF) | tl.maximum(a & 0xFFFF0000, b & 0xFFFF0000)
        else:
            return larger16(a ^ 0x80008000, b ^ 0x80008000, LARGEST) ^ 0x80008000
    elif KIND == LEAST:
        return least16(a, b)
    elif KIND == LARGEST:
        return largest16(a, b)
    else:
        return highest16(a, b)


@triton.jit
def group16(words, KIND: tl.constexpr):
    """Return the largest, highest or least of the values of each group, in both halves."""
    halves = reduce16(reduce16(reduce16(reduce16(words, 4, KIND), 3, KIND), 2, KIND), 0, KIND)
    return larger16(halves, swap16(halves), KIND)


@triton.jit(do_not_specialize=["full", "rest", "rows", "magic", "shift", "length", "seed_low", "seed_high"])
def gq_encode_pairs_kernel(
    x, data, seeds, full: tl.int32, rest: tl.int32, rows: tl.int32, magic: tl.int32, shift: tl.int32, length: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr,
    WHOLE: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Encode G groups as gq_encode_kernel does, two 16-bit values in a word. The address of x is a multiple of 4.

    UNIT is even, so that the codes of a group begin at an even byte; for 3-bit codes it is a multiple of four.
    """
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    length = LENGTH if WHOLE else length // UNIT * UNIT
    _, g, start, valid = group_places(full, rest, rows, magic, shift, length, T, G, UNIT)
    pair = byte_places(length // 2, LENGTH // 2, THREADS, LANES // 2)
    t = tl.arange(0, T)[None, None, None, :, None]
    if valid == length * T:
        i = t * (length // 2) + pair[:, :, :, None, :]
        at = tl.multiple_of(start // 2, UNIT // 2)
        words = tl.load(x.to(tl.pointer_type(tl.uint32)) + (of_group(at) + i))
    else:
        i = t * length + pair[:, :, :, None, :] * 2
        halves = x.to(tl.pointer_type(tl.uint16)) + of_group(start)
        low = tl.load(halves + tl.minimum(i, valid - 1)).to(tl.uint32)
        words = low | (tl.load(halves + tl.minimum(i + 1, valid - 1)).to(tl.uint32) << 16)
    size = words & 0x7FFF7FFF if SIGNS else words
    here = tl.full((G,), True, tl.int1)
    lo, step, inverse, steps, signed, extra = half_steps(
        group16(words, LARGEST), group16(size, HIGHEST), add_one16(group16(less_one16(size), LEAST)),
        first_values(x, start, here, DTYPE), False, DTYPE, BITS, SIGNS,
    )  # fmt: skip
    codes = g.to(tl.int64) * group_bytes(length, BITS, UNIT)
    byte = codes.to(tl.uint32)[None, :, None, None] + (pair * 2).to(tl.uint32)
    h_low = inverted_random32(byte, seed_low, seed_high)[:, :, :, None, :]
    # The byte after an even one.
    h_high = inverted_random32(byte, seed_low ^ 1, seed_high)[:, :, :, None, :]
    exact = of_group(tl.where(signed, 0, 0xFFFFFFFF).to(tl.uint32))
    at, per, most, one = of_group(lo), of_group(inverse), of_group(steps), of_group(extra)
    code = upper_bytes(
        raised_codes(half_of(words, False, DTYPE), h_low, at, per, most, one, t, BITS, SIGNS),
        raised_codes(half_of(words, True, DTYPE), h_high, at, per, most, one, t, BITS, SIGNS),
        BITS,
    )
    code = masked_codes(code, words, exact, DTYPE, BITS, SIGNS)
    field = code & 0x30003 if BITS == 3 else code
    packed = bytes_of(tl.sum(field << (t * FIELD).to(tl.uint32), 3))
    tl.store(data.to(tl.pointer_type(tl.uint16)) + ((codes // 2)[None, :, None, None] + pair), packed)
    if BITS == 3:
        # The third bits of a pair of bytes share a byte.
        both = tl.sum(((code >> 2) & 0x10001) << t.to(tl.uint32), 3)
        tl.store(data + (codes[None, :, None, None] + length + pair), (both | (both >> 12)).to(tl.uint8))
    groups = all_groups(full, rest, rows)
    at_lo = scales_at(data, groups, group_bytes(length, BITS, UNIT))
    store_scales(at_lo, g, here, groups, lo, step, signed, SIGNS)


@triton.jit
def of_word(v):
    """Broadcast one number for each word of channels to a tile."""
    return v[:, None, None, None]


@triton.jit
def word16(words, KIND: tl.constexpr):
    """Return the largest, highest or least value of each channel, two channels in a word."""
    return reduce16(reduce16(reduce16(words, 3, KIND), 2, KIND), 1, KIND)


@triton.jit
def spread_of(v, lo, k, count, FULL: tl.constexpr):
    """Return the mean of the first `count` pixels of each channel, and the sum of the squared deviations from it.

    Both are computed from the distances from `lo`, which encoding needs too. These are not large compared with their
    spread, which avoids cancellation.
    """
    apart = v - of_word(lo)
    if not FULL:
        apart = tl.where(k < count, apart, 0.0)
    first = tl.sum(tl.sum(tl.sum(apart, 3), 2), 1)
    mean = first * tl.div_rn(1.0, count.to(tl.float32))
    square = tl.sum(tl.sum(tl.sum(apart * apart, 3), 2), 1) - first * mean
    return lo + mean, tl.where(square < 0, 0.0, square)


@triton.jit
def channel_words(stride, pixels, BITS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, FULL: tl.constexpr):
    """Return the addresses of a tile [word of channels, pair of bytes, byte of a pair, slice] of a block of pixels.

    Returns: number of the block; words of channels, and which of them exist; pixel of each element within the block,
    and the pixel to read instead; offset of the block in values; offset of each word in bytes, which takes fewer
    instructions to add.
    """
    LENGTH: tl.constexpr = GROUP // (4 if BITS == 3 else 8 // BITS)
    row = (stride >> 1).to(tl.int32)
    block, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * (CHANNELS // 2) + tl.arange(0, CHANNELS // 2)
    t, k = tl.arange(0, GROUP // LENGTH)[None, None, None, :], tl.arange(0, 2)[None, None, :, None]
    pixel = t * LENGTH + tl.arange(0, LENGTH // 2)[None, :, None, None] * 2 + k
    read = pixel
    if not FULL:
        # Fill the last group with copies of its last value.
        read = tl.minimum(pixel, (pixels - block * GROUP).to(tl.int32) - 1)
    i = (read.to(tl.uint32) * row.to(tl.uint32) + of_word(c).to(tl.uint32)) * 4
    return block, c, c < row, pixel, read, block * GROUP * stride, i.to(tl.int64)


@triton.jit
def load_words(x, start, i, there, FULL: tl.constexpr):
    """Load the words at the addresses of `channel_words`."""
    at = ((x + start).to(tl.pointer_type(tl.uint8)) + i).to(tl.pointer_type(tl.uint32))
    return tl.load(at) if FULL else tl.load(at, mask=of_word(there), other=0)


@triton.jit
def store_words(out, start, i, words, there, pixel, read, FULL: tl.constexpr):
    """Store words at the addresses of `channel_words`."""
    at = ((out + start).to(tl.pointer_type(tl.uint8)) + i).to(tl.pointer_type(tl.uint32))
    if FULL:
        tl.store(at, words)
    else:
        tl.store(at, words, mask=of_word(there) & (pixel == read))


@triton.jit
def encode_words(
    words, first_low, first_high, data, block, c, there, stride, pixels, seed_low, seed_high,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Encode the groups of a tile of words; return lo of both halves.

    `first_low` and `first_high` are the first values of the groups, needed for fp16 only.
    """
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    LENGTH: tl.constexpr = GROUP // T
    ALL: tl.constexpr = LENGTH // 2 * 3 if BITS == 3 else LENGTH
    row = (stride >> 1).to(tl.int32)
    t, k = tl.arange(0, T)[None, None, None, :], tl.arange(0, 2)[None, None, :, None]
    j = tl.arange(0, LENGTH // 2)[None, :, None, None] * 2 + k
    size = words & 0x7FFF7FFF if SIGNS else words
    largest, highest = word16(words, LARGEST), word16(size, HIGHEST)
    least = add_one16(word16(less_one16(size), LEAST))
    lo, step, inverse, steps, signed, extra = half_steps(largest, highest, least, first_low, False, DTYPE, BITS, SIGNS)
    lo2, step2, inverse2, steps2, signed2, extra2 = half_steps(
        largest, highest, least, first_high, True, DTYPE, BITS, SIGNS
    )
    exact = tl.where(signed, 0, 0xFFFF).to(tl.uint32) | tl.where(signed2, 0, 0xFFFF0000).to(tl.uint32)
    at = block * ALL * stride
    pair = j * row + of_word(c)
    byte = at.to(tl.uint32) + pair.to(tl.uint32) * 2
    h = inverted_random32(byte, seed_low, seed_high)
    # The byte after an even one.
    h2 = inverted_random32(byte, seed_low ^ 1, seed_high)
    code = upper_bytes(
        raised_codes(
            half_of(words, False, DTYPE), h, of_word(lo), of_word(inverse), of_word(steps), of_word(extra), t, BITS,
            SIGNS,
        ),
        raised_codes(
            half_of(words, True, DTYPE), h2, of_word(lo2), of_word(inverse2), of_word(steps2), of_word(extra2), t,
            BITS, SIGNS,
        ),
        BITS,
    )  # fmt: skip
    code = masked_codes(code, words, of_word(exact), DTYPE, BITS, SIGNS)
    field = code & 0x30003 if BITS == 3 else code
    packed = bytes_of(tl.sum(field << (t * FIELD).to(tl.uint32), 3))
    to_codes = (data + at).to(tl.pointer_type(tl.uint16))
    tl.store(to_codes + pair.reshape(packed.shape), packed, mask=there[:, None, None])
    if BITS == 3:
        both = bytes_of(tl.sum(tl.sum(((code >> 2) & 0x10001) << (k * 4 + t).to(tl.uint32), 3), 2))
        behind = (LENGTH + tl.arange(0, LENGTH // 2)[None, :]) * row + c[:, None]
        tl.store(to_codes + behind, both, mask=there[:, None])
    groups = tl.cdiv(pixels, GROUP) * stride
    g = block * stride + c * 2
    store_scales(scales_at(data, groups, ALL), g, there, groups, lo, step, signed, SIGNS)
    store_scales(scales_at(data, groups, ALL), g + 1, there, groups, lo2, step2, signed2, SIGNS)
    return lo, lo2


@triton.jit(do_not_specialize=["stride", "pixels", "seed_low", "seed_high"])
def gq_encode_channels_pairs_kernel(
    x, data, beside, seeds, stride: tl.int64, pixels: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr,
    WITH: tl.constexpr, FULL: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Encode groups as gq_encode_channels_kernel does, two channels of 16 bits in a word.

    The stride is even, the address of x is a multiple of 4, and GROUP * stride < 2^30. Each thread processes one word
    of each of its pixels, and a warp 32 words of these pixels, so that threads exchange little, and the scales of a
    group are computed once for each warp.

    With RELU, encode the ReLU of x, and write it to `beside`. With MOMENTS, write the mean of each group and the sum of
    the squared deviations from it to `beside`, [2, blocks, stride]. FULL: pixels are a multiple of GROUP, and channels
    are a multiple of CHANNELS.
    """
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    block, c, there, pixel, read, start, i = channel_words(stride, pixels, BITS, GROUP, CHANNELS, FULL)
    words = load_words(x, start, i, there, FULL)
    if WITH == RELU:
        words = relu16(words, DTYPE)
        store_words(beside, start, i, words, there, pixel, read, FULL)
    first_low, first_high = c, c
    if DTYPE == tl.float16:
        word = tl.load((x + start).to(tl.pointer_type(tl.uint32)) + c, mask=there, other=0)
        if WITH == RELU:
            word = relu16(word, DTYPE)
        first_low, first_high = half_of(word, False, DTYPE), half_of(word, True, DTYPE)
    lo, lo2 = encode_words(
        words, first_low, first_high, data, block, c, there, stride, pixels, seed_low, seed_high, DTYPE, BITS, SIGNS,
        GROUP,
    )  # fmt: skip
    if WITH == MOMENTS:
        count = tl.minimum(pixels - block * GROUP, GROUP).to(tl.int32)
        to = beside + block * stride + c * 2
        apart = tl.cdiv(pixels, GROUP) * stride
        mean, square = spread_of(half_of(words, False, DTYPE), lo, pixel, count, FULL)
        tl.store(to, mean, mask=there)
        tl.store(to + apart, square, mask=there)
        mean, square = spread_of(half_of(words, True, DTYPE), lo2, pixel, count, FULL)
        tl.store(to + 1, mean, mask=there)
        tl.store(to + 1 + apart, square, mask=there)
