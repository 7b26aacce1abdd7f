"""The decoder of error-bounded values in Triton. docs/design.md explains the format, tiles.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import narrow, widen
from encke.kernels.gpu.tiles import (
    AS_IS,
    REPEATED,
    ROUNDS,
    count_ones,
    moves_of,
    of_block,
    places_of,
    shrink,
    split_lanes,
    split_slices,
    spread,
    tile_hash,
    tile_index,
    valid_bits,
    values_of,
)


@triton.jit
def get_words(payload, at, count):
    """Read `count` bits for each thread, one after the other from bit `at` of each block; others come along."""
    before, total = places_of(count)
    bit = at[None, None, :] + before
    words = payload.to(tl.pointer_type(tl.uint32)) + (bit >> 5)
    shift = (bit & 31).to(tl.uint32)
    low = tl.load(words, mask=count > 0, other=0)
    high = tl.load(words + 1, mask=(bit & 31) + count > 32, other=0)
    return (low >> shift) | ((high << 1) << (31 - shift)), at + total


@triton.jit
def get_planes(payload, at, width, mask):
    """Read numbers of `width` bits for the values under the mask, and return where they end."""
    one, two, four, eight, sixteen = moves_of(mask)
    count = count_ones(mask)
    most = tl.max(width, 0)
    number = tl.zeros((2, 4, 16, 8, 4), tl.int32)
    first = 0
    while first < most:
        bytes = tl.zeros((2, 4, 16, 8), tl.uint32)
        p = first
        end = tl.minimum(first + 8, most)
        while p < end:
            word, at = get_words(payload, at, tl.where((p < width)[None, None, :], count, 0))
            word = tl.where((p < width)[None, None, :], spread(word, mask, one, two, four, eight, sixteen), 0)
            bytes |= split_slices(word) << (p - first).to(tl.uint32)  # type: ignore[attr-defined]
            p += 1
        number |= split_lanes(bytes) << first
        first += 8
    return number, at


@triton.jit
def get_quotients(payload, at, alive):
    """Read unary codes of the values that are alive; return also which are escaped, and where the codes end."""
    bytes = tl.zeros((2, 4, 16, 8), tl.uint32)
    left = 1
    j = 0
    while (j < ROUNDS) & (left > 0):
        one, two, four, eight, sixteen = moves_of(alive)
        word, at = get_words(payload, at, count_ones(alive))
        alive = spread(word, alive, one, two, four, eight, sixteen)
        bytes += split_slices(alive)
        left = tl.max(tl.max(tl.max((alive != 0).to(tl.int32), 0), 0), 0)
        j += 1
    return split_lanes(bytes), alive, at


@triton.jit
def levels_of(payload, at, k, fixed, coded):
    """Read the numbers of the values that are coded, from bit `at` of each block."""
    number, at = get_planes(payload, at, k, coded)
    quotient, escaped, at = get_quotients(payload, at, tl.where(fixed[None, None, :], 0, coded))
    some = tl.max(tl.max((escaped != 0).to(tl.int32), 0), 0)
    if tl.max(some, 0) > 0:
        words = payload.to(tl.pointer_type(tl.uint32)) + (at >> 5)
        low = tl.load(words, mask=some > 0, other=0)
        high = tl.load(words + 1, mask=(some > 0) & ((at & 31) > 27), other=0)
        shift = (at & 31).to(tl.uint32)
        width = (((low >> shift) | ((high << 1) << (31 - shift))) & 31).to(tl.int32)
        rest, at = get_planes(payload, at + some * 5, width * some, escaped)
        quotient += rest
    return number | (quotient << of_block(k))


@triton.jit
def get_raw(payload, start, mask, STEP: tl.constexpr, SIZE: tl.constexpr):
    """Read stored values as integers, STEP values apart: 0 for one value that is repeated."""
    WHOLE: tl.constexpr = tl.int64 if SIZE == 8 else (tl.int32 if SIZE == 4 else tl.int16)
    bits = tl.zeros((2, 4, 16, 8, 4), WHOLE)
    at = of_block(start) + (tile_index() & 255) * (SIZE * STEP)
    for part in tl.static_range(SIZE):
        bits |= tl.load(payload + at + part, mask=mask, other=0).to(WHOLE) << (8 * part)
    return bits


@triton.jit
def put_values(out, value, nonzero, mask, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Write values as they are stored, or whether they are not zero."""
    if MASK:
        tl.store(out, nonzero.to(tl.uint8), mask=mask)
    else:
        tl.store(out, value, mask=mask)


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
    start = tl.cumsum(size, 0) - size
    offset = tl.load((meta + 16).to(tl.pointer_type(tl.uint32)) + group).to(tl.int64) * 4
    i = tile_index()
    out += group * 4096 + i
    if offset + tl.sum(size, 0) > capacity:
        lost = tl.full((2, 4, 16, 8, 4), 0x7FC0 if DTYPE == tl.bfloat16 else float("nan"), STORED)
        put_values(out, lost, i < 0, i < left, DTYPE, MASK)
        return
    payload += offset

    at = start * 8 + tl.where(wide, 32, 0)
    sparse = plain & ((what & 8) > 0)
    coded = tl.where(plain[None, None, :], valid_bits(left), 0)
    if tl.max(sparse.to(tl.int32), 0) > 0:
        one, two, four, eight, sixteen = moves_of(coded)
        flags, at = get_words(payload, at, tl.where(sparse[None, None, :], count_ones(coded), 0))
        coded = tl.where(sparse[None, None, :], spread(flags, coded, one, two, four, eight, sixteen), coded)

    nonzero = split_lanes(split_slices(coded)) > 0
    here = (i < left) & of_block((what != AS_IS) & (what != REPEATED))
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    if MASK:
        put_values(out, nonzero, nonzero, here, DTYPE, MASK)
    else:
        eb = tl.load(meta.to(tl.pointer_type(tl.float64))).to(WORK)
        code = tl.load(meta + 16 + groups * 4 + group).to(tl.int32) & 15
        eb_c = shrink(eb, code, DTYPE)
        base = tl.where(second > 127, second - 256, second)
        for byte in tl.static_range(4):
            part = tl.load(payload + start + byte, mask=wide, other=0).to(tl.int32) << (8 * byte)
            base = tl.where(wide, part if byte == 0 else base | part, base)
        k = tl.where(plain, tl.where(wide, second >> 3, what & 7), 0)
        number = levels_of(payload, at, k, (what & 16) > 0, coded)
        turned = tl.where((number & 1) > 0, (number + 1) >> 1, -(number >> 1))
        order = of_block((what >> 5) & 3)
        level = of_block(base) + tl.where(order == 0, number, tl.where(order == 2, -turned, turned))
        seed = (meta + 8).to(tl.pointer_type(tl.int32))
        hash = tile_hash(group, tl.load(seed), tl.load(seed + 1))
        zero = narrow(tl.zeros((2, 4, 16, 8, 4), WORK), DTYPE)
        value = tl.where(nonzero, values_of(level, eb_c, hash, DTYPE, DITHERED), zero)
        put_values(out, value, nonzero, here, DTYPE, MASK)

    if tl.max(((what == AS_IS) | (what == REPEATED)).to(tl.int32), 0) > 0:
        raw, constant = (i < left) & of_block(what == AS_IS), (i < left) & of_block(what == REPEATED)
        bits = get_raw(payload, start, raw, 1, SIZE) | get_raw(payload, start, constant, 0, SIZE)
        value = bits.to(STORED, bitcast=True)
        put_values(out, value, widen(value, DTYPE) != 0, raw | constant, DTYPE, MASK)
