"""Fixed-rate codes of groups on the CPU."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
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
def divide(top, deep, least, signed, bits, signs):
    """Divide the range of a group: (lo, step, factor to fixed point, largest result), the first two as stored.

    `top` and `deep` are the largest bits with and without a sign, `least` the smallest of a value that is not zero.
    """
    zero = as_float(0, from_bits(least))
    affine, finite = signed and not signs, is_finite(top, deep)
    if affine:
        lo, hi = from_bits(deep), from_bits(plain_bits(from_bits(top)) if top >= 0 else least)
    else:
        lo, hi = from_bits(least) if top > 0 else zero, from_bits(top) if top > 0 else zero
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
    """Return a value's code. `one`: zero has a code of its own, below the others. `h` is the rotated hash."""
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
def byte_of(v, j, bits, length, signs, one, lo, factor, most, h):
    """Return byte j of a group, whose hash is h.

    (A function, as are all bodies of loops over bytes: LLVM peels a loop that has variables of its own, and the rest
    does not fill its vectors.)
    """
    byte = u32(0)
    for t in range(8 // bits):
        code = code_of(widen(v[t * length + j]), bits, signs, one, lo, factor, most, rotate_right(h, u32(4 * bits * t)))
        byte |= u32(code << u32(bits * t))
    return u8(byte)


@inline
def quantize_slices(v, bits, length, signs, one, lo, factor, most, word, seed_low, seed_high, out):
    """Write the bytes of a group; `word` is the place of the first one."""
    for j in range(length):
        out[j] = byte_of(v, j, bits, length, signs, one, lo, factor, most, random32(u32(word + j), seed_low, seed_high))


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
        x, one = widen(v[t * length + j, c]), u32(terms[3, c] > 0)
        code = code_of(x, bits, signs, one, terms[0, c], terms[1, c], terms[2, c], rotate_right(h, u32(4 * bits * t)))
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


@functools.cache
def contiguous_kernels(bits, group, signs):
    """Make the kernels of one setting, in which its numbers are constants: loops unroll and vectorise."""
    slices, length = 8 // bits, group * bits // 8

    @jit
    def quantize_task(task, size, x, tail, out, seed_low, seed_high, los, steps):
        """Encode the groups of a task. x is cut into groups; `tail` is an incomplete one."""
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
        """Decode the groups of a task into out, cut as in quantize_task."""
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
        """Write whether values are not zero; without `signs` the codes of a group with negative values cannot tell."""
        for g in range(task * size, min((task + 1) * size, los.size)):
            to, codes = out[g] if g < out.shape[0] else tail[0], data[g]
            step, signed = widen(steps[g]), widen(los[g]) < 0
            unknown = u8(step != step or (signed and not signs))
            top = u8((1 << bits - 1) - 1 if signed and signs else (1 << bits) - 1)
            for j in range(length):
                for t in range(slices):
                    to[t * length + j] = u8(codes[j] >> u8(bits * t) & top | unknown) != 0

    return quantize_task, dequantize_task, mask_task


@functools.cache
def channel_kernels(bits, group, signs):
    """Make the same kernels for groups that lie side by side: value i of group c of a block is in row i, column c."""
    slices, length = 8 // bits, group * bits // 8

    @jit
    def quantize_rows_task(task, size, x, tail, out, seed_low, seed_high, los, steps):
        """Encode the blocks of a task."""
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
        """Decode the blocks of a task into out."""
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
        """Write whether the values of a task's blocks are not zero."""
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

    return quantize_rows_task, dequantize_rows_task, mask_rows_task


class CpuPlan(GroupPlan):
    """Plan for numba kernels: the buffer and the values beside it are cut into groups."""

    __slots__ = ("kernels", "places", "shape", "unit")

    def __init__(self, format: GroupFormat, numel: int, device: torch.device) -> None:
        super().__init__(format, numel, device)
        self.places = format.places(numel)
        # Groups that lie side by side are taken together, a block of them at a time.
        self.shape = (-1, format.group, format.stride) if format.stride > 1 else (-1, format.group)
        self.unit = format.group * format.stride
        make = channel_kernels if format.stride > 1 else contiguous_kernels
        self.kernels = make(format.bits, format.group, format.signs)

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        if self.numel:
            halves = seed_halves(self._seed_number(seed))
            self._run(self.kernels[0], self._cut(elements(flat_memory(x))), data, *halves)

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        if self.numel:
            halves, ends = seed_halves(self._seed_number(seed)), nan_and_limit(self.format.dtype)
            self._write(self.kernels[1], elements(flat_memory(out)), data, *halves, ends=ends)

    def mask_into(self, data: Tensor, out: Tensor) -> None:
        if self.numel:
            self._write(self.kernels[2], flat_memory(out).numpy(), data)

    def _new_values(self, dtype: torch.dtype) -> Tensor:
        return huge_empty(self.numel, dtype)

    def _write(self, kernel: Callable, out: np.ndarray, data: Tensor, *halves: Any, ends: tuple = ()) -> None:
        """Run a decoding kernel; the last group, if it is incomplete, is decoded beside `out`."""
        whole, tail = self._cut(out)
        self._run(kernel, (whole, tail), data, *halves, ends=ends)
        out[whole.size :] = tail.reshape(-1)[: self.numel - whole.size]

    def _run(self, kernel: Callable, values: tuple, data: Tensor, *halves: Any, ends: tuple = ()) -> None:
        """Run a kernel over all tasks."""
        at_lo, at_step, _ = self.places
        buffer, beside = data.numpy(), self.shape[2:]
        codes = buffer[:at_lo].reshape(-1, self.format.group * self.format.bits // 8, *beside)
        scale = np.float64 if self.format.dtype == torch.float64 else np.uint16
        los, steps = (scales.view(scale).reshape(-1, *beside) for scales in (buffer[at_lo:at_step], buffer[at_step:]))
        size = task_size(self.numel, self.unit, QUICK) // self.unit
        run(kernel, -(-len(los) // size), size, *values, codes, *halves, los, steps, *ends)

    def _cut(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the whole groups of some values, and an incomplete last one, filled with zeros."""
        whole = values.size // self.unit * self.unit
        tail = np.zeros(self.unit, values.dtype)
        tail[: values.size - whole] = values[whole:]
        return values[:whole].reshape(self.shape), tail.reshape(self.shape)


@functools.lru_cache(maxsize=4096)
def group_plan(format: GroupFormat, numel: int, device: torch.device, seed_table: bool = False) -> GroupPlan:
    """Return the plan for tensors of `numel` values in that format; see `reference.group_plan`."""
    return CpuPlan(format, numel, device)
