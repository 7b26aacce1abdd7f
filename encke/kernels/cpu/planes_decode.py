"""Decoder of error-bounded values on the CPU. docs/design.md explains the format."""

from __future__ import annotations

import math

import numpy as np

from encke.kernels.cpu.scalars import (
    as_float,
    exponent,
    f32,
    i32,
    i64,
    index,
    inline,
    jit,
    magnitude,
    narrow,
    random24,
    u8,
    u32,
    u64,
    widen,
)
from encke.kernels.cpu.words import add_plane, copy_bytes, count_ones, get_bits, get_plane, get_word, spread, turn_block
from encke.kernels.formats import (
    AS_IS,
    DITHERED,
    NEAREST,
    PLANE_BLOCK,
    PLANE_GROUP,
    PLANE_HEADER,
    PLANE_WORD,
    REPEATED,
    ROUNDS,
    SIGNED,
)

WORDS = PLANE_BLOCK // PLANE_WORD
TAIL = PLANE_GROUP * 8 + 4096  # bytes: largest size of a group, plus room for reads of a corrupt block


@inline
def fill_steps(steps, eb, itemsize):
    """Compute eb_c of docs/design.md for each shrink code."""
    e = exponent(eb)
    steps[0] = eb * f32(0.5) if itemsize == 2 else math.ldexp(1.0, e - 1)
    for c in range(1, 16):
        unit = math.ldexp(1.0, e - c)
        steps[c] = eb - unit if itemsize == 2 else math.floor(eb / unit) * unit - unit


@inline
def value_of(level, random, eb_c, least, rounding, like):
    """Decode a level to a value. `random` is the number with which it was dithered, or 2^24 without dithering."""
    if rounding == SIGNED:
        cell = i32(-1 - level) if level < 0 else i32(level)
        u = as_float(random, eb_c) * f32(2.0**-24) - f32(1.0)
        size = max((as_float(cell, eb_c) + u) * (eb_c * f32(2.0)), least)
        return narrow(-size if level < 0 else size, like)
    u = as_float(random, eb_c) * f32(2.0**-24) - f32(0.5)
    return narrow((as_float(level, eb_c) + u) * (eb_c * f32(2.0)), like)


@inline
def clear(rows):
    """Set the bytes of a block to zero."""
    for i in range(PLANE_BLOCK // 8):
        rows[i] = u64(0)


@inline
def add_bytes(k, bytes_, shift):
    """Add the bytes, shifted left, to the numbers."""
    for i in range(PLANE_BLOCK):
        k[i] += i32(bytes_[i]) << shift


@inline
def get_planes(data, at, k, width, shift, rows, bytes_, masks):
    """Read `width` bits of the numbers under the masks and add them at bit `shift`; return the position after them."""
    for first in range(0, width, 8):
        clear(rows)
        for p in range(first, min(first + 8, width)):
            for w in range(WORDS):
                add_plane(spread(get_bits(data, at), masks[w]), rows, 8 * w, u64(p & 7))
                at += i64(count_ones(masks[w]))
        turn_block(rows)
        add_bytes(k, bytes_, i32(shift + first & 31))
    return at


@inline
def get_map(data, at, sparse, valid, rows, bytes_, masks):
    """Read the flags of a block's non-zero values to `bytes_` as bytes and to `masks` as bits; return the end."""
    for i in range(PLANE_BLOCK):
        bytes_[i] = i < valid
    if valid < PLANE_BLOCK:
        turn_block(rows)
    for w in range(WORDS):
        masks[w] = get_plane(rows, 8 * w, u64(0))
    if sparse:
        clear(rows)
        for w in range(WORDS):
            inside = masks[w]
            masks[w] = spread(get_bits(data, at), inside)
            add_plane(masks[w], rows, 8 * w, u64(0))
            at += i64(count_ones(inside))
    if sparse or valid < PLANE_BLOCK:
        turn_block(rows)
    return at


@jit
def get_block(data, at, what, low_bits, valid, k, flags, flag_bytes, rows, bytes_, masks):
    """Read the numbers of a block from bit `at` on, and the flags of its non-zero values."""
    for i in range(PLANE_BLOCK):
        k[i] = 0
    at = get_map(data, at, what & 8, valid, flags, flag_bytes, masks)
    at = get_planes(data, at, k, low_bits, 0, rows, bytes_, masks)
    if what & 16:
        return
    clear(rows)
    for _ in range(ROUNDS):
        alive = u64(0)
        for w in range(WORDS):
            count = count_ones(masks[w])
            masks[w] = spread(get_bits(data, at), masks[w])
            at += i64(count)
            add_plane(masks[w], rows, 8 * w, u64(0))
            alive |= masks[w]
        if alive == 0:
            break
    turn_block(rows)
    add_bytes(k, bytes_, i32(low_bits))
    if masks[0] | masks[1] | masks[2] | masks[3]:
        width = i64(get_bits(data, at) & u64(31))
        get_planes(data, at + 5, k, width, low_bits, rows, bytes_, masks)


@inline
def level_of(number, base, order):
    """Return the level of a number: the inverse of `map_levels` in the encoder."""
    turned = i32(number + 1 >> 1) if number & 1 else i32(-(number >> 1))
    return i32(base + (number if order == 0 else i32(-turned) if order == 2 else turned))


@inline
def put_values(k, flags, base, order, eb_c, least, rounding, start, seed_low, seed_high, to, at):
    """Decode the levels of a block. `start` is the index of its first value, for random numbers."""
    for w in range(WORDS):
        for i in range(PLANE_WORD):
            j = w * PLANE_WORD + i
            random = i32(1 << 24)
            if rounding >= DITHERED:
                random = random24(u32(start // 4 + w * 16 + (i & 15)), u32(i >> 4 << 3), seed_low, seed_high)
            value = value_of(level_of(k[j], base, order), random, eb_c, least, rounding, to[index(at) + j])
            to[index(at) + j] = value if flags[j] else narrow(as_float(0, eb_c), to[index(at) + j])


@inline
def block_size(first, second, what, valid, itemsize):
    """Return the size of a block in bytes."""
    if what & 0x60 != 0x60:
        return i64(first) | (i64(second & 7) << 8 if what & 128 else 0)
    return valid * itemsize if what == AS_IS else itemsize if what == REPEATED else 0


@jit
def decode_group(
    data, at, heads, head, eb_c, least, rounding, start, seed_low, seed_high, valid, to, to_bytes, first, k, words
):
    """Decode a group from byte `at` of data to element `first` of `to`. `start` is the index of its first value."""
    itemsize = to.itemsize
    flags, rows, masks = words[:32], words[32:64], words[64:]
    flag_bytes, bytes_ = flags.view(u8), rows.view(u8)
    zero = narrow(as_float(0, eb_c), to[0])
    for here in range(0, valid, PLANE_BLOCK):
        inside, place = min(valid - here, PLANE_BLOCK), first + here
        what, second = i64(heads[index(head) + 2]), i64(heads[index(head) + 1])
        size = block_size(heads[index(head)], second, what, inside, itemsize)
        head += 3
        if what & 0x60 != 0x60:
            wide = what & 128
            low_bits = second >> 3 if wide else what & 7
            base = i32(get_word(data, at, 4)) if wide else i32(np.int8(second))
            order = what >> 5 & 3
            get_block(
                data, 8 * at + (32 if wide else 0), what, low_bits, inside, k, flags, flag_bytes, rows, bytes_, masks
            )
            random = (start + here, seed_low, seed_high)
            if rounding == DITHERED:
                put_values(k, flag_bytes, base, order, eb_c, least, DITHERED, *random, to, place)
            elif rounding == SIGNED:
                put_values(k, flag_bytes, base, order, eb_c, least, SIGNED, *random, to, place)
            else:
                put_values(k, flag_bytes, base, order, eb_c, least, NEAREST, *random, to, place)
        elif what == AS_IS:
            copy_bytes(data, at, size, to_bytes, place * itemsize)
        else:
            for i in range(inside):
                to[index(place) + i] = zero
            for i in range(inside if what == REPEATED else 0):
                copy_bytes(data, at, itemsize, to_bytes, (place + i) * itemsize)
        at += size


@jit
def decode_task(task, size, numel, out, meta, payload, eb, least, rounding, seed_low, seed_high):
    """Decode the groups of a task to `out`."""
    groups = (numel + PLANE_GROUP - 1) // PLANE_GROUP
    codes, heads = meta[PLANE_HEADER + 4 * groups :], meta[PLANE_HEADER + 5 * groups :]
    steps, k, words = np.full(16, eb), np.empty(PLANE_BLOCK, i32), np.empty(68, u64)
    last, tail = np.empty(PLANE_GROUP, out.dtype), np.zeros(TAIL, u8)
    out_bytes, last_bytes = out.view(u8), last.view(u8)
    fill_steps(steps, eb, out.itemsize)
    for group in range(task * size // PLANE_GROUP, min((task + 1) * size // PLANE_GROUP, groups)):
        at = i64(get_word(meta, PLANE_HEADER + 4 * group, 4)) * 4
        first, head = group * PLANE_GROUP, group * (PLANE_GROUP // PLANE_BLOCK) * 3
        valid, eb_c = min(numel - first, PLANE_GROUP), steps[codes[group] & 15]
        random = (least, rounding, first, seed_low, seed_high)
        if valid == PLANE_GROUP and at + TAIL <= payload.size:
            decode_group(payload, at, heads, head, eb_c, *random, valid, out, out_bytes, first, k, words)
            continue
        copy_bytes(payload, at, min(TAIL, payload.size - at), tail, 0)  # the decoder needs room to read and write
        decode_group(tail, 0, heads, head, eb_c, *random, valid, last, last_bytes, 0, k, words)
        for i in range(valid):
            out[index(first) + i] = last[i]


@jit
def mask_task(task, size, numel, out, meta, payload, like):
    """Write whether the values of a task are not zero, from bitmaps and raw values."""
    groups = (numel + PLANE_GROUP - 1) // PLANE_GROUP
    heads, itemsize = meta[PLANE_HEADER + 5 * groups :], like.itemsize
    tail, words, values = np.zeros(TAIL, u8), np.empty(36, u64), np.empty(PLANE_BLOCK, like.dtype)
    rows, bytes_, masks, value_bytes = words[:32], words[:32].view(u8), words[32:], values.view(u8)
    for group in range(task * size // PLANE_GROUP, min((task + 1) * size // PLANE_GROUP, groups)):
        first = i64(get_word(meta, PLANE_HEADER + 4 * group, 4)) * 4
        copy_bytes(payload, first, min(TAIL, payload.size - first), tail, 0)
        at = 0
        for start in range(group * PLANE_GROUP, min((group + 1) * PLANE_GROUP, numel), PLANE_BLOCK):
            head, valid = index(start // PLANE_BLOCK * 3), min(numel - start, PLANE_BLOCK)
            what = i64(heads[head + 2])
            length = block_size(heads[head], i64(heads[head + 1]), what, valid, itemsize)
            if what & 0x60 != 0x60:
                get_map(tail, 8 * at + (32 if what & 128 else 0), what & 8, valid, rows, bytes_, masks)
            else:
                for i in range(PLANE_BLOCK):
                    bytes_[i] = 0
                copy_bytes(tail, at, length, value_bytes, 0)
                for i in range(length // itemsize):
                    bytes_[i] = magnitude(widen(values[i])) != 0
                for i in range(valid if what == REPEATED else 0):
                    bytes_[i] = bytes_[0]
            for i in range(valid):
                out[index(start) + i] = bytes_[i]
            at += length
