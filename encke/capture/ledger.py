"""Ledger: bytes before and after packing for each site, pass by pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from encke.capture.facts import SiteFacts
from encke.capture.sites import Site
from encke.codecs import Codec

storage_ref = weakref.ref
"""A storage's Python object lives as long as its memory does, even if only C++ code holds the memory."""


class Record:
    """Bytes that one site saved in one forward pass, for the report."""

    __slots__ = ("codec", "facts", "packed_bytes", "saved_bytes")

    def __init__(self, facts: SiteFacts, saved_bytes: int = 0, packed_bytes: int = 0) -> None:
        self.facts = facts
        self.saved_bytes = saved_bytes
        """Bytes that plain autograd would hold; zero if another record counts that memory."""
        self.packed_bytes = packed_bytes
        self.codec: Codec | str = "kept"

    @property
    def site(self) -> Site:
        """The site that saved."""
        return self.facts.site


LEFT_OUT = SiteFacts(Site("", "(layers left out)", ""))
UNUSUAL = SiteFacts(Site("", "(sparse and other unusual tensors)", ""))
COMPUTED = SiteFacts(Site("", "(tensors computed from weights)", ""))
"""Copies of weights that cannot be cast again, and weights that are computed from others."""
SMALL_ONES = SiteFacts(Site("", "(small tensors)", ""))
CAST_AGAIN = "cast again"
CASTS = SiteFacts(Site("", "(copies of weights)", ""))
"""Copies of weights that autocast makes and that are cast again in backward."""


class Tally:
    """Count of the tensors that one forward pass saves: a record for each site, each storage counted once."""

    __slots__ = ("_counted", "records", "small_bytes")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.small_bytes = 0
        """Bytes of all tensors that are too small to be packed."""
        self._counted: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def count(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes of a storage if this forward pass has not counted it yet, else zero."""
        counted, name = self._counted, storage._cdata
        known = counted.get(name)
        if known is not None and known() is not None:
            return 0
        counted[name] = storage_ref(storage)
        return storage.nbytes()

    def close(self) -> list[Record]:
        """Return the records of the pass, with one for all small tensors."""
        if self.small_bytes:
            self.records.append(Record(SMALL_ONES, self.small_bytes, self.small_bytes))
        return self.records


class Ledger:
    """Records of the last forward pass, and the log that receives them."""

    def __init__(self) -> None:
        self.last: list[Record] = []
        """Records of the last forward pass, or of the last round of layers that were called one by one."""
        self._newest: list[Record] = []
        self._rounds: dict[str, list[Record]] = {}
        self.log: Callable[[int, list[Record]], None] | None = None
        """Called with the number of a forward pass and its records, once all sizes are known."""

    def add(self, layer: str, records: list[Record]) -> None:
        """Add the records of a forward pass; `layer` is the outermost one, "" for the model itself.

        Layers called one by one, without the model around them, are added up until one of them is called again.
        """
        if not layer or layer in self._rounds:
            self._rounds = {}
        self._newest = self._rounds[layer] = records
        self.last = [record for each in self._rounds.values() for record in each]

    def write(self, step: int) -> None:
        """Write the last forward pass to the log, if there is one."""
        if self.log is not None and self._newest:
            self.log(step, self._newest)
