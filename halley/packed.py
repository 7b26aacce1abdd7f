"""Packed: a tensor in compressed form, with all that is needed to restore size, stride, dtype and device."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from halley.codecs.base import Codec


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor's elements lie on a flat run of memory: enough to lay the decoded run out in the same way."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    copied: bool = False
    """The elements had gaps between them, so the run is a contiguous copy and not the tensor's own memory."""

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor whose run `flat` is: the same size and stride as the one that was flattened."""
        if not self.copied:
            return flat.as_strided(self.size, self.stride)
        out = torch.empty_strided(self.size, self.stride, dtype=flat.dtype, device=flat.device)
        return out.copy_(flat.view(self.size))


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
    layout, length = _layout_of(tuple(x.shape), x.stride())
    if layout.copied:
        return x.contiguous().view(-1), layout
    return x.as_strided((length,), (1,)), layout


@functools.lru_cache(maxsize=4096)
def _layout_of(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Layout, int]:
    """The layout of a tensor of that size and stride, and the length of the run that it covers, if it covers one."""
    if 0 in size:
        return Layout(size, stride), 0
    length = _run_length(size, stride)
    if length is None:
        if not _overlaps(size, stride):
            return Layout(size, stride, copied=True), 0
        length = 1 + sum((sz - 1) * st for sz, st in zip(size, stride, strict=True))
    return Layout(size, stride), length


class Packed:
    """What a codec makes of a tensor. `decode()` gives it back, `nbytes` counts every byte that is kept.

    Each codec has its own subclass, which implements `decode_flat`.
    """

    __slots__ = ("__weakref__", "codec", "dtype", "layout", "numel", "parts")

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

    def decode(self) -> Tensor:
        """The tensor: same size, stride, dtype and device as the one that was encoded."""
        return self.layout.restore(self.decode_flat())

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
