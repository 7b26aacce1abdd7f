"""Formats of packed data: sizes, constants and seeds, shared by all kernels. docs/design.md explains them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

MASK32 = (1 << 32) - 1
MASK64 = (1 << 64) - 1
START = 0x9E3779B97F4A7C15 * (0xD1342543DE82EF95 + 1) & MASK64
"""Initial term of the hash `mix`."""

PLANE_WORD = 64
"""Number of values whose bits share a word in the error-bounded format."""
PLANE_BLOCK = 256
"""Number of values in a block of the error-bounded format. A block has one form (base, order, low bits)."""
PLANE_GROUP = 4096
"""Number of values in a group of the error-bounded format. A group has one step."""
PLANE_HEADER = 16
"""Bytes of the header of the error-bounded format's metadata."""
ROUNDS = 4
"""Largest number of bits of a unary code in the error-bounded format."""
ALL_ZERO, AS_IS, REPEATED = 0x60, 0x61, 0x62
"""Flags of blocks in the error-bounded format that are all zero, stored verbatim, or one repeated value."""
NEAREST, STOCHASTIC, DITHERED, SIGNED = 0, 1, 2, 3
"""Rounding modes of the error-bounded format; SIGNED is dithered with exact signs."""
COIN = 0x5851F42D4C957F2C
"""Constant that turns the seed into the seed of SIGNED's second random number (XOR)."""
NORM_GROUP = 128
"""The only group size that the kernels of batch norm's backward can read packed."""
SMALLEST_PLANE = 32
"""Number of values of the smallest plane in NCHW memory that these kernels can read packed."""
RECOMPUTED = {"Gelu": ("gelu", "gelu tanh"), "Silu": ("silu",)}
"""Operations whose result a kernel can recompute from their packed input, and the kernel's names for them."""
SMOOTH = {"Silu": 2, "Hardswish": 3}
"""Activations after a batch norm that its kernels compute, with their gradients: operation -> number. 0 means none."""
LOG_KNEE = 8.0
"""Distance below zero at which the step of log-probabilities changes."""

FLOATS = {
    torch.float16: (10, -14, 0),
    torch.bfloat16: (7, -126, 0),
    torch.float32: (23, -126, 3),
    torch.float64: (52, -1022, 3),
}
"""dtype -> (mantissa bits, smallest exponent, extra exponent for the reciprocal multiplication)."""

SMALLEST_BOUND = {
    torch.float16: 2.0**-22,
    torch.bfloat16: 2.0**-100,
    torch.float32: 2.0**-100,
    torch.float64: 2.0**-900,
}
"""Smaller bounds count as zero: a level could be a denormal, which some processors flush to zero."""

Seed = int | tuple[Tensor, int]
"""Seed as a number, or as a tensor of seeds on the device and the row to read. A CUDA graph reads it at replay."""


def mix(first: int, second: int, third: int | None = None) -> int:
    """Hash two or three integers to 64 bits, as a signed number that fits an operator's int argument.

    The hash is a polynomial in the integers, followed by the final steps of splitmix64.
    """
    h = first * 0xD1342543DE82EF95 + second + START
    if third is not None:
        h = h * 0xD1342543DE82EF95 + third + 0x9E3779B97F4A7C15
    h &= MASK64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    h = (h ^ h >> 27) * 0x94D049BB133111EB & MASK64
    h ^= h >> 31
    return h - (1 << 64) if h >> 63 else h


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def run_length(size: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the number of elements that a tensor covers in memory, without expanded ones; None if it has gaps."""
    expected = 1
    for step, extent in sorted((st, sz) for sz, st in zip(size, stride, strict=True) if sz != 1 and st != 0):
        if step != expected:
            return None
        expected *= extent
    return expected


@functools.lru_cache(maxsize=4096)
def rows_of(size: tuple[int, ...], stride: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, int]:
    """Return (row, step): the length of the longest evenly spaced rows along `dims`, and the distance of their values.

    Dense memory consists of rows of `row` values that are `step` elements apart; `step` rows are interleaved. A row
    stays within the dimensions `dims`. Return (1, 1) if all of these have size 1.
    """
    best, row, first = (1, 1), 1, 1
    inner = 1
    order = sorted(range(len(size)), key=lambda d: (stride[d], size[d]))
    for d in order:
        if size[d] == 1 or stride[d] == 0:
            continue
        if d in dims:
            row, first = row * size[d], first if row > 1 else inner
            if row > best[0]:
                best = (row, first)
        else:
            row = 1
        inner *= size[d]
    return best


def channel_dims(dimensions: int) -> tuple[int, ...]:
    """Return all dimensions except the channels: those that batch norm reduces over."""
    return (0, *range(2, dimensions))


def fills_groups(row: int, group: int) -> bool:
    """Return whether `row` values fill groups with at most 2 % padding."""
    return -row % group <= row // 50


@functools.lru_cache(maxsize=4096)
def channel_stride(size: tuple[int, ...], stride: tuple[int, ...], numel: int, group: int) -> int:
    """Return the distance between the values of one channel in channels_last memory: the number of channels.

    Return 1 for other memory formats, and if there are too few pixels to fill groups.
    """
    if len(size) < 4 or stride[1] != 1 or size[1] == 1 or numel % size[1]:
        return 1
    return size[1] if fills_groups(numel // size[1], group) else 1


class Format:
    """Base class of the formats: frozen dataclasses that operators take as a list of numbers.

    A new field is declared once, in the dataclass: schemas, fakes and lowerings pass the list on.
    """

    def numbers(self) -> list[Any]:
        """Return the fields as numbers of one type, for an operator's `int[]` or `float[]` argument."""
        values: list[Any] = [getattr(self, f.name) for f in fields(self)]  # type: ignore[arg-type]
        kind = float if any(isinstance(value, float) for value in values) else int
        return [kind(_DTYPES.index(v) if isinstance(v, torch.dtype) else v) for v in values]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Self:
        """Rebuild the format from `numbers()`."""
        return _from_numbers(cls, tuple(numbers))  # type: ignore[arg-type]


_DTYPES = tuple(FLOATS)
_FROM_NUMBER: dict[Any, Callable[[float], Any]] = {
    "int": int,
    "float": float,
    "bool": bool,
    "torch.dtype": lambda number: _DTYPES[int(number)],
}


@functools.lru_cache(maxsize=4096)
def _from_numbers(cls: Any, numbers: tuple[float, ...]) -> Any:
    return cls(*(_FROM_NUMBER[f.type](n) for f, n in zip(fields(cls), numbers, strict=True)))


@dataclass(frozen=True)
class GroupFormat(Format):
    """Format of fixed-rate codes with a lo and a step for each group, in one buffer: codes, los, steps."""

    bits: int
    group: int
    """Number of values in a group."""
    dtype: torch.dtype
    stride: int = 1
    """Distance between the values of a group. The number of channels in channels_last memory: a group has one channel.
    """
    signs: bool = False
    """Whether zeros and signs are exact in groups with negative values too (4 or 8 bits)."""
    row: int = 0
    """Number of values, `stride` apart, in a row. Groups stay within rows, and each row is cut into equal groups. 0:
    all values are one row, cut into groups of `group` values and a remainder."""

    @classmethod
    def in_rows(
        cls, bits: int, group: int, dtype: torch.dtype, signs: bool, numel: int, row: int, stride: int
    ) -> GroupFormat:
        """Return the format whose groups stay within rows of `row` values, `stride` apart."""
        whole = row % group == 0 or (numel == row * stride and (stride == 1 or fills_groups(row, group)))
        return cls(bits, group, dtype, stride, signs, 0 if whole else row)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of lo and step."""
        return torch.float64 if self.dtype == torch.float64 else torch.bfloat16

    @property
    def field(self) -> int:
        """Bits of each code in the group's field. The third bits of 3-bit codes follow the field."""
        return 2 if self.bits == 3 else self.bits

    @property
    def field_length(self) -> int:
        """Bytes of a group's field of codes."""
        values = -(-self.row // -(-self.row // self.group)) if self.row else self.group
        return -(-values * self.field // 8)

    @property
    def length(self) -> int:
        """Bytes of a group's codes: the field and, for 3-bit codes, four bits for each of its bytes."""
        return self.field_length + (-(-self.field_length // 2) if self.bits == 3 else 0)

    @property
    def extent(self) -> int:
        """Number of values that a group has room for; the last group of a row may have fewer."""
        return self.field_length * 8 // self.field

    def groups_in_row(self, numel: int) -> int:
        """Return the number of groups in a row of a tensor with `numel` values."""
        return -(-(self.row or numel // self.stride) // self.group)

    def groups(self, numel: int) -> int:
        """Return the number of groups of `numel` values."""
        rows = numel // (self.row * self.stride) if self.row else 1
        return rows * self.groups_in_row(numel) * self.stride

    def places(self, numel: int) -> tuple[int, int, int]:
        """Return the offsets in bytes of the los (aligned for any dtype) and the steps, and the size of the buffer."""
        groups = self.groups(numel)
        codes, each = -(-groups * self.length // 8) * 8, self.scale_dtype.itemsize
        return codes, codes + groups * each, codes + groups * 2 * each

    def nbytes(self, numel: int) -> int:
        """Return the size in bytes of the buffer for `numel` values."""
        return self.places(numel)[2]


@dataclass(frozen=True)
class RowUse(Format):
    """Use of a norm over rows whose input is packed at fixed rates: everything that decides which kernels it needs."""

    width: int
    """Number of values in a row."""
    centred: bool
    offset: float
    inner: torch.dtype
    out: torch.dtype
    """`centred`, `offset`, `inner` and `out` are as in `RowNorm`."""
    dtype: torch.dtype
    """Dtype of the input."""
    weight_dtype: torch.dtype
    """Dtype of weight and bias."""
    affine: bool
    """Whether there is a weight."""
    bias: bool
    """Whether there is a bias."""
    transposed: bool
    """Whether the order of rows in memory differs from that in the tensor."""
    group: int
    """Number of values in a group."""
    again: torch.dtype
    """Dtype in which the next layers read the result when it is recomputed."""


@dataclass(frozen=True)
class UsualUse(Format):
    """Use of tensors by a typical model: decides which kernels to compile before the model's own tensors are known."""

    dtype: torch.dtype
    images: bool
    """Whether the model is a CNN. If not, only tensors whose groups are contiguous are considered."""
    channels_last: bool
    """Whether the tensors of a CNN are in channels_last memory."""
    seed_table: bool = False
    """Whether seeds are on the device, as in compiled models."""


class PackedUse(NamedTuple):
    """Use of a tensor packed at fixed rates: everything that decides which kernels it needs."""

    format: GroupFormat
    size: tuple[int, ...]
    """Size of the tensor."""
    channels_last: bool
    norm: bool
    """Whether batch norm reads it."""
    relu: bool
    """Whether ReLU reads it. With `norm`: whether ReLU may read the result of the batch norm."""
    smooth: tuple[str, ...]
    """Smooth activations (keys of `SMOOTH`) that may read the result of the batch norm. Without `norm`: the operation
    that reads the tensor, if it is in `RECOMPUTED`."""
    rates: tuple[int, ...]
    """Numbers of bits that it may be packed with; `format.bits` is ignored."""

    def before(self, relu: bool, smooth: tuple[str, ...]) -> PackedUse:
        """Return this use with the activations that may follow."""
        return PackedUse(self.format, self.size, self.channels_last, self.norm, relu, smooth, self.rates)


class SampledUnits(NamedTuple):
    """Sample of a packed tensor: some of its units. A unit is a row, or a group, of each of `stride` columns."""

    values: tuple[tuple[int, ...], tuple[int, ...]]
    """Size and strides of the values: [unit, row, column]."""
    scales: tuple[tuple[int, ...], tuple[int, ...], int]
    """Size, strides and offset of the groups' los and steps in the buffer: [lo or step, unit, group, column]."""


@dataclass(frozen=True)
class BoundedFormat(Format):
    """Format of error-bounded Golomb-Rice codes at variable rate: metadata and a payload."""

    bound: float
    """Largest absolute error, or infinity."""
    relative: float
    """Largest error relative to the range of the finite values, or infinity; the smaller of the two applies."""
    rounding: int
    """NEAREST, STOCHASTIC, DITHERED or SIGNED."""
    dtype: torch.dtype

    @staticmethod
    def meta_size(numel: int) -> int:
        """Return the bytes of metadata for `numel` values."""
        return PLANE_HEADER + 5 * -(-numel // PLANE_GROUP) + 3 * -(-numel // PLANE_BLOCK)


@dataclass(frozen=True)
class DualFormat(Format):
    """Format of dual precision: bf16 averages of small tiles of each plane, and codes of the differences from them."""

    height: int
    width: int
    block: int
    """Height and width of a tile."""
    bits: int
    masked: bool
    """Whether to store a bit for each value that says whether it is zero."""
    dtype: torch.dtype

    @property
    def plane(self) -> int:
        """Number of values in a plane."""
        return self.height * self.width

    @property
    def tile(self) -> tuple[int, int]:
        """Height and width of a tile, at most those of the plane."""
        return min(self.block, self.height), min(self.block, self.width)

    @property
    def tiles(self) -> tuple[int, int]:
        """Number of tiles in a plane, vertically and horizontally."""
        tall, wide = self.tile
        return -(-self.height // tall), -(-self.width // wide)

    def places(self, numel: int) -> tuple[int, int, int, int, int]:
        """Return the offsets in bytes of steps, averages, codes and mask bits, and the size of the buffer."""
        planes = numel // self.plane
        lo, step = (8, 8) if self.dtype == torch.float64 else (4, 2)
        at_low = planes * (lo + step)
        at_codes = at_low + 2 * planes * math.prod(self.tiles)
        at_mask = at_codes + planes * -(-self.plane * self.bits // 8)
        return planes * lo, at_low, at_codes, at_mask, at_mask + (planes * -(-self.plane // 8) if self.masked else 0)

    def nbytes(self, numel: int) -> int:
        """Return the size in bytes of the buffer for `numel` values."""
        return self.places(numel)[4]


@dataclass(frozen=True)
class LogFormat(Format):
    """Format of one byte for each log-probability: its distance from zero in steps."""

    step: float
    far: float
    """Step of log-probabilities more than `LOG_KNEE` below zero; not larger than `step`."""
    shift: float
    """Number that is subtracted when decoding, so that exponentials are unbiased."""
    dtype: torch.dtype

    @property
    def bend(self) -> float:
        """Offset that makes the two counts of steps meet at the knee."""
        return LOG_KNEE * (1 / self.far - 1 / self.step)
