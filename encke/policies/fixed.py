"""Fixed: one codec for everything that may be lossy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant, LogProb
from encke.codecs.logprob import BOUND
from encke.policies.base import Policy

ATTENTION_REL = 1 / 512
"""Attention under a bound: half a step of eight bits, relative to the range."""
LOGPROB_ABS = BOUND


@dataclass(frozen=True)
class Fixed(Policy):
    """The same codec at every site.

    Attention keeps at least 8 bits (values and output 4), log-probabilities an error of at most 0.05.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise TypeError(f"Fixed takes a codec such as encke.codecs.ErrorBounded(1e-2, 'rel'), got {self.codec!r}")

    def choose(self, site: Site) -> Codec:
        """The codec for what `site` saves."""
        if site.need == "attention":
            return at_attention(self.codec, site)
        if site.need == "logprob":
            return at_logprob(self.codec, site)
        return self.codec


def at_attention(codec: Codec, site: Site) -> Codec:
    """`codec`, made fine enough for attention: the softmax multiplies errors of queries and keys.

    Values and output do not pass through it, and have 4 bits; where attention is sharp that is felt (docs/comet.md).
    """
    if isinstance(codec, GroupQuant):
        return replace(codec, bits=max(codec.bits, 4 if site.slot in ("value", "output") else 8))
    if isinstance(codec, ErrorBounded) and codec.bound > 0:
        return replace(codec, limit=min(codec.limit, ATTENTION_REL))
    return codec


def at_logprob(codec: Codec, site: Site) -> Codec:
    """`codec`, with an absolute error that the exponential in log-softmax's backward can bear."""
    if isinstance(codec, ErrorBounded) and codec.mode == "rel" and codec.bound > 0:
        return replace(codec, bound=LOGPROB_ABS, mode="abs", limit=min(codec.bound, codec.limit))
    if isinstance(codec, ErrorBounded):
        return replace(codec, bound=min(codec.bound, LOGPROB_ABS))
    if isinstance(codec, GroupQuant):
        fixed_rate = LogProb(codec.seed)
        return fixed_rate if fixed_rate.takes(site.signature[0]) else ErrorBounded(LOGPROB_ABS)
    return codec
