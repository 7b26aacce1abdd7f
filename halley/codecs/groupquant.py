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

    __slots__ = ("seed", "stride")
    codec: GroupQuant
    seed: int
    stride: int

    def decode_flat(self, mask: bool = False) -> Tensor:
        bits, group = self.codec.bits, self.codec.group
        data, numel, dtype = self.parts[0], self.numel, self.dtype
        return torch.ops.halley.gq_decode(data, numel, bits, group, dtype, mask, self.seed, self.stride)


def channel_stride(layout: Layout, numel: int, group: int) -> int:
    """How far apart the values of one channel lie: channels_last memory has all channels of a pixel together.

    One where memory is not like that, and where there are too few pixels to fill groups with.
    """
    size, stride = layout.size, layout.stride
    if len(size) < 4 or stride[1] != 1 or size[1] == 1 or layout.copied or numel % size[1]:
        return 1
    pixels = numel // size[1]
    return size[1] if -pixels % group <= pixels // 50 else 1


@dataclass(frozen=True, repr=False)
class GroupQuant(Codec):
    """`bits` bits a value with a scale for every `group` values; each value is right on average.

    In groups without negative values zeros are exact, and no other value is taken for one. At 2 bits a value comes back
    within half a step, small ones perhaps with the other sign; from 4 bits on zeros and signs are exact in all groups,
    within a step. A group that holds a NaN or an infinity comes back as NaN. In channels_last memory a group takes
    values of one channel.
    """

    bits: int = 2
    group: int = 128
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
        seed, stride = mix(self.seed, key), channel_stride(layout, flat.numel(), self.group)
        data = torch.ops.halley.gq_encode(flat, self.bits, self.group, seed, stride)
        packed = GroupQuantPacked(self, layout, flat.dtype, flat.numel(), (data,))
        packed.seed, packed.stride = seed, stride
        return packed
