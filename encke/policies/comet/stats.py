"""Statistics of one run of saved memory: share of non-zeros, spread, and the error of each candidate codec.

Errors of the fixed rates follow from the scales of the packed data (rates.py). Other errors are measured by encoding a
sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from encke.codecs import Codec, GroupQuant, Packed
from encke.codecs.layout import Layout
from encke.policies.comet.rates import SampleFigures, Scales, follow_from_scales, power_at, units_of

TRIED = 1 << 20
"""Number of values of a tensor that are encoded to measure an error, in evenly spaced runs."""
RUNS = 16

DERIVATIVES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Gelu": torch.ops.aten.gelu_backward,
    "Silu": torch.ops.aten.silu_backward,
    "Mish": torch.ops.aten.mish_backward,
    "Sigmoid": torch.ops.aten.sigmoid_backward,
    "Tanh": torch.ops.aten.tanh_backward,
    "Hardswish": torch.ops.aten.hardswish_backward,
}
"""Backward of pointwise functions, given the output gradient and the saved tensor."""


@dataclass(slots=True)
class TensorFigures:
    """Statistics of one run of saved memory, as numbers."""

    share: float
    std: float
    errors: list[tuple[float, float]]
    """Mean square and mean of the error, for each codec tried."""
    in_force: tuple[float, float]
    """Mean square and mean of the error of the codec in force."""
    codec: Codec
    trials: tuple[Codec, ...]
    values: int
    row: int
    distortion: list[float] = field(default_factory=list)
    """Relative mean square error of a function's derivative, for each codec tried."""
    fixed: bool = False
    """Whether only codes of a fixed rate are suitable."""
    signed: bool = False
    """Whether a reader needs signs."""

    @property
    def bound(self) -> float:
        """The absolute bound in force; from the error itself where the codec has a relative one."""
        codec = self.codec
        absolute, relative = codec.bounds()
        if absolute < math.inf and relative == math.inf:
            return absolute
        return math.sqrt(3 * self.in_force[0] / self.share) if self.share else 0.0


def sample(flat: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
    """Return at most TRIED values of a flat tensor, in evenly spaced runs of groups (channels_last: of pixels)."""
    channels = layout.size[1] if len(layout.size) > 3 and layout.stride[1] == 1 and not layout.copied else 1
    if flat.numel() <= TRIED:
        values = flat
    else:
        unit = 1024 * channels
        length = max(TRIED // RUNS // unit, 1) * unit
        runs = max(min(RUNS, TRIED // length), 1)
        step = (flat.numel() - length) // max(runs - 1, 1) // unit * unit
        values = torch.cat([flat[i * step : i * step + length] for i in range(runs)])
    pixels = values.numel() // channels
    if channels == 1 or pixels * channels != values.numel():
        return values, Layout((values.numel(),), (1,))
    return values, Layout((pixels, channels, 1, 1), (channels, 1, channels, channels))


def upcast(x: Tensor) -> Tensor:
    """Return `x` in a precision fit for differences."""
    return x if x.dtype == torch.float64 else x.float()


def round_trip(codec: Codec, flat: Tensor, layout: Layout, key: int) -> Tensor:
    """Encode and decode a flat tensor."""
    return upcast(codec.encode_flat(flat, layout, key).decode_flat())


class TensorStats:
    """Statistics of one run of saved memory when it was packed, on its device.

    The packed data itself is not held: it is released when backward has read it.
    """

    def __init__(
        self, flat: Tensor, layout: Layout, packed: Packed, trials: Sequence[GroupQuant], key: int, operation: str = ""
    ) -> None:
        self.values = flat.numel()
        self.trials = tuple(trials)
        self.codec = packed.codec
        self.row = max(math.prod(layout.size[2:]) if len(layout.size) > 3 else layout.size[-1] if layout.size else 1, 1)
        """Values in a row (planes: in a plane), which a normalisation takes together at least."""
        self.fixed = False
        """Whether only codes of a fixed rate are suitable."""
        self.signed = False
        """Whether a reader needs signs."""
        self.bits = 0
        """Rate of the codes if errors follow from their scales, without bias; 0 if errors were measured instead."""
        self.tensors: list[Tensor | None]
        """Share of non-zeros, standard deviation, distortion of a function's derivative, and figures of the errors.

        Or sums over a sample, None and the distortion, if a kernel computes such sums.
        """
        slope = DERIVATIVES.get(operation) if trials else None
        plan = packed.plan
        if plan is None and self.codec in self.trials:
            # A recomputed tensor has no codes: those of a sample have the same steps.
            flat, layout = sample(flat, layout)
            packed = self.trials[0].encode_flat(flat, layout, key)
            plan = packed.plan
        self.plan = plan
        if not trials or plan is None or not follow_from_scales(plan, trials[0].group):
            self.tensors = self._try(*sample(flat, layout), slope, key)
            return
        self.bits = plan.format.bits
        units, sums = units_of(plan.format, plan.numel), None
        if plan.sample_sums is not None:
            sums = plan.sample_sums(flat, packed.buffers[0], units)
        scales = Scales.of(flat, packed) if sums is None or slope is not None else None
        distortion = None
        if scales is not None and slope is not None:
            distortion = scales.distortion(slope, self.bits, [each.bits for each in trials])
        if scales is not None and sums is None:
            share, *squares = scales.powers()
            self.tensors = [share, upcast(scales.values).std(correction=0), distortion, *squares]
        else:
            self.tensors = [sums, None, distortion]

    def _try(
        self, values: Tensor, layout: Layout, slope: Callable[[Tensor, Tensor], Tensor] | None, key: int
    ) -> list[Tensor | None]:
        """Encode a sample with each codec. Figures of an error are its mean square and its mean, including zeros."""
        exact = upcast(values)
        right = slope(torch.ones_like(exact), exact) if slope is not None else exact
        errors: list[Tensor] = []
        distortion: list[Tensor] = []
        for codec in (*self.trials, *([] if self.codec in self.trials else [self.codec])):
            error = round_trip(codec, values, layout, key) - exact
            errors += [error.square().mean(), error.mean()]
            if slope is not None and len(distortion) < len(self.trials):
                wrong = slope(torch.ones_like(exact), exact + error) - right
                distortion.append(wrong.square().mean() / right.square().mean())
        share = torch.count_nonzero(values) / values.numel()
        return [share, exact.std(correction=0), torch.stack(distortion) if distortion else None, *errors]

    def figures(self, numbers: Sequence[Any]) -> TensorFigures:
        """Return the statistics from `tensors`, given as numbers in the same order."""
        share, std, distortion, *figures = numbers
        if isinstance(share, Tensor) and self.plan is not None:
            share, std, *figures = SampleFigures.of(share, self.plan)
        if self.bits:
            errors = [(power_at(self.bits, each.bits, *figures), 0.0) for each in self.trials]
            in_force = (power_at(self.bits, self.codec.bits, *figures), 0.0)  # type: ignore[attr-defined]
        else:
            errors = list(zip(figures[::2], figures[1::2], strict=True))
            in_force = errors[self.trials.index(self.codec)] if self.codec in self.trials else errors.pop()
        of_slope = [] if self.tensors[2] is None else distortion.tolist()
        return TensorFigures(
            share, std, errors, in_force, self.codec, self.trials, self.values, self.row, of_slope, self.fixed,
            self.signed,
        )  # fmt: skip
