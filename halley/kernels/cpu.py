"""The kernels for CPU tensors, compiled by numba at their first call. The same bytes as `reference`; see docs/design.md.

Kernels are serial and hold no GIL; a tensor is cut into tasks of whole groups, which a small pool of threads works off.
This compiles each kernel once (numba's own parallel loops would need a serial twin, for use inside threads and forks).

fp16 travels as int16 and bf16 as uint16, so that numba's type specialisation tells the four dtypes apart. Stores of a fixed
number of bytes may run past the end of a field: what follows overwrites them, and buffers have room for it. No fastmath.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from halley.kernels.reference import BLOCK, BLOCKS, FLOATS, GROUP, HEADER, MASK32, RAW, gq_sizes, meta_size

MIN_TASK = 32 * GROUP  # values: less is not worth waking a thread for
MAX_TASK = 256 * GROUP
SLACK = 128  # bytes that a block may be written or read past its end
LARGEST_BLOCK = 8 + 4 * BLOCK  # bytes of a bitmap block of the largest width a head can state

f32, f64, i32, i64, u8, u32 = np.float32, np.float64, np.int32, np.int64, np.uint8, np.uint32

# How a dtype's bits travel: fp16 and bf16 as integers that only the compiled code reads.
CARRIER = {torch.float16: torch.int16, torch.bfloat16: torch.uint16, torch.float32: None, torch.float64: None}


def jit(function: Callable) -> Callable:
    """numba.njit, cached on disk where some cache directory can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:
        return numba.njit(function, **options)


# --- scalars: what differs between the dtypes -------------------------------------------------------------------------


def magnitude(v: Any) -> Any:
    """The bits of |v| as a signed integer: ordered like the magnitudes, NaN and infinity last."""


def of_bits(u: Any) -> Any:
    """The float with these bits."""


def ordered(v: Any) -> Any:
    """A signed integer, ordered like the values: the bits of |v|, inverted where v is negative."""


def sign(v: Any) -> Any:
    """-1 where the sign bit is set, else 0, int32."""


def exponent(v: Any) -> Any:
    """floor(log2 v) of a positive normal value."""


def as_float(k: Any, like: Any) -> Any:
    """An integer as a float of the type of `like`."""


def widen(element: Any) -> Any:
    """An element of a tensor as the float to compute with."""


def narrow(v: Any, like: Any) -> Any:
    """A computed float, not NaN, as an element of the type of `like`: nearest, ties to even, as torch casts."""


@overload(magnitude)
def _magnitude(v):
    if v == types.float32:
        return lambda v: i32(f32(v).view(i32) & i32(0x7FFFFFFF))
    return lambda v: f64(v).view(i64) & i64(0x7FFFFFFFFFFFFFFF)


@overload(ordered)
def _ordered(v):
    if v == types.float32:
        return lambda v: i32(f32(v).view(i32) & 0x7FFFFFFF ^ f32(v).view(i32) >> 31)
    return lambda v: f64(v).view(i64) & i64(0x7FFFFFFFFFFFFFFF) ^ f64(v).view(i64) >> 63


@overload(of_bits)
def _of_bits(u):
    if u == types.int32:
        return lambda u: i32(u).view(f32)
    return lambda u: i64(u).view(f64)


@overload(sign)
def _sign(v):
    if v == types.float32:
        return lambda v: i32(f32(v).view(i32) >> 31)
    return lambda v: i32(f64(v).view(i64) >> 63)


@overload(exponent)
def _exponent(v):
    if v == types.float32:
        return lambda v: (f32(v).view(i32) >> 23) - 127
    return lambda v: (f64(v).view(i64) >> 52) - 1023


@overload(as_float)
def _as_float(k, like):
    if like == types.float32:
        return lambda k, like: f32(k)
    return lambda k, like: f64(k)


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
            small = i32(f32(i32(m).view(f32) + f32(0.5)).view(i32) - 0x3F000000)  # the sum rounds to a multiple of 2^-24
            h = 0x7C00 if m >= 0x477FF000 else (small if m < 113 << 23 else normal)
            return np.int16(h | (u >> 16 & 0x8000))

        return to_half
    return lambda v, like: v


@jit
def random24(index, a, b):
    """24 random bits for an index, from the halves of the seed (b with its lowest bit set), as int32."""
    h = u32(u32(index ^ a) * b)
    h = u32(u32(h ^ h >> 16) * u32(0x7FEB352D))
    h = u32(u32(h ^ h >> 15) * u32(0x846CA68B))
    return i32(u32(h ^ h >> 16) >> 8)


@jit
def bits_of(v):
    """How many bits a non-negative integer below 2^31 needs."""
    return max((f64(v).view(i64) >> 52) - 1022, 0)


# --- fields -----------------------------------------------------------------------------------------------------------


@jit
def field_bytes(n, width):
    rest = ((width & 4) * n + 7 >> 3) + ((width & 2) * n + 7 >> 3) + ((width & 1) * n + 7 >> 3)
    return (width >> 3) * n + rest


@jit
def put_fields(out, at, v, n, width, rest):
    """Writes the fields of v (n values, then zeros) at byte `at`; returns where they end."""
    for c in range(width >> 3):
        to = out[at : at + BLOCK]
        for i in range(BLOCK):
            to[i] = u8(v[i] >> 8 * c)
        at += n
    if width & 7:
        shift = width & 24
        for i in range(BLOCK + 8):
            rest[i] = u8(v[i] >> shift)
    if width & 4:
        length = n + 1 >> 1
        to, r1 = out[at : at + 32], rest[length : length + 32]
        for j in range(32):
            to[j] = u8(rest[j] & 15 | r1[j] << 4)
        at += length
    if width & 2:
        length, s = n + 3 >> 2, width & 4
        to, r1 = out[at : at + 16], rest[length : length + 16]
        r2, r3 = rest[2 * length : 2 * length + 16], rest[3 * length : 3 * length + 16]
        for j in range(16):
            to[j] = u8(rest[j] >> s & 3 | (r1[j] >> s & 3) << 2 | (r2[j] >> s & 3) << 4 | (r3[j] >> s & 3) << 6)
        at += length
    if width & 1:
        length, s = n + 7 >> 3, width & 6
        to = out[at : at + 8]
        for j in range(8):
            to[j] = 0
        for t in range(8):
            r = rest[t * length : t * length + 8]
            for j in range(8):
                to[j] |= u8((r[j] >> s & 1) << t)
        at += length
    return at


@jit
def get_fields(data, at, v, n, width, rest, piece):
    """Reads what put_fields wrote: n values, then anything; returns where the fields end."""
    count = width >> 3
    bytes_at, at = at, at + count * n
    for i in range(BLOCK):
        rest[i] = 0
    s = 0
    for b in (4, 2, 1):
        if width & b:
            length = n * b + 7 >> 3
            for t in range(8 // b):  # a slice ends where the next one starts, and is overwritten from there
                to, source = piece[t * length : t * length + 8 * b], data[at : at + 8 * b]
                for j in range(8 * b):
                    to[j] = u8((source[j] >> t * b & (1 << b) - 1) << s)
            for i in range(BLOCK):
                rest[i] |= piece[i]
            at += length
            s += b
    for i in range(BLOCK):
        v[i] = i32(rest[i]) << 8 * count
    for c in range(count):
        source = data[bytes_at + c * n : bytes_at + c * n + BLOCK]
        for i in range(BLOCK):
            v[i] |= i32(source[i]) << 8 * c
    return at


# --- error-bounded encoding -------------------------------------------------------------------------------------------


@jit
def find_range(task, size, x, found):
    """Smallest and largest finite value of a task; the smallest is infinite if there is none."""
    infinite = magnitude(as_float(math.inf, widen(x[0])))
    low, high = infinite, ordered(as_float(-math.inf, widen(x[0])))
    none = high
    part = x[task * size : (task + 1) * size]
    for i in range(part.size):
        v = widen(part[i])
        finite, key = magnitude(v) < infinite, ordered(v)
        low = min(low, key if finite else infinite)
        high = max(high, key if finite else none)
    for side, key in enumerate((low, high)):
        found[task, side] = of_bits(key) if key >= 0 else -of_bits(~key)


@jit
def fill_steps(steps, eb):
    """eb_c of docs/design.md for each shrink code."""
    steps[0] = eb * f32(0.5)
    for c in range(1, 16):
        steps[c] = eb - math.ldexp(1.0, exponent(eb) - c)


@jit
def load_group(x, first, v, limit):
    """Widens a group into v, filled with zeros; returns the largest magnitude below the limit, as bits."""
    part = x[first : first + GROUP]
    zero = magnitude(as_float(0, v[0]))
    largest = zero
    for i in range(part.size):
        v[i] = widen(part[i])
        m = magnitude(v[i])
        largest = max(largest, m if m < limit else zero)
    for i in range(part.size, GROUP):
        v[i] = 0
    return largest


@jit
def nearest_levels(v, k, like, limit, eb, factor, half):
    """Levels of a block; returns whether it must be stored raw."""
    bad = i32(0)
    for i in range(BLOCK):
        m = magnitude(v[i])
        a = of_bits(m) if m < limit else as_float(0, eb)
        q = a * factor
        level = i32(q)
        level = max(i32(level + (as_float(level, q) < q)), i32(1)) if a > 0 else i32(0)
        back = widen(narrow(as_float(i32(2 * level - 1), q) * half, like))
        bad |= i32((m >= limit) | ((a > 0) & (not abs(back - a) <= eb)))
        s = sign(v[i])
        k[i] = (level ^ s) - s
    return bad


@jit
def stochastic_levels(v, k, like, limit, eb, factor, half, index, seed_low, seed_high):
    """The same with stochastic rounding; `index` is that of the first value."""
    bad = i32(0)
    for i in range(BLOCK):
        m = magnitude(v[i])
        a = of_bits(m) if m < limit else as_float(0, eb)
        q = a * factor + f32(0.5)
        level = i32(q)
        part = i32((q - as_float(level, q)) * f32(2.0**24))
        up = random24(u32(index + i), seed_low, seed_high) < part
        level = max(i32(level + up), i32(1)) if a > 0 else i32(0)
        back = widen(narrow(as_float(i32(2 * level - 1), q) * half, like))
        bad |= i32((m >= limit) | ((a > 0) & (not abs(back - a) <= eb)))
        s = sign(v[i])
        k[i] = (level ^ s) - s
    return bad


@jit
def measure_block(k):
    """Smallest and largest level, the same of the non-zero levels (1 if there is none), and how many these are."""
    big = i32(1 << 30)
    low, high, low_nz, high_nz, count = big, i32(-big), big, i32(-big), i32(0)
    for i in range(BLOCK):
        level = k[i]
        low, high = min(low, level), max(high, level)
        low_nz = min(low_nz, level if level != 0 else big)
        high_nz = max(high_nz, level if level != 0 else i32(-big))
        count = i32(count + (level != 0))
    if count == 0:
        low_nz = high_nz = i32(1)
    return low, high, low_nz, high_nz, count


@jit
def plan_group(kind, blocks, stats, raw_sizes, bitmap, heads, bases):
    """Chooses how to store each block under a base kind; returns the bytes of the group."""
    total = blocks * (0, 1, 4)[kind] + 3 & ~3
    for b in range(blocks):
        low, high, low_nz, high_nz, count, must_raw = stats[b]
        for_base, map_base = (0, 1) if kind == 0 else (low, low_nz)
        for_width, map_width = bits_of(max(high - for_base, 0)), bits_of(max(high_nz - map_base, 0))
        for_size, map_size = 8 * for_width, 8 + field_bytes(count, map_width)
        use_map = bitmap and map_size < for_size
        size = map_size if use_map else for_size
        unfit = must_raw != 0
        if kind == 0:
            unfit |= low < 0
        elif kind == 1:
            unfit |= (low < -128) | ((low_nz if bitmap else low) > 127)
        use_raw = unfit | (raw_sizes[b] < size)
        heads[b] = RAW if use_raw else (map_width + 32 if use_map else for_width)
        bases[b] = map_base if use_map else for_base
        total += raw_sizes[b] if use_raw else size
    return total


@jit
def put_block(out, at, k, head, base, packed, rest):
    """Writes a block that is not raw; returns where it ends."""
    if head < 32:
        for i in range(BLOCK):
            packed[i] = k[i] - base
        return put_fields(out, at, packed, BLOCK, head, rest)
    for i in range(BLOCK):
        rest[i] = k[i] != 0
    for j in range(8):
        byte = u8(0)
        for t in range(8):
            byte |= u8(rest[j + 8 * t] << t)
        out[at + j] = byte
    n = 0
    for i in range(BLOCK):
        packed[n] = k[i] - base
        n += k[i] != 0
    for i in range(n, n + 8):
        packed[i] = 0
    return put_fields(out, at + 8, packed, n, head & 31, rest)


@jit
def encode_task(
    task, size, x, raw, meta, scratch, slot, units, eb, mant, emin, extra, stochastic, seed_low, seed_high, bitmap
):
    """Encodes the groups of a task into its slot of scratch; offsets count from there."""
    like, itemsize, groups = x[0], x.itemsize, (x.size + GROUP - 1) // GROUP
    offsets = meta[HEADER : HEADER + 4 * groups].view(u32)
    infos, all_heads = meta[HEADER + 4 * groups :], meta[HEADER + 5 * groups :]
    out = scratch[task * slot : (task + 1) * slot]
    v, steps = np.full(GROUP, eb), np.full(16, eb)
    k, packed, rest = np.zeros(GROUP, i32), np.zeros(BLOCK + 8, i32), np.empty(2 * BLOCK, u8)
    stats, raw_sizes = np.empty((BLOCKS, 6), i32), np.empty(BLOCKS, i32)
    heads, bases = np.empty((3, BLOCKS), u8), np.empty((3, BLOCKS), i32)
    totals = np.empty(3, i64)
    fill_steps(steps, eb)
    limit, e0 = magnitude(eb * f32(2.0**22)), exponent(eb) - 1
    at = 0
    for group in range(task * size // GROUP, min((task + 1) * size // GROUP, groups)):
        first = group * GROUP
        blocks = min((x.size - first + BLOCK - 1) // BLOCK, BLOCKS)
        largest = load_group(x, first, v, limit)
        r = max(exponent(of_bits(largest) + eb), emin) - mant - 1 + extra
        code = 0 if eb == 0 or r > e0 else min(e0 - r + 1, 15)
        step = steps[code]
        for b in range(blocks):
            values, levels = v[b * BLOCK : (b + 1) * BLOCK], k[b * BLOCK : (b + 1) * BLOCK]
            start = first + b * BLOCK
            if eb == 0:
                bad = i32(0)
                for i in range(BLOCK):
                    bad |= i32(ordered(values[i]) != 0)
            elif stochastic:
                bad = stochastic_levels(
                    values, levels, like, limit, eb, f32(1.0) / step, step * f32(0.5), start, seed_low, seed_high
                )
            else:
                bad = nearest_levels(values, levels, like, limit, eb, f32(0.5) / step, step)
            if bad:
                levels[:] = 0
            low, high, low_nz, high_nz, count = measure_block(levels)
            stats[b, 0], stats[b, 1], stats[b, 2] = low, high, low_nz
            stats[b, 3], stats[b, 4], stats[b, 5] = high_nz, count, bad
            raw_sizes[b] = min(x.size - start, BLOCK) * itemsize

        best = 0
        for kind in range(3):
            totals[kind] = plan_group(kind, blocks, stats, raw_sizes, bitmap, heads[kind], bases[kind])
            if totals[kind] < totals[best]:
                best = kind
        offsets[group] = at // 4
        infos[group] = code + 16 * best
        if best == 1:
            for b in range(blocks + 3 & ~3):
                out[at + b] = u8(bases[1, b]) if b < blocks else 0
            at += blocks + 3 & ~3
        elif best == 2:
            for b in range(blocks):
                for byte in range(4):
                    out[at + 4 * b + byte] = u8(bases[2, b] >> 8 * byte)
            at += 4 * blocks
        for b in range(blocks):
            head = heads[best, b]
            all_heads[group * BLOCKS + b] = head
            if head == RAW:
                start = (first + b * BLOCK) * itemsize
                out[at : at + raw_sizes[b]] = raw[start : start + raw_sizes[b]]
                at += raw_sizes[b]
            else:
                at = put_block(out, at, k[b * BLOCK : (b + 1) * BLOCK], head, bases[best, b], packed, rest)
        while at & 3:
            out[at] = 0
            at += 1
    units[task] = at // 4


@jit
def gather_task(task, size, groups, meta, scratch, slot, base, units, payload):
    """Moves a task's bytes to their place in the payload."""
    offsets = meta[HEADER : HEADER + 4 * groups].view(u32)
    for group in range(task * size // GROUP, min((task + 1) * size // GROUP, groups)):
        offsets[group] += base[task]
    source = scratch[task * slot : task * slot + 4 * units[task]]
    to = payload[4 * base[task] :]
    for i in range(source.size):
        to[i] = source[i]


@jit
def decode_task(task, size, meta, payload, numel, eb, half_steps, out, first_out):
    """Decodes the groups of a task into out, which starts at value `first_out`."""
    like, itemsize, groups = out[0], out.itemsize, (numel + GROUP - 1) // GROUP
    offsets = meta[HEADER : HEADER + 4 * groups]
    infos, all_heads = meta[HEADER + 4 * groups :], meta[HEADER + 5 * groups :]
    steps, values = np.full(16, eb), np.empty(BLOCK, out.dtype)
    k, packed = np.empty(BLOCK, i32), np.empty(BLOCK, i32)
    rest, piece, flags = np.empty(BLOCK, u8), np.empty(BLOCK, u8), np.empty(BLOCK, u8)
    largest = BLOCKS * (max(LARGEST_BLOCK, BLOCK * itemsize) + 4) + SLACK
    tail = np.zeros(largest, u8)
    fill_steps(steps, abs(eb))
    for group in range(task * size // GROUP, min((task + 1) * size // GROUP, groups)):
        first = group * GROUP
        blocks = min((numel - first + BLOCK - 1) // BLOCK, BLOCKS)
        at = i64(0)
        for byte in range(4):
            at |= i64(offsets[4 * group + byte]) << 8 * byte + 2
        data = payload[at : at + largest]
        if data.size < largest:  # near the end: fixed-size reads need room
            tail[: data.size] = data
            data = tail
        code, kind = infos[group] & 15, infos[group] >> 4
        half = steps[code] * (f32(0.5) if eb < 0 else f32(1.0))
        at = (0, blocks + 3 & ~3, 4 * blocks)[min(kind, 2)]
        for b in range(blocks):
            head = all_heads[group * BLOCKS + b]
            start = first + b * BLOCK
            valid = min(numel - start, BLOCK)
            to = out[start - first_out : start - first_out + valid]
            if head == RAW:
                to.view(u8)[:] = data[at : at + valid * itemsize]
                at += valid * itemsize
                continue
            base = i32(head >> 5)
            if kind == 1:
                base = i32(np.int8(data[b]))
            elif kind == 2:
                base = i32(data[4 * b]) | i32(data[4 * b + 1]) << 8
                base |= i32(data[4 * b + 2]) << 16 | i32(data[4 * b + 3]) << 24
            if head < 32:
                at = get_fields(data, at, k, BLOCK, head, rest, piece)
                for i in range(BLOCK):
                    k[i] += base
            else:
                n = 0
                for t in range(8):
                    for j in range(8):
                        flags[8 * t + j] = data[at + j] >> t & 1
                for i in range(BLOCK):
                    n += flags[i]
                at = get_fields(data, at + 8, packed, n, head & 31, rest, piece)
                n = 0
                for i in range(BLOCK):
                    k[i] = i32(packed[n & 63] + base) & -i32(flags[i])
                    n += flags[i]
            for i in range(BLOCK):
                level = k[i]
                m = as_float(i32(2 * abs(level) - 1), half) * half
                m = as_float(0, half) if level == 0 or eb == 0 else m
                values[i] = narrow(-m if level < 0 else m, like)
            to[:] = values[:valid]


@jit
def find_nonzero(values, out):
    """Whether each value is not zero."""
    for i in range(values.size):
        out[i] = magnitude(widen(values[i])) != 0


# --- fixed rate -------------------------------------------------------------------------------------------------------


# --- running ----------------------------------------------------------------------------------------------------------

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    global _pool
    _pool = None


# Threads do not survive a fork: the child starts its own.
os.register_at_fork(after_in_child=_forget_pool)


def run(kernel: Callable, tasks: int, *args: Any) -> None:
    """Calls kernel(task, *args) for each task, on as many threads as torch uses."""
    global _pool, _pool_size
    threads = min(torch.get_num_threads(), tasks)
    if threads <= 1:
        for task in range(tasks):
            kernel(task, *args)
        return
    if _pool is None or _pool_size < threads - 1:
        _pool, _pool_size = ThreadPoolExecutor(threads - 1, "halley"), threads - 1
    left = iter(range(tasks))

    def work() -> None:
        for task in left:
            kernel(task, *args)

    helpers = [_pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.cancel() or helper.result()


def task_size(numel: int, unit: int) -> int:
    """Values of one task: a multiple of `unit`, small enough to balance the threads."""
    size = min(max(numel // (4 * torch.get_num_threads()), MIN_TASK), MAX_TASK)
    return -(-size // unit) * unit


def elements(x: Tensor) -> np.ndarray:
    """A tensor's values as the kernels take them."""
    x = x.detach().contiguous().view(-1)
    carrier = CARRIER[x.dtype]
    return (x if carrier is None else x.view(carrier)).numpy()


def usable_bound(bound: float, dtype: torch.dtype) -> np.floating:
    """The bound as the kernels use it: rounded down to the computing dtype, clamped, zero where too small."""
    work = np.float64 if dtype == torch.float64 else f32
    eb = work(min(bound, 2.0**120))
    if float(eb) > bound:
        eb = np.nextafter(eb, work(0))
    return eb if float(eb) >= (2.0**-900 if dtype == torch.float64 else 2.0**-100) else work(0)


def eb_encode(
    x: Tensor, bound: float, rel: float, stochastic: bool, seed: int, bitmap: bool, capacity: int
) -> tuple[Tensor, Tensor]:
    """Encodes flat float values under min(bound, rel * range): (meta, payload). `capacity` is ignored: the size is exact."""
    numel = x.numel()
    if numel == 0:
        return torch.zeros(HEADER, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    values, size = elements(x), task_size(numel, GROUP)
    tasks, groups = -(-numel // size), -(-numel // GROUP)
    if rel != math.inf:
        found = np.empty((tasks, 2))
        run(find_range, tasks, size, values, found)
        low, high = found[:, 0].min(), found[:, 1].max()
        bound = min(bound, rel * float(high - low) if low <= high else 0.0)
    eb = usable_bound(bound, x.dtype)
    meta = torch.empty(meta_size(numel), dtype=torch.uint8)
    slot = min(size, groups * GROUP) * x.element_size() + SLACK
    # Most of a slot is never touched. torch does not ask for huge pages, numpy does.
    scratch = torch.empty(tasks * slot, dtype=torch.uint8).numpy()
    units, meta_bytes = np.empty(tasks, np.int64), meta.numpy()
    run(
        encode_task, tasks, size, values, values.view(u8), meta_bytes, scratch, slot, units, eb, *FLOATS[x.dtype],
        stochastic, u32(seed & MASK32), u32(seed >> 32 & MASK32 | 1), bitmap,
    )  # fmt: skip
    base = np.cumsum(units) - units
    total = int(units.sum())
    payload = torch.empty(4 * total, dtype=torch.uint8)
    run(gather_task, tasks, size, groups, meta_bytes, scratch, slot, base, units, payload.numpy())
    meta_bytes[:HEADER] = np.frombuffer(struct.pack("<dqqq", -eb if stochastic else eb, total, 0, 0), u8)
    return meta, payload
