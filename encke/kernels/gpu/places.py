"""Addresses of groups in Triton: positions in memory of the values and codes of a program's groups.

A row of memory has `full` groups whose field has `length` bytes, with T slices of values, and one more group if `rest`
values are left. The first programs process full groups, the others the last groups of all rows, so that all groups of a
program have equally many values. Threads without a group or word of their own repeat the last one and write the same
values as another thread: no masks are needed.

A tile of bytes is [thread, group, further words, lane], a tile of values [thread, group, further words, slice, lane].
With this order of dimensions, Triton assigns the threads of the first one to a group, and to each of them all the
slices of its bytes: the reduction over a group stays within a warp. A word is LANES adjacent bytes, whose values are
loaded at once if rows and lengths are multiples of UNIT values.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from encke.kernels.formats import GroupFormat
from encke.kernels.gpu.launch import power_of_two

THREADS = 8  # largest number of threads that share a group
GROUPS = 64  # largest number of groups of a program: with one per thread, scales would go through shared memory


@triton.jit
def group_bytes(length, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the number of code bytes of a group whose field has `length` bytes."""
    if BITS != 3:
        return length
    elif UNIT > 1:
        return length // UNIT * (UNIT // 2 * 3)
    else:
        return length + (length + 1) // 2


@triton.jit
def all_groups(full, rest, rows):
    """Return the number of groups."""
    return (full + (rest > 0).to(tl.int32)).to(tl.int64) * rows


@triton.jit
def quotient(n, magic, shift):
    """Divide integers below 2^31 by the divisor from which `reciprocal` computed `magic` and `shift`."""
    return (tl.umulhi(n.to(tl.uint32) * 2, magic.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def group_places(full, rest, rows, magic, shift, length, T: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr):
    """Return row, index, and offset of the values of each of a program's groups, and the number of values in a group.

    `magic` and `shift` divide by `full`.
    """
    program = tl.program_id(0)
    before = tl.cdiv(rows * full, G)
    last = program >= before
    end = tl.where(last, rows, rows * full)
    n = tl.minimum(tl.where(last, program - before, program) * G + tl.arange(0, G), end - 1)
    row = tl.where(last, n, quotient(n, magic, shift))
    place = tl.where(last, full, n - row * full)
    start = row * (full.to(tl.int64) * (length * T) + rest) + place.to(tl.int64) * (length * T)
    count = full + (rest > 0).to(tl.int32)
    return row, row * count + place, tl.multiple_of(start, UNIT), tl.where(last, rest, length * T)


@triton.jit
def word_range(LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the indices of words along a tile of at most LENGTH bytes per group."""
    u = tl.arange(0, LENGTH // (THREADS * LANES))[None, None, :, None]
    return u * THREADS + tl.arange(0, THREADS)[:, None, None, None]


@triton.jit
def byte_range(LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the indices of bytes along a tile, including those after the last one."""
    return word_range(LENGTH, THREADS, LANES) * LANES + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def byte_places(length, LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the index of each byte of a tile in its group's field. Words after the last one repeat it."""
    word = tl.minimum(word_range(LENGTH, THREADS, LANES), tl.cdiv(length, LANES) - 1)
    return word * LANES + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def pair_places(length, LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the indices of the bytes of third bits after the field of 3-bit codes: one for two bytes of the field."""
    word = tl.minimum(word_range(LENGTH, THREADS, LANES), tl.cdiv(length, LANES) - 1)
    return length + word * (LANES // 2) + tl.arange(0, LANES // 2)[None, None, None, :]


def reciprocal(n: int) -> tuple[int, int]:
    """Return two int32 numbers for `quotient` to divide by n: 2^(31 + shift) / n rounded up, and shift."""
    shift = (n - 1).bit_length()
    magic = -(-(1 << 31 + shift) // n)
    return (magic ^ 1 << 31) - (1 << 31), shift


class Rows:
    """Rows of adjacent values in one format, with the kernels' arguments for them."""

    def __init__(self, format: GroupFormat, numel: int, row: int) -> None:
        length = format.field_length
        self.format = format
        self.rows, self.full, self.rest = numel // row, row // format.extent, row % format.extent
        self.numbers = (self.full, self.rest, self.rows, *reciprocal(max(self.full, 1)), length)
        """Arguments of the kernels from `full` to `length`."""
        self.unit = math.gcd(length, row if self.rows > 1 else 16, 16)
        """Number of values that divides rows and fields of codes."""

    def tiles(self, values: int, lanes: int, each: int = 16) -> tuple[int, tuple]:
        """Return the number of programs, each of which processes `values` values, and the constants from G to UNIT.

        A thread processes `lanes` adjacent values at a time if they are aligned, and `each` values of a group.
        """
        field, length = self.format.field, self.numbers[-1]
        unit = min(self.unit, lanes)
        lanes = max(unit, 2) if self.format.bits == 3 else unit
        room = max(power_of_two(length), lanes)
        threads = max(min(THREADS, room // lanes, room * 8 // (field * each)), 1)
        groups = min(max(values * field // 8 // room, 1), GROUPS)
        programs = -(-self.rows * self.full // groups) + (-(-self.rows // groups) if self.rest else 0)
        return programs, (groups, room, room == length, threads, lanes, unit)
