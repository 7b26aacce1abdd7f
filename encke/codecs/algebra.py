"""One packed tensor for several readers: which codecs serve which readers, and the codec that serves all."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from encke.codecs.base import Codec
from encke.codecs.errorbounded import ErrorBounded


def strictest(codecs: Iterable[Codec]) -> Codec:
    """Return a codec that serves readers of all `codecs`; a bit-exact one if there is no other."""
    return functools.reduce(stricter, codecs)


def stricter(first: Codec, second: Codec) -> Codec:
    """Return a codec that serves readers of both; a bit-exact one if there is no other."""
    if second is first or satisfies(first, second):
        return first
    if satisfies(second, first):
        return second
    joined = first.join(second) or second.join(first) or ErrorBounded(0)
    # The same object where nothing changes: memory that is packed with it is as all have asked.
    return first if joined == first else joined


def satisfies(codec: Codec, other: Codec) -> bool:
    """Return whether the values that `codec` restores serve a reader that asks for `other`."""
    if codec is other:
        return True
    # Only ReLU's result is read as a mask, and it is not negative.
    if other.zeros_only and codec.keeps_zeros:
        return True
    return codec == other or codec.exact or codec.covers(other)
