"""The memory of this process, for measurements without a GPU, and what ties it to the process that started it."""

from __future__ import annotations

import ctypes
import signal
import sys
from pathlib import Path
from typing import Literal

# Read by glibc when a process starts: allocations from 64 KiB on get memory of their own, which goes back when freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
PR_SET_PDEATHSIG = 1


def memory(field: Literal["VmRSS", "VmHWM", "VmData"]) -> int | None:
    """Bytes of this process: in use now, the peak so far, or what a cap counts; None where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def forget_peak() -> None:
    """Makes VmHWM start again from the memory in use now, where the system allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def glibc() -> ctypes.CDLL | None:
    """The C library, if it is one whose allocator can be told what to do."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if library is not None and hasattr(library, "mallopt") else None


def give_back() -> None:
    """Gives freed memory that still lies between pieces in use back to the system."""
    library = glibc()
    if library is not None:
        library.malloc_trim(0)


def keep_freed_memory() -> None:
    """Undoes ALLOCATOR from now on: freed memory stays with the process, as glibc does by itself after a few steps."""
    library = glibc()
    if library is not None:
        library.mallopt(M_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(M_TRIM_THRESHOLD, 64 << 20)


def cap_memory(more: int) -> None:
    """From now on this process may allocate `more` bytes; then allocations fail."""
    import resource

    now = memory("VmData")
    if now is None:
        raise NotImplementedError("a cap on the memory of a process needs Linux")
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def die_with_parent() -> None:
    """Makes the system end this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
