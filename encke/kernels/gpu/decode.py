"""The error-bounded decoder in Triton. docs/design.md explains the format, common.py the tile."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import (
    RAW,
    base_bytes,
    block_index,
    block_sum,
    blocks_of_group,
    field_bytes,
    narrow,
    of_block,
    of_group,
    rank_of,
    shrink,
    tile_index,
    tile_max,
    unit_pointer,
    widen,
    word_index,
)


@triton.jit
def expand(word, BITS: tl.constexpr, G: tl.constexpr):
    """Take apart the slices that share a field's bytes: BITS slices of words -> 8 slices."""
    T: tl.constexpr = 8 // BITS
    shift = (tl.arange(0, T) * BITS).to(tl.uint32)[None, None, None, :, None]
    return tl.reshape(word[:, :, :, None, :] >> shift, (2, 16, G, 8))


@triton.jit
def split_lanes(word):
    """Return the four bytes of each word: [half, block, group, slice, lane]."""
    shift = (tl.arange(0, 4) * 8).to(tl.uint32)[None, None, None, None, :]
    return ((word[:, :, :, :, None] >> shift) & 255).to(tl.int32)


@triton.jit
def get_aligned(at, width, most, G: tl.constexpr):
    """Read what put_aligned wrote."""
    at, width = at[None, :, :, None], width[None, :, :, None]
    top = at + (width & 24) * 2
    four = tl.load(top + word_index(4), mask=(width & 4) > 0, other=0).to(tl.uint32)
    two = tl.load(top + (width & 4) * 2 + word_index(2), mask=(width & 2) > 0, other=0).to(tl.uint32)
    one = tl.load(top + (width & 6) * 2 + word_index(1), mask=(width & 1) > 0, other=0).to(tl.uint32)
    word = expand(four, 4, G) & 0x0F0F0F0F
    word |= (expand(two, 2, G) & 0x03030303) << (width & 4).to(tl.uint32)
    word |= (expand(one, 1, G) & 0x01010101) << (width & 6).to(tl.uint32)
    rest = split_lanes(word)
    if most >= 8:
        rest = rest << (width & 24)[:, :, :, :, None]
        for plane in tl.static_range(3):
            word = tl.load(at + (16 * plane + word_index(8)), mask=width >= 8 * (plane + 1), other=0).to(tl.uint32)
            rest |= split_lanes(word) << (8 * plane)
    return rest


@triton.jit
def get_raw(payload, start, raw, left, SIZE: tl.constexpr, UNIT: tl.constexpr, G: tl.constexpr):
    """Read what put_raw wrote, as integers."""
    i = tile_index(G)
    mask = of_block(raw) & (i < left)
    at = unit_pointer(payload, UNIT) + of_block(start // UNIT) + (i & 63) * (SIZE // UNIT)
    WHOLE: tl.constexpr = tl.int64 if SIZE == 8 else (tl.int32 if SIZE == 4 else tl.int16)
    bits = tl.zeros((2, 16, G, 8, 4), WHOLE)
    for part in tl.static_range(SIZE // UNIT):
        piece = tl.load(at + part, mask=mask, other=0).to(WHOLE)
        # The sign of a lower part must not reach the higher ones.
        bits |= (piece & 0xFFFFFFFF if SIZE == 8 and UNIT == 4 else piece) << (8 * UNIT * part)
    return bits


@triton.jit
def map_starts(payload, cursor, heads, g0, groups, numel, SIZE: tl.constexpr, G: tl.constexpr):
    """Return where each block starts: a bitmap's size is known only after its bitmap, so one slot after the other."""
    group = tl.arange(0, G)
    column = tl.arange(0, 16)[:, None]
    start = tl.zeros((16, G), tl.int32)
    slot = 0
    while slot < 16:
        start = tl.where(column == slot, cursor[None, :], start)
        block = (g0 + group) * 16 + slot
        left = tl.minimum(tl.maximum(numel - block * 64, 0), 64).to(tl.int32)
        head = tl.load(heads + block, mask=left > 0, other=0).to(tl.int32)
        is_map, width = head >= 32, head & 31
        j = tl.arange(0, 8)[None, :]
        byte = tl.load((payload + cursor)[:, None] + j, mask=is_map[:, None], other=0).to(tl.int32)
        byte = (byte & 0x55) + ((byte >> 1) & 0x55)
        byte = (byte & 0x33) + ((byte >> 2) & 0x33)
        n = tl.where(is_map, tl.sum((byte & 15) + (byte >> 4), 1), 64)
        cursor += tl.where(head == RAW, left * SIZE, tl.where(is_map, 8, 0) + field_bytes(n, width))
        slot += 1
    return start


@triton.jit
def get_field(at, rank, n, keep, BITS: tl.constexpr):
    """Return bits of the values with that rank among n, from the field at byte pointers `at`."""
    length = tl.maximum((n * BITS + 7) >> 3, 1)
    # rank // length by a multiplication: exact for ranks below 64.
    t = (rank * of_block(65536 // length + 1)) >> 16
    byte = tl.load(of_block(at) + (rank - t * of_block(length)), mask=keep, other=0).to(tl.int32)
    return (byte >> (t * BITS)) & ((1 << BITS) - 1)


@triton.jit
def get_bytes(at, is_map, width, base, most, G: tl.constexpr):
    """Return levels of blocks of which some have bitmaps, at byte pointers `at` [block, group]."""
    # Through & 63 Triton does not see that bytes are neighbours, and keeps the tile's layout.
    j = (tl.arange(0, 2)[:, None, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, None, :]) & 63
    byte = tl.load(of_block(at) + j, mask=of_block(is_map), other=255).to(tl.int32)
    flags = (byte >> tl.arange(0, 8)[None, None, None, :, None]) & 1
    rank = rank_of(flags)
    n = block_sum(flags)
    at += tl.where(is_map, 8, 0)
    keep = flags > 0
    rest = tl.zeros((2, 16, G, 8, 4), tl.int32)
    plane = 0
    while (plane + 1) * 8 <= most:
        full = width >= (plane + 1) * 8
        rest |= get_field(at, rank, n, keep & of_block(full), 8) << (plane * 8)
        at += tl.where(full, n, 0)
        plane += 1
    shift = width & 24
    if tile_max(width & 4) > 0:
        rest |= get_field(at, rank, n, keep & of_block((width & 4) > 0), 4) << of_block(shift)
        at += tl.where((width & 4) > 0, (n * 4 + 7) >> 3, 0)
        shift += width & 4
    if tile_max(width & 2) > 0:
        rest |= get_field(at, rank, n, keep & of_block((width & 2) > 0), 2) << of_block(shift)
        at += tl.where((width & 2) > 0, (n * 2 + 7) >> 3, 0)
        shift += width & 2
    if tile_max(width & 1) > 0:
        rest |= get_field(at, rank, n, keep & of_block((width & 1) > 0), 1) << of_block(shift)
    return tl.where(keep, rest + of_block(base), 0)


@triton.jit
def decode_levels(k, half):
    """Return (2|k| - 1) * half with the sign of k, and zero for zero."""
    f = k.to(half.dtype)
    sign = tl.minimum(tl.maximum(f, -1.0), 1.0)
    return tl.fma(f, 2.0, -sign) * half


@triton.jit
def group_table(meta, g0, left, groups, G: tl.constexpr):
    """Return for each group payload offset in bytes, shrink code, base kind, bytes of its bases."""
    group = tl.arange(0, G)
    here = g0 + group < groups
    offsets, infos = (meta + 32).to(tl.pointer_type(tl.uint32)) + g0, meta + 32 + groups * 4 + g0
    if G == 1:
        # One value for all threads: a scalar needs no exchange between them.
        offset, info = tl.full((1,), tl.load(offsets), tl.uint32), tl.full((1,), tl.load(infos), tl.int32)
    else:
        offset = tl.load(offsets + group, mask=here, other=0)
        info = tl.load(infos + group, mask=here, other=0).to(tl.int32)
    kind = info >> 4
    return offset.to(tl.int64) * 4, info & 15, kind, base_bytes(kind, blocks_of_group(left, G))


@triton.jit
def bases_of(groups_at, kind, is_map, exists):
    """Return the base of each block: [block, group]."""
    column, kind = tl.arange(0, 16)[:, None], kind[None, :]
    base = tl.where(is_map, 1, 0)
    if tile_max(kind) > 0:
        at = groups_at[None, :]
        one = tl.load(at + column, mask=exists & (kind == 1), other=0).to(tl.int8, bitcast=True).to(tl.int32)
        four = tl.load(unit_pointer(at, 4) + column, mask=exists & (kind == 2), other=0)
        base = tl.where(kind == 0, base, tl.where(kind == 1, one, four))
    return base


@triton.jit
def put_values(out, value, mask, DTYPE: tl.constexpr, MASK: tl.constexpr):
    """Write a tile's values as they are stored, or whether they are not zero."""
    if MASK:
        value = (widen(value, DTYPE) != 0).to(tl.uint8)
    tl.store(out, value, mask=mask)


@triton.jit
def decode_tile(
    meta, payload, out, g0, numel, DTYPE: tl.constexpr, MASK: tl.constexpr, MAPPED: tl.constexpr, G: tl.constexpr
):
    """Decode a tile if it has bitmaps (MAPPED) or if it has none (not MAPPED)."""
    SIZE: tl.constexpr = 8 if DTYPE == tl.float64 else (4 if DTYPE == tl.float32 else 2)
    eb = tl.load(meta.to(tl.pointer_type(tl.float64))).to(tl.float64 if DTYPE == tl.float64 else tl.float32)
    groups = (numel + 1023) >> 10
    left = tl.minimum(numel - g0 * 1024, G * 1024).to(tl.int32)
    exists = block_index(G) * 64 < left
    heads = meta + 32 + groups * 5
    head = tl.load(heads + g0 * 16 + block_index(G), mask=exists, other=0).to(tl.int32)
    offset, code, kind, base_size = group_table(meta, g0, left, groups, G)
    groups_at = payload + offset
    is_map, raw = head >= 32, head == RAW
    width = tl.where(raw, 0, head & 31)
    i = tile_index(G)
    out += g0 * 1024 + i
    # 31 or more: there may be raw blocks; 32 or more: there are bitmaps.
    most = tile_max(head)
    if (most >= 32) == MAPPED:
        base = bases_of(groups_at, kind, is_map, exists)
        if MAPPED:
            start = map_starts(groups_at, base_size, heads, g0, groups, numel, SIZE, G)
            k = get_bytes(groups_at[None, :] + start, is_map, width, base, tile_max(width), G)
        else:
            size = tl.where(raw, 64 * SIZE, width * 8)
            start = base_size[None, :] + tl.cumsum(size, 0) - size
            k = get_aligned(unit_pointer(groups_at, 4)[None, :] + (start >> 2), width, most, G) + of_block(base)
        half = shrink(tl.abs(eb), code)
        half = tl.where(eb < 0, half * 0.5, half)
        value = narrow(decode_levels(k, of_group(half)), DTYPE)
        put_values(out, value, (i < left) & of_block(raw == 0), DTYPE, MASK)
        if tile_max(raw.to(tl.int32)) > 0:
            bits = get_raw(of_group(groups_at), start, raw, left, SIZE, 1 if MAPPED else (2 if SIZE == 2 else 4), G)
            put_values(out, bits.to(value.dtype, bitcast=True), (i < left) & of_block(raw), DTYPE, MASK)


@triton.jit
def decode_maps_kernel(
    meta, payload, out, numel: tl.int64, DTYPE: tl.constexpr, MASK: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr
):
    """Decode the tiles with bitmaps, if there are any among the TILES of a program."""
    groups = (numel + 1023) >> 10
    blocks = (numel + 63) >> 6
    g0 = tl.program_id(0).to(tl.int64) * (G * TILES)
    at = g0 * 16 + tl.arange(0, 16 * G * TILES)
    if tl.max(tl.load(meta + 32 + groups * 5 + at, mask=at < blocks, other=0).to(tl.int32), 0) >= 32:
        end = tl.minimum(g0 + G * TILES, groups)
        while g0 < end:
            decode_tile(meta, payload, out, g0, numel, DTYPE, MASK, True, G)
            g0 += G


@triton.jit
def decode_kernel(meta, payload, out, numel: tl.int64, DTYPE: tl.constexpr, MASK: tl.constexpr, G: tl.constexpr):
    """Decode the tiles without bitmaps."""
    decode_tile(meta, payload, out, tl.program_id(0).to(tl.int64) * G, numel, DTYPE, MASK, False, G)
