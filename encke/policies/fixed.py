"""Fixed: one codec for everything that may be lossy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, LogProb
from encke.codecs.exact import Keep
from encke.codecs.logprob import BOUND
from encke.policies.base import Policy


@dataclass(frozen=True)
class Fixed(Policy):
    """Uses one codec at every site.

    Log-probabilities have an error of at most 0.05. Attention has more bits where it needs them, as with every policy.

    Args:
        codec: The codec.

    Raises:
        TypeError: It is not a codec.

    Example:
        >>> import torch, encke
        >>> policy = encke.policies.Fixed(encke.codecs.GroupQuant(bits=4))
        >>> encke.attach(torch.nn.Linear(64, 64), policy).policy
        Fixed(codec=GroupQuant(bits=4))
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"Fixed takes a codec such as encke.codecs.ErrorBounded(1e-2, 'rel'), got {self.codec!r}")
        if not self.codec.restores_values:
            raise ValueError(
                f"{self.codec!r} does not restore values: capture chooses it where a reader needs no more. "
                "Fixed takes a codec such as encke.codecs.GroupQuant(bits=4)"
            )

    def choose(self, site: Site) -> Codec:
        """Return the codec for the tensors that `site` saves."""
        if site.need == "logprob":
            return at_logprob(self.codec, site)
        return self.codec


def at_logprob(codec: Codec, site: Site) -> Codec:
    """Return `codec`, with an absolute error that the exponential in log-softmax's backward can bear."""
    if codec.unbiased and codec.bounds() == (math.inf, math.inf):
        fixed_rate = LogProb(codec.seed)
        return fixed_rate if fixed_rate.takes(site.dtype) else ErrorBounded(BOUND)
    return codec.refined(bound=BOUND) or Keep()
