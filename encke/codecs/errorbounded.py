"""ErrorBounded: levels packed at variable rate; the bound holds for every value, and zeros are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatCodec, Packed, operations
from encke.codecs.groupquant import GroupQuant
from encke.codecs.layout import Layout
from encke.codecs.pending import PendingPacked
from encke.kernels import BoundedFormat, mix
from encke.kernels.formats import DITHERED, NEAREST, SIGNED, STOCHASTIC

ROUNDINGS = {"nearest": NEAREST, "stochastic": STOCHASTIC, "dithered": DITHERED}
KINDS = ROUNDINGS | {"dithered with signs": SIGNED}
"""Kinds of rounding in the format."""


class ErrorBoundedPacked(PendingPacked):
    """Two buffers, meta and payload (docs/design.md)."""

    __slots__ = ()

    def intact(self, source: Tensor) -> bool:
        return True

    def gate(self, grad: Tensor, slope: float | None = None) -> Tensor | None:
        meta, payload = self.buffers
        kernel: Any = getattr(operations(meta), "bounded_gate", None)
        if kernel is None or slope is not None:
            return None
        self.confirm()
        found: Tensor = kernel(meta, payload, self.format, grad)
        return found

    def decode_flat(self, mask: bool = False) -> Tensor:
        self.confirm()
        meta, payload = self.buffers
        return operations(meta).bounded_decode(meta, payload, self.format, self.numel, mask)


@dataclass(frozen=True, repr=False)
class ErrorBounded(FlatCodec):
    """Codes of variable size with a bound: every finite value decodes to within `bound` of itself.

    Zeros are exact, masks of non-zeros too, NaN and infinities are restored bit for bit. `bound=0` is bit-exact.

    Example:
        >>> import torch
        >>> from encke.codecs import ErrorBounded
        >>> x = torch.randn(64, 1024).relu()
        >>> packed = ErrorBounded(0.1).encode(x)
        >>> x.nbytes / packed.nbytes > 8
        True
        >>> y = packed.decode()
        >>> bool((y - x).abs().max() <= 0.1)
        True
        >>> torch.equal(y == 0, x == 0)
        True
    """

    bound: float
    """Largest error of a finite value."""
    mode: Literal["abs", "rel"] = "abs"
    """Whether the bound is absolute, or relative to the range (largest minus smallest finite value)."""
    rounding: Literal["nearest", "stochastic", "dithered"] = "nearest"
    """"nearest" and "stochastic" keep signs. Stochastic rounding is unbiased between non-zero levels; its step is the
    bound, that of the others twice the bound. "dithered" is unbiased, with the error of every value uniform within the
    bound; values below the bound may change their sign, unless `signs` says otherwise."""
    seed: int = 0
    limit: float = math.inf
    """Second bound, relative to the range; the smaller of the two holds."""
    coarsens: bool = False
    """Whether, on a GPU, values that do not fit the memory predicted for them may be encoded with 4 or 64 times the
    bound. Policies say so of bounds they have chosen. Without it, backward raises an error for such values."""
    signs: bool = False
    """Whether signs are exact with "dithered" rounding too: still unbiased, with smaller errors next to zero, in up to
    1.2 bits more for each value. The other roundings keep signs in any case."""
    keeps_zeros = True

    def __post_init__(self) -> None:
        for name in ("bound", "limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, got {value!r}")
            if math.isnan(value) or value < 0:
                raise ValueError(f"{name} must be zero or positive, got {value}")
        if math.isinf(self.bound):
            raise ValueError(f"bound must be finite, got {self.bound}")
        if self.mode not in ("abs", "rel"):
            raise ValueError(f'mode must be "abs" or "rel", got {self.mode!r}')
        if self.rounding not in ROUNDINGS:
            raise ValueError(f'rounding must be "nearest", "stochastic" or "dithered", got {self.rounding!r}')

    @property
    def exact(self) -> bool:
        return self.bound == 0

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.rounding == "dithered" or self.bound == 0

    @property
    def zeros_decode(self) -> bool:  # type: ignore[override]
        return self.keeps_signs

    @property
    def keeps_signs(self) -> bool:
        """Whether signs are exact."""
        return self.signs or self.rounding != "dithered"

    def covers(self, other: Codec) -> bool:
        if self.bound == 0:
            return True
        if other.signs_only:
            return self.keeps_signs
        if not isinstance(other, ErrorBounded):
            return False
        return (
            self.mode == other.mode
            and self.bound <= other.bound
            and self.limit <= other.limit
            and self.rounding == other.rounding
            and self.coarsens <= other.coarsens
            and self.signs >= other.signs
        )

    def join(self, other: Codec) -> Codec | None:
        if other.signs_only:
            return replace(self, signs=True)
        if not isinstance(other, ErrorBounded) or self.rounding != other.rounding:
            return None
        pairs = (self.bounds(), other.bounds())
        absolute, relative = (min(pair[i] for pair in pairs) for i in range(2))
        weaker, signs = self.coarsens and other.coarsens, self.signs or other.signs
        if math.isinf(absolute):
            return replace(self, bound=relative, mode="rel", limit=math.inf, coarsens=weaker, signs=signs)
        return replace(self, bound=absolute, mode="abs", limit=relative, coarsens=weaker, signs=signs)

    def refined(self, min_bits: int | None = None, bound: float | None = None) -> Codec | None:
        if self.exact:
            return self
        # Half a step, relative to the range.
        limit = self.limit if min_bits is None else min(self.limit, 0.5 / 2**min_bits)
        if bound is None:
            return replace(self, limit=limit, coarsens=False)
        if self.mode == "rel":
            return replace(self, bound=bound, mode="abs", limit=min(self.bound, limit), coarsens=False)
        return replace(self, bound=min(self.bound, bound), limit=limit, coarsens=False)

    def fixed_rate(self) -> GroupQuant | None:
        return None if self.exact else GroupQuant(bits=8, seed=self.seed, signs=self.signs)

    def describe(self) -> str:
        named = zip(self.bounds(), ("abs", "rel"), strict=True)
        text = ", ".join(f"{value:.3g} {mode}" for value, mode in named if value != math.inf)
        text = (text if self.bound else "0 (bit-exact)") + f" {self.rounding}" * (self.rounding != "nearest")
        return text + " with signs" * self.signs

    def bounds(self) -> tuple[float, float]:
        if self.bound == 0:
            return 0.0, math.inf
        return (self.bound, self.limit) if self.mode == "abs" else (math.inf, min(self.bound, self.limit))

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, state: EncoderState | None = None) -> Packed:
        kind = KINDS[self.rounding + " with signs" * (self.signs and self.rounding == "dithered")]
        packed = ErrorBoundedPacked(self, layout, flat.dtype, flat.numel())
        packed.format = BoundedFormat(*self.bounds(), kind, flat.dtype)
        packed.fill(flat, mix(self.seed, key), state, self.coarsens and not self.exact)
        return packed
