"""Codecs: `codec.encode(x) -> Packed`, `packed.decode()`, `packed.nbytes`."""

from halley.codecs.base import Codec
from halley.codecs.dualprecision import DualPrecision
from halley.codecs.errorbounded import ErrorBounded
from halley.codecs.groupquant import GroupQuant
from halley.codecs.logprob import LogProb
from halley.codecs.lossless import Between, Keep, Lossless, Mask, Sign, Window

__all__ = [
    "Between", "Codec", "DualPrecision", "ErrorBounded", "GroupQuant", "Keep", "LogProb", "Lossless", "Mask", "Sign",
    "Window",
]  # fmt: skip
