"""Packed: a tensor in compressed form, with all that is needed to restore size, stride, dtype and device."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from encke.codecs.base import Codec


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels_last format for so many dimensions."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor's elements lie on a flat run of memory: enough to lay the decoded run out in the same way."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    copied: bool = False
    """The elements had gaps between them, so the run is a contiguous copy and not the tensor's own memory."""
    dense: bool = field(init=False, compare=False)
    """The run is the tensor's own memory and holds each element once."""
    last: bool | None = field(init=False, compare=False)
    """Whether the elements lie in channels_last memory (True), contiguously (False), or otherwise (None)."""

    def __post_init__(self) -> None:
        dense = not self.copied and _run_length(self.size, self.stride) == math.prod(self.size)
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "last", _is_last(self.size, self.stride) if dense else None)

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor whose run `flat` is: the same size and stride as the one that was flattened."""
        if not self.copied:
            return flat.as_strided(self.size, self.stride)
        out = torch.empty_strided(self.size, self.stride, dtype=flat.dtype, device=flat.device)
        return out.copy_(flat.view(self.size))


def _is_last(size: tuple[int, ...], stride: tuple[int, ...]) -> bool | None:
    order = [*range(len(size))]
    for last, dims in ((False, order), (True, [0, *order[2:], 1])):
        step, good = 1, not last or len(size) in FORMATS
        for d in reversed(dims):
            good = good and (size[d] == 1 or stride[d] == step)
            step *= size[d]
        if good:
            return last
    return None


def _run_length(size: tuple[int, ...], stride: tuple[int, ...]) -> int | None:
    """Length of the gapless run that a tensor covers once (repeated dimensions aside), or None if there is none."""
    expected = 1
    for step, extent in sorted((st, sz) for sz, st in zip(size, stride, strict=True) if sz != 1 and st != 0):
        if step != expected:
            return None
        expected *= extent
    return expected


def _overlaps(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether two elements may share memory (repeated dimensions included)."""
    reach = 0
    for step, extent in sorted((st, sz) for sz, st in zip(size, stride, strict=True) if sz != 1):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def flatten(x: Tensor) -> tuple[Tensor, Layout]:
    """The memory of `x` as one flat run without copying where that is possible, and the layout that undoes it."""
    layout, length = layout_of(x.shape, x.stride())
    return run_of(x, layout, length), layout


def run_of(x: Tensor, layout: Layout, length: int) -> Tensor:
    """The memory of `x` as one flat run, from what `layout_of` says about it."""
    return x.contiguous().view(-1) if layout.copied else x.as_strided((length,), (1,))


@functools.lru_cache(maxsize=4096)
def layout_of(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Layout, int]:
    """The layout of a tensor of that size and stride, and the length of its run."""
    size = tuple(size)
    if 0 in size:
        return Layout(size, stride), 0
    length = _run_length(size, stride)
    if length is None:
        if not _overlaps(size, stride):
            return Layout(size, stride, copied=True), math.prod(size)
        length = 1 + sum((sz - 1) * st for sz, st in zip(size, stride, strict=True))
    return Layout(size, stride), length


class Packed:
    """What a codec makes of a tensor. `decode()` gives it back, `nbytes` counts every byte that is kept.

    Each codec has its own subclass, which implements `decode_flat`.
    """

    __slots__ = ("__weakref__", "codec", "dtype", "layout", "numel", "parts")
    late: Any = None
    """What tells the number of bytes, where only the GPU knows it yet."""

    def __init__(
        self, codec: Codec, layout: Layout, dtype: torch.dtype, numel: int, parts: tuple[Tensor, ...] = ()
    ) -> None:
        self.codec = codec
        self.layout = layout
        self.dtype = dtype
        self.numel = numel
        self.parts = parts

    @property
    def nbytes(self) -> int:
        """Bytes kept: payload and metadata."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    def decode_flat(self, mask: bool = False) -> Tensor:
        """The decoded run of memory; with `mask`, only whether each value differs from zero, as booleans."""
        raise NotImplementedError

    def decode_in(self, layout: Layout) -> Tensor:
        """The decoded run laid out as a tensor, which need not be the one that was encoded."""
        return layout.restore(self.decode_flat())

    def decode(self) -> Tensor:
        """The tensor: same size, stride, dtype and device as the one that was encoded."""
        return self.decode_in(self.layout)

    def __repr__(self) -> str:
        return f"Packed({self.codec!r}, size={list(self.layout.size)}, dtype={self.dtype}, nbytes={self.nbytes})"


def check_version(tensor: Tensor, version: int) -> None:
    """Raises as autograd would if a tensor that was kept as it is has been changed in place since."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.dtype} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}. "
            "Clone the tensor before changing it, or change it after backward."
        )
