"""Facts about sites: what capture learns about each place where a tensor is saved."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from encke.capture.sites import Site
from encke.codecs.base import Codec, EncoderState
from encke.codecs.layout import Layout, rows_for


class SiteState(enum.Enum):
    """State of knowledge about a site's reader; `encke/capture/readers.py` shows the transitions."""

    PENDING = "pending"
    """A tensor was saved, its reader is not known yet: the tensor is held unpacked."""
    KNOWN = "known"
    """The reader is known: the next tensor saved here is packed at once."""
    UNSTABLE = "unstable"
    """The reader is learnt again in every pass: either a different operation has read from this call of the layer, or
    the need depends on numbers that only the reader's node holds."""
    HIDDEN = "hidden"
    """The graph does not show the reader: the tensor is kept as it is (encke/capture/hidden.py)."""


class SteadySave:
    """Decisions with which a site has saved. They hold as long as policy, tensor and sharers stay the same."""

    __slots__ = (
        "changes", "chosen", "codec", "device", "first", "layout", "length", "lossy_input", "packed_layout",
        "recomputed", "sharers", "size", "stride", "values",
    )  # fmt: skip

    def __init__(
        self, chosen: tuple[tuple[Callable[[Site], Codec], Site, Codec], ...], codec: Codec, first: SiteFacts,
        device: torch.device, layout: Layout, packed_layout: Layout, length: int, values: bool, lossy_input: bool,
        recomputed: bool, changes: int,
    ) -> None:  # fmt: skip
        self.chosen = chosen
        """Codecs chosen for the site, for the sites that share its memory, and for the sites that are recomputed from
        it, each with the function that chose it."""
        self.codec = codec
        """Codec with which the memory is packed; it satisfies every codec in `chosen`."""
        self.first = first
        """Site that saves the memory first, and packs it."""
        self.device, self.layout, self.packed_layout, self.length = device, layout, packed_layout, length
        self.size, self.stride = layout.size, layout.stride
        self.sharers = len(first.sharers)
        self.values = values
        """Whether the site reads values, not a mask."""
        self.lossy_input = lossy_input
        """Whether this is an input of attention that is packed lossily."""
        self.recomputed = recomputed
        """Whether backward recomputes the tensor."""
        self.changes = changes
        """Number of changes among the recomputed tensors at the time of the decision."""


class SiteFacts:
    """Everything about a site that is learnt from one pass to the next. Each fact is checked when it is used."""

    __slots__ = (
        "activation",
        "cast",
        "changed",
        "copied",
        "dependents",
        "function",
        "high",
        "encoder_state",
        "examined",
        "index",
        "input_index",
        "norm",
        "of_module",
        "position",
        "raw_slot",
        "reader",
        "recomputed",
        "rows",
        "sharers",
        "siblings",
        "signature",
        "site",
        "sources",
        "state",
        "steady",
        "waits",
        "window",
    )

    def __init__(self, site: Site, index: int = -1, signature: tuple[Any, ...] = ()) -> None:
        self.site = site
        """The key; its operation and slot are `?` while the state is PENDING."""
        self.index = index
        """Index of the tensor among all that the layer's call saves."""
        self.signature = signature
        """Dtype, dimensions, whether a gradient is needed, and the operation that made the tensor."""
        self.state = SiteState.PENDING
        self.reader = ""
        """Name of the autograd node that reads, as `operation_name` gives it."""
        self.raw_slot = ""
        """Attribute of the reader's node that must hold the object saved here; empty if any slot may read it."""
        self.position = 0
        """Number in that attribute, if it holds several."""
        self.siblings: list[SiteFacts | None] = []
        """Facts about all sites of the same call."""
        self.of_module = False
        """Whether the layer provides window and limit: it is a max-pool or an embedding of torch."""
        self.window: tuple[tuple[int, ...], ...] | None = None
        """Kernel, stride, padding and dilation, if this is where a max-pool saves its indices."""
        self.input_index = -1
        """Index, within the same call, of the site where that max-pool saves its input."""
        self.activation: weakref.ref[nn.Module] | None = None
        """Module of an activation of torch that saves its input here; it may work in place."""
        self.high: int | None = None
        """A known limit of the integers saved here."""
        self.sources: frozenset[int] | None = None
        """Indices, within the same call, of the sites of query, key and value, if attention reads here."""
        self.norm: tuple[str, int] | None = None
        """Dimensions that the reader normalises over, as `layout.rows_for` takes them; None if it does not."""
        self.rows: tuple[int, tuple[int, int] | None] = (0, None)
        """Length of the run of memory saved last, and the rows in it that the reader normalises."""
        self.sharers: set[SiteFacts] = set()
        """Sites that later save the same memory: the strictest need among them decides."""
        self.dependents: set[SiteFacts] = set()
        """Sites whose tensors are recomputed from the tensor saved here (encke/capture/recompute.py)."""
        self.recomputed: tuple[Any, ...] | bool | None = None
        """Operations by which backward recomputes the tensor; False if it must not, None if not tried yet."""
        self.waits = False
        """Whether backward could recompute the tensor once its sources are packed finely enough."""
        self.changed = False
        """Whether the memory had other values when another site saved it before: written through `tensor.data`."""
        self.examined = False
        """Whether the values saved here were looked at, for NaN and infinities."""
        self.copied: tuple[Any, int] | None = None
        """Frozen weight, and its version, of which a cast copy was found here (encke/capture/casts.py)."""
        self.cast: Any = None
        """Stand-in for the copy of a weight that was last saved here (encke/capture/casts.py)."""
        self.encoder_state = EncoderState(lambda: self.site.name)
        self.steady: SteadySave | None = None
        """Decisions of the last pass; None if they need not hold in the next pass."""
        self.function: Any = None
        """Function that replaces the operation (encke/fused); False if there is none, None if not looked up yet."""

    def rows_in(self, layout: Layout, length: int) -> tuple[int, int] | None:
        """Return the rows of a run of memory that the reader normalises; None if it does not."""
        if self.norm is None:
            return None
        rows = rows_for(layout, length, self.norm)
        self.rows = (length, rows)
        return rows

    def same_as(self, other: SiteFacts) -> bool:
        """Return whether the reader and everything learnt from it are the same."""
        return (
            all(
                getattr(self, name) == getattr(other, name)
                for name in (
                    "site",
                    "signature",
                    "reader",
                    "raw_slot",
                    "window",
                    "input_index",
                    "high",
                    "sources",
                    "norm",
                )
            )
            and self.site.need == other.site.need
        )

    def become_exact(self) -> None:
        """Store this site's tensors losslessly from now on, as they hold values that are not finite."""
        self.site = replace(self.site, need="exact")
        self.function = self.steady = None

    def distrust(self) -> None:
        """Learn every site of the call again from now on: the order of the call's operations has changed."""
        for facts in (self, *self.siblings):
            if facts is not None:
                facts.state = SiteState.UNSTABLE

    @property
    def stays(self) -> bool:
        """Whether packing a tensor that must be exact gains nothing: floats that did not shrink last time, and labels.

        To find the range of labels, the host would have to wait for the GPU.
        """
        return self.encoder_state.share >= 0.94 or self.site.operation.startswith("NllLoss")

    def __repr__(self) -> str:
        return f"SiteFacts({self.site.name}, {self.site.need}, {self.state.name})"
