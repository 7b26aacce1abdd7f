"""LogProb: logarithms of probabilities at 8 bits each, in steps that are the same everywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatCodec, FlatPacked, Packed, mix, operations
from encke.codecs.layout import Layout

BOUND = 0.05
STEPS = {torch.float32: (0.099, 0.099), torch.float16: (0.092, 0.083), torch.bfloat16: (0.0925, 0.0615)}
"""The step above -8 and the one below. Half of it, the shift and the dtype's rounding together stay below the bound;
below -8, where bf16's own steps are coarser than the bound, they are less than half of such a step: nothing changes."""


def shift(step: float) -> float:
    """Errors that are uniform within half a step make the exponential larger on average: by so much in the exponent."""
    return math.log(math.sinh(step / 2) / (step / 2))


class LogProbPacked(FlatPacked):
    """A byte each."""

    __slots__ = ("seed",)
    seed: int

    def decode_flat(self, mask: bool = False) -> Tensor:
        data, (step, far) = self.buffers[0], STEPS[self.dtype]
        values = operations(data).lp_decode(data, step, far, shift(step), self.seed, self.dtype)
        return values != 0 if mask else values


@dataclass(frozen=True, repr=False)
class LogProb(FlatCodec):
    """Values from -25 (fp16: -21, bf16: -18) to 0 come back within 0.05, and their exponentials are right on average.

    Lower ones come back as about that, probabilities of 1e-11 (5e-10, 1e-8); NaN stays NaN. The size is known
    beforehand, so that nobody waits for a GPU to tell it.
    """

    seed: int = 0

    def takes(self, dtype: torch.dtype) -> bool:
        """Not fp64: where that is asked for, so few bits are not what is meant."""
        return dtype in STEPS

    def covers(self, other: Codec) -> bool:
        return isinstance(other, LogProb)

    def refined(self, min_bits: int | None = None, bound: float | None = None) -> Codec | None:
        return self if (min_bits or 0) <= 8 and (bound is None or bound >= BOUND) else None

    def describe(self) -> str:
        return f"{BOUND} abs"

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        seed = mix(self.seed, key)
        data = operations(flat).lp_encode(flat, *STEPS[flat.dtype], seed)
        packed = LogProbPacked(self, layout, flat.dtype, flat.numel(), (data,))
        packed.seed = seed
        return packed
