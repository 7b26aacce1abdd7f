"""Layouts: how the elements of a tensor are placed on a flat run of memory, and how a run becomes that tensor again."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from encke.kernels.formats import SMALLEST_PLANE, channel_dims, rows_of, run_length

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels_last memory format by number of dimensions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Size and strides of a tensor on a flat run of memory, which suffice to restore it from a decoded run."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    copied: bool = False
    """Whether the run is a contiguous copy, because the tensor's own elements have gaps between them."""
    rows: tuple[int, int] | None = None
    """Number and distance of the values that a norm reduces together: a codec's groups stay within these rows."""
    dense: bool = field(init=False, compare=False)
    """Whether the run is the tensor's own memory and holds each element once."""
    channels_last: bool | None = field(init=False, compare=False)
    """Whether a dense run is in channels_last order (True), contiguous (False), or in another order (None)."""

    def __post_init__(self) -> None:
        dense = not self.copied and fills_memory(self.size, self.stride)
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "channels_last", _channels_last(self.size, self.stride) if dense else None)

    def restore(self, flat: Tensor) -> Tensor:
        """Return the tensor that lies on the run `flat`, with the size and strides of this layout."""
        if not self.copied:
            return flat.as_strided(self.size, self.stride)
        out = torch.empty_strided(self.size, self.stride, dtype=flat.dtype, device=flat.device)
        return out.copy_(flat.view(self.size))


def _channels_last(size: tuple[int, ...], stride: tuple[int, ...]) -> bool | None:
    order = [*range(len(size))]
    if fills_in_order(size, stride, order):
        return False
    return True if len(size) in FORMATS and fills_in_order(size, stride, [0, *order[2:], 1]) else None


def fills_in_order(size: Sequence[int], stride: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether elements fill their memory without gaps, with the dimensions in `order`, outermost first."""
    expected = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != expected:
            return False
        expected *= size[d]
    return True


def fills_memory(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether each element has memory of its own and there are no gaps, in any order of dimensions."""
    return run_length(size, stride) == math.prod(size)


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements may share memory, as in expanded tensors."""
    reach = 0
    for step, extent in sorted((st, sz) for sz, st in zip(size, stride, strict=True) if sz != 1):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


@functools.lru_cache(maxsize=4096)
def layout_of(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Layout, int]:
    """Return the layout of a tensor with this size and stride, and the length of its run."""
    size = tuple(size)
    if 0 in size:
        return Layout(size, stride), 0
    length = run_length(size, stride)
    if length is None:
        if not overlaps(size, stride):
            return Layout(size, stride, copied=True), math.prod(size)
        length = 1 + sum((sz - 1) * st for sz, st in zip(size, stride, strict=True))
    return Layout(size, stride), length


@functools.lru_cache(maxsize=4096)
def with_rows(layout: Layout, rows: tuple[int, int] | None) -> Layout:
    """Return a layout on whose run a norm reads these rows."""
    return layout if layout.rows == rows else replace(layout, rows=rows)


@functools.lru_cache(maxsize=4096)
def rows_for(layout: Layout, length: int, norm: tuple[str, int]) -> tuple[int, int] | None:
    """Return the rows of a run of memory that a norm reduces: the values of each row, and their distance.

    Args:
        layout: Layout of the norm's input.
        length: Length of the run.
        norm: Dimensions that it normalises over: ("last", number of dimensions), ("channels", 0) for all but the second
            dimension, or ("groups", number of groups) of the second dimension.
    """
    size, stride = layout.size, layout.stride
    if layout.copied:
        stride = tuple(math.prod(size[d + 1 :]) for d in range(len(size)))
    if length == 0 or run_length(size, stride) != length:
        return None
    kind, number = norm
    if kind == "last":
        return rows_of(size, stride, tuple(range(len(size) - number, len(size))))
    if kind == "channels":
        # If planes are not tiny, fused layers read the codes.
        plane = rows_of(size, stride, channel_dims(len(size))[1:])
        whole = plane[1] == 1 and plane[0] >= SMALLEST_PLANE
        return plane if whole else rows_of(size, stride, channel_dims(len(size)))
    each, rest = divmod(size[1], number)
    if rest:
        return None
    size, stride = (size[0], number, each, *size[2:]), (stride[0], stride[1] * each, *stride[1:])
    return rows_of(size, stride, tuple(range(2, len(size))))


@functools.lru_cache(maxsize=4096)
def rows_inside(layout: Layout, width: int) -> int | None:
    """Return how many rows of `width` values are adjacent along the leading dimension in memory.

    Rows consist of the last dimensions. With `inner` for the result, row `m` of memory is row `(m % inner) * (rows //
    inner) + m // inner` of the tensor. The result is all rows for contiguous memory, and the batch size if batch and
    sequence are transposed, as after `nn.MultiheadAttention`. None if memory has gaps or any other order.
    """
    size, stride = layout.size, layout.stride
    if not layout.dense or 0 in size:
        return None
    first, each = len(size), 1
    while first and each < width:
        first -= 1
        each *= size[first]
    if each != width or not fills_in_order(size[first:], stride[first:], range(len(size) - first)):
        return None
    outer = [d for d in range(first) if size[d] != 1]
    order = sorted(outer, key=lambda d: -stride[d])
    start = order.index(outer[0]) if outer else 0
    if order[start:] + order[:start] != outer:
        return None
    return math.prod(size[d] for d in order[start:])


def finer(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int] | None:
    """Return the finer of two kinds of rows of one run of memory if it nests in the coarser; None if it does not."""
    for inner, outer in ((first, second), (second, first)):
        if inner[1] % outer[1] == 0 and outer[0] * outer[1] % (inner[0] * inner[1]) == 0:
            return inner
    return None


def run_of(x: Tensor, layout: Layout, length: int) -> Tensor:
    """Return the memory of `x` as one flat run, given the results of `layout_of`."""
    return x.contiguous().view(-1) if layout.copied else x.as_strided((length,), (1,))


def flatten(x: Tensor) -> tuple[Tensor, Layout]:
    """Return the memory of `x` as one flat run, without a copy where possible, and the layout that restores `x`."""
    layout, length = layout_of(x.shape, x.stride())
    return run_of(x, layout, length), layout
