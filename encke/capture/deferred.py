"""Forward passes of our own layers that are computed while what they save is packed."""

from __future__ import annotations

from typing import Any

from encke.capture.facts import SiteFacts
from encke.codecs import Codec, Packed
from encke.codecs.base import EncoderState
from encke.codecs.layout import Layout


class DeferredForward:
    """The saving that one of our own layers makes next, which need not be recognised: its tensor and its site.

    An operation may leave its work to be done while that tensor is encoded, in one pass over it.
    """

    __slots__ = ("codec", "facts", "t")

    def __init__(self, facts: SiteFacts, codec: Codec | None, t: Any) -> None:
        self.facts = facts
        self.codec = codec
        """What the policy has chosen for the site, if it was asked."""
        self.t = t

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, state: EncoderState) -> Packed:
        """Does the work and encodes the tensor; the arguments are those of `Codec.encode_run`."""
        return codec.encode_run(self.t, layout, length, key, state)

    def run_unfused(self) -> None:
        """Does the work where nothing is encoded."""
