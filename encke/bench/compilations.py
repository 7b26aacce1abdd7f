"""Compilations for which a training waits: Triton kernels, graphs of torch.compile, and recordings of CUDA graphs."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch


@dataclass(frozen=True)
class Compiled:
    """Kernels and graphs that were compiled, the time that Triton's compiler took, and recorded CUDA graphs."""

    kernels: int = 0
    kernel_seconds: float = 0.0
    graphs: int = 0
    recordings: int = 0

    def __sub__(self, other: Compiled) -> Compiled:
        return Compiled(
            self.kernels - other.kernels,
            self.kernel_seconds - other.kernel_seconds,
            self.graphs - other.graphs,
            self.recordings - other.recordings,
        )

    def figures(self) -> dict[str, float]:
        """Return the columns of a CSV row."""
        return asdict(self) | {"kernel_seconds": round(self.kernel_seconds, 3)}


def constants_of(source: Any) -> str:
    """Return the constants that a kernel is specialised on, in the order of its parameters."""
    return ", ".join(str(value) for _, value in sorted(getattr(source, "constants", {}).items()))


class Compilations:
    """Counts compilations in this process as a context manager. Kernels that Triton finds on disk do not count.

    Kernels that inductor compiles in processes of its own are not counted; its graphs are.
    """

    def __init__(self) -> None:
        self.kernels: list[tuple[str, float]] = []
        """Name and seconds of each kernel that was compiled."""
        self.knobs: Any = None
        self.recordings = 0
        """Number of CUDA graphs that were recorded."""

    @property
    def total(self) -> Compiled:
        """Everything so far."""
        counters = sys.modules["torch._dynamo.utils"].counters if "torch._dynamo.utils" in sys.modules else {}
        seconds = sum(taken for _, taken in self.kernels)
        graphs = counters["stats"]["unique_graphs"] if counters else 0
        return Compiled(len(self.kernels), seconds, graphs, self.recordings)

    def __enter__(self) -> Compilations:
        self.capture_begin = capture_begin = torch.cuda.CUDAGraph.capture_begin

        def counted(graph: Any, *arguments: Any, **settings: Any) -> None:
            self.recordings += 1
            capture_begin(graph, *arguments, **settings)

        torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[assignment, method-assign]
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
        torch.cuda.CUDAGraph.capture_begin = self.capture_begin  # type: ignore[method-assign]
        if self.knobs is not None:
            self.knobs.listener = self.listener

    def listen(self, *, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        """Record one compilation; Triton calls this."""
        if not cache_hit:
            self.kernels.append((f"{getattr(src, 'name', '?')}({constants_of(src)})", times.total / 1e6))
        if self.listener is not None:
            self.listener(src=src, times=times, cache_hit=cache_hit, **others)
