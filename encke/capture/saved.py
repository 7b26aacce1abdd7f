"""Objects that autograd holds in place of tensors: a `Saved` for each tensor, a `SharedCell` for shared memory."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from encke.capture.facts import SiteFacts
from encke.capture.ledger import Record
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, Packed
from encke.codecs.algebra import stricter
from encke.codecs.base import check_version
from encke.codecs.layout import Layout, fills_in_order, finer
from encke.torch_internals import storage_from_weak_pointer


class SharedCell:
    """One run of memory, shared by every site that saved it. Packed once, and again for a stricter reader."""

    __slots__ = (
        "__weakref__",
        "checksum",
        "decoded",
        "fixed",
        "held",
        "key",
        "lock",
        "packed",
        "producer",
        "readers",
        "record",
        "rows",
        "version",
        "waiting",
        "wanted",
    )

    def __init__(self, key: int, record: Record) -> None:
        self.key = key
        self.record = record
        self.fixed = False
        """Whether it needs codes of a fixed rate; set for policies that measure."""
        self.packed: Packed | None = None
        self.held: Tensor | None = None
        self.version = 0
        self.waiting = 0
        self.wanted: Codec | None = None
        """Codec that satisfies every reader so far."""
        self.readers = 0
        """Number of saved tensors that read this memory for its values, not for a mask."""
        self.rows: tuple[int, int] | None = None
        """Finest rows of the memory that a reader normalises: number and distance of the values in a row."""
        self.decoded: tuple[StorageWeakRef, int] | None = None
        self.checksum: list[int] | None = None
        """Checksum of the memory when it was first held; None if it was not needed."""
        self.lock: threading.Lock | None = None
        self.producer: tuple[Any, int, Layout] | None = None
        """Node and output that made the tensor, and its layout, while the memory is held."""

    def ask(self, codec: Codec, values: bool = False, rows: tuple[int, int] | None = None) -> None:
        """Add a reader for which `codec` is fine enough and which may normalise these rows of the memory.

        Two or more readers of `values` share one decoded copy. If the rows of two readers do not nest, no groups serve
        both, and the memory is exact.
        """
        if rows is not None and rows != self.rows:
            finest = rows if self.rows is None else finer(self.rows, rows)
            if finest is None:
                codec = ErrorBounded(0)
            else:
                self.rows = finest
        wanted = self.wanted
        if codec is not wanted:
            self.wanted = codec if wanted is None else stricter(wanted, codec)
        if values:
            self.share()

    def share(self) -> None:
        """Count one more reader of values."""
        self.readers += 1
        if self.readers == 2:
            self.lock = threading.Lock()

    @property
    def masked(self) -> bool:
        """Whether the first reader is a ReLU, which reads only which values are zero and saves its result first."""
        return self.record.facts.site.need == "mask"

    @property
    def signed(self) -> bool:
        """Whether somebody reads signs."""
        facts = self.record.facts
        return any(each.site.need == "sign" for each in (facts, *facts.sharers))

    @property
    def settled(self) -> bool:
        """Whether the packed data matches the request, by a quick check."""
        packed = self.packed
        return packed is not None and packed.codec is self.wanted and packed.layout.rows == self.rows

    def hold(self, flat: Tensor) -> None:
        """Keep the memory itself until its readers' needs are known."""
        self.held = flat
        self.version = flat._version

    def flat(self, mask: bool) -> Tensor:
        """Return the decoded run of memory; concurrent readers share one decoded copy."""
        if self.held is not None:
            check_version(self.held, self.version)
            return self.held
        packed = self.packed
        assert packed is not None
        if mask or packed.codec.zeros_only:
            return packed.decode_flat(mask=True)
        if self.lock is None:
            return packed.decode_flat()
        with self.lock:
            if self.decoded is not None:
                reference, numel = self.decoded
                storage = storage_from_weak_pointer(reference.cdata)
                if storage is not None:
                    return torch.empty(0, dtype=packed.dtype, device=storage.device).set_(storage, 0, (numel,), (1,))
            flat = packed.decode_flat()
            self.decoded = (StorageWeakRef(flat.untyped_storage()), flat.numel())
            return flat


class Pending:
    """Facts about a saved tensor whose reader is not known yet."""

    __slots__ = ("frame", "from_leaves", "parameter")

    def __init__(self, frame: Any, parameter: bool, from_leaves: bool) -> None:
        self.frame = frame
        """The layer's call that saved."""
        self.parameter = parameter
        """Whether the tensor is a parameter behind views and casts, or computed from parameters alone."""
        self.from_leaves = from_leaves
        """Whether it is computed from leaves of any kind alone."""


class Saved:
    """One saved tensor: a cell and the layout it was saved in, only a layout, or the tensor itself."""

    __slots__ = ("__weakref__", "cell", "device", "dtype", "facts", "layout", "owner", "pending", "tensor", "version")

    def __init__(self, owner: Any, facts: SiteFacts, t: Tensor, layout: Layout, cell: SharedCell | None) -> None:
        self.owner = owner
        self.facts = facts
        self.dtype = t.dtype
        self.device = t.device
        self.layout = layout
        self.cell = cell
        self.tensor: Tensor | None = None
        self.version = 0
        self.pending: Pending | None = None

    @property
    def site(self) -> Site:
        """The site that saved."""
        return self.facts.site

    @property
    def lossy(self) -> bool:
        """Whether the restored tensor may differ from the saved one."""
        cell = self.cell
        return cell is not None and cell.held is None and cell.packed is not None and not cell.packed.codec.exact

    @property
    def dropped(self) -> bool:
        """Whether this is a result of attention that was not kept."""
        return self.facts.site.need == "recomputed" and self.cell is None and self.tensor is None

    def restore(self) -> Tensor:
        """Return the tensor for its reader."""
        if self.tensor is not None:
            check_version(self.tensor, self.version)
            return self.tensor
        cell = self.cell
        if cell is None:
            if self.dropped:
                raise RuntimeError(
                    f"encke: {self.site.name} is not kept: backward computes it again from query, key and value, "
                    "where dropout is off as it was when the layer was examined. It cannot be read elsewhere. If "
                    "dropout was switched on since, run this step again; or leave the layer out with "
                    f"attach(..., overrides={{{self.site.layer!r}: None}})."
                )
            return dummy(self.layout, self.dtype, self.device)
        mask, packed = self.facts.site.need == "mask", cell.packed
        if not mask and cell.lock is None and packed is not None and packed.dtype == self.dtype and cell.held is None:
            return packed.decode_in(self.layout)
        flat = cell.flat(mask)
        # A recorded backward cannot use booleans; zero and one serve as well as the values.
        if flat.dtype != self.dtype and (not mask or torch.is_grad_enabled()):
            flat = flat.to(self.dtype)
        return self.layout.restore(flat)


def dummy(layout: Layout, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that is read only for its shape and memory format: one element if the format allows it."""
    if not fills_in_order(layout.size, layout.stride, range(len(layout.size))):
        return torch.empty_strided(layout.size, layout.stride, dtype=dtype, device=device)
    return torch.zeros((), dtype=dtype, device=device).expand(layout.size)
