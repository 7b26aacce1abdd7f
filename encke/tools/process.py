"""Memory of this process, for measurements without a GPU, and its link to the parent process."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

# Read by glibc when a process starts: allocations from 64 KiB on are mapped separately and unmapped when freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
PR_SET_PDEATHSIG = 1


def memory(field: Literal["VmRSS", "VmHWM", "VmData"]) -> int | None:
    """Return bytes of this process: in use, the peak, or the part that a cap limits; None if unknown."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None


def forget_peak() -> None:
    """Let VmHWM start again from the memory in use, where the system allows it."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def environment() -> dict[str, str]:
    """Return this process's environment for a child that imports the same `encke`."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, whose allocator can be configured."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if library is not None and hasattr(library, "mallopt") else None


def release_freed_memory() -> None:
    """Return freed memory that lies between blocks in use to the system."""
    library = glibc()
    if library is not None:
        library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Undo ALLOCATOR: freed memory stays with the process, as it does by default after a few steps."""
    library = glibc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(M_TRIM_THRESHOLD, 64 << 20)


def cap_memory(more: int) -> None:
    """Let this process allocate `more` bytes; then allocations fail."""
    import resource

    now = memory("VmData")
    if now is None:
        raise NotImplementedError("a cap on the memory of a process needs Linux")
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def die_with_parent() -> None:
    """Let the system end this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
