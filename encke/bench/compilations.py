"""Compilations that a training waits for: Triton kernels, and graphs of torch.compile."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """Kernels and graphs that were compiled, and the time that Triton's compiler took."""

    kernels: int = 0
    kernel_seconds: float = 0.0
    graphs: int = 0

    def __sub__(self, other: Compiled) -> Compiled:
        return Compiled(
            self.kernels - other.kernels, self.kernel_seconds - other.kernel_seconds, self.graphs - other.graphs
        )

    def figures(self) -> dict[str, float]:
        """Return the columns of a CSV row."""
        return {"kernels": self.kernels, "kernel_seconds": round(self.kernel_seconds, 3), "graphs": self.graphs}


def constants_of(source: Any) -> str:
    """Return the constants that a kernel is specialised on, in the order of its parameters."""
    return ", ".join(str(value) for _, value in sorted(getattr(source, "constants", {}).items()))


class Compilations:
    """Counts compilations in this process while it is entered. Kernels that Triton finds on disk do not count.

    Kernels that inductor compiles in processes of its own are not seen; its graphs are.
    """

    def __init__(self) -> None:
        self.kernels: list[tuple[str, float]] = []
        """Name and seconds of each kernel that was compiled."""
        self.knobs: Any = None

    @property
    def total(self) -> Compiled:
        """Everything so far."""
        counters = sys.modules["torch._dynamo.utils"].counters if "torch._dynamo.utils" in sys.modules else {}
        seconds = sum(taken for _, taken in self.kernels)
        return Compiled(len(self.kernels), seconds, counters["stats"]["unique_graphs"] if counters else 0)

    def __enter__(self) -> Compilations:
        try:
            from triton import knobs
        except ImportError:
            return self
        self.knobs, self.listener = knobs.compilation, knobs.compilation.listener
        self.knobs.listener = self.listen
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.knobs is not None:
            self.knobs.listener = self.listener

    def listen(self, *, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        """Take note of one compilation; Triton calls this."""
        if not cache_hit:
            self.kernels.append((f"{getattr(src, 'name', '?')}({constants_of(src)})", times.total / 1e6))
        if self.listener is not None:
            self.listener(src=src, times=times, cache_hit=cache_hit, **others)
