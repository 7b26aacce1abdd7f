"""Division: dual precision for the layers for which DIVISION (ICML'23) uses it, no compression for others."""

from __future__ import annotations

from dataclasses import dataclass

from encke.capture.sites import Site
from encke.codecs import Codec, DualPrecision
from encke.codecs.exact import Keep
from encke.policies.base import Policy


@dataclass(frozen=True)
class Division(Policy):
    """Keeps inputs of convolutions and batch norms as averages of tiles and a few bits per value.

    ReLU and dropout masks take one bit, pool indices a few, as with every policy. Inputs of linear layers, attention,
    layer norms and pointwise functions are kept as they are.

    Args:
        block: Side of the tiles that are averaged.
        bits: Bits of each value's difference from its tile's average.

    Raises:
        TypeError: A setting is not a whole number.
        ValueError: A setting is out of range.

    Example:
        >>> import torch, encke
        >>> encke.attach(torch.nn.Conv2d(3, 8, 3), encke.policies.Division(bits=4)).policy
        Division(block=8, bits=4)
    """

    block: int = 8
    bits: int = 2

    def __post_init__(self) -> None:
        DualPrecision(self.block, self.bits)  # names a wrong value

    def choose(self, site: Site) -> Codec:
        """Return the codec for the tensors that `site` saves."""
        planes = site.slot == "input" and site.dimensions >= 3
        if planes and ("Convolution" in site.operation or "BatchNorm" in site.operation):
            return DualPrecision(self.block, self.bits)
        return Keep()
