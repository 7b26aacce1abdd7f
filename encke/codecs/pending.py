"""Payloads whose size only the GPU knows: encoded into a predicted capacity, checked and trimmed later.

The host must not wait for the GPU in the forward pass. So `fill` encodes into as many bytes as the site needed last
time, sends the true size to pinned memory behind the kernel, and keeps the source until that size has arrived. If it
fitted, the source is let go (and a generous buffer is trimmed); if it did not, the source is encoded again, so nothing
is lost. The sources kept are bounded: those before the newest have `IN_FLIGHT` bytes at most. For the newest nobody
waits, however large it is: the GPU would have nothing to do until the host had gone on.
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
Encode = Callable[[int], tuple[Tensor, Tensor]]


class PendingPacked(FlatPacked):
    """A Packed whose parts are (meta, payload), the payload's size in 4-byte units being at byte 8 of meta."""

    __slots__ = ("pending_size",)
    pending_size: _PendingSize | None

    def fill(self, flat: Tensor, encode: Encode, state: EncoderState | None) -> None:
        """Encodes `flat`; on a GPU with a state without waiting for it."""
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
        """Waits until the size is known and makes the payload right and tight."""
        late = self.pending_size
        if late is not None:
            late.finish()


class _PendingSize:
    """One encoding in flight: its source, the pinned word its size will arrive in, the event behind that copy."""

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

    def finish(self) -> None:
        with self.lock:
            packed, encode = self.packed, self.encode
            if packed is None or encode is None:
                return
            self.event.synchronize()
            used = int(self.size.item()) * 4
            meta, payload = packed.buffers
            if used > payload.numel():
                assert self.source is not None
                check_version(self.source, self.version)
                packed.buffers = encode(used + 511 & -512)
            elif payload.numel() > 1.25 * used + 65536:
                packed.buffers = (meta, payload[:used].clone())
            self.state.learn(used, self.source_bytes)
            packed.pending_size = None
            self.state.nbytes = packed.nbytes
            _pinned.give(self.size)
            self.packed = self.source = self.encode = None


class _Pinned:
    """Pinned 8-byte words, reused: a pinned allocation costs far more than the copy into it."""

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
    """The encodings whose sizes have not arrived, oldest first."""

    def __init__(self) -> None:
        self.queue: deque[_PendingSize] = deque()
        self.bytes = 0
        self.lock = threading.Lock()

    def add(self, late: _PendingSize) -> None:
        with self.lock:
            self.queue.append(late)
            self.bytes += late.source_bytes
        self.drain(wait=False)

    def drain(self, wait: bool) -> None:
        """Finishes what has arrived, and by waiting the oldest ones beyond the limit, or with `wait` all."""
        while True:
            with self.lock:
                if not self.queue:
                    return
                late = self.queue[0]
                before = self.bytes - self.queue[-1].source_bytes
                if not (wait or before > IN_FLIGHT or late.packed is None or late.event.query()):
                    return
                self.queue.popleft()
                self.bytes -= late.source_bytes
            late.finish()


_pinned = _Pinned()
_in_flight = _InFlight()


def settle_all(wait: bool = True) -> None:
    """Finishes the encodings in flight, so that memory holds nothing but what is packed."""
    _in_flight.drain(wait)
