"""Error-bounded codes at variable rate on the CPU."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.fields import (
    ONES,
    SLACK,
    add_byte,
    clear,
    field_bytes,
    get_slices,
    get_word,
    join_pieces,
    put_slices,
    put_word,
    spread_bits,
    take_bytes,
)
from encke.kernels.cpu.launch import MIN_TASK, decode, elements, run, seed_halves, task_size
from encke.kernels.cpu.scalars import (
    as_float,
    bit_width,
    exponent,
    f32,
    from_magnitude,
    from_ordered,
    i32,
    i64,
    index,
    inline,
    jit,
    magnitude,
    narrow,
    ordered,
    random24,
    sign,
    u8,
    u32,
    u64,
    widen,
)
from encke.kernels.formats import (
    BLOCK,
    BLOCKS,
    FLOATS,
    GROUP,
    HEADER,
    RAW,
    SMALLEST_BOUND,
    BoundedFormat,
    DitheredFormat,
)


@jit
def range_task(task, size, x, found):
    """Find the smallest and largest finite value of a task; infinity and -infinity if there is none."""
    none_low = ordered(as_float(math.inf, widen(x[0])))
    none_high = ordered(as_float(-math.inf, widen(x[0])))
    low, high = none_low, none_high
    mine = x[task * size : (task + 1) * size]
    for i in range(mine.size):
        v = widen(mine[i])
        finite, key = magnitude(v) < none_low, ordered(v)
        low, high = min(low, key if finite else none_low), max(high, key if finite else none_high)
    found[task, 0], found[task, 1] = from_ordered(low), from_ordered(high)


@inline
def fill_steps(steps, eb):
    """Compute eb_c of docs/design.md for each shrink code."""
    steps[0] = eb * f32(0.5)
    for c in range(1, 16):
        steps[c] = eb - math.ldexp(1.0, exponent(eb) - c)


@inline
def load_group(x, first, v, limit):
    """Widen a group into v, filled with zeros; return the largest magnitude below the limit."""
    first, size = index(first), min(x.size - first, v.size)
    zero = magnitude(as_float(0, v[0]))
    largest = zero
    for i in range(size):
        v[i] = widen(x[first + i])
        m = magnitude(v[i])
        largest = max(largest, m if m < limit else zero)
    for i in range(size, v.size):
        v[i] = 0
    return from_magnitude(largest)


@inline
def store_level(v, k, b, i, level, a, like, limit, eb, half):
    """Store a level with the sign of its value; return whether decoding it would miss the value by more than eb."""
    level = max(level, i32(1)) if a > 0 else i32(0)
    back = widen(narrow(as_float(i32(2 * level - 1), half) * half, like))
    s = sign(v[b, i])
    k[b, i] = (level ^ s) - s
    return i32((magnitude(v[b, i]) >= limit) | ((a > 0) & (not abs(back - a) <= eb)))


@inline
def usable_magnitude(value, limit, eb):
    """Return the magnitude of a value, zero from the limit on, where values are stored raw."""
    m = magnitude(value)
    return from_magnitude(m) if m < limit else as_float(0, eb)


@inline
def nearest_levels(v, k, b, like, limit, eb, factor, half):
    """Round the values of a block to levels; return whether it must be stored raw."""
    bad = i32(0)
    for i in range(BLOCK):
        a = usable_magnitude(v[b, i], limit, eb)
        q = a * factor
        level = i32(q)
        level = i32(level + (as_float(level, q) < q))
        bad |= store_level(v, k, b, i, level, a, like, limit, eb, half)
    return bad


@inline
def stochastic_levels(v, k, b, like, limit, eb, factor, half, start, seed_low, seed_high):
    """Round the values of a block stochastically; `start` is the index of the first one."""
    bad = i32(0)
    for i in range(BLOCK):
        a = usable_magnitude(v[b, i], limit, eb)
        q = a * factor + f32(0.5)
        level = i32(q)
        chance = i32((q - as_float(level, q)) * f32(2.0**24))
        up = random24(u32(start // 4 + (i & 15)), u32(i >> 4 << 3), seed_low, seed_high) < chance
        bad |= store_level(v, k, b, i, i32(level + up), a, like, limit, eb, half)
    return bad


@inline
def zero_levels(v, k, b):
    """Set all levels to zero, as under a bound of zero; return whether any bit of the block is set."""
    bad = i32(0)
    for i in range(BLOCK):
        bad |= i32(ordered(v[b, i]) != 0)
        k[b, i] = 0
    return bad


@inline
def measure_block(k, b):
    """Return the range of the levels, the range of the non-zero ones (1 to 1 if there is none), and their number."""
    big = i32(1 << 30)
    low, high, low_nz, high_nz, count = big, i32(-big), big, i32(-big), i32(0)
    for i in range(BLOCK):
        level = k[b, i]
        low, high = min(low, level), max(high, level)
        low_nz = min(low_nz, level if level != 0 else big)
        high_nz = max(high_nz, level if level != 0 else i32(-big))
        count = i32(count + (level != 0))
    if count == 0:
        low_nz = high_nz = i32(1)
    return i64(low), i64(high), i64(low_nz), i64(high_nz), i64(count)


@inline
def smallest_form(for_range, map_range, count, bitmap, must_raw, raw_size):
    """Choose between frame of reference, bitmap and raw: (head, size, whether the bitmap beats the frame)."""
    for_width, map_width = bit_width(max(for_range, 0)), bit_width(max(map_range, 0))
    for_size, map_size = 8 * for_width, 8 + field_bytes(count, map_width)
    use_map = bitmap & (map_size < for_size)
    size = map_size if use_map else for_size
    if must_raw | (raw_size < size):
        return RAW, raw_size, use_map
    return (map_width + 32 if use_map else for_width), size, use_map


@inline
def find_bits(k, b, flags, flag_bytes):
    """Return the bitmap of a block."""
    for i in range(BLOCK):
        flag_bytes[i] = k[b, i] != 0
    bitmap = u64(0)
    for t in range(8):
        bitmap |= flags[t] << u64(t)
    return bitmap


@inline
def subtract_base(k, b, base):
    """Subtract the base from all levels of a block."""
    for i in range(BLOCK):
        k[b, i] -= base


@inline
def compact(k, b, base, places, n):
    """Move the non-zero levels to the front, less the base; zeros follow."""
    for i in range(BLOCK):
        k[b, places[i]] = k[b, i] - base  # the place of a zero level is that of the next non-zero one
    for i in range(8):
        k[b, index(n) + i] = 0


@inline
def copy_bytes(source, at, n, out, to):
    """Copy n bytes."""
    for i in range(n):
        out[index(to) + i] = source[index(at) + i]


@inline
def put_padding(out, at):
    """Write zeros up to a multiple of 4 and return where they end. Slots start at multiples of 4."""
    for i in range(4):
        out[index(at) + i] = 0
    return at + 3 & ~3


@jit
def put_group(out, at, kind, blocks, heads, bases, k, raw, raw_at, raw_size, rest, words):
    """Write the bases and blocks of a group and return where they end. Overwrites the levels."""
    flags, bitmaps, counts = words[0], words[2], words[3]
    flag_bytes, places = flags.view(u8), words[1].view(u8)
    base_size = (0, 1, 4)[kind]
    for b in range(blocks):
        for byte in range(base_size):
            out[index(at + b * base_size + byte)] = u8(bases[b] >> 8 * byte)
    at = put_padding(out, at + blocks * base_size)
    for b in range(blocks):  # all blocks before any is packed: reading at once what was just moved would stall
        base = i32(bases[b] if kind else heads[0, b] >> 5)
        if heads[kind, b] < 32:
            subtract_base(k, b, base)
        else:
            bitmaps[b] = find_bits(k, b, flags, flag_bytes)
            counts[b] = spread_bits(bitmaps[b], flags, words[1])
            compact(k, b, base, places, counts[b])
    for b in range(blocks):
        head, n = heads[kind, b], i64(BLOCK)
        width = head & 31
        if head == RAW:
            size = min(raw.size - raw_at - b * raw_size, raw_size)
            copy_bytes(raw, raw_at + b * raw_size, size, out, at)
            at += size
            continue
        if head >= 32:
            put_word(out, at, bitmaps[b])
            at, n = at + 8, i64(counts[b])
        for _ in range(width >> 3):
            take_bytes(k, b, out, at)
            at += n
        take_bytes(k, b, rest, 0)
        if width & 4:
            put_slices(out, at, rest, n + 1 >> 1, 4, 0)
            at += n + 1 >> 1
        if width & 2:
            put_slices(out, at, rest, n + 3 >> 2, 2, width & 4)
            at += n + 3 >> 2
        if width & 1:
            put_slices(out, at, rest, n + 7 >> 3, 1, width & 6)
            at += n + 7 >> 3
    return put_padding(out, at)


@jit
def encode_task(
    task, size, x, raw, meta, scratch, slot, units, eb, mant, emin, extra, stochastic, seed_low, seed_high, bitmap
):
    """Encode the groups of a task into its slot of scratch, from where offsets count."""
    like, itemsize, groups = x[0], x.itemsize, (x.size + GROUP - 1) // GROUP
    offsets = meta[HEADER : HEADER + 4 * groups].view(u32)
    infos, all_heads = meta[HEADER + 4 * groups :], meta[HEADER + 5 * groups :]
    flat, steps = np.full(GROUP, eb), np.full(16, eb)
    v, k = flat.reshape(BLOCKS, BLOCK), np.empty((BLOCKS, BLOCK + 8), i32)
    rest, words = np.empty(2 * BLOCK, u8), np.empty((4, BLOCKS), u64)
    heads, bases = np.empty((3, BLOCKS), i64), np.empty(BLOCKS, i64)
    fill_steps(steps, eb)
    limit, e0 = magnitude(eb * f32(2.0**22)), exponent(eb) - 1
    begin = at = task * slot
    for group in range(task * size // GROUP, min((task + 1) * size // GROUP, groups)):
        first = group * GROUP
        blocks = min((x.size - first + BLOCK - 1) // BLOCK, BLOCKS)
        largest = load_group(x, first, flat, limit)
        r = max(exponent(largest + eb), emin) - mant - 1 + extra
        code = 0 if eb == 0 or r > e0 else min(e0 - r + 1, 15)
        step = steps[code]
        total0, total1, total2 = 0, blocks + 3 & ~3, 4 * blocks
        for b in range(blocks):
            start = first + b * BLOCK
            if eb == 0:
                bad = zero_levels(v, k, b)
            elif stochastic:
                factor, half = f32(1.0) / step, step * f32(0.5)
                bad = stochastic_levels(v, k, b, like, limit, eb, factor, half, start, seed_low, seed_high)
            else:
                bad = nearest_levels(v, k, b, like, limit, eb, f32(0.5) / step, step)
            if bad:
                for i in range(BLOCK):
                    k[b, i] = 0
            low, high, low_nz, high_nz, count = measure_block(k, b)
            raw_size = min(x.size - start, BLOCK) * itemsize
            heads[0, b], size0, _ = smallest_form(high, high_nz - 1, count, bitmap, (bad != 0) | (low < 0), raw_size)
            heads[2, b], size2, use_map = smallest_form(high - low, high_nz - low_nz, count, bitmap, bad != 0, raw_size)
            unfit = (low < -128) | ((low_nz if bitmap else low) > 127)
            heads[1, b], size1 = (RAW, raw_size) if unfit else (heads[2, b], size2)
            bases[b] = low_nz if use_map else low
            total0, total1, total2 = total0 + size0, total1 + size1, total2 + size2

        kind = 1 if total1 < total0 else 0
        kind = 2 if total2 < min(total0, total1) else kind
        offsets[group] = (at - begin) // 4
        infos[group] = code + 16 * kind
        for b in range(blocks):
            all_heads[group * BLOCKS + b] = heads[kind, b]
        at = put_group(scratch, at, kind, blocks, heads, bases, k, raw, first * itemsize, BLOCK * itemsize, rest, words)
    units[task] = (at - begin) // 4


@jit
def gather_task(task, size, groups, group, header, meta, scratch, slot, base, units, payload):
    """Move a task's bytes to their place in the payload; a group has `group` values, the metadata a `header`."""
    offsets = meta[header : header + 4 * groups].view(u32)
    for g in range(task * size // group, min((task + 1) * size // group, groups)):
        offsets[g] += base[task]
    copy_bytes(scratch, task * slot, 4 * units[task], payload, 4 * base[task])


@inline
def values_of(k, base, half, to, at):
    """Decode the levels of a block."""
    at = index(at)
    for i in range(BLOCK):
        level = i32(k[i] + base)
        m = as_float(i32(2 * abs(level) - 1), half) * half
        m = m if level != 0 else as_float(0, half)
        to[at + i] = narrow(-m if level < 0 else m, to[at + i])


@inline
def expand(dense, flags, places, place_bytes, to, at):
    """Put values at their places in a block, zeros between them; `dense` ends with 64 zeros."""
    for t in range(8):
        places[t] |= (flags[t] ^ ONES) << u64(6)
    for i in range(BLOCK):
        to[index(at) + i] = dense[place_bytes[i]]


@jit
def decode_group(data, at, heads, first_head, blocks, kind, half, to, to_bytes, first, valid, dense, k, words):
    """Decode a group from byte `at` of data to place `first` of `to`."""
    itemsize, bases_at = to.itemsize, at
    flags, places, place_bytes = words[0], words[1], words[1].view(u8)
    p4, p2, p1 = words[2].view(u8), words[3].view(u8), words[4].view(u8)
    at += 0 if kind == 0 else (blocks + 3 & ~3 if kind == 1 else 4 * blocks)
    for b in range(blocks):
        head, n = i64(heads[first_head + b]), BLOCK
        start = first + b * BLOCK
        if head == RAW:
            raw_size = min(valid - b * BLOCK, BLOCK) * itemsize
            copy_bytes(data, at, raw_size, to_bytes, start * itemsize)
            at += raw_size
            continue
        base, width = i32(head >> 5), head & 31
        if kind == 1:
            base = i32(np.int8(data[index(bases_at) + b]))
        elif kind == 2:
            base = i32(get_word(data, bases_at + 4 * b, 4))
        if head >= 32:
            n = spread_bits(get_word(data, at, 8), flags, places)
            at += 8
        bytes_at = at
        at += (width >> 3) * n
        clear(p4)
        clear(p2)
        clear(p1)
        if width & 4:
            get_slices(data, at, n + 1 >> 1, 4, 0, p4)
            at += n + 1 >> 1
        if width & 2:
            get_slices(data, at, n + 3 >> 2, 2, width & 4, p2)
            at += n + 3 >> 2
        if width & 1:
            get_slices(data, at, n + 7 >> 3, 1, width & 6, p1)
            at += n + 7 >> 3
        join_pieces(p4, p2, p1, k)
        for c in range((width >> 3) - 1, -1, -1):
            add_byte(data, bytes_at + c * n, k)
        if head < 32:
            values_of(k, base, half, to, start)
        else:
            values_of(k, base, half, dense, 0)
            expand(dense, flags, places, place_bytes, to, start)


@jit
def decode_task(task, size, numel, out, first_out, meta, payload, eb):
    """Decode the groups of a task into out, which starts with value `first_out`."""
    groups = (numel + GROUP - 1) // GROUP
    infos, heads = meta[HEADER + 4 * groups :], meta[HEADER + 5 * groups :]
    steps, k, words = np.full(16, eb), np.empty(BLOCK, i32), np.empty((5, 8), u64)
    dense, last = np.zeros(2 * BLOCK, out.dtype), np.empty(GROUP, out.dtype)
    tail = np.zeros(BLOCKS * (BLOCK * max(out.itemsize, 4) + 12) + SLACK, u8)  # the most that a group takes
    out_bytes, last_bytes = out.view(u8), last.view(u8)
    fill_steps(steps, abs(eb))
    for group in range(task * size // GROUP, min((task + 1) * size // GROUP, groups)):
        at = i64(get_word(meta, HEADER + 4 * group, 4)) * 4
        first = index(group * GROUP - first_out)
        valid = min(numel - group * GROUP, GROUP)
        blocks, kind = (valid + BLOCK - 1) // BLOCK, infos[group] >> 4
        half = steps[infos[group] & 15] * (f32(0.5) if eb < 0 else f32(1.0))
        here = group * BLOCKS
        if valid == GROUP and at + tail.size <= payload.size:
            decode_group(payload, at, heads, here, blocks, kind, half, out, out_bytes, first, valid, dense, k, words)
            continue
        copy_bytes(payload, at, min(tail.size, payload.size - at), tail, 0)  # there must be room to read and write
        decode_group(tail, 0, heads, here, blocks, kind, half, last, last_bytes, 0, valid, dense, k, words)
        for i in range(valid):
            out[first + i] = last[i]


def usable_bound(bound: float, dtype: torch.dtype) -> np.floating:
    """Return the bound as the kernels use it: rounded down to the computing dtype, clamped, zero where too small."""
    work = np.float64 if dtype == torch.float64 else np.float32
    eb = work(min(bound, 2.0**120))
    if float(eb) > bound:
        eb = np.nextafter(eb, work(0))
    return eb if float(eb) >= SMALLEST_BOUND[dtype] else work(0)


def encode_in_tasks(
    x: Tensor, format: BoundedFormat | DitheredFormat, encode: Any, rounding: tuple[Any, ...], group: int, header: int,
    slack: int = 0,
) -> tuple[Tensor, Tensor, float]:  # fmt: skip
    """Encode flat values within the bound: meta without its header, payload, and the bound as it is used.

    Args:
        x: The values.
        format: Bounds and sizes.
        encode: The kernel that encodes a task.
        rounding: Its arguments behind those that all formats have.
        group: Values of a group.
        header: Bytes at the beginning of the metadata.
        slack: Bytes that a task may write beyond those of its values.
    """
    numel, bound = x.numel(), format.bound
    values, size = elements(x), task_size(numel, group)
    tasks, groups = -(-numel // size), -(-numel // group)
    if format.relative != math.inf:
        ends = np.empty((tasks, 2))
        run(range_task, tasks, size, values, ends)
        low, high = ends[:, 0].min(), ends[:, 1].max()
        bound = min(bound, format.relative * float(high - low) if low <= high else 0.0)
    eb = usable_bound(bound, x.dtype)
    meta = torch.empty(format.meta_size(numel), dtype=torch.uint8)
    slot = min(size, groups * group) * x.element_size() + slack
    # Most of a slot is never touched: no huge pages, so not from numpy.
    scratch = torch.empty(tasks * slot, dtype=torch.uint8).numpy()
    units = np.empty(tasks, np.int64)
    place = (meta.numpy(), scratch, slot)
    run(encode, tasks, size, values, values.view(np.uint8), *place, units, eb, *FLOATS[x.dtype], *rounding)
    base, total = np.cumsum(units) - units, int(units.sum())
    payload = torch.empty(4 * total, dtype=torch.uint8)
    run(gather_task, tasks, size, groups, group, header, *place, base, units, payload.numpy(), wake=total > MIN_TASK)
    return meta, payload, float(eb)


def write_header(meta: Tensor, layout: str, *numbers: Any) -> None:
    """Write numbers to the beginning of the metadata."""
    header = struct.pack(layout, *numbers)
    meta.numpy()[: len(header)] = np.frombuffer(header, np.uint8)


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload), of exact size whatever the capacity."""
    if x.numel() == 0:
        return torch.zeros(HEADER, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    rounding = (format.stochastic, *seed_halves(seed), format.bitmap)
    meta, payload, eb = encode_in_tasks(x, format, encode_task, rounding, GROUP, HEADER, SLACK)
    write_header(meta, "<dqqq", -eb if format.stochastic else eb, payload.numel() // 4, 0, 0)
    return meta, payload


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Return the flat values that `bounded_encode` stored, or with `mask` only whether each is not zero."""
    work = np.float64 if format.dtype == torch.float64 else np.float32
    meta_bytes = meta.numpy()
    eb = work(meta_bytes[:8].view(np.float64)[0])
    size = task_size(numel, GROUP)
    return decode(decode_task, size, numel, format.dtype, mask, meta_bytes, payload.numpy(), eb)
