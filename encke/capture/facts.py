"""Facts about sites: what capture learns about each place where a tensor is saved."""

from __future__ import annotations

import enum
from typing import Any

from encke.capture.sites import Site
from encke.codecs.base import EncoderState


class SiteState(enum.Enum):
    """Knowledge of a site's reader; `encke/capture/readers.py` shows the transitions."""

    PENDING = "pending"
    """A tensor was saved, its reader is not known yet: the tensor is held as it is."""
    KNOWN = "known"
    """The reader is known: what is saved next is packed at once."""
    UNSTABLE = "unstable"
    """Another operation than the one learnt has read from here: every pass learns it anew."""


class SiteFacts:
    """Everything about a site that is learnt from one pass to the next. Each fact is checked when it is used."""

    __slots__ = (
        "function",
        "high",
        "encoder_state",
        "index",
        "input_index",
        "reader",
        "sharers",
        "signature",
        "site",
        "state",
        "window",
    )

    def __init__(self, site: Site, index: int = -1, signature: tuple[Any, ...] = ()) -> None:
        self.site = site
        """The key; its operation and slot are `?` while the state is PENDING."""
        self.index = index
        """Number of the tensor among all that the layer's call saves."""
        self.signature = signature
        """Dtype, dimensions, whether a gradient is needed, and the operation that made the tensor."""
        self.state = SiteState.PENDING
        self.reader = ""
        """Name of the autograd node that reads, as `operation_name` gives it."""
        self.window: tuple[tuple[int, ...], ...] | None = None
        """Kernel, stride, padding and dilation, if this is where a max-pool saves its indices."""
        self.input_index = -1
        """Index, within the same call, of the site where that max-pool saves its input."""
        self.high: int | None = None
        """A known limit of the integers saved here."""
        self.sharers: set[SiteFacts] = set()
        """Sites that later save the same memory: the strictest of them decides."""
        self.encoder_state = EncoderState()
        self.function: Any = None
        """Function that runs in the operation's place (encke/fused); False if there is none, None if not asked yet."""

    @property
    def stays(self) -> bool:
        """Whether packing what must be exact gains nothing: floats that did not shrink last time, and labels.

        To find the range of labels, the host would have to wait for the GPU.
        """
        return self.encoder_state.share >= 1 or self.site.operation.startswith("NllLoss")

    def __repr__(self) -> str:
        return f"SiteFacts({self.site.name}, {self.site.need}, {self.state.name})"
