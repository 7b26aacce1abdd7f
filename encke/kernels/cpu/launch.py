"""Launch of kernels on CPU tensors, which are divided into tasks that threads share.

Kernels are serial and do not hold the GIL. A task is a number of whole groups.
(numba's own parallel loops must not run in two threads at once or after a fork: each kernel would be compiled twice.)
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.scalars import jit, magnitude, widen
from encke.kernels.formats import MASK32

MIN_TASK = 1 << 16  # values: fewer are not worth waking a thread
MAX_TASK = 1 << 18
HUGE = 1 << 22  # bytes, as in numpy: smaller tensors are not worth huge pages
QUICK = 4  # tasks of kernels without a search have this many times as many values

CARRIER = {
    torch.float16: np.int16,
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
"""numpy dtype for the elements of a torch dtype."""

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    global _pool
    _pool = None


# Threads do not survive a fork, so the child starts its own.
os.register_at_fork(after_in_child=_forget_pool)


def run(kernel: Callable, tasks: int, *args: Any, wake: bool = True) -> None:
    """Call kernel(task, *args) for each task, on as many threads as torch uses; without `wake`, on this thread only."""
    global _pool, _pool_size
    threads = min(torch.get_num_threads(), tasks) if wake else 1
    if threads <= 1:
        for task in range(tasks):
            kernel(task, *args)
        return
    if _pool is None or _pool_size < threads - 1:
        _pool, _pool_size = ThreadPoolExecutor(threads - 1, "encke"), threads - 1
    left, given = iter(range(tasks)), [(kernel, args)]

    def work() -> None:
        function, arguments = given[0]
        for task in left:
            function(task, *arguments)

    helpers = [_pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
        for helper in helpers:
            helper.cancel() or helper.result()
    finally:
        # A thread drops `work` after its result is known. It must not be the one that releases the arrays: memory
        # recorders, such as torch's profiler, would miss the release.
        given.clear()


def task_size(numel: int, unit: int, factor: int = 1) -> int:
    """Return the number of values in a task: a multiple of `unit`, small enough to balance the threads."""
    size = min(max(numel // (4 * torch.get_num_threads()), factor * MIN_TASK), factor * MAX_TASK)
    return -(-size // unit) * unit


def elements(x: Tensor) -> np.ndarray:
    """Return a tensor's values as a flat numpy array of the dtype that the kernels expect."""
    x = x.detach().contiguous().view(-1)
    return (x.view(torch.int16) if x.element_size() == 2 else x).numpy().view(CARRIER[x.dtype])


@functools.cache
def nan_and_limit(dtype: torch.dtype) -> tuple[Any, np.floating]:
    """Return NaN as an element of `elements`, and the largest finite value in the computing dtype."""
    nan = elements(torch.full((1,), math.nan, dtype=dtype))[0]
    return nan, (np.float64 if dtype == torch.float64 else np.float32)(torch.finfo(dtype).max)


@functools.cache
def advise() -> Callable[[int, int, int], int] | None:
    """Return the system's `madvise`; None if the system has no huge pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return function


def huge_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor and request huge pages, which torch does not: page faults would take most of the time."""
    out = torch.empty(numel, dtype=dtype)
    if out.nbytes >= HUGE and (ask := advise()) is not None:
        first = -(-out.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        ask(first, out.data_ptr() + out.nbytes - first, mmap.MADV_HUGEPAGE)  # if refused, continue without
    return out


def seed_halves(seed: int) -> tuple[np.uint32, np.uint32]:
    """Return the halves of a seed as arguments of the hash; the upper half is made odd."""
    return np.uint32(seed & MASK32), np.uint32(seed >> 32 & MASK32 | 1)


@jit
def find_nonzero(values, out):
    """Write whether each value is not zero to `out`."""
    for i in range(values.size):
        out[i] = magnitude(widen(values[i])) != 0


def decode(kernel: Callable, size: int, numel: int, dtype: torch.dtype, mask: bool, *args: Any) -> Tensor:
    """Run a decoding kernel over all tasks. A mask is computed from the values of one task at a time."""
    out = huge_empty(numel, torch.bool if mask else dtype)
    if numel == 0:
        return out
    tasks = -(-numel // size)
    if not mask:
        run(kernel, tasks, size, numel, elements(out), 0, *args)
        return out
    flags = out.numpy()

    def masked(task: int) -> None:
        first = task * size
        values = np.empty(min(size, numel - first), CARRIER[dtype])
        kernel(task, size, numel, values, first, *args)
        find_nonzero(values, flags[first : first + size])

    run(masked, tasks)
    return out
