"""Record of torch's allocator: the bytes alive at every moment, including all threads and temporary tensors."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType

import torch
from torch.autograd.profiler import profile, record_function

from encke.torch_internals import profiler_enabled

MARK = "encke mark "
NOISE = (b"CPUAllocator.cpp", b"ActivityProfiler")
"""In each line about a profiler's start and stop, and about memory that is older than the profiler."""


@dataclass
class Part:
    """Operations and memory before a mark, from the mark before it on."""

    name: str = ""
    operations: list[str] = field(default_factory=list)
    """Operations in order; the first one represents the time before them."""
    peaks: list[int] = field(default_factory=list)
    """Bytes alive at most during each operation, until the next one begins."""
    end: float = 0.0
    """Seconds from the start of the block to the mark."""


class Allocations:
    """Records every allocation in a `with` block; after the block, `times`, `alive` and `parts` hold the result.

    Bytes count from the start of the block. Earlier allocations are left out, on the CPU even when they are freed in
    the block.

    Args:
        device: "cpu" or "cuda", the allocator that is recorded.

    Raises:
        RuntimeError: A torch profiler is active already; there can be only one.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.seconds = 0.0
        """Duration of the block."""
        self.times: list[float] = []
        """Seconds since the block began, one for each change."""
        self.alive: list[int] = []
        """Bytes alive from that time on."""
        self.parts: list[Part] = []
        """Parts of the block, each ending with a mark."""
        self._kind = getattr(torch.profiler.DeviceType, device.upper())
        self._names: list[str] = []
        self._profile = profile(profile_memory=True)

    def mark(self, name: str) -> None:
        """Name this moment."""
        with record_function(f"{MARK}{len(self._names)}"):
            self._names.append(name)

    def __enter__(self) -> Allocations:
        if profiler_enabled():
            raise RuntimeError("memory is recorded with torch's profiler, and one is at work already: leave it first")
        self._quiet = quiet()
        self._quiet.__enter__()
        self._profile.__enter__()
        self._began = time.time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.time() - self._began
        self._profile.__exit__(kind, value, trace)
        self._quiet.__exit__(None, None, None)
        results = self._profile.kineto_results
        assert results is not None
        events = sorted(results.events(), key=lambda event: event.start_ns())
        alive, part = 0, Part("", [""], [0])
        for event in events:
            if event.name() == "[memory]":
                if event.device_type() == self._kind:
                    alive += event.nbytes()  # type: ignore[attr-defined]
                    self.times.append(event.start_ns() / 1e9 - self._began)
                    self.alive.append(alive)
                    part.peaks[-1] = max(part.peaks[-1], alive)
            elif event.name().startswith(MARK):
                part.name = self._names[int(event.name().removeprefix(MARK))]
                part.end = event.start_ns() / 1e9 - self._began
                self.parts.append(part)
                part = Part("", [""], [alive])
            else:
                part.operations.append(event.name())
                part.peaks.append(alive)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop messages of the profiler and the allocator on the process's standard error; delay other lines."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not any(noise in line for noise in NOISE):
                    os.write(2, line)
