"""What was saved, counted: bytes before and after for each site, pass by pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from encke.capture.sites import Site
from encke.codecs import Codec

storage_ref = weakref.ref
"""A storage's Python object lives as long as its memory does, whoever holds that."""
SIZE_PENDING = -1
"""Bytes that are not known yet: the site's hint has them once the GPU has told."""


class Record:
    """What one site saved in one forward pass, for the report."""

    __slots__ = ("codec", "packed_bytes", "saved_bytes", "site")

    def __init__(self, site: Site, saved_bytes: int = 0) -> None:
        self.site = site
        self.saved_bytes = saved_bytes
        self.packed_bytes = 0
        self.codec: Codec | str = "kept"


KEPT = Site("", -1, (), operation="(small or kept)", slot="")


class Tally:
    """What one forward pass saves: a record for each site, each storage counted once."""

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

    def add_kept(self, size: int) -> None:
        """Count bytes that are kept as they are."""
        record = Record(KEPT, size)
        record.packed_bytes = size
        self.records.append(record)

    def close(self) -> list[Record]:
        """Return the records of the pass, with one for all small tensors."""
        if self.small_bytes:
            self.add_kept(self.small_bytes)
        return self.records


class Ledger:
    """Records of the last forward pass, and the log that gets them."""

    def __init__(self) -> None:
        self.last: list[Record] = []
        self.log: Callable[[int, list[Record]], None] | None = None
        """Called with the number of a forward pass and its records, once all sizes are known."""

    def write(self, step: int) -> None:
        """Write the last forward pass to the log, if there is one."""
        if self.log is not None and self.last:
            self.log(step, self.last)
