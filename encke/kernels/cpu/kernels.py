"""The compiled code of cpu.py. All of it is in this file: numba's cache notices changes to a kernel's own file only.

fp16 travels as int16 and bf16 as uint16, so that numba's type specialisation tells the four dtypes apart. Blocks are
read and written in steps of a fixed number of bytes, which vectorise: what runs past an end is overwritten or ignored.
No fastmath: values are those of the reference, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload

from encke.kernels.reference import BLOCK, BLOCKS, GROUP, HEADER, RAW

SLACK = 128  # bytes: how far past its end a block may be written or read

f32, f64, i32, i64 = np.float32, np.float64, np.int32, np.int64
u8, u32, u64 = np.uint8, np.uint32, np.uint64
PIECE = 4096  # bytes that stay in the nearest cache
ONES = u64(0x0101010101010101)


def jit(function: Callable, **options: Any) -> Callable:
    """numba.njit, cached on disk where there is a directory for it."""
    options.update(nogil=True, error_model="numpy")
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:
        return numba.njit(function, **options)


def inline(function: Callable) -> Callable:
    """For what kernels call in their inner loops: passing an array to a function costs as much as packing a block."""
    return jit(function, forceinline=True)


# --- scalars ----------------------------------------------------------------------------------------------------------


def choose(single: Callable, double: Callable) -> Callable:
    """A function for compiled code: `single` where the last argument has 32 bits, `double` where it has 64."""

    def chosen(*args: Any) -> Any:
        raise NotImplementedError("for compiled code only")

    overload(chosen, strict=False)(lambda *args: single if args[-1].bitwidth == 32 else double)
    return chosen


# The bits of |v| as an integer: ordered like the magnitudes, then infinity, then NaN.
magnitude = choose(lambda v: i32(f32(v).view(i32) & 0x7FFFFFFF), lambda v: f64(v).view(i64) & i64(2**63 - 1))
of_magnitude = choose(lambda m: i32(m).view(f32), lambda m: i64(m).view(f64))
# The bits of v as a signed integer that is ordered like the values.
ordered = choose(
    lambda v: i32(f32(v).view(i32) ^ f32(v).view(i32) >> 31 & 0x7FFFFFFF),
    lambda v: f64(v).view(i64) ^ f64(v).view(i64) >> 63 & i64(2**63 - 1),
)
of_ordered = choose(
    lambda key: i32(key ^ key >> 31 & 0x7FFFFFFF).view(f32),
    lambda key: i64(key ^ key >> 63 & i64(2**63 - 1)).view(f64),
)
# -1 where the sign bit is set, else 0.
sign = choose(lambda v: i32(f32(v).view(i32) >> 31), lambda v: i32(f64(v).view(i64) >> 63))
# floor(log2 v) of a positive normal value.
exponent = choose(lambda v: i64(f32(v).view(i32) >> 23) - 127, lambda v: (f64(v).view(i64) >> 52) - 1023)
# A number as a float of the type of `like`.
as_float = choose(lambda number, like: f32(number), lambda number, like: f64(number))
# A positive step as GroupQuant keeps it: bf16 rounded up (fp64 as it is), not too small.
step_up = choose(
    lambda step: max(i32(f32(step).view(i32) + 0xFFFF & -0x10000).view(f32), f32(2.0**-100)),
    lambda step: max(step, 2.0**-990),
)


def _lo_down(marked, lo):
    size = i32(f32(lo).view(i32) & 0x7FFFFFFF)
    if lo < 0:
        return -i32(size + 0xFFFF & -0x10000 if size < 0x7F7F0000 else 0x7F7F0000).view(f32)
    return i32(0x10000 if marked and size < 0x10000 else size & -0x10000).view(f32)


# A group's lo as it is stored: bf16 rounded down (fp64 as it is), finite; not zero where its sign is a mark.
lo_down = choose(_lo_down, lambda marked, lo: lo)


def widen(element: Any) -> Any:
    """An element of a tensor as the float to compute with."""


def narrow(v: Any, like: Any) -> Any:
    """A computed float, not NaN, as an element of the type of `like`: nearest, ties to even, as torch casts."""


@overload(widen)
def _widen(element):
    if element == types.uint16:
        return lambda element: u32(u32(element) << 16).view(f32)
    if element == types.int16:

        def from_half(element):
            h = i32(element)
            u = i32((h & 0x7FFF) << 13)
            u = i32(u + (224 << 23 if u >= 31 << 23 else 112 << 23))  # infinity and NaN go to the largest exponent
            small = i32(u + (1 << 23)).view(f32) - f32(2.0**-14)  # denormals: their leading one is not implied
            m = f32(small).view(i32) if u < 113 << 23 else u
            return i32(m | (h & 0x8000) << 16).view(f32)

        return from_half
    return lambda element: element


@overload(narrow)
def _narrow(v, like):
    if like == types.uint16:

        def to_bfloat(v, like):
            u = f32(v).view(u32)
            return np.uint16(u32(u + 0x7FFF + (u >> 16 & 1)) >> 16)

        return to_bfloat
    if like == types.int16:

        def to_half(v, like):
            u = f32(v).view(i32)
            m = i32(u & 0x7FFFFFFF)
            normal = i32((m + 0xFFF + (m >> 13 & 1) - (112 << 23)) >> 13)
            # Denormals: this sum rounds to a multiple of 2^-24.
            small = i32(f32(i32(m).view(f32) + f32(0.5)).view(i32) - 0x3F000000)
            h = 0x7C00 if m >= 0x477FF000 else (small if m < 113 << 23 else normal)
            return np.int16(h | (u >> 16 & 0x8000))

        return to_half
    return lambda v, like: v


@inline
def random32(i, a, b):
    """The hash of index i, from the halves of the seed (b with its lowest bit set)."""
    h = u32(u32(i ^ a) * b)
    h = u32(u32(h ^ h >> 15) * u32(0x846CA68B))
    return u32(h ^ h >> 16)


@inline
def turned(h, turn):
    """A hash turned right by `turn` bits."""
    return u32(h >> turn | u32(h << (u32(32) - turn & u32(31))))


@inline
def turned24(h, turn):
    """24 bits of a hash turned by `turn`, as int32."""
    return i32(turned(h, turn) >> 8)


@inline
def random24(i, turn, a, b):
    """24 random bits of index i, turned by `turn`, as int32."""
    return turned24(random32(i, a, b), turn)


@inline
def bits_of(v):
    """How many bits a non-negative integer below 2^31 needs."""
    return max((f64(v).view(i64) >> 52) - 1022, 0)


@inline
def index(at):
    """The same number, known to the compiler not to be negative: no wrap-around, which would not vectorise."""
    return at & 0x7FFFFFFFFFFF


# --- fields -----------------------------------------------------------------------------------------------------------


@inline
def field_bytes(n, width):
    rest = ((width & 4) * n + 7 >> 3) + ((width & 2) * n + 7 >> 3) + ((width & 1) * n + 7 >> 3)
    return (width >> 3) * n + rest


@inline
def get_word(data, at, size):
    """An unsigned integer of `size` bytes; eight become one load."""
    word = u64(0)
    for byte in range(size):
        word |= u64(data[index(at) + byte]) << u64(8 * byte)
    return word


@inline
def put_word(out, at, word):
    for byte in range(8):
        out[index(at) + byte] = u8(word >> u64(8 * byte))


@inline
def take_bytes(v, b, out, at):
    """Moves the low byte of each value of a block to out. (With less to do the loop is unrolled, not vectorised.)"""
    for i in range(BLOCK):
        out[index(at) + i] = u8(v[b, i])
        v[b, i] >>= 8


@inline
def put_slices(out, at, rest, length, b, shift):
    """One field of b bits out of the bytes in rest, always 8 * b bytes long."""
    mask = ONES * u64((1 << b) - 1)
    for j in range(0, 8 * b, 8):
        word = u64(0)
        for t in range(8 // b):
            word |= (get_word(rest, t * length + j, 8) >> u64(shift & 7) & mask) << u64(t * b)
        put_word(out, at + j, word)


@inline
def get_slices(data, at, length, b, shift, pieces):
    """The values of one field of b bits, shifted to their place."""
    at, length = index(at), index(length)
    for t in range(8 // b):  # a slice ends where the next one starts, and is overwritten from there
        for j in range(8 * b):
            pieces[t * length + j] = u8((data[at + j] >> t * b & (1 << b) - 1) << shift)


@inline
def clear(pieces):
    for i in range(BLOCK):
        pieces[i] = 0


@inline
def join_pieces(p4, p2, p1, v):
    for i in range(BLOCK):
        v[i] = p4[i] | p2[i] | p1[i]


@inline
def add_byte(data, at, v):
    """Puts a byte below each value."""
    for i in range(BLOCK):
        v[i] = i32(v[i] << 8) | data[index(at) + i]


@inline
def spread_bits(bitmap, flags, places):
    """A bitmap as 64 bytes, and how many bits are set before each; eight values in a word. Returns how many are set."""
    n = u64(0)
    for t in range(8):
        flags[t] = bitmap >> u64(t) & ONES
        sums = (flags[t] + n) * ONES
        places[t] = sums - flags[t]
        n = sums >> u64(56)
    return i64(n)


# --- error-bounded encoding -------------------------------------------------------------------------------------------


@jit
def range_task(task, size, x, found):
    """Smallest and largest finite value of a task; infinities the wrong way round if there is none."""
    none_low = ordered(as_float(math.inf, widen(x[0])))
    none_high = ordered(as_float(-math.inf, widen(x[0])))
    low, high = none_low, none_high
    mine = x[task * size : (task + 1) * size]
    for i in range(mine.size):
        v = widen(mine[i])
        finite, key = magnitude(v) < none_low, ordered(v)
        low, high = min(low, key if finite else none_low), max(high, key if finite else none_high)
    found[task, 0], found[task, 1] = of_ordered(low), of_ordered(high)


@inline
def fill_steps(steps, eb):
    """eb_c of docs/design.md for each shrink code."""
    steps[0] = eb * f32(0.5)
    for c in range(1, 16):
        steps[c] = eb - math.ldexp(1.0, exponent(eb) - c)


@inline
def load_group(x, first, v, limit):
    """Widens a group into v, filled with zeros; returns the largest magnitude below the limit."""
    first, size = index(first), min(x.size - first, GROUP)
    zero = magnitude(as_float(0, v[0]))
    largest = zero
    for i in range(size):
        v[i] = widen(x[first + i])
        m = magnitude(v[i])
        largest = max(largest, m if m < limit else zero)
    for i in range(size, GROUP):
        v[i] = 0
    return of_magnitude(largest)


@inline
def nearest_levels(v, k, b, like, limit, eb, factor, half):
    """Levels of a block; returns whether it must be stored raw."""
    bad = i32(0)
    for i in range(BLOCK):
        m = magnitude(v[b, i])
        a = of_magnitude(m) if m < limit else as_float(0, eb)
        q = a * factor
        level = i32(q)
        level = max(i32(level + (as_float(level, q) < q)), i32(1)) if a > 0 else i32(0)
        back = widen(narrow(as_float(i32(2 * level - 1), q) * half, like))
        bad |= i32((m >= limit) | ((a > 0) & (not abs(back - a) <= eb)))
        s = sign(v[b, i])
        k[b, i] = (level ^ s) - s
    return bad


@inline
def stochastic_levels(v, k, b, like, limit, eb, factor, half, start, seed_low, seed_high):
    """The same with stochastic rounding; `start` is the index of the block's first value."""
    bad = i32(0)
    for i in range(BLOCK):
        m = magnitude(v[b, i])
        a = of_magnitude(m) if m < limit else as_float(0, eb)
        q = a * factor + f32(0.5)
        level = i32(q)
        chance = i32((q - as_float(level, q)) * f32(2.0**24))
        up = random24(u32(start // 4 + (i & 15)), u32(i >> 4 << 3), seed_low, seed_high) < chance
        level = max(i32(level + up), i32(1)) if a > 0 else i32(0)
        back = widen(narrow(as_float(i32(2 * level - 1), q) * half, like))
        bad |= i32((m >= limit) | ((a > 0) & (not abs(back - a) <= eb)))
        s = sign(v[b, i])
        k[b, i] = (level ^ s) - s
    return bad


@inline
def zero_levels(v, k, b):
    """The levels under a bound of zero; returns whether any bit of the block is set."""
    bad = i32(0)
    for i in range(BLOCK):
        bad |= i32(ordered(v[b, i]) != 0)
        k[b, i] = 0
    return bad


@inline
def measure_block(k, b):
    """Smallest and largest level, the same of the non-zero levels (1 if there is none), and how many these are."""
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
    """Chooses between frame of reference, bitmap and raw; returns head, size and whether the bitmap beats the frame."""
    for_width, map_width = bits_of(max(for_range, 0)), bits_of(max(map_range, 0))
    for_size, map_size = 8 * for_width, 8 + field_bytes(count, map_width)
    use_map = bitmap & (map_size < for_size)
    size = map_size if use_map else for_size
    if must_raw | (raw_size < size):
        return RAW, raw_size, use_map
    return (map_width + 32 if use_map else for_width), size, use_map


@inline
def find_bits(k, b, flags, flag_bytes):
    """The bitmap of a block."""
    for i in range(BLOCK):
        flag_bytes[i] = k[b, i] != 0
    bitmap = u64(0)
    for t in range(8):
        bitmap |= flags[t] << u64(t)
    return bitmap


@inline
def subtract_base(k, b, base):
    for i in range(BLOCK):
        k[b, i] -= base


@inline
def compact(k, b, base, places, n):
    """Moves the non-zero levels to the front, less the base; zeros follow."""
    for i in range(BLOCK):
        k[b, places[i]] = k[b, i] - base  # the place of a zero level is that of the next non-zero one
    for i in range(8):
        k[b, index(n) + i] = 0


@inline
def copy_bytes(source, at, n, out, to):
    for i in range(n):
        out[index(to) + i] = source[index(at) + i]


@inline
def put_padding(out, at):
    """Zeros up to a multiple of 4; returns where they end. Slots start at multiples of 4."""
    for i in range(4):
        out[index(at) + i] = 0
    return at + 3 & ~3


@jit
def put_group(out, at, kind, blocks, heads, bases, k, raw, raw_at, raw_size, rest, words):
    """Writes the bases and blocks of a group; returns where they end. Uses up the levels."""
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
    """Encodes the groups of a task into its slot of scratch, from where offsets count."""
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
def gather_task(task, size, groups, meta, scratch, slot, base, units, payload):
    """Moves a task's bytes to their place in the payload."""
    offsets = meta[HEADER : HEADER + 4 * groups].view(u32)
    for group in range(task * size // GROUP, min((task + 1) * size // GROUP, groups)):
        offsets[group] += base[task]
    source, to = index(task * slot), index(4 * base[task])
    for i in range(4 * units[task]):
        payload[to + i] = scratch[source + i]


# --- error-bounded decoding -------------------------------------------------------------------------------------------


@inline
def values_of(k, base, half, to, at):
    """Decodes the levels of a block."""
    at = index(at)
    for i in range(BLOCK):
        level = i32(k[i] + base)
        m = as_float(i32(2 * abs(level) - 1), half) * half
        m = m if level != 0 else as_float(0, half)
        to[at + i] = narrow(-m if level < 0 else m, to[at + i])


@inline
def expand(dense, flags, places, place_bytes, to, at):
    """Puts values at their places in a block, zeros between them; `dense` ends with 64 zeros."""
    for t in range(8):
        places[t] |= (flags[t] ^ ONES) << u64(6)
    for i in range(BLOCK):
        to[index(at) + i] = dense[place_bytes[i]]


@jit
def decode_group(data, at, heads, first_head, blocks, kind, half, to, to_bytes, first, valid, dense, k, words):
    """Decodes a group from byte `at` of data to place `first` of `to`."""
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
    """Decodes the groups of a task into out, which starts with value `first_out`."""
    groups = (numel + GROUP - 1) // GROUP
    infos, heads = meta[HEADER + 4 * groups :], meta[HEADER + 5 * groups :]
    steps, k, words = np.full(16, eb), np.empty(BLOCK, i32), np.empty((5, 8), u64)
    dense, last = np.zeros(2 * BLOCK, out.dtype), np.empty(GROUP, out.dtype)
    tail = np.zeros(BLOCKS * (BLOCK * max(out.itemsize, 4) + 12) + SLACK, u8)  # what a group may take at most
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


# --- fixed rate -------------------------------------------------------------------------------------------------------

# The bits of v as an integer with and without a sign, and back.
signed_bits = choose(lambda v: f32(v).view(i32), lambda v: f64(v).view(i64))
plain_bits = choose(lambda v: f32(v).view(u32), lambda v: f64(v).view(u64))
of_bits = choose(lambda b: u32(b).view(f32), lambda b: u64(b).view(f64))
# Unsigned integers, wrapping around.
less_one = choose(lambda b: u32(b - u32(1)), lambda b: u64(b - u64(1)))
more_one = choose(lambda b: u32(b + u32(1)), lambda b: u64(b + u64(1)))


@inline
def size_of(x, signs):
    """What of a value is divided into steps: its magnitude, if signs are kept apart."""
    return abs(x) if signs else x


@inline
def is_finite(top, deep):
    infinite = as_float(math.inf, of_bits(deep))
    return top < signed_bits(infinite) and deep < plain_bits(-infinite)


@inline
def divide(top, deep, least, signed, bits, signs):
    """How a group is divided: lo and step as they are kept, the factor to fixed point and the largest result.

    `top` and `deep` are the largest bits with and without a sign, `least` the smallest of a value that is not zero.
    """
    zero = as_float(0, of_bits(least))
    affine, finite = signed and not signs, is_finite(top, deep)
    if affine:
        lo, hi = of_bits(deep), of_bits(plain_bits(of_bits(top)) if top >= 0 else least)
    else:
        lo, hi = of_bits(least) if top > 0 else zero, of_bits(top) if top > 0 else zero
    lo = lo_down(signed and signs, lo) if finite else zero
    n = as_float(((1 << bits - 1) - 2 if signs else (1 << bits) - 1) if signed else (1 << bits) - 2, zero)
    step, factor = zero, zero
    if not finite:
        step = as_float(math.nan, zero)
    elif hi > lo:
        step = step_up(hi * (f32(1.0) / n) - lo * (f32(1.0) / n))
        factor = f32(1.0) / step * f32(2.0**24)
    return lo, step, factor, n * f32(2.0**24)


@inline
def code_of(x, bits, signs, one, lo, factor, most, h):
    """A value's code. `one`: zero has a code of its own, below the others. `h` is the hash, turned."""
    s = (size_of(x, signs) - lo) * factor
    s = s if s > 0 else as_float(0, s)
    s = s if s < most else most
    fixed = u32(s) if bits == 8 else u32(i32(s))
    code = u32(u32(fixed + u32(u32(~h) >> u32(8))) >> u32(24)) + u32(one)
    if signs:
        code |= u32(x < 0) << u32(bits - 1)
    return u32(code) if one == 0 or size_of(x, signs) > 0 else u32(0)


@inline
def value_of(code, h, bits, signs, one, lo, unit, limit):
    """A code's value; what was added by chance is taken off again. With `signs`, `one` is the bit of the sign."""
    if signs:
        size = i32(code & u32(one - 1))
        value = lo + as_float(size - 1, lo) * unit
        value = limit if value > limit else value
        value = value if size > 0 else as_float(0, lo)
        return -value if code & u32(one) else value
    fixed = u32(u32(code << u32(24)) | u32(h >> u32(8)))
    value = lo + (as_float(fixed, lo) if bits == 8 else as_float(i32(fixed), lo)) * unit
    value = limit if value > limit else value
    value = -limit if value < -limit else value
    return value if code >= u32(one) else as_float(0, lo)


@inline
def terms_of(lo, step, bits, signs):
    """What value_of takes of a group: `one`, the value of nothing, and the unit."""
    if signs:
        return i32(1 << bits - 1 if lo < 0 else 256), abs(lo), step
    one = i32(0 if lo < 0 else 1)
    return one, lo - (f32(0.5) + as_float(one, lo)) * step, step * f32(2.0**-24)


@inline
def any_negative(v):
    found = False
    for x in v.flat:
        found |= widen(x) < 0
    return found


@inline
def byte_of(v, j, bits, length, signs, one, lo, factor, most, h):
    """The codes of the values of a group that meet in byte j, whose hash is h.

    (A function, as is all that a loop over bytes does: LLVM peels a loop that has variables of its own, and the rest
    does not fill its vectors.)
    """
    byte = u32(0)
    for t in range(8 // bits):
        code = code_of(widen(v[t * length + j]), bits, signs, one, lo, factor, most, turned(h, u32(4 * bits * t)))
        byte |= u32(code << u32(bits * t))
    return u8(byte)


@inline
def quantize_slices(v, bits, length, signs, one, lo, factor, most, word, seed_low, seed_high, out):
    """The bytes of a group; `word` is the place of the first one."""
    for j in range(length):
        out[j] = byte_of(v, j, bits, length, signs, one, lo, factor, most, random32(u32(word + j), seed_low, seed_high))


@inline
def put_values(byte, to, j, bits, length, signs, one, lo, unit, h, nan, limit):
    """The values of a group that meet in byte j, whose hash is h."""
    for t in range(8 // bits):
        code = u32(byte >> u8(bits * t) & u8((1 << bits) - 1))
        value = value_of(code, turned(h, u32(4 * bits * t)), bits, signs, one, lo, unit, limit)
        to[t * length + j] = narrow(value, nan)


@inline
def measure_row(row, signs, tops, deeps, leasts):
    """Takes a value of each group into what divide needs of them."""
    for c in range(tops.size):
        value = widen(row[c])
        part = size_of(value, signs)
        deeps[c], tops[c] = max(deeps[c], plain_bits(value)), max(tops[c], signed_bits(part))
        leasts[c] = min(leasts[c], less_one(plain_bits(part)))


@inline
def byte_at(v, j, c, bits, length, signs, terms, h):
    """The codes of the values of column c that meet in byte j, whose hash is h."""
    byte = u32(0)
    for t in range(8 // bits):
        x, one = widen(v[t * length + j, c]), u32(terms[3, c] > 0)
        code = code_of(x, bits, signs, one, terms[0, c], terms[1, c], terms[2, c], turned(h, u32(4 * bits * t)))
        byte |= u32(code << u32(bits * t))
    return u8(byte)


@inline
def quantize_row(v, j, bits, length, signs, terms, word, seed_low, seed_high, out):
    """Byte j of all groups of a block."""
    for c in range(out.size):
        out[c] = byte_at(v, j, c, bits, length, signs, terms, random32(u32(word + c), seed_low, seed_high))


@inline
def dequantize_row(codes, t, bits, signs, terms, word, seed_low, seed_high, nan, limit, to):
    """The values of slice t in a byte of each group."""
    for c in range(to.size):
        code, h = u32(codes[c] >> u8(bits * t) & u8((1 << bits) - 1)), random32(u32(word + c), seed_low, seed_high)
        turn = turned(h, u32(4 * bits * t))
        value = value_of(code, turn, bits, signs, i32(terms[0, c]), terms[1, c], terms[2, c], limit)
        to[c] = narrow(value, nan) if terms[2, c] == terms[2, c] else nan


@inline
def mask_row(codes, shift, tops, unknown, to):
    for c in range(to.size):
        to[c] = u8(codes[c] >> u8(shift) & tops[c] | unknown[c]) != 0


@functools.cache
def rate_kernels(bits, group, signs):
    """The kernels of one setting, whose numbers are constants in them: so loops unroll and vectorise."""
    slices, length = 8 // bits, group * bits // 8

    @jit
    def quantize_task(task, size, x, tail, seed_low, seed_high, out, los, steps):
        """Codes, lo and step of the groups of a task. x is cut into groups; `tail` is an incomplete one."""
        zero = as_float(0, widen(tail[0, 0]))
        for g in range(task * size, min((task + 1) * size, los.size)):
            v = x[g] if g < x.shape[0] else tail[0]
            top, deep, least = signed_bits(-zero), plain_bits(zero), less_one(plain_bits(zero))
            for i in range(group):
                value = widen(v[i])
                part = size_of(value, signs)
                deep, top = max(deep, plain_bits(value)), max(top, signed_bits(part))
                least = min(least, less_one(plain_bits(part)))
            signed = deep > plain_bits(-zero) if is_finite(top, deep) else any_negative(v)
            lo, step, factor, most = divide(top, deep, more_one(least), signed, bits, signs)
            los[g] = narrow(-lo if signed and signs else lo, los[g])
            steps[g] = narrow(step, steps[g])
            word = u32(g * length)
            if signed and not signs:
                quantize_slices(v, bits, length, signs, u32(0), lo, factor, most, word, seed_low, seed_high, out[g])
            else:
                quantize_slices(v, bits, length, signs, u32(1), lo, factor, most, word, seed_low, seed_high, out[g])

    @jit
    def dequantize_task(task, size, out, tail, data, seed_low, seed_high, los, steps, nan, limit):
        """Decodes the groups of a task into out, cut as in quantize_task."""
        for g in range(task * size, min((task + 1) * size, los.size)):
            to, codes = out[g] if g < out.shape[0] else tail[0], data[g]
            step, word = widen(steps[g]), u32(g * length)
            one, lo, unit = terms_of(widen(los[g]), step, bits, signs)
            if step != step:
                to[:] = nan
                continue
            for j in range(length):
                h = u32(0) if signs else random32(u32(word + j), seed_low, seed_high)
                put_values(codes[j], to, j, bits, length, signs, one, lo, unit, h, nan, limit)

    @jit
    def mask_task(task, size, out, tail, data, los, steps):
        """Whether the values of a task's groups are not zero; without `signs` a signed group's codes cannot tell."""
        for g in range(task * size, min((task + 1) * size, los.size)):
            to, codes = out[g] if g < out.shape[0] else tail[0], data[g]
            step, signed = widen(steps[g]), widen(los[g]) < 0
            unknown = u8(step != step or (signed and not signs))
            top = u8((1 << bits - 1) - 1 if signed and signs else (1 << bits) - 1)
            for j in range(length):
                for t in range(slices):
                    to[t * length + j] = u8(codes[j] >> u8(bits * t) & top | unknown) != 0

    @jit
    def quantize_rows_task(task, size, x, tail, seed_low, seed_high, out, los, steps):
        """The same of groups that lie side by side: value i of group c of a block is in row i, column c."""
        zero, columns = as_float(0, widen(tail[0, 0, 0])), los.shape[1]
        tops, deeps = np.full(columns, signed_bits(zero)), np.full(columns, plain_bits(zero))
        leasts, terms = np.full(columns, plain_bits(zero)), np.full((4, columns), zero)
        for b in range(task * size, min((task + 1) * size, los.shape[0])):
            v = x[b] if b < x.shape[0] else tail[0]
            tops[:], deeps[:], leasts[:] = signed_bits(-zero), plain_bits(zero), less_one(plain_bits(zero))
            for i in range(group):
                measure_row(v[i], signs, tops, deeps, leasts)
            for c in range(columns):
                top, deep, least = tops[c], deeps[c], more_one(leasts[c])
                signed = deep > plain_bits(-zero) if is_finite(top, deep) else any_negative(v[:, c])
                lo, step, factor, most = divide(top, deep, least, signed, bits, signs)
                los[b, c] = narrow(-lo if signed and signs else lo, los[b, c])
                steps[b, c] = narrow(step, steps[b, c])
                terms[0, c], terms[1, c], terms[2, c], terms[3, c] = lo, factor, most, not signed or signs
            for j in range(length):
                quantize_row(
                    v, j, bits, length, signs, terms, u32((b * length + j) * columns), seed_low, seed_high, out[b, j]
                )

    @jit
    def dequantize_rows_task(task, size, out, tail, data, seed_low, seed_high, los, steps, nan, limit):
        """The same of groups that lie side by side."""
        columns = los.shape[1]
        terms = np.full((3, columns), as_float(0, widen(los[0, 0])))
        for b in range(task * size, min((task + 1) * size, los.shape[0])):
            to = out[b] if b < out.shape[0] else tail[0]
            for c in range(columns):
                one, terms[1, c], terms[2, c] = terms_of(widen(los[b, c]), widen(steps[b, c]), bits, signs)
                terms[0, c] = one
            for j in range(length):
                word = u32((b * length + j) * columns)
                for t in range(slices):
                    dequantize_row(
                        data[b, j], t, bits, signs, terms, word, seed_low, seed_high, nan, limit, to[t * length + j]
                    )

    @jit
    def mask_rows_task(task, size, out, tail, data, los, steps):
        """The same of groups that lie side by side."""
        columns = los.shape[1]
        tops, unknown = np.empty(columns, u8), np.empty(columns, u8)
        for b in range(task * size, min((task + 1) * size, los.shape[0])):
            to = out[b] if b < out.shape[0] else tail[0]
            for c in range(columns):
                step, signed = widen(steps[b, c]), widen(los[b, c]) < 0
                unknown[c] = step != step or (signed and not signs)
                tops[c] = (1 << bits - 1) - 1 if signed and signs else (1 << bits) - 1
            for j in range(length):
                for t in range(slices):
                    mask_row(data[b, j], bits * t, tops, unknown, to[t * length + j])

    return (quantize_task, dequantize_task, mask_task), (quantize_rows_task, dequantize_rows_task, mask_rows_task)


# --- dual precision ---------------------------------------------------------------------------------------------------


@jit
def average_tiles(v, height, width, tall, wide, sums, lows, at):
    """Averages of a plane's tiles as they are kept: columns from top to bottom, then their sums from left to right."""
    zero = as_float(0, v[0])
    for top in range(0, height, tall):
        rows = min(tall, height - top)
        for x in range(width):
            sums[x] = zero
        for y in range(top, top + rows):
            first = index(y * width)
            for x in range(width):
                sums[x] += v[first + x]
        for left in range(0, width, wide):
            columns, total = min(wide, width - left), zero
            for x in range(columns):
                total += sums[index(left) + x]
            mean = f32(total / as_float(rows * columns, zero))
            kept = narrow(mean, np.uint16(0))
            lows[at] = kept if mean - mean == 0 and kept & 0x7F80 != 0x7F80 else np.uint16(0)
            at += 1


@inline
def spread_averages(lows, at, width, wide, row):
    """The averages of one row of tiles at all places of a row of values."""
    for left in range(0, width, wide):
        mean = as_float(widen(lows[at]), row[0])
        for x in range(min(wide, width - left)):
            row[index(left) + x] = mean
        at += 1


@jit
def subtract_averages(v, height, width, tall, wide, lows, at, row):
    """Leaves of a plane what the averages do not tell; returns the smallest and the largest of it."""
    for top in range(0, height, tall):
        spread_averages(lows, at, width, wide, row)
        at += (width + wide - 1) // wide
        for y in range(top, min(top + tall, height)):
            first = index(y * width)
            for x in range(width):
                v[first + x] -= row[x]
    low, high = ordered(as_float(math.inf, v[0])), ordered(as_float(-math.inf, v[0]))
    for i in range(v.size):  # a loop of its own: one over many values vectorises better than many over a row
        key = ordered(v[i])
        low, high = min(low, key), max(high, key)
    return of_ordered(low), of_ordered(high)


@jit
def quantize_plane(v, codes, bits, length, lo, inverse, hashes):
    """Codes of what is left of a plane. The values of a byte share one hash."""
    zero, n = as_float(0, lo), as_float((1 << bits) - 1, lo)
    for t in range(8 // bits):
        first, turn = index(t * length), u32(4 * bits * t)
        for j in range(min(length, v.size - t * length)):
            s = (v[first + j] - lo) * inverse
            s = s if s > 0 else zero
            s = s if s < n else n
            q = i32(s)
            chance = i32((s - as_float(q, s)) * f32(2.0**24))
            codes[first + j] = u8(q + (turned24(hashes[j], turn) < chance))


@jit
def dual_encode_task(
    task, size, x, height, width, tall, wide, bits, seed_low, seed_high, los, steps, lows, codes, masks
):
    """Everything that is kept of the planes of a task."""
    values = height * width
    length, mask_length = (values * bits + 7) // 8, (values + 7) // 8
    v, flags, sums, row = np.full(values, los[0]), np.empty(values, u8), np.full(width, los[0]), np.full(width, los[0])
    hashes, tiles = np.empty(length, u32), lows.size // los.size
    zero, n = as_float(0, los[0]), as_float((1 << bits) - 1, los[0])
    for p in range(task * size // values, min((task + 1) * size // values, los.size)):
        mine = x[p * values : (p + 1) * values]
        for i in range(values):
            v[i] = widen(mine[i])
        if masks.size:
            for i in range(values):
                flags[i] = magnitude(v[i]) != 0
            pack(flags, 1, mask_length, 0, mask_length, masks[p * mask_length : (p + 1) * mask_length])
        average_tiles(v, height, width, tall, wide, sums, lows, p * tiles)
        lo, hi = subtract_averages(v, height, width, tall, wide, lows, p * tiles, row)
        lo += zero  # never -0.0
        step, inverse = zero, zero
        if not hi - lo < math.inf:
            lo, step = zero, as_float(math.nan, zero)
        elif hi > lo:
            step = step_up(hi / n - lo / n)
            inverse = f32(1.0) / step
        los[p], steps[p] = lo, narrow(step, steps[p])
        for j in range(length):
            hashes[j] = random32(u32(p * length + j), seed_low, seed_high)
        quantize_plane(v, flags, bits, length, lo, inverse, hashes)
        pack(flags, bits, length, 0, length, codes[p * length : (p + 1) * length])


@jit
def dual_decode_task(
    task, size, numel, out, first_out, height, width, tall, wide, bits, los, steps, lows, data, nan, limit
):
    """Decodes the planes of a task into out, which starts with value `first_out`."""
    values = height * width
    length, tiles = (values * bits + 7) // 8, lows.size // los.size
    codes, row = np.empty(values, u8), np.full(width, los[0])
    for p in range(task * size // values, min((task + 1) * size // values, los.size)):
        unpack(data[p * length : (p + 1) * length], bits, length, 0, length, codes)
        lo, step, at = los[p], widen(steps[p]), p * tiles
        to = out[p * values - first_out : (p + 1) * values - first_out]
        for top in range(0, height, tall):
            spread_averages(lows, at, width, wide, row)
            at += (width + wide - 1) // wide
            for y in range(top, min(top + tall, height)):
                first = index(y * width)
                for x in range(width):
                    value = row[x] + (lo + as_float(i32(codes[first + x]), lo) * step)
                    to[first + x] = narrow(min(max(value, -limit), limit), nan)
        if step != step:
            to[:] = nan


@jit
def dual_mask_task(task, size, values, masks, out):
    """The mask bits of the planes of a task, a byte each."""
    length = (values + 7) // 8
    for p in range(task * size // values, min((task + 1) * size, out.size) // values):
        mine = masks[p * length : (p + 1) * length]
        unpack(mine, 1, length, 0, length, out[p * values : (p + 1) * values])


# --- masks and small integers -----------------------------------------------------------------------------------------


@jit
def find_nonzero(values, out):
    """Whether each value is not zero."""
    for i in range(values.size):
        out[i] = magnitude(widen(values[i])) != 0


@inline
def pack(values, bits, length, start, stop, out):
    """Bytes start to stop of one field over the values, a few at a time: they are gone over once for each slice."""
    for first in range(start, stop, PIECE):
        end = min(first + PIECE, stop)
        to, slice_ = out[first:end], values[first:end]
        for j in range(to.size):
            to[j] = slice_[j]
        for t in range(1, 8 // bits):
            slice_ = values[t * length + first : t * length + end]
            for j in range(slice_.size):
                to[j] |= u8(slice_[j] << t * bits)


@inline
def unpack(data, bits, length, start, stop, out):
    """The values in bytes start to stop of one field."""
    codes = data[start:stop]
    for t in range(8 // bits):
        to = out[t * length + start : t * length + stop]
        for j in range(to.size):
            to[j] = codes[j] >> t * bits & (1 << bits) - 1


@jit
def log_encode_task(task, size, x, inverse, far, bend, seed_low, seed_high, out):
    for i in range(task * size, min((task + 1) * size, x.size)):
        u = f32(random24(u32(i), u32(0), seed_low, seed_high)) * f32(2.0**-24)
        v = widen(x[i])
        t = min(max(max(v * inverse, v * far - bend) + u, f32(0)), f32(254))
        out[i] = u8(t) if v == v else u8(255)


@jit
def log_decode_task(task, size, numel, out, start, data, step, far, bend, shift, seed_low, seed_high, nan):
    for i in range(task * size, min((task + 1) * size, numel)):
        u = f32(random24(u32(i), u32(0), seed_low, seed_high)) * f32(2.0**-24)
        t = f32(data[i]) + f32(0.5) - u
        v = max(t * step, (t + bend) * far) - shift
        out[i - start] = narrow(v, nan) if data[i] != 255 else nan


@jit
def pack_task(task, size, values, bits, out):
    pack(values, bits, out.size, task * size, min((task + 1) * size, out.size), out)


@jit
def unpack_task(task, size, data, bits, out):
    unpack(data, bits, data.size, task * size, min((task + 1) * size, data.size), out)
