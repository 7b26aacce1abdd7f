"""What every codec is: a frozen dataclass that encodes tensors and knows which other codecs' promises it keeps."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from encke import kernels
from encke.codecs.packed import Layout, Packed, flatten, run_of

MASK64 = (1 << 64) - 1
START = 0x9E3779B97F4A7C15 * (0xD1342543DE82EF95 + 1) & MASK64


def mix(first: int, second: int, third: int | None = None) -> int:
    """One 64-bit hash of two or three integers, as a signed number that fits an operator's int argument.

    A polynomial in the words, then splitmix64's last steps.
    """
    h = first * 0xD1342543DE82EF95 + second + START
    if third is not None:
        h = h * 0xD1342543DE82EF95 + third + 0x9E3779B97F4A7C15
    h &= MASK64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    h = (h ^ h >> 27) * 0x94D049BB133111EB & MASK64
    h ^= h >> 31
    return h - (1 << 64) if h >> 63 else h


def operations(flat: Tensor) -> Any:
    """Where the kernels for a tensor are: past the dispatcher, which costs more than a launch, where it is plain."""
    if type(flat) is Tensor and not torch.compiler.is_dynamo_compiling():
        return kernels.of(flat.device.type)
    return torch.ops.encke


def as_written(thing: Any) -> str:
    """A codec or policy as one would write it: the fields that differ from their defaults."""
    values = [(f, getattr(thing, f.name)) for f in fields(thing) if f.init]
    given = [f"{f.name}={value!r}" for f, value in values if value != f.default]
    return f"{type(thing).__name__}({', '.join(given)})"


class Codec:
    """Turns a tensor into a `Packed`. Subclasses are frozen dataclasses with `encode_flat`, `covers` and `takes`."""

    signs_only = False
    """Whether nothing but signs comes back."""
    keeps_zeros = True
    """Whether zeros of non-negative data, and only they, come back as zeros: what a reader of a mask needs."""

    @property
    def exact(self) -> bool:
        """Whether every bit comes back."""
        return False

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether this codec can encode tensors of `dtype`."""
        raise NotImplementedError

    def covers(self, other: Codec) -> bool:
        """Whether what this codec restores satisfies a reader that asked for `other`."""
        raise NotImplementedError

    def join(self, other: Codec) -> Codec | None:
        """One codec that serves a reader of either, where neither covers the other; None if there is none."""
        return None

    def encode_flat(self, flat: Tensor, layout: Layout, key: int = 0, hint: Hint | None = None) -> Packed:
        """Encodes a flat run of memory. `key` varies stochastic rounding, `hint` carries sizes between steps."""
        raise NotImplementedError

    def encode_run(self, x: Tensor, layout: Layout, length: int, key: int, hint: Hint) -> Packed:
        """The same from a tensor, of which `layout_of` told layout and length; codecs may read its memory as it is."""
        return self.encode_flat(run_of(x.detach(), layout, length), layout, key, hint)

    def encode(self, x: Tensor) -> Packed:
        """Encodes a tensor of any size and stride; `packed.decode()` gives it back."""
        if not isinstance(x, Tensor):
            raise TypeError(f"{type(self).__name__}.encode takes a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided:
            raise TypeError(
                f"{type(self).__name__}.encode takes dense tensors, got layout {x.layout}; use x.to_dense()"
            )
        if not self.takes(x.dtype):
            raise TypeError(
                f"{type(self).__name__}.encode cannot take {x.dtype}; convert it, or use codecs.Lossless() for integers"
            )
        with torch.no_grad():
            flat, layout = flatten(x.detach().resolve_neg())
            return self.encode_flat(flat, layout)

    def __repr__(self) -> str:
        return as_written(self)


class Hint:
    """What one site's last encoding told: the payload's share of the source's bytes, all bytes kept, how it went."""

    __slots__ = ("nbytes", "plan", "share")

    def __init__(self) -> None:
        self.share = 0.0
        self.nbytes = 0
        self.plan: Any = None

    def learn(self, payload: int, source: int) -> None:
        """Notes the payload's share, and leaves room for the next one to be a little larger."""
        self.share = max(payload * 1.06 / max(source, 1), 1e-4)
