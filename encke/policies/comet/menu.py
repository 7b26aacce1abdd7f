"""Codes that a saved tensor may get, with the squared error and the bits of each.

Usually they are the fixed rates, which a collection step has tried. What weights alone read may have dithered levels
instead: any error, in fewer bits, for a gradient's error is proportional to that of the values. Each level has half the
squared error of the one before, and takes half a bit more for each value that is not zero (rate-distortion theory).
Where signs are read, coarse levels take up to 1.2 bits more, and their error is smaller than announced next to zero.
Norms and functions take fixed rates, which have a scale for each group; one bound for all channels harms small ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from encke.codecs import Codec, ErrorBounded
from encke.policies.comet import allocate
from encke.policies.comet.stats import TensorFigures

SIGNS, LESS = 1.2, 0.14
"""Bits that exact signs take at a bound of the standard deviation, and how many fewer at each level of half the squared
error: measured for normal values, and about the same for those of a leaky ReLU (docs/lab.md)."""


@dataclass(slots=True)
class Menu:
    """Codes for one piece of memory, the coarsest first."""

    codecs: Sequence[Codec]
    bits: Sequence[float]
    """Bits of a value. Between dithered levels only differences count."""
    growth: list[float] | None = None
    """Squared error of each dithered level over that of the coarsest fixed rate; None for fixed rates.

    With exact signs it is less, by how much depends on the values next to zero.
    """

    @staticmethod
    def of(tensor: TensorFigures, dithered: bool, seed: int) -> Menu:
        """Return the fixed rates, or dithered levels from a bound of the standard deviation to the error of 8 bits."""
        share, signed, first, last = tensor.share, tensor.signed, tensor.errors[0][0], tensor.errors[-1][0]
        # Zeros have no error; that of other values is uniform within the bound.
        power = share * tensor.std**2 / 3
        if not dithered or not math.inf > power > last > 0:
            return Menu(tensor.trials, allocate.BITS)
        powers = [power / 2**i for i in range(1 + math.ceil(math.log2(power / last)))]
        bounds = [math.sqrt(3 * each / share) for each in powers]
        codecs = [ErrorBounded(bound, rounding="dithered", seed=seed, coarsens=True, signs=signed) for bound in bounds]
        levels, signs = range(len(powers)), SIGNS if signed else 0.0
        bits = [allocate.BITS[0] + share * (i / 2 + max(signs - LESS * i, 0.0)) for i in levels]
        return Menu(codecs, bits, [each / first for each in powers])

    def errors(self, at_fixed: Sequence[float]) -> list[float]:
        """Return the squared error of a reader with each code, from that with each fixed rate."""
        if self.growth is None:
            return list(at_fixed)
        return [at_fixed[0] * growth for growth in self.growth]
