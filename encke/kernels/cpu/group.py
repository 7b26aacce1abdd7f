"""Fixed-rate codes of groups on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.codes import (
    any_negative,
    code_in,
    code_of,
    divide,
    field_of,
    is_finite,
    less_one,
    load_scales,
    more_one,
    plain_bits,
    put_code,
    put_values,
    quantize_slices,
    signed_bits,
    size_of,
    slices_of,
    split_thirds,
    store_scales,
    terms_of,
    value_of,
    word_at,
)
from encke.kernels.cpu.launch import QUICK, elements, huge_empty, nan_and_limit, run, seed_halves, task_size
from encke.kernels.cpu.scalars import (
    as_float,
    i32,
    inline,
    jit,
    narrow,
    random32,
    rotate_right,
    u8,
    u32,
    widen,
)
from encke.kernels.formats import GroupFormat, Seed
from encke.kernels.plans import GroupPlan, flat_memory, seed_number


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
    word = u32(0)
    for t in range(slices_of(bits)):
        x, one, first = widen(v[t * length + j, c]), u32(terms[3, c] > 0), u32(i32(terms[4, c]))
        turned = rotate_right(h, u32(4 * field_of(bits) * t))
        code = code_of(x, bits, signs, one, first, terms[0, c], terms[1, c], terms[2, c], turned)
        word |= put_code(code, t, bits)
    return word


@inline
def quantize_row(v, j, bits, length, signs, terms, place, seed_low, seed_high, out, above):
    """Write byte j of all groups of a block and, for 3-bit codes, the third bits to `above`."""
    keep, shift = u8(15 * (j & 1)), u32(4 * (j & 1))
    for c in range(out.size):
        word = byte_at(v, j, c, bits, length, signs, terms, random32(u32(place + c), seed_low, seed_high))
        out[c] = u8(word)
        if bits == 3:
            above[c] = above[c] & keep | u8(word >> u32(8) << shift)


@inline
def code_at(codes, above, c, shift, t, bits):
    """Return slice t's code from a byte of column c. The byte's third bits begin at bit `shift` of `above`."""
    if bits == 3:
        return u32(u8(codes[c] >> u8(2 * t)) & u8(3) | u8(u8(above[c] >> u8(shift + t)) & u8(1)) << u8(2))
    return code_in(u32(codes[c]), t, bits)


@inline
def dequantize_row(codes, above, j, t, bits, signs, terms, place, seed_low, seed_high, nan, limit, to):
    """Decode the values of slice t in byte j of each group."""
    shift = 4 * (j & 1)
    for c in range(to.size):
        code, h = code_at(codes, above, c, shift, t, bits), random32(u32(place + c), seed_low, seed_high)
        h = rotate_right(h, u32(4 * field_of(bits) * t))
        value = value_of(code, h, bits, signs, i32(terms[0, c]), terms[1, c], terms[2, c], limit)
        to[c] = narrow(value, nan) if terms[2, c] == terms[2, c] else nan


@inline
def mask_row(codes, above, j, t, bits, tops, unknown, to):
    """Write whether the values of slice t in byte j of each group are not zero."""
    shift = 4 * (j & 1)
    for c in range(to.size):
        to[c] = u8(u8(code_at(codes, above, c, shift, t, bits)) & tops[c] | unknown[c]) != 0


@inline
def copy_values(source, to, count):
    """Copy the first `count` values. numba takes 1.5 s to compile an assignment of slices."""
    for i in range(count):
        to[i] = source[i]


@inline
def place_of(g, row, count, each):
    """Return start and size of group g. Rows have `row` values and `count` groups of up to `each` values."""
    at = g % count * each
    return g // count * row + at, min(each, row - at)


@inline
def room_for(length, bits):
    """Return the number of bytes of the field in a group of `length` code bytes."""
    return 2 * length // 3 if bits == 3 else length


@functools.cache
def contiguous_kernels(bits, group, signs):
    """Make the kernels of one setting. Its numbers are constants in them, so that loops unroll and vectorise.

    With `group` 0, the kernels process rows of any width.
    """
    slices = 4 if bits == 3 else 8 // bits
    fixed = group // slices

    @jit
    def quantize_task(task, size, row, count, x, out, seed_low, seed_high, los, steps):
        """Encode the groups of a task."""
        length = fixed if group else room_for(out.shape[1], bits)
        each = length * slices
        filled, zero, third = np.empty(each, x.dtype), as_float(0, widen(x[0])), np.zeros(length + 1, u8)
        for g in range(task * size, min((task + 1) * size, los.size)):
            start, valid = place_of(g, row, count, each)
            v = x[start : start + valid]
            if valid < each:
                copy_values(v, filled, valid)
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
            word = u32(g * out.shape[1])
            if signed and not signs:
                quantize_slices(
                    v, bits, length, signs, u32(0), last, lo, factor, most, word, seed_low, seed_high, out[g], third
                )
            else:
                quantize_slices(
                    v, bits, length, signs, u32(1), u32(last + u32(1)), lo, factor, most, word, seed_low, seed_high,
                    out[g], third,
                )  # fmt: skip

    @jit
    def dequantize_task(task, size, row, count, out, data, seed_low, seed_high, los, steps, nan, limit):
        """Decode the groups of a task."""
        length = fixed if group else room_for(data.shape[1], bits)
        each = length * slices
        filled, third = np.empty(each, out.dtype), np.zeros(length + 1, u8)
        for g in range(task * size, min((task + 1) * size, los.size)):
            start, valid = place_of(g, row, count, each)
            to, codes = out[start : start + valid] if valid == each else filled, data[g]
            if bits == 3:
                split_thirds(codes, length, third)
            lo, step = load_scales(los[g], steps[g], codes[0], signs)
            word = u32(g * data.shape[1])
            one, lo, unit = terms_of(lo, step, bits, signs)
            if step != step:
                to[:] = nan
            else:
                for j in range(length):
                    h = u32(0) if signs else random32(u32(word + j), seed_low, seed_high)
                    word_j = word_at(codes, third, j, bits)
                    put_values(word_j, to, j, bits, length, signs, one, lo, unit, h, nan, limit)
            if valid < each:
                copy_values(filled, out[start:], valid)

    @jit
    def mask_task(task, size, row, count, out, data, los, steps):
        """Write which values are not zero. Without `signs`, all values of groups with negative ones count as such."""
        length = fixed if group else room_for(data.shape[1], bits)
        each = length * slices
        filled, third = np.empty(each, out.dtype), np.zeros(length + 1, u8)
        for g in range(task * size, min((task + 1) * size, los.size)):
            start, valid = place_of(g, row, count, each)
            to, codes = out[start : start + valid] if valid == each else filled, data[g]
            if bits == 3:
                split_thirds(codes, length, third)
            lo, step = load_scales(los[g], steps[g], codes[0], signs)
            unknown = u8(step != step or (lo < 0 and not signs))
            top = u8((1 << bits - 1) - 1 if lo < 0 and signs else (1 << bits) - 1)
            for j in range(length):
                for t in range(slices):
                    code = u8(code_in(word_at(codes, third, j, bits), t, bits))
                    to[t * length + j] = u8(code & top | unknown) != 0
            if valid < each:
                copy_values(filled, out[start:], valid)

    return quantize_task, dequantize_task, mask_task


@functools.cache
def channel_kernels(bits, group, signs):
    """Make the kernels for interleaved groups: value i of group c of a block is in row i, column c."""
    slices = 4 if bits == 3 else 8 // bits
    fixed = group // slices

    @jit
    def quantize_rows_task(task, size, row, count, x, out, seed_low, seed_high, los, steps):
        """Encode the blocks of a task."""
        length, columns = fixed if group else room_for(out.shape[1], bits), los.shape[1]
        third = out.shape[1] - length
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
                for i in range(each):
                    copy_values(v[min(i, valid - 1)], filled[i], columns)
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
                above, place = out[b, length + (j >> 1) if third else j], u32((b * (length + third) + j) * columns)
                quantize_row(v, j, bits, length, signs, terms, place, seed_low, seed_high, out[b, j], above)

    @jit
    def dequantize_rows_task(task, size, row, count, out, data, seed_low, seed_high, los, steps, nan, limit):
        """Decode the blocks of a task to `out`."""
        length, columns = fixed if group else room_for(data.shape[1], bits), los.shape[1]
        third = data.shape[1] - length
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
                above, place = data[b, length + (j >> 1) if third else j], u32((b * (length + third) + j) * columns)
                for t in range(slices):
                    if t * length + j < valid:
                        line = to[t * length + j]
                        dequantize_row(
                            data[b, j], above, j, t, bits, signs, terms, place, seed_low, seed_high, nan, limit, line
                        )

    @jit
    def mask_rows_task(task, size, row, count, out, data, los, steps):
        """Write whether the values of a task's blocks are not zero."""
        length, columns = fixed if group else room_for(data.shape[1], bits), los.shape[1]
        third = data.shape[1] - length
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
                above = data[b, length + (j >> 1) if third else j]
                for t in range(slices):
                    if t * length + j < valid:
                        mask_row(data[b, j], above, j, t, bits, tops, unknown, to[t * length + j])

    return quantize_rows_task, dequantize_rows_task, mask_rows_task


class CpuPlan(GroupPlan):
    """Plan that runs numba kernels. A task has whole groups, or whole blocks of interleaved groups."""

    __slots__ = ("beside", "kernels", "row")

    def __init__(self, format: GroupFormat, numel: int, device: torch.device) -> None:
        super().__init__(format, numel, device)
        self.beside = (format.stride,) if format.stride > 1 else ()
        self.row = (format.row or numel // format.stride, format.groups_in_row(numel))
        make = channel_kernels if format.stride > 1 else contiguous_kernels
        self.kernels = make(format.bits, 0 if format.row else format.group, format.signs)

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        if self.numel:
            self._run(self.kernels[0], elements(flat_memory(x)), data, *seed_halves(seed_number(seed, self.format)))

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        if self.numel:
            halves, ends = seed_halves(seed_number(seed, self.format)), nan_and_limit(self.format.dtype)
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
