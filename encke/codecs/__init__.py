"""Codecs: `codec.encode(tensor)` returns a `Packed`, `packed.decode()` the tensor, `packed.nbytes` the bytes kept."""

from encke.codecs.base import Codec, Packed
from encke.codecs.dualprecision import DualPrecision
from encke.codecs.errorbounded import ErrorBounded
from encke.codecs.exact import Lossless
from encke.codecs.groupquant import GroupQuant
from encke.codecs.logprob import LogProb

__all__ = ["Codec", "DualPrecision", "ErrorBounded", "GroupQuant", "LogProb", "Lossless", "Packed"]
