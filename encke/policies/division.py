"""Division: dual precision where DIVISION (ICML'23) uses it, everything else left alone."""

from __future__ import annotations

from dataclasses import dataclass

from encke.capture.sites import Site
from encke.codecs import Codec, DualPrecision
from encke.codecs.exact import Keep
from encke.policies.base import Policy


@dataclass(frozen=True)
class Division(Policy):
    """Inputs of convolutions and batch norms as averages of `block` x `block` tiles and `bits` bits a value.

    ReLU and dropout masks take one bit, pool indices a few, as with every policy. Inputs of linear layers, attention,
    layer norms and pointwise functions are kept as they are.
    """

    block: int = 8
    bits: int = 2

    def __post_init__(self) -> None:
        DualPrecision(self.block, self.bits)  # names a wrong value

    def choose(self, site: Site) -> Codec:
        """The codec for what `site` saves."""
        planes = site.slot == "input" and site.signature[1] >= 3
        if planes and ("Convolution" in site.operation or "BatchNorm" in site.operation):
            return DualPrecision(self.block, self.bits)
        return Keep()
