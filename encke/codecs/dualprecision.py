"""DualPrecision: averages of small tiles in bf16, and the difference of each value from its average in a few bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatCodec, FlatPacked, Packed, operations
from encke.codecs.groupquant import GroupQuant, at_least
from encke.codecs.layout import Layout, run_length
from encke.kernels import DualFormat, GroupFormat, GroupPlan, mix

SMALLEST_PLANE = 16
"""Planes with fewer values are not worth an average, a minimum and a step of their own."""
RATES = (2, 4, 8)
"""Bits of a difference."""
GROUP = 128
"""Group size of tensors without planes, which are packed as by `GroupQuant`."""


class DualPrecisionPacked(FlatPacked):
    """One buffer: minimum and step of each plane, the averages of its tiles, codes, mask bits."""

    __slots__ = ("format", "order")
    codec: DualPrecision
    format: DualFormat
    order: tuple[tuple[int, ...], tuple[int, ...]] | None
    """Size and stride of the planes in the encoded memory, if they are not contiguous there."""

    def intact(self, source: Tensor) -> bool | Tensor:
        at_step, at_low, *_ = self.format.places(self.numel)
        steps = self.buffers[0][at_step:at_low]
        kind = torch.float64 if self.dtype == torch.float64 else torch.bfloat16
        return ~steps.view(kind).isnan().any()

    def decode_flat(self, mask: bool = False) -> Tensor:
        data, numel = self.buffers[0], self.numel
        flat = operations(data).dual_decode(data, self.format, numel, mask)
        if self.order is None:
            return flat
        size, stride = self.order
        restored = torch.empty_strided(size, stride, dtype=flat.dtype, device=flat.device)
        return restored.copy_(flat.view(size)).as_strided((numel,), (1,))


class PlanelessPacked(FlatPacked):
    """Tensor without planes: the buffer of `GroupQuant`, and one of mask bits if the codec keeps them."""

    __slots__ = ("plan", "seed")
    codec: DualPrecision
    plan: GroupPlan
    seed: int

    def intact(self, source: Tensor) -> bool | Tensor:
        return self.plan.finite(self.buffers[0])

    def decode_flat(self, mask: bool = False) -> Tensor:
        if mask and self.codec.mask:
            return operations(self.buffers[1]).bits_decode(self.buffers[1], 1, self.numel).view(torch.bool)
        return self.plan.mask(self.buffers[0]) if mask else self.plan.decode(self.buffers[0], self.seed)


@dataclass(frozen=True, repr=False)
class DualPrecision(FlatCodec):
    """The average of each tile in bf16, and the difference of each value from it in a few bits, unbiased.

    This is the codec of DIVISION (ICML 2023). The last two dimensions are a plane; in a tensor with three dimensions
    the last one is. Each plane has its own minimum and step. Zeros and signs are not exact. A plane that holds a NaN or
    an infinity decodes to NaN. Tensors without planes of at least 16 values are packed as by `GroupQuant(bits)`.

    Example:
        >>> import torch
        >>> from encke.codecs import DualPrecision
        >>> x = torch.randn(8, 16, 32, 32)
        >>> packed = DualPrecision(block=8, bits=2).encode(x)
        >>> x.nbytes / packed.nbytes > 13
        True
        >>> packed.decode().shape
        torch.Size([8, 16, 32, 32])
    """

    block: int = 8
    """Height and width of a tile."""
    bits: int = 2
    """2, 4 or 8."""
    seed: int = 0
    mask: bool = False
    """Keep one more bit per value: whether it was zero, so that ReLU's mask can be read from the packed form."""
    unbiased = True

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int):
            raise TypeError(f"block must be an integer, got {self.block!r}")
        if self.block < 2:
            raise ValueError(f"block must be at least 2, got {self.block!r}")
        if self.bits not in RATES:
            raise ValueError(f"bits must be 2, 4 or 8, got {self.bits!r}")

    @property
    def keeps_zeros(self) -> bool:  # type: ignore[override]
        return self.mask

    def covers(self, other: Codec) -> bool:
        if other.zeros_only:
            return self.mask
        return (
            isinstance(other, DualPrecision)
            and self.bits >= other.bits
            and self.block <= other.block
            and self.mask >= other.mask
        )

    def join(self, other: Codec) -> Codec | None:
        if other.zeros_only:
            return replace(self, mask=True)
        if isinstance(other, DualPrecision):
            block, bits = min(self.block, other.block), max(self.bits, other.bits)
            return replace(self, block=block, bits=bits, mask=self.mask or other.mask)
        return None

    def refined(self, min_bits: int | None = None, bound: float | None = None) -> Codec | None:
        bits = at_least(self.bits, min_bits, RATES)
        return replace(self, bits=bits) if bits and bound is None else None

    def fixed_rate(self) -> GroupQuant:
        return GroupQuant(bits=self.bits, seed=self.seed)

    def describe(self) -> str:
        return f"{self.bits} bits"

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        seed, numel, dtype = mix(self.seed, key), flat.numel(), flat.dtype
        size, plane = planes_of(flat, layout)
        format = DualFormat(*plane, self.block, self.bits, self.mask, dtype)
        if format.plane < SMALLEST_PLANE or format.nbytes(numel) > numel * dtype.itemsize:
            rows = layout.rows or (numel, 1)
            groups = GroupFormat.in_rows(self.bits, GROUP, dtype, False, numel, *rows)
            plan = operations(flat).group_plan(groups, numel, flat.device)
            buffers = [plan.encode(flat, seed)]
            if self.mask:
                buffers.append(operations(flat).bits_encode(flat != 0, 1))
            kept = PlanelessPacked(self, layout, dtype, numel, tuple(buffers))
            kept.plan, kept.seed = plan, seed
            return kept
        planes = flat.view(size) if layout.copied else flat.as_strided(size, layout.stride)
        data = operations(flat).dual_encode(planes.contiguous().view(-1), format, seed)
        packed = DualPrecisionPacked(self, layout, dtype, numel, (data,))
        packed.format = format
        packed.order = None if planes.is_contiguous() else (size, layout.stride)
        return packed


def planes_of(flat: Tensor, layout: Layout) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the size of the tensor on a run of memory, with repeated dimensions once, and of its planes, or (0, 0)."""
    size, stride = layout.size, layout.stride
    if not layout.copied:
        if run_length(size, stride) is None:
            return size, (0, 0)
        size = tuple(1 if step == 0 else extent for extent, step in zip(size, stride, strict=True))
    if len(size) < 3 or flat.numel() == 0:
        return size, (0, 0)
    return size, (size[-2] if len(size) > 3 else 1, size[-1])
