"""Codecs only for the study: one without exact zeros, and the two halves of DIVISION. Plain torch operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from encke.codecs import Codec, Packed
from encke.codecs.base import EncoderState, FlatCodec, FlatPacked
from encke.codecs.layout import Layout


class LevelsPacked(FlatPacked):
    """Integer levels, and the half width of a cell."""

    __slots__ = ()

    def decode_flat(self, mask: bool = False) -> Tensor:
        levels, half = self.buffers
        decoded = ((2 * levels.float() + 1) * half).to(self.dtype)
        return decoded != 0 if mask else decoded


@dataclass(frozen=True, repr=False)
class Midpoint(FlatCodec):
    """Map every value to the middle of its cell, as in stock SZ: the bound holds, but zeros become the bound.

    `bound` is relative to the tensor's range, as in `ErrorBounded(bound, "rel")`, which decodes all values but zeros to
    the same result.
    """

    bound: float
    # Deliberately untrue: a mask is then read from the decoded values, as with a compressor that has no masks. With
    # False, capture would keep exact zeros for ReLU.
    keeps_zeros = zeros_decode = True

    def covers(self, other: Codec) -> bool:
        return other.signs_only or (isinstance(other, Midpoint) and self.bound <= other.bound)

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        half = self.bound * (flat.amax() - flat.amin()).float().clamp_min(torch.finfo(torch.float32).tiny)
        levels = torch.floor(flat.float() / (2 * half)).to(torch.int32)
        return LevelsPacked(self, layout, flat.dtype, flat.numel(), (levels, half))


class LowPacked(FlatPacked):
    """The averages of the tiles of each plane."""

    __slots__ = ()
    codec: LowFrequency

    def decode_flat(self, mask: bool = False) -> Tensor:
        return self.layout_of(spread(self.buffers[0].float(), self.layout.size, self.codec.block), mask)

    def layout_of(self, x: Tensor, mask: bool) -> Tensor:
        """Return the planes as the flat memory that was encoded."""
        restored = torch.empty_strided(self.layout.size, self.layout.stride, dtype=self.dtype, device=x.device)
        flat = restored.copy_(x).as_strided((self.numel,), (1,))
        return flat != 0 if mask else flat


class HighPacked(LowPacked):
    """Differences from the averages, as codes of a few bits with minimum and step for each plane."""

    __slots__ = ()

    def decode_flat(self, mask: bool = False) -> Tensor:
        codes, low, step = self.buffers
        return self.layout_of(low.float() + codes.float() * step.float(), mask)

    codec: HighFrequency

    @property
    def nbytes(self) -> int:
        """Bytes with the codes packed, although each takes a byte here."""
        codes, low, step = self.buffers
        return -(-codes.numel() * self.codec.bits // 8) + low.nbytes + step.nbytes


def tiles(x: Tensor, block: int) -> Tensor:
    """Return the average of each tile of each plane; tiles at the edges may be smaller."""
    return F.avg_pool2d(x.float(), block, ceil_mode=True, count_include_pad=False).bfloat16()


def spread(averages: Tensor, size: tuple[int, ...], block: int) -> Tensor:
    """Return planes in which each tile has its average at every position."""
    rows, columns = (torch.arange(extent, device=averages.device) // block for extent in size[-2:])
    return averages[..., rows[:, None], columns]


@dataclass(frozen=True, repr=False)
class LowFrequency(FlatCodec):
    """Keep only the average of each `block` x `block` tile, in bf16."""

    block: int = 8

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        averages = tiles(layout.restore(flat), self.block)
        return LowPacked(self, layout, flat.dtype, flat.numel(), (averages,))


@dataclass(frozen=True, repr=False)
class HighFrequency(LowFrequency):
    """Keep only the differences from the averages, at `bits` bits, rounded stochastically and unbiased."""

    bits: int = 2
    seed: int = 0

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        x = layout.restore(flat).float()
        rest = x - spread(tiles(x, self.block).float(), layout.size, self.block)
        low, high = rest.amin((-2, -1), keepdim=True), rest.amax((-2, -1), keepdim=True)
        top = 2**self.bits - 1
        step = ((high - low) / top).clamp_min(torch.finfo(torch.float32).tiny)
        generator = torch.Generator(x.device).manual_seed(self.seed)
        random = torch.rand(x.shape, generator=generator, device=x.device)
        codes = torch.floor((rest - low) / step + random).clamp_(0, top).to(torch.uint8)
        return HighPacked(self, layout, flat.dtype, flat.numel(), (codes, low, step))
