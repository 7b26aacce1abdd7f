"""Codecs: `codec.encode(x) -> Packed`, `packed.decode()`, `packed.nbytes`."""

from halley.codecs.base import Codec
from halley.codecs.errorbounded import ErrorBounded
from halley.codecs.groupquant import GroupQuant
from halley.codecs.lossless import Lossless, Mask, Sign, Window

__all__ = ["Codec", "ErrorBounded", "GroupQuant", "Lossless", "Mask", "Sign", "Window"]
