"""Exact codecs, and codecs of masks, signs, ranges and pool indices. All but `Lossless` are internal.

A mask, a sign or a range takes one bit, an integer the narrowest width that holds it. Capture uses these codecs for
readers that need no more. Policies do not choose them, except `Keep`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatCodec, FlatPacked, Packed, operations
from encke.codecs.errorbounded import ErrorBounded
from encke.codecs.layout import Layout
from encke.kernels import FLOATS

BYTES = (torch.bool, torch.uint8)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class BitsPacked(FlatPacked):
    """Numbers of `bits` bits above `low`, in a narrow type from 8 bits on. Flags have a second buffer: their scale."""

    __slots__ = ("bits", "low")
    bits: int
    low: int

    def decode_flat(self, mask: bool = False) -> Tensor:
        data = self.buffers[0]
        if self.bits < 8:
            data = operations(data).bits_decode(data, self.bits, self.numel)
        if self.dtype in FLOATS:
            # No product: zero times infinity is not a number.
            return data.bool() if mask else torch.where(data.bool(), self.buffers[1], 0).to(self.dtype)
        if self.dtype == torch.bool:
            return data.view(torch.bool)
        value = data.to(self.dtype)
        return value.add_(self.low) if self.low else value


class SignPacked(BitsPacked):
    """One bit per value: plus or minus one."""

    __slots__ = ()

    def gate(self, grad: Tensor, slope: float | None = None) -> Tensor | None:
        if slope is None:
            return None
        positive = operations(self.buffers[0]).bits_decode(self.buffers[0], 1, self.numel).view(torch.bool)
        return torch.where(positive.as_strided(grad.shape, grad.stride()), grad, grad * slope)

    def decode_flat(self, mask: bool = False) -> Tensor:
        positive = operations(self.buffers[0]).bits_decode(self.buffers[0], 1, self.numel)
        return positive.bool() if mask else positive.to(self.dtype).mul_(2).sub_(1)


class BetweenPacked(BitsPacked):
    """One bit per value: the lower limit, or the middle."""

    __slots__ = ()
    codec: Between

    def decode_flat(self, mask: bool = False) -> Tensor:
        outside = operations(self.buffers[0]).bits_decode(self.buffers[0], 1, self.numel)
        low, middle = self.codec.low, self.codec.middle
        values = outside.to(self.dtype).mul_(low - middle).add_(middle)
        return values != 0 if mask else values


class RawPacked(FlatPacked):
    """Copy of the values."""

    __slots__ = ()

    def decode_flat(self, mask: bool = False) -> Tensor:
        return self.buffers[0] != 0 if mask else self.buffers[0].clone()


class WindowPacked(BitsPacked):
    """Positions inside pooling windows."""

    __slots__ = ()
    codec: Window

    def decode_flat(self, mask: bool = False) -> Tensor:
        codec, layout = self.codec, self.layout
        code = self.buffers[0]
        if self.bits < 8:
            code = operations(code).bits_decode(code, self.bits, self.numel)
        code = code.view(layout.size)
        if layout.copied:
            restored = torch.empty(layout.size, dtype=torch.int64, device=code.device)
        else:
            restored = torch.empty_strided(layout.size, layout.stride, dtype=torch.int64, device=code.device)
        offsets, corners = codec.offsets(code.device).to(codec.width()), codec.corners(code)
        for source, target in zip(pieces(code), pieces(restored), strict=True):
            index = torch.empty_like(target, dtype=torch.int32).copy_(source)
            torch.add(look_up(offsets, index), corners, out=target)
        return restored.as_strided((self.numel,), (1,))


PIECE = 1 << 22
"""Indices that `Window` works on at a time, so that its temporary tensors take at most 32 MiB."""


def pieces(x: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor along its first dimension into pieces of at most `PIECE` values, or of one row."""
    return x.split(max(PIECE // max(math.prod(x.shape[1:]), 1), 1))


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Return the table's entry for each index of a tensor without gaps, in the same memory layout."""
    entries = table.index_select(0, index.as_strided((index.numel(),), (1,)))
    return entries.as_strided(index.shape, index.stride())


def pack_bits(
    codec: Codec,
    flat: Tensor,
    layout: Layout,
    dtype: torch.dtype,
    bits: int,
    low: int = 0,
    scale: Tensor | None = None,
    kind: type[BitsPacked] = BitsPacked,
) -> Packed:
    """Pack non-negative values below 2^bits, which decode to `dtype` with `low` added."""
    if bits < 8:
        data = operations(flat).bits_encode(flat if flat.dtype in BYTES else flat.to(torch.uint8), bits)
    else:
        data = flat.to({8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits])
    packed = kind(codec, layout, dtype, flat.numel(), (data,) if scale is None else (data, scale))
    packed.bits, packed.low = bits, low
    return packed


def _narrowest(low: int, high: int) -> tuple[int, int] | None:
    """Return (bits, low) of the narrowest form for values in [low, high]; a signed type needs no offset."""
    for bits in (1, 2, 4, 8):
        if high - low < 1 << bits:
            return bits, low
    for bits in (16, 32):
        if -(1 << bits - 1) <= low and high < 1 << bits - 1:
            return bits, 0
    return None


class ExactCodec(FlatCodec):
    """A codec that restores every bit."""

    @property
    def exact(self) -> bool:
        return True

    def describe(self) -> str:
        return ""


class ReaderCodec(FlatCodec):
    """A codec that keeps only what one kind of reader needs, and not the values."""

    restores_values = False

    def describe(self) -> str:
        return ""


@dataclass(frozen=True, repr=False)
class Lossless(ExactCodec):
    """Booleans at 1 bit, integers at the narrowest width that holds their range, floats bit for bit.

    Example:
        >>> import torch
        >>> from encke.codecs import Lossless
        >>> labels = torch.arange(1000) % 10
        >>> packed = Lossless().encode(labels)
        >>> labels.nbytes // packed.nbytes
        16
        >>> torch.equal(packed.decode(), labels)
        True
    """

    high: int | None = None
    """Known upper limit (exclusive) of non-negative integers. Without it the range is computed, and the host has to
    wait for a GPU."""

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bool or dtype in INTEGERS or dtype in FLOATS

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        if flat.dtype == torch.bool:
            return pack_bits(self, flat, layout, flat.dtype, 1)
        if flat.dtype in FLOATS:
            flags = self._two_values(flat, layout)
            return flags or ErrorBounded(0).encode_flat(flat, layout, key, state)
        if flat.numel() == 0:
            return RawPacked(self, layout, flat.dtype, flat.numel(), (flat.clone(),))
        if self.high is not None:
            low, high = 0, self.high - 1
        else:
            low, high = (int(v) for v in torch.stack(torch.aminmax(flat)).tolist())
        form = _narrowest(low, high)
        if form is None or form[0] >= 8 * flat.element_size():
            if state is not None:
                # As for floats: a tensor that did not shrink is kept unpacked from the next time on.
                state.share = 1.0
            return RawPacked(self, layout, flat.dtype, flat.numel(), (flat.clone(),))
        bits, offset = form
        return pack_bits(self, flat - offset if offset else flat, layout, flat.dtype, bits, offset)

    def _two_values(self, flat: Tensor, layout: Layout) -> Packed | None:
        """Pack values that are zero or one constant, as a dropout mask on the CPU is, at one bit each."""
        if flat.device.type != "cpu" or flat.numel() == 0:
            return None
        scale = flat.max()
        if scale <= 0 or not bool(((flat == 0) | (flat == scale)).all()) or bool(torch.signbit(flat).any()):
            return None
        return pack_bits(self, flat != 0, layout, flat.dtype, 1, scale=scale.reshape(1))


@dataclass(frozen=True, repr=False)
class Keep(ExactCodec):
    """Keep the tensor itself; for policies. This codec encodes nothing."""

    def takes(self, dtype: torch.dtype) -> bool:
        return False

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        raise TypeError("Keep encodes nothing; use codecs.Lossless() for a bit-exact packed form")


@dataclass(frozen=True, repr=False)
class Mask(ReaderCodec):
    """Keeps only whether each value differs from zero, enough for ReLU's backward. Decodes to booleans."""

    zeros_only = True

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        return pack_bits(self, flat.bool(), layout, torch.bool, 1)


@dataclass(frozen=True, repr=False)
class Sign(ReaderCodec):
    """Keeps only whether each value is positive, enough for leaky ReLU's backward. Decodes to 1 and -1."""

    signs_only = True

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        return pack_bits(self, flat > 0, layout, flat.dtype, 1, kind=SignPacked)


@functools.cache
def are_numbers(values: tuple[float, ...], dtype: torch.dtype) -> bool:
    """Return whether `dtype` represents these values exactly."""
    return torch.tensor(values, dtype=torch.float64).to(dtype).tolist() == list(values) and math.isfinite(sum(values))


@dataclass(frozen=True, repr=False)
class Between(ReaderCodec):
    """Keeps only whether each value lies between two limits.

    That is enough for the backward of ReLU6, hard tanh and hard sigmoid. Values inside decode to the middle of the
    range, values outside to the lower limit. NaN counts as inside.
    """

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether limits, middle and half the width are exact in `dtype`, so that rounding changes nothing."""
        return dtype in FLOATS and are_numbers((self.low, self.middle, self.high, self.low - self.middle), dtype)

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        outside = flat <= self.low
        outside |= flat >= self.high
        return pack_bits(self, outside, layout, flat.dtype, 1, kind=BetweenPacked)


@dataclass(frozen=True, repr=False)
class Window(ExactCodec):
    """Max-pool indices as positions inside their pooling window: a few bits instead of 64.

    All settings are for the last dimensions (1 to 3). `plane` is the size of the pooled input.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    plane: tuple[int, ...]
    restores_values = False

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.int64 and math.prod(self.kernel) <= 256

    def steps(self) -> list[int]:
        """Return the distance in the plane between neighbours in each pooled dimension."""
        return [math.prod(self.plane[d + 1 :]) for d in range(len(self.plane))]

    def offsets(self, device: torch.device) -> Tensor:
        """Return the distance of each position in the window from the window's corner."""
        total = torch.zeros(1, dtype=torch.int64, device=device)
        for extent, dilation, step in zip(self.kernel, self.dilation, self.steps(), strict=True):
            total = (total[:, None] + torch.arange(extent, device=device) * (dilation * step)).view(-1)
        return total

    def corners(self, x: Tensor) -> Tensor:
        """Return the corner of each output's window, shaped to broadcast over `x`; negative in the padding."""
        total = torch.zeros((), dtype=torch.int64, device=x.device)
        sizes = x.shape[x.dim() - len(self.kernel) :]
        for size, stride, padding, step in zip(sizes, self.stride, self.padding, self.steps(), strict=True):
            total = total[..., None] + (torch.arange(size, device=x.device) * stride - padding) * step
        return total

    def reach(self) -> int:
        """Return the distance of the last position in the window from the window's corner."""
        return sum((k - 1) * d * s for k, d, s in zip(self.kernel, self.dilation, self.steps(), strict=True))

    def width(self) -> torch.dtype:
        """Return the narrowest index type that holds distances within a window."""
        return torch.int32 if self.reach() < 1 << 31 else torch.int64

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        index = flat.view(layout.size) if layout.copied else layout.restore(flat)
        offsets, corners = self.offsets(flat.device), self.corners(index)
        # A GPU narrows while it subtracts; a CPU does that in a second pass.
        width = torch.int64 if flat.device.type == "cpu" else self.width()
        position = torch.zeros(self.reach() + 1, dtype=torch.uint8, device=flat.device)
        position[offsets] = torch.arange(len(offsets), device=flat.device).to(torch.uint8)
        code = torch.empty(layout.size, dtype=torch.uint8, device=flat.device)
        for source, target in zip(pieces(index), pieces(code), strict=True):
            distance = torch.sub(source, corners, out=torch.empty_like(source, dtype=width))
            target.copy_(look_up(position, distance))
        bits = next(b for b in (1, 2, 4, 8) if len(offsets) <= 1 << b)
        return pack_bits(self, code.view(-1), layout, torch.int64, bits, kind=WindowPacked)
