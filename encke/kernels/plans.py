"""Plans: everything about one launch that does not change from step to step, with the same methods in all backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encke.kernels.formats import GroupFormat, SampledUnits, Seed

INFINITY_BF16 = 0x7F80
"""Bit pattern of infinity in bf16; those of NaNs are larger."""


Norm = tuple[Tensor, Tensor, Tensor, Tensor]
"""Mean, 1 / deviation, weight and bias of each channel of a batch norm, in fp32."""


class GroupPlan(ABC):
    """Encode and decode tensors of one size in one `GroupFormat` on one device.

    Tensors must be dense (no gaps between their elements). They are read and written in memory order.
    """

    __slots__ = ("at_step", "device", "format", "nbytes", "norm_plan", "numel")

    fuses_forward = False
    """Whether `encode_relu` and `encode_moments` are available."""
    fuses_norm_relu = False
    """Whether `encode_norm_relu` is available."""
    sample_sums: Callable[[Tensor, Tensor, SampledUnits], Tensor] | None = None
    """Function that sums a sample of the flat values and of their scales in the codes; None if there is no kernel.

    It returns a row for each part of the sample: the numbers of values and of non-zeros; a value, the sum of the
    differences from it and the sum of their squares; the sum of the squared steps of groups with negative values, and
    the sum of the squared steps of other groups, each times the share of non-zeros.
    """

    def __init__(self, format: GroupFormat, numel: int, device: torch.device) -> None:
        if numel % (format.stride * (format.row or 1)):
            rows = f"rows of {format.row} values" if format.row else "groups of values"
            raise ValueError(f"a tensor of {numel} values cannot be split into {rows} with a stride of {format.stride}")
        self.format, self.numel, self.device = format, numel, device
        _, self.at_step, self.nbytes = format.places(numel)
        self.norm_plan: tuple[Any, torch.dtype | None, Any] | None = None
        """Cache for a batch norm layer: layout, dtype of the weight, and the plan of a backward that reads this format.
        """

    @abstractmethod
    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        """Write the codes of `x` to `data`."""

    @abstractmethod
    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        """Decode `data`, which was encoded with this seed, to `out`."""

    @abstractmethod
    def mask_into(self, data: Tensor, out: Tensor) -> None:
        """Write a mask of the non-zero values to `out`. Groups whose codes cannot express zero count as non-zero."""

    def gate_into(self, data: Tensor, grad: Tensor, out: Tensor, other: Tensor | None = None) -> None:
        """Write `grad` (plus `other` if given) to `out` where the values in `data` are not zero, else zero."""
        mask = self.mask(data).as_strided(grad.shape, grad.stride())
        out.copy_(torch.where(mask, grad if other is None else grad + other, 0))

    def encode(self, x: Tensor, seed: Seed) -> Tensor:
        """Encode `x` into one buffer: codes, and lo and step of each group."""
        data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self.encode_into(x, seed, data)
        return data

    def decode(self, data: Tensor, seed: Seed) -> Tensor:
        """Return the decoded values as a flat tensor."""
        out = self._new_values(self.format.dtype)
        self.decode_into(data, seed, out)
        return out

    def decode_strided(
        self, data: Tensor, seed: Seed, size: tuple[int, ...], stride: tuple[int, ...], norm: Norm | None = None
    ) -> Tensor:
        """Return the values as a dense tensor of that size and stride; with `norm`, return the batch norm's result."""
        x = self.decode(data, seed).as_strided(size, stride)
        if norm is None:
            return x
        mean, invstd, weight, bias = (each.view(-1, *[1] * (len(size) - 2)) for each in norm)
        return ((x - mean) * invstd * weight + bias).to(x.dtype)

    def mask(self, data: Tensor) -> Tensor:
        """Return the mask of the non-zero values as a flat tensor; see `mask_into`."""
        out = self._new_values(torch.bool)
        self.mask_into(data, out)
        return out

    def gate(self, data: Tensor, grad: Tensor, slope: float | None = None) -> Tensor:
        """Return the gradient of ReLU: `grad` where the values in `data` are not zero, else zero.

        With `slope`, return the gradient of leaky ReLU: `grad` where the values are positive, else `slope * grad`. The
        values must be packed with `signs`.
        """
        if slope is not None:
            size, stride = grad.shape, grad.stride()
            negative = self.decode_strided(data, 0, size, stride) < 0  # signs do not depend on the seed
            return torch.where(self.mask(data).as_strided(size, stride) & ~negative, grad, grad * slope)
        out = torch.empty_like(grad)
        self.gate_into(data, grad, out)
        return out

    def finite(self, data: Tensor) -> bool | Tensor:
        """Return whether all values are finite, as a zero-dimensional tensor.

        A group with a NaN or an infinity has a NaN step.
        """
        if self.numel == 0:
            return True
        steps = data[self.at_step : self.nbytes]
        if self.format.scale_dtype == torch.float64:
            return ~steps.view(torch.float64).isnan().any()
        # Constant groups are marked by the sign bit, so they are negative here; their other bits are arbitrary.
        return steps.view(torch.int16).amax() <= INFINITY_BF16

    # The methods below write the codes to `data`, or allocate it.

    def encode_relu(self, x: Tensor, out: Tensor, seed: Seed, data: Tensor | None = None) -> Tensor:
        """Write the ReLU of `x` to `out` and return the codes of the result."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel for ReLU; see fuses_forward")

    def encode_moments(self, x: Tensor, workspace: Tensor, seed: Seed, data: Tensor | None = None) -> Tensor:
        """Write mean and sum of squared deviations of each group to `workspace` and return the codes of `x`."""
        raise NotImplementedError(f"{type(self).__name__} has no kernel for moments; see fuses_forward")

    def encode_norm_relu(
        self, x: Tensor, norm: Norm | Tensor, out: Tensor, seed: Seed, data: Tensor | None = None
    ) -> Tensor:
        """Apply batch norm and ReLU to `x`, write the result to `out`, which may be `x`, and return its codes.

        `norm` is a `Norm`, or one tensor with the rows mean, 1 / deviation, scale and bias.
        """
        raise NotImplementedError(f"{type(self).__name__} has no kernel for batch norm; see fuses_norm_relu")

    def _new_values(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.numel, dtype=dtype, device=self.device)


Gate = tuple[Tensor, GroupPlan]
"""Codes of a ReLU's result, and their plan. Gradients pass where the codes are not zero."""


def flat_memory(x: Tensor) -> Tensor:
    """Return a flat view of a dense tensor, in memory order."""
    return x if x.dim() == 1 else x.as_strided((x.numel(),), (1,))


def seed_number(seed: Seed, format: GroupFormat) -> int:
    """Return the seed as a number, for kernels that cannot read it on the device."""
    if not isinstance(seed, tuple):
        return seed
    seeds, row = seed
    if seeds.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"encke: GroupQuant(bits={format.bits}, group={format.group}) has no kernel on the GPU, and without one "
            "nothing can be packed in a CUDA graph. Take group=128, or compile with another mode than "
            "'reduce-overhead'."
        )
    return int(seeds[row])
