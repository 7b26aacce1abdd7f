"""LogProb: logarithms of probabilities at 8 bits each, in steps that are the same everywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halley.codecs.base import Codec, Hint, mix, operations
from halley.packed import Layout, Packed

BOUND = 0.05
STEP = 0.099
"""Half of it and SHIFT together stay below the bound."""
SHIFT = math.log(math.sinh(STEP / 2) / (STEP / 2))
"""An error that is uniform within half a step makes the exponential larger on average: by this much in the exponent."""


class LogProbPacked(Packed):
    """A byte each."""

    __slots__ = ("seed",)
    seed: int

    def decode_flat(self, mask: bool = False) -> Tensor:
        values = operations(self.parts[0]).lp_decode(self.parts[0], STEP, SHIFT, self.seed)
        return values != 0 if mask else values


@dataclass(frozen=True, repr=False)
class LogProb(Codec):
    """Values from -25 to 0 come back within 0.05, and their exponentials are right on average.

    Lower ones come back as about -25, probabilities of 1e-11; NaN stays NaN. The size is known beforehand, so that
    nobody waits for a GPU to tell it.
    """

    seed: int = 0
    keeps_zeros = False

    def takes(self, dtype: torch.dtype) -> bool:
        """Only fp32, in which log-softmax is computed as a rule: bf16's own steps are coarser than the bound."""
        return dtype == torch.float32

    def covers(self, other: Codec) -> bool:
        return isinstance(other, LogProb)

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, hint: Hint | None = None) -> Packed:
        seed = mix(self.seed, key)
        packed = LogProbPacked(self, layout, flat.dtype, flat.numel(), (operations(flat).lp_encode(flat, STEP, seed),))
        packed.seed = seed
        return packed
