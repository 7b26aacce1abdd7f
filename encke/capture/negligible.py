"""Negligible tensors, which are kept as they are because the model saves far larger ones.

Packing and restoring a tensor takes the host about the same time whatever its size. A model of many small and a few
large tensors, such as a network with squeeze-and-excite layers or statistics of norms, would spend much of that time on
a thousandth of its memory. The decision is made once, by site, from the second forward pass, and is part of the state:
a resumed run packs the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from encke.capture.facts import SiteState
from encke.capture.ledger import CASTS, Record

SHARE = 1e-4
"""Largest share of the saved bytes that one negligible tensor may have."""
TOGETHER = 3e-3
"""Largest share that all negligible tensors may have together."""
PASS = 2
"""Number of the forward pass that decides: the first one learns the readers of the tensors saved last."""


class Negligible:
    """Sites and copies of weights of one model that are not worth packing."""

    def __init__(self, automatic: bool) -> None:
        self.automatic = automatic
        """Whether to decide at all; False if the user has set `min_bytes`."""
        self.decided = False
        self.places: set[str] = set()
        """Places of the sites."""
        self.weight_bytes = 0
        """Copies of weights smaller than this, in bytes, are kept. Their size does not change with the batch size."""

    def end_pass(self, step: int, records: Iterable[Record]) -> None:
        """Decide by the sizes of the tensors that the last forward pass saved, if it is time to."""
        if self.automatic and not self.decided and step >= PASS:
            self.decide(records)

    def decide(self, records: Iterable[Record]) -> None:
        """Decide by the sizes of the tensors that the last forward pass saved; at most `TOGETHER` is left unpacked."""
        self.decided = True
        # Smallest first. A tensor whose memory another record counts has no size of its own.
        sizes = sorted((record.saved_bytes, number, record.facts) for number, record in enumerate(records))
        total, taken = sum(size for size, *_ in sizes), 0
        for size, _, facts in sizes:
            taken += size
            if size > SHARE * total or taken > TOGETHER * total:
                break
            if facts is CASTS:
                self.weight_bytes = size + 1
            elif size and facts.state is SiteState.KNOWN and facts.site.need not in ("weight", "shape"):
                for each in (facts, *facts.sharers):
                    self.places.add(each.site.place)
                    each.steady = None

    def state_dict(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return {"decided": self.decided, "places": sorted(self.places), "weight_bytes": self.weight_bytes}

    def load_state_dict(self, state: Any) -> None:
        """Take over the decision of another run, unless there is nothing to decide.

        Raises:
            ValueError: The state is invalid.
        """
        if not isinstance(state, dict) or not isinstance(state.get("places", []), list):
            raise ValueError(f"negligible tensors must be a dictionary with a list of places, got {state!r}")
        places, weight_bytes = state.get("places", []), state.get("weight_bytes", 0)
        if not all(isinstance(place, str) for place in places):
            raise ValueError(f"places of negligible tensors must be text, got {places!r}")
        if isinstance(weight_bytes, bool) or not isinstance(weight_bytes, int) or weight_bytes < 0:
            raise ValueError(f"weight_bytes of negligible tensors must be a number of bytes, got {weight_bytes!r}")
        if self.automatic:
            self.decided, self.places, self.weight_bytes = bool(state.get("decided")), set(places), weight_bytes
