"""GroupQuant: fixed-rate codes with one scale for each group of values, unbiased by stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatCodec, FlatPacked, Packed, operations
from encke.codecs.layout import Layout
from encke.kernels import GroupFormat, GroupPlan, mix
from encke.kernels.formats import channel_stride

RATES = (2, 3, 4, 8)
"""Bits per code."""


class GroupQuantPacked(FlatPacked):
    """One buffer: the codes, then the smallest value and the step of each group."""

    __slots__ = ("plan", "seed")
    codec: GroupQuant
    plan: GroupPlan

    def __init__(self, codec: Any, layout: Layout, data: Tensor, seed: int, plan: GroupPlan) -> None:
        self.codec = codec
        self.layout = layout
        self.dtype = plan.format.dtype
        self.numel = plan.numel
        self.buffers = (data,)
        self.seed = seed
        self.plan = plan

    @property
    def nbytes(self) -> int:
        return self.buffers[0].nbytes

    def intact(self, source: Tensor) -> bool | Tensor:
        return self.plan.finite(self.buffers[0])

    def gate(self, grad: Tensor, slope: float | None = None) -> Tensor | None:
        return self.plan.gate(self.buffers[0], grad, slope) if slope is None or self.codec.signs else None

    def decode_in(self, layout: Layout) -> Tensor:
        if layout.dense and self.layout.dense:
            return self.plan.decode_strided(self.buffers[0], self.seed, layout.size, layout.stride)
        return layout.restore(self.decode_flat())

    def decode_flat(self, mask: bool = False) -> Tensor:
        return self.plan.mask(self.buffers[0]) if mask else self.plan.decode(self.buffers[0], self.seed)


def at_least(bits: int, min_bits: int | None, rates: tuple[int, ...]) -> int | None:
    """Return `bits` if that is at least `min_bits`, else the first of `rates` that is; None if none is."""
    return next((rate for rate in (bits, *rates) if rate >= max(bits, min_bits or 0)), None)


@dataclass(frozen=True, repr=False)
class GroupQuant(FlatCodec):
    """Fixed-rate codes of `bits` bits with one scale for every `group` values. Decoded values are unbiased.

    A value is off by at most half a step of its group; rounding is random. In groups without negative values, zeros and
    the mask of non-zeros are exact. Groups of one value are exact. A group that holds a NaN or an infinity decodes to
    NaN. In channels_last memory a group takes values of one channel. The groups of a norm's input stay within the
    values that the norm reduces together.

    Example:
        >>> import torch
        >>> from encke.codecs import GroupQuant
        >>> x = torch.randn(64, 1024)
        >>> packed = GroupQuant(bits=4).encode(x)
        >>> x.nbytes / packed.nbytes > 7
        True
        >>> y = packed.decode()
        >>> y.shape, y.dtype
        (torch.Size([64, 1024]), torch.float32)
        >>> bool((y - x).abs().max() < 0.6)
        True
    """

    bits: int = 2
    """2, 3, 4 or 8."""
    group: int = 128
    """64, 128, 256, 512 or 1024."""
    seed: int = 0
    signs: bool = False
    """Keep zeros and signs exact in groups with negative values too, with coarser steps; needs 4 or 8 bits."""
    exact = False
    keeps_zeros = zeros_decode = True
    unbiased = True
    reads_packed = True

    def __post_init__(self) -> None:
        if self.bits not in RATES:
            raise ValueError(f"bits must be 2, 3, 4 or 8, got {self.bits!r}")
        if self.signs and self.bits < 4:
            raise ValueError(f"signs=True needs 4 or 8 bits, got {self.bits}")
        if self.group not in (64, 128, 256, 512, 1024):
            raise ValueError(f"group must be 64, 128, 256, 512 or 1024, got {self.group!r}")

    def covers(self, other: Codec) -> bool:
        if other.signs_only:
            return self.signs
        if not isinstance(other, GroupQuant) or (other.signs and not self.signs):
            return False
        return self.levels >= other.levels and self.group <= other.group

    @property
    def levels(self) -> int:
        """Number of levels of a group with negative values."""
        return 2 ** (self.bits - 1) - 1 if self.signs else 2**self.bits

    def join(self, other: Codec) -> Codec | None:
        if other.signs_only:
            return replace(self, bits=4 if self.bits == 2 else 8, signs=True)
        if not isinstance(other, GroupQuant):
            return None
        group, signs = min(self.group, other.group), self.signs or other.signs
        bits = max(codec.bits if codec.signs or not signs else 4 if codec.bits == 2 else 8 for codec in (self, other))
        return replace(self, bits=bits, group=group, signs=signs)

    def refined(self, min_bits: int | None = None, bound: float | None = None) -> Codec | None:
        bits = at_least(self.bits, min_bits, RATES)
        if not bits or bound is not None:
            return None
        return self if bits == self.bits else replace(self, bits=bits)

    def fixed_rate(self) -> GroupQuant:
        return self

    def describe(self) -> str:
        return f"{self.bits} bits"

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        seed, plan = mix(self.seed, key), self._plan(flat, layout, flat.numel())
        return GroupQuantPacked(self, layout, plan.encode(flat, seed), seed, plan)

    def encode_run(self, x: Tensor, layout: Layout, length: int, key: int, state: EncoderState) -> Packed:
        plan = self.planned(x, layout, length, state)
        if plan is None:
            return super().encode_run(x, layout, length, key, state)
        seed = mix(self.seed, key)
        return GroupQuantPacked(self, layout, plan.encode(x, seed), seed, plan)

    def planned(self, x: Tensor, layout: Layout, length: int, state: EncoderState) -> GroupPlan | None:
        """Return the plan for a tensor whose memory is a run, kept from step to step; None for others."""
        known = state.plan
        # Policies create some codecs at every call.
        same = known is not None and (known[0] is self or known[0] == self)
        if not same or known[1] is not layout or known[2] is not x.dtype or known[3] != x.device:
            plan = self._plan(x, layout, length) if layout.dense else None
            known = state.plan = (self, layout, x.dtype, x.device, plan)
        return known[4]

    def _plan(self, x: Tensor, layout: Layout, length: int) -> GroupPlan:
        if layout.rows is not None:
            format = GroupFormat.in_rows(self.bits, self.group, x.dtype, self.signs, length, *layout.rows)
        else:
            stride = 1 if layout.copied else channel_stride(layout.size, layout.stride, length, self.group)
            format = GroupFormat(self.bits, self.group, x.dtype, stride, self.signs)
        return operations(x).group_plan(format, length, x.device)
