"""Codecs: `codec.encode(x) -> Packed`, `packed.decode()`, `packed.nbytes`."""

from encke.codecs.base import Codec
from encke.codecs.dualprecision import DualPrecision
from encke.codecs.errorbounded import ErrorBounded
from encke.codecs.exact import Between, Keep, Lossless, Mask, Sign, Window
from encke.codecs.groupquant import GroupQuant
from encke.codecs.logprob import LogProb

__all__ = [
    "Between", "Codec", "DualPrecision", "ErrorBounded", "GroupQuant", "Keep", "LogProb", "Lossless", "Mask", "Sign",
    "Window",
]  # fmt: skip
