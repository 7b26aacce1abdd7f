"""Payloads whose size only the GPU knows: encoded into a predicted capacity, checked and trimmed later.

The host must not wait for the GPU in the forward pass. So `fill` encodes into as many bytes as the site needed last
time, copies the true size to pinned memory after the kernel, and holds the source until that size has arrived. If the
payload fitted, the source is released, and a much too large buffer is trimmed. If it did not, the source is encoded
again, so nothing is lost. Sources older than the newest take `IN_FLIGHT` bytes at most. The host never waits for the
newest, however large it is: the GPU would be idle until the host had caught up.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from encke.codecs.base import EncoderState, FlatPacked, check_version

IN_FLIGHT = 128 << 20
FIRST_SHARE = 0.3
"""Capacity of a site's first payload, as a share of the source's bytes."""
Encode = Callable[[int], tuple[Tensor, Tensor]]


class PendingPacked(FlatPacked):
    """Packed form with the buffers meta and payload. Byte 8 of meta has the payload's size in units of 4 bytes."""

    __slots__ = ("pending_size",)
    pending_size: _PendingSize | None

    def fill(self, flat: Tensor, encode: Encode, state: EncoderState | None) -> None:
        """Encode `flat`. On a GPU, and with a state, the host does not wait for the size."""
        self.pending_size = None
        source_bytes = flat.numel() * flat.element_size()
        if flat.device.type != "cuda" or state is None:
            self.buffers = encode(-1)
            if state is not None:
                state.learn(self.buffers[1].numel(), source_bytes)
            return
        share = state.share or FIRST_SHARE
        capacity = int(source_bytes * share) + 1024 & -512
        self.buffers = encode(capacity)
        self.pending_size = _PendingSize(self, flat, encode, state)
        _in_flight.add(self.pending_size)

    @property
    def nbytes(self) -> int:
        self.settle()
        return super().nbytes

    def settle(self) -> None:
        """Wait until the size is known, and make the payload complete and no larger than needed."""
        pending = self.pending_size
        if pending is not None:
            pending.finish()


class _PendingSize:
    """Size of one encoding in flight: its source, the pinned word that the size is copied to, the event after that."""

    __slots__ = ("encode", "event", "lock", "packed", "size", "source", "source_bytes", "state", "version")

    def __init__(self, packed: PendingPacked, source: Tensor, encode: Encode, state: EncoderState) -> None:
        self.packed: PendingPacked | None = packed
        self.source: Tensor | None = source
        self.version = source._version
        self.source_bytes = source.numel() * source.element_size()
        self.encode: Encode | None = encode
        self.state = state
        self.lock = threading.Lock()
        self.size = _pinned.take()
        self.size.copy_(packed.buffers[0][8:16].view(torch.int64), non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(source.device))

    def forget_source(self) -> None:
        """Release the source, which is about to be overwritten: the payload must have had room for any size."""
        with self.lock:
            self.source, self.encode = None, _cannot_encode_again

    def finish(self) -> None:
        """Wait for the size, and encode again or trim the payload as it says."""
        with self.lock:
            packed, encode = self.packed, self.encode
            if packed is None or encode is None:
                return
            self.event.synchronize()
            used = int(self.size.item()) * 4
            meta, payload = packed.buffers
            if used > payload.numel():
                if self.source is not None:
                    check_version(self.source, self.version)
                packed.buffers = encode(used + 511 & -512)
            elif payload.numel() > 1.25 * used + 65536:
                packed.buffers = (meta, payload[:used].clone())
            self.state.learn(used, self.source_bytes)
            packed.pending_size = None
            self.state.nbytes = packed.nbytes
            _pinned.give(self.size)
            self.packed = self.source = self.encode = None


def _cannot_encode_again(capacity: int) -> tuple[Tensor, Tensor]:
    raise RuntimeError(f"encke: a payload took {capacity} bytes, more than its source, which is gone: this is a bug")


class _Pinned:
    """Pool of pinned 8-byte words. A pinned allocation costs far more than the copy into it."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []
        self.lock = threading.Lock()

    def take(self) -> Tensor:
        with self.lock:
            if not self.free:
                self.free = list(torch.zeros(256, dtype=torch.int64, pin_memory=True).split(1))
            return self.free.pop()

    def give(self, word: Tensor) -> None:
        with self.lock:
            self.free.append(word)


class _InFlight:
    """Queue of the encodings whose sizes have not arrived, oldest first."""

    def __init__(self) -> None:
        self.queue: deque[_PendingSize] = deque()
        self.bytes = 0
        self.lock = threading.Lock()

    def add(self, pending: _PendingSize) -> None:
        with self.lock:
            self.queue.append(pending)
            self.bytes += pending.source_bytes
        self.drain(wait=False)

    def drain(self, wait: bool) -> None:
        """Finish what has arrived. Wait for the oldest beyond the limit, or with `wait` for all."""
        while True:
            with self.lock:
                if not self.queue:
                    return
                pending = self.queue[0]
                before = self.bytes - self.queue[-1].source_bytes
                if not (wait or before > IN_FLIGHT or pending.packed is None or pending.event.query()):
                    return
                self.queue.popleft()
                self.bytes -= pending.source_bytes
            pending.finish()


_pinned = _Pinned()
_in_flight = _InFlight()


def settle_all(wait: bool = True) -> None:
    """Finish the encodings in flight, so that no source is held any more; without `wait` those that have arrived."""
    _in_flight.drain(wait)
