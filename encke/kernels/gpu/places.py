"""Places of groups in Triton: where the values and codes of a program's groups lie in memory.

A row of memory has `full` groups of `length` code bytes, whose values share bytes in T slices, and one more with `rest`
values if there are any. Programs first take full groups, then the last ones of all rows, so that all groups of a
program have as many values. Threads without a group or word of their own repeat the last one, and write what another
thread writes as well: no masks.

A tile of bytes is [thread, group, further words, lane], a tile of values [thread, group, further words, slice, lane].
In this order of dimensions Triton gives the threads of the first one to a group, and each of them all the slices of its
bytes: the reduction of a group stays within a warp. A word is LANES neighbouring bytes, whose values are loaded at once
where rows and lengths are multiples of UNIT values.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from encke.kernels.formats import GroupFormat
from encke.kernels.gpu.launch import power_of_two

THREADS = 8  # threads that share a group, at most
GROUPS = 64  # groups of a program, at most: with one for each thread Triton exchanges scales through shared memory


@triton.jit
def group_bytes(length, BITS: tl.constexpr, UNIT: tl.constexpr):
    """Return the code bytes of a group whose field has `length`."""
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
    """Divide numbers below 2^31 by the number that `reciprocal` made `magic` and `shift` of."""
    return (tl.umulhi(n.to(tl.uint32) * 2, magic.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def group_places(full, rest, rows, magic, shift, length, T: tl.constexpr, G: tl.constexpr, UNIT: tl.constexpr):
    """Return of a program's groups their rows, numbers, where their values begin, and how many values each of them has.

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
    """Return the numbers of words along a tile of at most LENGTH bytes a group."""
    u = tl.arange(0, LENGTH // (THREADS * LANES))[None, None, :, None]
    return u * THREADS + tl.arange(0, THREADS)[:, None, None, None]


@triton.jit
def byte_range(LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the places of bytes along a tile, also of those after the last one."""
    return word_range(LENGTH, THREADS, LANES) * LANES + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def byte_places(length, LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the place of each byte of a tile in its group's field: words after the last one repeat it."""
    word = tl.minimum(word_range(LENGTH, THREADS, LANES), tl.cdiv(length, LANES) - 1)
    return word * LANES + tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def pair_places(length, LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr):
    """Return the places of the third bits of 3-bit codes behind the field: two bytes of it share one."""
    word = tl.minimum(word_range(LENGTH, THREADS, LANES), tl.cdiv(length, LANES) - 1)
    return length + word * (LANES // 2) + tl.arange(0, LANES // 2)[None, None, None, :]


def reciprocal(n: int) -> tuple[int, int]:
    """Return two int32 numbers with which `quotient` divides by n: 2^(31 + shift) / n rounded up, and shift."""
    shift = (n - 1).bit_length()
    magic = -(-(1 << 31 + shift) // n)
    return (magic ^ 1 << 31) - (1 << 31), shift


class Rows:
    """Rows of neighbouring values in one format, as the kernels take them."""

    def __init__(self, format: GroupFormat, numel: int, row: int) -> None:
        length = format.field_length
        self.format = format
        self.rows, self.full, self.rest = numel // row, row // format.extent, row % format.extent
        self.numbers = (self.full, self.rest, self.rows, *reciprocal(max(self.full, 1)), length)
        """Arguments of the kernels: full to length."""
        self.unit = math.gcd(length, row if self.rows > 1 else 16, 16)
        """Rows and fields of codes are multiples of so many values."""

    def tiles(self, values: int, lanes: int, each: int = 16) -> tuple[int, tuple]:
        """Return the number of programs, and G to UNIT, where a program takes so many values.

        A thread takes `lanes` neighbouring ones at a time if they are aligned, and `each` values of a group.
        """
        field, length = self.format.field, self.numbers[-1]
        unit = min(self.unit, lanes)
        lanes = max(unit, 2) if self.format.bits == 3 else unit
        room = max(power_of_two(length), lanes)
        threads = max(min(THREADS, room // lanes, room * 8 // (field * each)), 1)
        groups = min(max(values * field // 8 // room, 1), GROUPS)
        programs = -(-self.rows * self.full // groups) + (-(-self.rows // groups) if self.rest else 0)
        return programs, (groups, room, room == length, threads, lanes, unit)
