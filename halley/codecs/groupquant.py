"""GroupQuant: fixed-rate codes with one scale for each group of values, unbiased by stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halley.codecs.base import Codec, Hint, mix
from halley.kernels import FLOATS
from halley.packed import Layout, Packed


class GroupQuantPacked(Packed):
    """One buffer: codes, then lo and step of each group."""

    __slots__ = ()
    codec: GroupQuant

    def decode_flat(self, mask: bool = False) -> Tensor:
        codec = self.codec
        return torch.ops.halley.gq_decode(self.parts[0], self.numel, codec.bits, codec.group, self.dtype, mask)


@dataclass(frozen=True, repr=False)
class GroupQuant(Codec):
    """`bits` bits a value with a scale for every `group` values; each value is right on average.

    Zeros and signs are exact in groups without negative values, and from 4 bits in all groups. A group that holds a NaN
    or an infinity comes back as NaN.
    """

    bits: int = 2
    group: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (2, 4, 8):
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")
        if self.group not in (64, 128, 256, 512, 1024):
            raise ValueError(f"group must be 64, 128, 256, 512 or 1024, got {self.group!r}")

    def takes(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def covers(self, other: Codec) -> bool:
        if other.signs_only:
            return self.bits >= 4
        return isinstance(other, GroupQuant) and self.bits >= other.bits and self.group <= other.group

    def join(self, other: Codec) -> Codec | None:
        if not isinstance(other, GroupQuant):
            return None
        return replace(self, bits=max(self.bits, other.bits), group=min(self.group, other.group))

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, hint: Hint | None = None) -> Packed:
        data = torch.ops.halley.gq_encode(flat, self.bits, self.group, mix(self.seed, key))
        return GroupQuantPacked(self, layout, flat.dtype, flat.numel(), (data,))
