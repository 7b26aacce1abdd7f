"""LogProb: logarithms of probabilities at 8 bits each, in equal steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatCodec, FlatPacked, Packed, operations
from encke.codecs.layout import Layout
from encke.kernels import LogFormat, mix

BOUND = 0.05
"""Largest error of a value in the range that the codes cover."""
STEPS = {torch.float32: (0.099, 0.099), torch.float16: (0.092, 0.083), torch.bfloat16: (0.0925, 0.0615)}
"""Step above -8 and step below -8, by dtype. Half a step, the shift and the dtype's rounding together stay within the
bound. Below -8 the steps of bf16 itself are coarser than the bound; there the error is less than half such a step, so
that rounding restores the value."""


def format_of(dtype: torch.dtype) -> LogFormat:
    """Return the format for a dtype, with a shift that makes exponentials unbiased.

    Errors that are uniform within half a step would make the exponential larger on average.
    """
    step, far = STEPS[dtype]
    return LogFormat(step, far, math.log(math.sinh(step / 2) / (step / 2)), dtype)


class LogProbPacked(FlatPacked):
    """One buffer with a byte for each value."""

    __slots__ = ("seed",)
    seed: int

    def intact(self, source: Tensor) -> bool:
        return True

    def decode_flat(self, mask: bool = False) -> Tensor:
        data = self.buffers[0]
        values = operations(data).log_decode(data, format_of(self.dtype), self.seed)
        return values != 0 if mask else values


@dataclass(frozen=True, repr=False)
class LogProb(FlatCodec):
    """Logarithms of probabilities, one byte each: off by at most 0.05, with unbiased exponentials.

    This holds from -25 (fp16: -21, bf16: -18) to 0. Lower values decode to about that limit, a probability of 1e-11
    (5e-10, 1e-8); NaN stays NaN. The size is fixed, so the host does not wait for a GPU to compute it.

    Example:
        >>> import torch
        >>> from encke.codecs import LogProb
        >>> x = torch.randn(64, 100).log_softmax(-1)
        >>> packed = LogProb().encode(x)
        >>> x.nbytes // packed.nbytes
        4
        >>> bool((packed.decode() - x).abs().max() <= 0.05)
        True
    """

    seed: int = 0

    def takes(self, dtype: torch.dtype) -> bool:
        """Return whether this codec supports `dtype`. fp64 is not: its users want more precision than 8 bits."""
        return dtype in STEPS

    def covers(self, other: Codec) -> bool:
        return isinstance(other, LogProb)

    def refined(self, min_bits: int | None = None, bound: float | None = None) -> Codec | None:
        return self if (min_bits or 0) <= 8 and (bound is None or bound >= BOUND) else None

    def describe(self) -> str:
        return f"{BOUND} abs"

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        seed = mix(self.seed, key)
        data = operations(flat).log_encode(flat, format_of(flat.dtype), seed)
        packed = LogProbPacked(self, layout, flat.dtype, flat.numel(), (data,))
        packed.seed = seed
        return packed
