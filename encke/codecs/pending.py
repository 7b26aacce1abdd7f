"""Payloads whose size only the GPU knows: encoded into a predicted capacity. The host learns the size later.

The capacity is the size of the site's recent payloads and some slack (`EncoderState.capacity`). The kernels count the
bytes they need in a table on the GPU, with a row for each payload. The source is not kept. If a capacity is too small
and a policy has chosen the bound, the GPU encodes again at once, with a coarser bound. A bound that the user has set is
never exceeded: the values that do not fit are lost.

The table is copied to pinned memory when backward reads its first payload. When that backward pass ends, the host waits
for the copy, which is older than every launch of the pass, so that the GPU stays busy. Then sites learn how many bytes
they needed, and if a payload that was read is incomplete, `backward()` raises. Sites learn in program order, whenever a
copy arrives: runs repeat bit for bit.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from encke.codecs.base import Codec, EncoderState, FlatPacked, operations
from encke.kernels import BoundedFormat
from encke.tools.units import size
from encke.torch_internals import current_graph_task, queue_backward_callback

ROWS = 256
"""Number of payloads in a table."""
WORDS = 8
"""Words per row: the sizes of up to four attempts in units of 4 bytes, and further words that the kernels need."""
FACTORS = (1.0, 4.0, 64.0)
"""Bound of each attempt, as a multiple of the bound that a policy has chosen."""
NO_BACKWARD = -1
"""Task number outside of a backward pass."""


class PendingPacked(FlatPacked):
    """Packed form with the buffers meta and payload. On a GPU the host learns later whether the payload is complete."""

    __slots__ = ("format", "row")
    format: BoundedFormat
    row: _Row | None

    def fill(self, flat: Tensor, seed: int, state: EncoderState | None, coarsens: bool) -> None:
        """Encode `flat`. The host waits for a GPU if it cannot predict the size, or must not be wrong (at bound zero).

        Args:
            flat: The run of memory.
            seed: Seed of random rounding.
            state: State of the site's encoder.
            coarsens: Whether the bound may be exceeded if the capacity is too small.
        """
        kernels: Any = operations(flat)
        source, self.row = flat.numel() * flat.element_size(), None
        # Kernels that know the size before they return lack this function.
        encode_within: Any = getattr(kernels, "bounded_encode_within", None)
        capacity = None if state is None or encode_within is None else state.capacity(self.format, source)
        if state is None or capacity is None or (self.codec.exact and capacity < source):
            self.buffers = kernels.bounded_encode(flat, self.format, seed)
            if state is not None:
                state.learn(self.format, self.buffers[1].numel(), source)
            return
        with _lock:
            # The table must not be sent between the choice of a row and the launch that counts in it.
            table = _open_table(flat)
            words, factors = table.words[len(table.rows)], FACTORS if coarsens and capacity < source else FACTORS[:1]
            self.buffers = encode_within(flat, self.format, seed, capacity, words, factors)
            self.row = _Row(table, self.codec, self.format, state, source, capacity)
            table.add(self.row)

    def confirm(self) -> None:
        """Make the backward pass that reads this payload raise if the payload is incomplete."""
        if self.row is not None:
            self.row.confirm()


class _Row:
    """Size of one payload, pending."""

    __slots__ = ("capacity", "codec", "format", "missing", "read", "source", "state", "table")

    def __init__(
        self, table: _Table, codec: Codec, format: BoundedFormat, state: EncoderState, source: int, capacity: int
    ) -> None:
        self.table, self.codec, self.format, self.state = table, codec, format, state
        self.source, self.capacity = source, capacity
        self.read = False
        """Whether the payload has been decoded."""
        self.missing = 0
        """Bytes for which there was no space, as soon as that is known."""

    def learn(self, words: list[int]) -> None:
        """Take the sizes that the GPU has counted, one for each attempt."""
        sizes = [4 * word for word in words[: len(FACTORS)] if word]
        if sizes:
            self.missing = max(sizes[-1] - self.capacity, 0)
            self.state.coarsened += len(sizes) > 1 and not self.missing
            if self.format == self.state.format:
                self.state.learn(self.format, sizes[0], self.source)

    def confirm(self) -> None:
        """Raise at the end of the running backward pass if the payload is incomplete; outside of one, at once."""
        self.read = True
        self.table.confirm_later()


class _Table:
    """Sizes of consecutive payloads: on the GPU, then in pinned memory, then learnt."""

    def __init__(self, device: torch.device, stream: Any) -> None:
        self.words = torch.zeros(ROWS, WORDS, dtype=torch.int64, device=device)
        self.rows: list[_Row] = []
        self.stream = stream
        self.transfer: Transfer | None = None
        self.learnt = False
        self.task = NO_BACKWARD
        """Backward pass whose end confirms the rows."""

    def add(self, row: _Row) -> None:
        """Add a row whose kernels were launched. A full table is sent at once to avoid a later wait."""
        self.rows.append(row)
        if len(self.rows) == ROWS:
            self.send()

    def send(self) -> None:
        """Copy the sizes to pinned memory after the kernels that count them; the table is closed to further rows."""
        if self.transfer is None:
            _open.pop((self.words.device, self.stream), None)
            with torch.cuda.stream(self.stream):
                self.transfer = Transfer(self.words)

    def confirm_later(self) -> None:
        """Call `confirm` when the running backward pass ends; outside of one, now."""
        task = current_graph_task()
        if task != NO_BACKWARD and task == self.task:
            return
        with _lock:
            self.send()
            self.task = task
        if task == NO_BACKWARD:
            self.confirm()
        else:
            queue_backward_callback(self.confirm)

    def confirm(self) -> None:
        """Wait for the sizes; raise if a payload that was read is incomplete."""
        transfer = self.transfer
        assert transfer is not None, "a table is sent before it is confirmed"
        if not self.learnt:
            sizes = transfer.wait()
            with _lock:
                if not self.learnt:
                    self.learnt = True
                    for row, words in zip(self.rows, sizes, strict=False):
                        row.learn(words)
        lost = [row for row in self.rows if row.read and row.missing]
        if lost:
            raise incomplete(lost)


class Transfer:
    """Copy of GPU words in pinned memory, and the event that follows the copy."""

    def __init__(self, words: Tensor) -> None:
        self.copy = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        self.copy.copy_(words, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> list[list[int]]:
        """Return the words, once they have arrived."""
        self.event.synchronize()
        return self.copy.tolist()


def incomplete(rows: list[_Row]) -> RuntimeError:
    """Return the error for payloads that had not enough space."""
    first = rows[0]
    others = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
    return RuntimeError(
        f"encke: {first.state.name()}{others} took {size(first.missing)} more than the {size(first.capacity)} that "
        f"were predicted for {first.codec!r}, so backward has not read its values, and the gradients are wrong. From "
        "now on there is room for that many: set the gradients to zero and run this step again. A codec of fixed "
        "size, such as GroupQuant, cannot fail like this."
    )


_lock = threading.Lock()
_open: dict[tuple[torch.device, Any], _Table] = {}
"""The table that accepts rows, for each stream of each device."""


def _open_table(flat: Tensor) -> _Table:
    stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
    key = (flat.device, stream)
    table = _open.get(key)
    if table is None:
        table = _open[key] = _Table(*key)
    return table
