"""Fixed-rate codes of groups on the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from encke.kernels.cpu.launch import QUICK, elements, huge_empty, nan_and_limit, run, seed_halves, task_size
from encke.kernels.cpu.scalars import (
    as_float,
    choose,
    f32,
    f64,
    i32,
    i64,
    inline,
    jit,
    lo_down,
    narrow,
    random32,
    rotate_right,
    step_up,
    u8,
    u32,
    u64,
    widen,
)
from encke.kernels.formats import GroupFormat, Seed
from encke.kernels.plans import GroupPlan, flat_memory

# The bits of v as an integer with and without a sign, and back.
signed_bits = choose(lambda v: f32(v).view(i32), lambda v: f64(v).view(i64))
plain_bits = choose(lambda v: f32(v).view(u32), lambda v: f64(v).view(u64))
from_bits = choose(lambda b: u32(b).view(f32), lambda b: u64(b).view(f64))
# Unsigned integers, wrapping around.
less_one = choose(lambda b: u32(b - u32(1)), lambda b: u64(b - u64(1)))
more_one = choose(lambda b: u32(b + u32(1)), lambda b: u64(b + u64(1)))
# The bits of v that bf16 does not have; fp64 is stored as it is.
rest_of = choose(lambda v: u32(f32(v).view(u32) & u32(0xFFFF)), lambda v: u32(0))


def top_half(v: Any, like: Any) -> Any:
    """Return the upper half of fp32 as bf16; fp64 as it is."""


def low_half(v: Any, like: Any) -> Any:
    """Return the lower half of fp32 without its last bit, with the mark of a constant group."""


def marks_constant(step: Any) -> Any:
    """Return whether a stored step has the mark of a constant group."""


def constant_of(lo: Any, step: Any, byte: Any, signs: Any) -> Any:
    """Return the value of a constant group from its scales and the first byte of its codes, which has the last bit."""


@overload(top_half)
def _top_half(v, like):
    if like == types.uint16:
        return lambda v, like: np.uint16(f32(v).view(u32) >> u32(16))
    return lambda v, like: v


@overload(low_half)
def _low_half(v, like):
    if like == types.uint16:
        return lambda v, like: np.uint16(u32(f32(v).view(u32) >> u32(1)) | u32(0x8000))
    return lambda v, like: v


@overload(marks_constant)
def _marks_constant(step):
    if step == types.uint16:
        return lambda step: step >= np.uint16(0x8000)
    return lambda step: False


@overload(constant_of)
def _constant_of(lo, step, byte, signs):
    if lo == types.uint16:

        def from_halves(lo, step, byte, signs):
            last = u32(byte) if lo >= np.uint16(0x8000) and not signs else u32(byte) >> u32(1)
            return u32(u32(u32(lo) << u32(16)) | u32(u32(step) << u32(1) & u32(0xFFFE)) | last & u32(1)).view(f32)

        return from_halves
    return lambda lo, step, byte, signs: lo


@inline
def size_of(x, signs):
    """Return what is divided into steps: the magnitude of a value if signs are stored apart, else the value."""
    return abs(x) if signs else x


@inline
def is_finite(top, deep):
    """Return whether all values of a group are finite."""
    infinite = as_float(math.inf, from_bits(deep))
    return top < signed_bits(infinite) and deep < plain_bits(-infinite)


@inline
def divide(top, deep, least, signed, bits, signs, first):
    """Divide the range of a group: (lo, step, factor to fixed point, largest result), the first two as stored.

    `top` and `deep` are the largest bits with and without a sign, `least` the smallest of a value that is not zero. If
    all values but zeros are one and `first`, the group's first value, is none of these, lo is that value as it is.
    """
    zero = as_float(0, from_bits(least))
    affine, finite = signed and not signs, is_finite(top, deep)
    if affine:
        lo, hi = from_bits(deep), from_bits(plain_bits(from_bits(top)) if top >= 0 else least)
    else:
        lo, hi = from_bits(least) if top > 0 else zero, from_bits(top) if top > 0 else zero
    n = as_float(((1 << bits - 1) - 2 if signs else (1 << bits) - 1) if signed else (1 << bits) - 2, zero)
    step, factor = zero, zero
    if not finite:
        lo, step = zero, as_float(math.nan, zero)
    elif hi != lo or first == 0:
        lo = lo_down(signed and signs, lo)
    if hi > lo and finite:
        step = step_up(hi * (f32(1.0) / n) - lo * (f32(1.0) / n))
        factor = f32(1.0) / step * f32(2.0**24)
    return lo, step, factor, n * f32(2.0**24)


@inline
def store_scales(g, lo, step, los, steps):
    """Store lo and step of group g, or of a group with one value the first 31 bits of that value.

    Return the last bit, which is added to all codes.
    """
    los[g], steps[g] = top_half(lo, los[g]), top_half(step, steps[g])
    if rest_of(lo) == 0:
        return u32(0)
    steps[g] = low_half(lo, steps[g])
    return u32(rest_of(lo) & 1)


@inline
def load_scales(lo, step, byte, signs):
    """Return lo and step of a group from what is stored of it: both, and the first byte of its codes."""
    if not marks_constant(step):
        return widen(lo), widen(step)
    return constant_of(lo, step, byte, signs), as_float(0, widen(lo))


@inline
def code_of(x, bits, signs, one, first, lo, factor, most, h):
    """Return a value's code. `one`: zero has a code of its own, below that of lo, `first`. `h` is the rotated hash."""
    s = (size_of(x, signs) - lo) * factor
    s = s if s > 0 else as_float(0, s)
    s = s if s < most else most
    fixed = u32(s) if bits == 8 else u32(i32(s))
    code = u32(u32(fixed + u32(u32(~h) >> u32(8))) >> u32(24)) + first
    if signs:
        code |= u32(x < 0) << u32(bits - 1)
    return u32(code) if one == 0 or size_of(x, signs) > 0 else u32(0)


@inline
def value_of(code, h, bits, signs, one, lo, unit, limit):
    """Return a code's value, less the random number that was added. With `signs`, `one` is the bit of the sign."""
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
    """Return what `value_of` takes of a group: (zero code or sign bit, offset, step)."""
    if signs:
        return i32(1 << bits - 1 if lo < 0 else 256), abs(lo), step
    one = i32(0 if lo < 0 else 1)
    return one, lo - (f32(0.5) + as_float(one, lo)) * step, step * f32(2.0**-24)


@inline
def any_negative(v):
    """Return whether a group with values that are not finite has negative ones."""
    negative = False
    for x in v.flat:
        negative |= widen(x) < 0
    return negative


@inline
def byte_of(v, j, bits, length, signs, one, first, lo, factor, most, h):
    """Return byte j of a group, whose hash is h.

    (A function, as are all bodies of loops over bytes: LLVM peels a loop that has variables of its own, and the rest
    does not fill its vectors.)
    """
    byte = u32(0)
    for t in range(8 // bits):
        turned = rotate_right(h, u32(4 * bits * t))
        code = code_of(widen(v[t * length + j]), bits, signs, one, first, lo, factor, most, turned)
        byte |= u32(code << u32(bits * t))
    return u8(byte)


@inline
def quantize_slices(v, bits, length, signs, one, first, lo, factor, most, word, seed_low, seed_high, out):
    """Write the bytes of a group; `word` is the place of the first one."""
    for j in range(length):
        h = random32(u32(word + j), seed_low, seed_high)
        out[j] = byte_of(v, j, bits, length, signs, one, first, lo, factor, most, h)


@inline
def put_values(byte, to, j, bits, length, signs, one, lo, unit, h, nan, limit):
    """Write the values of a group that share byte j, whose hash is h."""
    for t in range(8 // bits):
        code = u32(byte >> u8(bits * t) & u8((1 << bits) - 1))
        value = value_of(code, rotate_right(h, u32(4 * bits * t)), bits, signs, one, lo, unit, limit)
        to[t * length + j] = narrow(value, nan)


@inline
def measure_row(row, signs, tops, deeps, leasts):
    """Update the extremes of each group with one of its values."""
    for c in range(tops.size):
        value = widen(row[c])
        part = size_of(value, signs)
        deeps[c], tops[c] = max(deeps[c], plain_bits(value)), max(tops[c], signed_bits(part))
        leasts[c] = min(leasts[c], less_one(plain_bits(part)))


@inline
def byte_at(v, j, c, bits, length, signs, terms, h):
    """Return byte j of column c, whose hash is h."""
    byte = u32(0)
    for t in range(8 // bits):
        x, one, first, turned = (
            widen(v[t * length + j, c]),
            u32(terms[3, c] > 0),
            u32(i32(terms[4, c])),
            rotate_right(h, u32(4 * bits * t)),
        )
        code = code_of(x, bits, signs, one, first, terms[0, c], terms[1, c], terms[2, c], turned)
        byte |= u32(code << u32(bits * t))
    return u8(byte)


@inline
def quantize_row(v, j, bits, length, signs, terms, word, seed_low, seed_high, out):
    """Write byte j of all groups of a block."""
    for c in range(out.size):
        out[c] = byte_at(v, j, c, bits, length, signs, terms, random32(u32(word + c), seed_low, seed_high))


@inline
def dequantize_row(codes, t, bits, signs, terms, word, seed_low, seed_high, nan, limit, to):
    """Write the values of slice t in a byte of each group."""
    for c in range(to.size):
        code, h = u32(codes[c] >> u8(bits * t) & u8((1 << bits) - 1)), random32(u32(word + c), seed_low, seed_high)
        h = rotate_right(h, u32(4 * bits * t))
        value = value_of(code, h, bits, signs, i32(terms[0, c]), terms[1, c], terms[2, c], limit)
        to[c] = narrow(value, nan) if terms[2, c] == terms[2, c] else nan


@inline
def mask_row(codes, shift, tops, unknown, to):
    """Write whether the values of one slice in a byte of each group are not zero."""
    for c in range(to.size):
        to[c] = u8(codes[c] >> u8(shift) & tops[c] | unknown[c]) != 0


@inline
def place_of(g, row, count, each):
    """Return where group g of rows of `row` values begins, `count` groups of `each` values a row, and its values."""
    at = g % count * each
    return g // count * row + at, min(each, row - at)


@functools.cache
def contiguous_kernels(bits, group, signs):
    """Make the kernels of one setting, in which its numbers are constants: loops unroll and vectorise.

    Without a group they take rows of any width.
    """
    slices, fixed = 8 // bits, group * bits // 8

    @jit
    def quantize_task(task, size, row, count, x, out, seed_low, seed_high, los, steps):
        """Encode the groups of a task."""
        length = fixed if group else out.shape[1]
        each = length * slices
        filled, zero = np.empty(each, x.dtype), as_float(0, widen(x[0]))
        for g in range(task * size, min((task + 1) * size, los.size)):
            start, valid = place_of(g, row, count, each)
            v = x[start : start + valid]
            if valid < each:
                filled[:valid] = v
                filled[valid:] = v[valid - 1]
                v = filled
            top, deep, least = signed_bits(-zero), plain_bits(zero), less_one(plain_bits(zero))
            for i in range(each):
                value = widen(v[i])
                part = size_of(value, signs)
                deep, top = max(deep, plain_bits(value)), max(top, signed_bits(part))
                least = min(least, less_one(plain_bits(part)))
            signed = deep > plain_bits(-zero) if is_finite(top, deep) else any_negative(v)
            lo, step, factor, most = divide(top, deep, more_one(least), signed, bits, signs, widen(v[0]))
            last = store_scales(g, -lo if signed and signs else lo, step, los, steps)
            word = u32(g * length)
            if signed and not signs:
                quantize_slices(
                    v, bits, length, signs, u32(0), last, lo, factor, most, word, seed_low, seed_high, out[g]
                )
            else:
                quantize_slices(
                    v, bits, length, signs, u32(1), last + u32(1), lo, factor, most, word, seed_low, seed_high, out[g]
                )

    @jit
    def dequantize_task(task, size, row, count, out, data, seed_low, seed_high, los, steps, nan, limit):
        """Decode the groups of a task."""
        length = fixed if group else data.shape[1]
        each = length * slices
        filled = np.empty(each, out.dtype)
        for g in range(task * size, min((task + 1) * size, los.size)):
            start, valid = place_of(g, row, count, each)
            to, codes = out[start : start + valid] if valid == each else filled, data[g]
            lo, step = load_scales(los[g], steps[g], codes[0], signs)
            word = u32(g * length)
            one, lo, unit = terms_of(lo, step, bits, signs)
            if step != step:
                to[:] = nan
            else:
                for j in range(length):
                    h = u32(0) if signs else random32(u32(word + j), seed_low, seed_high)
                    put_values(codes[j], to, j, bits, length, signs, one, lo, unit, h, nan, limit)
            if valid < each:
                out[start : start + valid] = filled[:valid]

    @jit
    def mask_task(task, size, row, count, out, data, los, steps):
        """Write whether values are not zero; without `signs` the codes of a group with negative values cannot tell."""
        length = fixed if group else data.shape[1]
        each = length * slices
        filled = np.empty(each, out.dtype)
        for g in range(task * size, min((task + 1) * size, los.size)):
            start, valid = place_of(g, row, count, each)
            to, codes = out[start : start + valid] if valid == each else filled, data[g]
            lo, step = load_scales(los[g], steps[g], codes[0], signs)
            unknown = u8(step != step or (lo < 0 and not signs))
            top = u8((1 << bits - 1) - 1 if lo < 0 and signs else (1 << bits) - 1)
            for j in range(length):
                for t in range(slices):
                    to[t * length + j] = u8(codes[j] >> u8(bits * t) & top | unknown) != 0
            if valid < each:
                out[start : start + valid] = filled[:valid]

    return quantize_task, dequantize_task, mask_task


@functools.cache
def channel_kernels(bits, group, signs):
    """Make the same kernels for groups that lie side by side: value i of group c of a block is in row i, column c."""
    slices, fixed = 8 // bits, group * bits // 8

    @jit
    def quantize_rows_task(task, size, row, count, x, out, seed_low, seed_high, los, steps):
        """Encode the blocks of a task."""
        length, columns = fixed if group else out.shape[1], los.shape[1]
        each = length * slices
        filled, zero = np.empty((0, columns), x.dtype), as_float(0, widen(x[0, 0]))
        tops, deeps = np.full(columns, signed_bits(zero)), np.full(columns, plain_bits(zero))
        leasts, terms = np.full(columns, plain_bits(zero)), np.full((5, columns), zero)
        for b in range(task * size, min((task + 1) * size, los.shape[0])):
            start, valid = place_of(b, row, count, each)
            v = x[start : start + valid]
            if valid < each:
                if not filled.size:
                    filled = np.empty((each, columns), x.dtype)
                filled[:valid] = v
                filled[valid:] = v[valid - 1]
                v = filled
            tops[:], deeps[:], leasts[:] = signed_bits(-zero), plain_bits(zero), less_one(plain_bits(zero))
            for i in range(each):
                measure_row(v[i], signs, tops, deeps, leasts)
            for c in range(columns):
                top, deep, least = tops[c], deeps[c], more_one(leasts[c])
                signed = deep > plain_bits(-zero) if is_finite(top, deep) else any_negative(v[:, c])
                lo, step, factor, most = divide(top, deep, least, signed, bits, signs, widen(v[0, c]))
                last = store_scales(c, -lo if signed and signs else lo, step, los[b], steps[b])
                terms[0, c], terms[1, c], terms[2, c], terms[3, c] = lo, factor, most, not signed or signs
                terms[4, c] = terms[3, c] + last
            for j in range(length):
                quantize_row(
                    v, j, bits, length, signs, terms, u32((b * length + j) * columns), seed_low, seed_high, out[b, j]
                )

    @jit
    def dequantize_rows_task(task, size, row, count, out, data, seed_low, seed_high, los, steps, nan, limit):
        """Decode the blocks of a task into out."""
        length, columns = fixed if group else data.shape[1], los.shape[1]
        each = length * slices
        terms = np.full((3, columns), as_float(0, widen(los[0, 0])))
        for b in range(task * size, min((task + 1) * size, los.shape[0])):
            start, valid = place_of(b, row, count, each)
            to = out[start : start + valid]
            for c in range(columns):
                lo, step = load_scales(los[b, c], steps[b, c], data[b, 0, c], signs)
                one, terms[1, c], terms[2, c] = terms_of(lo, step, bits, signs)
                terms[0, c] = one
            for j in range(length):
                word = u32((b * length + j) * columns)
                for t in range(slices):
                    if t * length + j < valid:
                        dequantize_row(
                            data[b, j], t, bits, signs, terms, word, seed_low, seed_high, nan, limit, to[t * length + j]
                        )

    @jit
    def mask_rows_task(task, size, row, count, out, data, los, steps):
        """Write whether the values of a task's blocks are not zero."""
        length, columns = fixed if group else data.shape[1], los.shape[1]
        each = length * slices
        tops, unknown = np.empty(columns, u8), np.empty(columns, u8)
        for b in range(task * size, min((task + 1) * size, los.shape[0])):
            start, valid = place_of(b, row, count, each)
            to = out[start : start + valid]
            for c in range(columns):
                lo, step = load_scales(los[b, c], steps[b, c], data[b, 0, c], signs)
                unknown[c] = step != step or (lo < 0 and not signs)
                tops[c] = (1 << bits - 1) - 1 if lo < 0 and signs else (1 << bits) - 1
            for j in range(length):
                for t in range(slices):
                    if t * length + j < valid:
                        mask_row(data[b, j], bits * t, tops, unknown, to[t * length + j])

    return quantize_rows_task, dequantize_rows_task, mask_rows_task


class CpuPlan(GroupPlan):
    """Plan for numba kernels: a task takes whole groups, or where these lie side by side whole blocks of them."""

    __slots__ = ("beside", "kernels", "row")

    def __init__(self, format: GroupFormat, numel: int, device: torch.device) -> None:
        super().__init__(format, numel, device)
        self.beside = (format.stride,) if format.stride > 1 else ()
        self.row = (format.row or numel // format.stride, format.groups_in_row(numel))
        make = channel_kernels if format.stride > 1 else contiguous_kernels
        self.kernels = make(format.bits, 0 if format.row else format.group, format.signs)

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        if self.numel:
            self._run(self.kernels[0], elements(flat_memory(x)), data, *seed_halves(self._seed_number(seed)))

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        if self.numel:
            halves, ends = seed_halves(self._seed_number(seed)), nan_and_limit(self.format.dtype)
            self._run(self.kernels[1], elements(flat_memory(out)), data, *halves, ends=ends)

    def mask_into(self, data: Tensor, out: Tensor) -> None:
        if self.numel:
            self._run(self.kernels[2], flat_memory(out).numpy(), data)

    def _new_values(self, dtype: torch.dtype) -> Tensor:
        return huge_empty(self.numel, dtype)

    def _run(self, kernel: Callable, values: np.ndarray, data: Tensor, *halves: Any, ends: tuple = ()) -> None:
        """Run a kernel over all tasks."""
        at_lo, at_step, _ = self.format.places(self.numel)
        buffer, beside = data.numpy(), self.beside
        length = self.format.length
        codes = buffer[: self.format.groups(self.numel) * length].reshape(-1, length, *beside)
        scale = np.float64 if self.format.dtype == torch.float64 else np.uint16
        los, steps = (scales.view(scale).reshape(-1, *beside) for scales in (buffer[at_lo:at_step], buffer[at_step:]))
        unit = self.format.extent * self.format.stride
        size = task_size(self.numel, unit, QUICK) // unit
        arguments = (size, *self.row, values.reshape(-1, *beside), codes, *halves, los, steps, *ends)
        run(kernel, -(-len(los) // size), *arguments)


@functools.lru_cache(maxsize=4096)
def group_plan(format: GroupFormat, numel: int, device: torch.device, seed_table: bool = False) -> GroupPlan:
    """Return the plan for tensors of `numel` values in that format; see `reference.group_plan`."""
    return CpuPlan(format, numel, device)
