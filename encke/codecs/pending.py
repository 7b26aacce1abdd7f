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

from encke.codecs.base import Hint
from encke.codecs.packed import Packed, check_version

IN_FLIGHT = 128 << 20
FIRST_SHARE = 0.3
Encode = Callable[[int], tuple[Tensor, Tensor]]


class LatePacked(Packed):
    """A Packed whose parts are (meta, payload), the payload's size in 4-byte units being at byte 8 of meta."""

    __slots__ = ("late",)
    late: _Late | None

    def fill(self, flat: Tensor, encode: Encode, hint: Hint | None) -> None:
        """Encodes `flat`; on a GPU with a hint without waiting for it."""
        self.late = None
        source_bytes = flat.numel() * flat.element_size()
        if flat.device.type != "cuda" or hint is None:
            self.parts = encode(-1)
            if hint is not None:
                hint.learn(self.parts[1].numel(), source_bytes)
            return
        share = hint.share or FIRST_SHARE
        capacity = int(source_bytes * share) + 1024 & -512
        self.parts = encode(capacity)
        self.late = _Late(self, flat, encode, hint)
        _in_flight.add(self.late)

    @property
    def nbytes(self) -> int:
        self.settle()
        return super().nbytes

    def settle(self) -> None:
        """Waits until the size is known and makes the payload right and tight."""
        late = self.late
        if late is not None:
            late.finish()


class _Late:
    """One encoding in flight: its source, the pinned word its size will arrive in, the event behind that copy."""

    __slots__ = ("encode", "event", "hint", "lock", "packed", "size", "source", "source_bytes", "version")

    def __init__(self, packed: LatePacked, source: Tensor, encode: Encode, hint: Hint) -> None:
        self.packed: LatePacked | None = packed
        self.source: Tensor | None = source
        self.version = source._version
        self.source_bytes = source.numel() * source.element_size()
        self.encode: Encode | None = encode
        self.hint = hint
        self.lock = threading.Lock()
        self.size = _pinned.take()
        self.size.copy_(packed.parts[0][8:16].view(torch.int64), non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record(torch.cuda.current_stream(source.device))

    def finish(self) -> None:
        with self.lock:
            packed, encode = self.packed, self.encode
            if packed is None or encode is None:
                return
            self.event.synchronize()
            used = int(self.size.item()) * 4
            meta, payload = packed.parts
            if used > payload.numel():
                assert self.source is not None
                check_version(self.source, self.version)
                packed.parts = encode(used + 511 & -512)
            elif payload.numel() > 1.25 * used + 65536:
                packed.parts = (meta, payload[:used].clone())
            self.hint.learn(used, self.source_bytes)
            packed.late = None
            self.hint.nbytes = packed.nbytes
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
        self.queue: deque[_Late] = deque()
        self.bytes = 0
        self.lock = threading.Lock()

    def add(self, late: _Late) -> None:
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
