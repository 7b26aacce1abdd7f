"""The kernels for CPU tensors, compiled by numba at their first call: the bytes and values of `reference`, faster.

Kernels are serial and do not hold the GIL. A tensor is cut into tasks of whole groups, which a few threads work off.
(numba's own parallel loops must not run in two threads at once or after a fork: each kernel would be compiled twice.)
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu import kernels as kernels
from encke.kernels.reference import (
    FLOATS,
    GROUP,
    HEADER,
    MASK32,
    SMALLEST_BOUND,
    dp_sizes,
    dp_tiles,
    gq_sizes,
    lp_bend,
    meta_size,
)

MIN_TASK = 64 * GROUP  # values: less is not worth waking a thread for
MAX_TASK = 256 * GROUP
QUICK = 4  # kernels without a search take so many times as many values in a task

# As what a dtype travels.
CARRIER = {
    torch.float16: np.int16,
    torch.bfloat16: np.uint16,
    torch.float32: np.float32,
    torch.float64: np.float64,
}

_pool: ThreadPoolExecutor | None = None
_pool_size = 0


def _forget_pool() -> None:
    global _pool
    _pool = None


# Threads do not survive a fork: the child starts its own.
os.register_at_fork(after_in_child=_forget_pool)


def run(kernel: Callable, tasks: int, *args: Any, wake: bool = True) -> None:
    """Calls kernel(task, *args) for each task, on as many threads as torch uses unless these need not wake."""
    global _pool, _pool_size
    threads = min(torch.get_num_threads(), tasks) if wake else 1
    if threads <= 1:
        for task in range(tasks):
            kernel(task, *args)
        return
    if _pool is None or _pool_size < threads - 1:
        _pool, _pool_size = ThreadPoolExecutor(threads - 1, "encke"), threads - 1
    left = iter(range(tasks))

    def work() -> None:
        for task in left:
            kernel(task, *args)

    helpers = [_pool.submit(work) for _ in range(threads - 1)]
    work()
    for helper in helpers:
        helper.cancel() or helper.result()


def task_size(numel: int, unit: int, factor: int = 1) -> int:
    """Values of one task: a multiple of `unit`, small enough to balance the threads."""
    size = min(max(numel // (4 * torch.get_num_threads()), factor * MIN_TASK), factor * MAX_TASK)
    return -(-size // unit) * unit


def elements(x: Tensor) -> np.ndarray:
    """A tensor's values as the kernels take them."""
    x = x.detach().contiguous().view(-1)
    return (x.view(torch.int16) if x.element_size() == 2 else x).numpy().view(CARRIER[x.dtype])


@functools.cache
def ends(dtype: torch.dtype) -> tuple[Any, np.floating]:
    """NaN as an element, and the largest finite value to compute with."""
    nan = elements(torch.full((1,), math.nan, dtype=dtype))[0]
    return nan, (np.float64 if dtype == torch.float64 else np.float32)(torch.finfo(dtype).max)


def from_numpy(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Elements as a tensor."""
    if values.size == 0:  # numpy gives empty arrays strides that torch cannot view
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(values).view(dtype)


def halves(seed: int) -> tuple[np.uint32, np.uint32]:
    """The halves of a seed as the hash takes them."""
    return np.uint32(seed & MASK32), np.uint32(seed >> 32 & MASK32 | 1)


def usable_bound(bound: float, dtype: torch.dtype) -> np.floating:
    """The bound as the kernels use it: rounded down to the computing dtype, clamped, zero where too small."""
    work = np.float64 if dtype == torch.float64 else np.float32
    eb = work(min(bound, 2.0**120))
    if float(eb) > bound:
        eb = np.nextafter(eb, work(0))
    return eb if float(eb) >= SMALLEST_BOUND[dtype] else work(0)


def eb_encode(
    x: Tensor, bound: float, rel: float, stochastic: bool, seed: int, bitmap: bool, capacity: int
) -> tuple[Tensor, Tensor]:
    """Encodes flat float values under min(bound, rel * range): (meta, payload), of exact size whatever the capacity."""
    numel = x.numel()
    if numel == 0:
        return torch.zeros(HEADER, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    values, size = elements(x), task_size(numel, GROUP)
    tasks, groups = -(-numel // size), -(-numel // GROUP)
    if rel != math.inf:
        found = np.empty((tasks, 2))
        run(kernels.range_task, tasks, size, values, found)
        low, high = found[:, 0].min(), found[:, 1].max()
        bound = min(bound, rel * float(high - low) if low <= high else 0.0)
    eb = usable_bound(bound, x.dtype)
    meta = torch.empty(meta_size(numel), dtype=torch.uint8)
    slot = min(size, groups * GROUP) * x.element_size() + kernels.SLACK
    # Most of a slot is never touched: no huge pages, so not from numpy.
    scratch = torch.empty(tasks * slot, dtype=torch.uint8).numpy()
    units, meta_bytes = np.empty(tasks, np.int64), meta.numpy()
    place = (meta_bytes, scratch, slot)
    rounding = (*FLOATS[x.dtype], stochastic, *halves(seed))
    run(kernels.encode_task, tasks, size, values, values.view(np.uint8), *place, units, eb, *rounding, bitmap)
    base, total = np.cumsum(units) - units, int(units.sum())
    payload = torch.empty(4 * total, dtype=torch.uint8)
    run(kernels.gather_task, tasks, size, groups, *place, base, units, payload.numpy(), wake=total > MIN_TASK)
    meta_bytes[:HEADER] = np.frombuffer(struct.pack("<dqqq", -eb if stochastic else eb, total, 0, 0), np.uint8)
    return meta, payload


def decode(kernel: Callable, size: int, numel: int, dtype: torch.dtype, mask: bool, *args: Any) -> Tensor:
    """Runs a decoding kernel over all tasks; a mask goes through one task's values at a time."""
    if numel == 0:  # numpy gives empty arrays strides that torch cannot view
        return torch.empty(0, dtype=torch.bool if mask else dtype)
    tasks = -(-numel // size)
    if not mask:
        # numpy asks for huge pages, torch does not: on large tensors page faults would take most of the time.
        out = np.empty(numel, CARRIER[dtype])
        run(kernel, tasks, size, numel, out, 0, *args)
        return torch.from_numpy(out).view(dtype)
    flags = np.empty(numel, np.bool_)

    def masked(task: int) -> None:
        first = task * size
        values = np.empty(min(size, numel - first), CARRIER[dtype])
        kernel(task, size, numel, values, first, *args)
        kernels.find_nonzero(values, flags[first : first + size])

    run(masked, tasks)
    return torch.from_numpy(flags)


def eb_decode(meta: Tensor, payload: Tensor, numel: int, dtype: torch.dtype, mask: bool, bitmap: bool = True) -> Tensor:
    """The flat values that eb_encode stored, or only whether each is not zero. `bitmap`: there may be bitmaps."""
    work = np.float64 if dtype == torch.float64 else np.float32
    meta_bytes = meta.numpy()
    eb = work(meta_bytes[:8].view(np.float64)[0])
    return decode(kernels.decode_task, task_size(numel, GROUP), numel, dtype, mask, meta_bytes, payload.numpy(), eb)


class Rate:
    """A fixed-rate buffer, and values beside it, as the kernels take them: cut into groups."""

    def __init__(self, data: Tensor, numel: int, bits: int, group: int, dtype: torch.dtype, stride: int) -> None:
        at_lo, at_step, _ = gq_sizes(numel, bits, group, dtype, stride)
        buffer = data.numpy()
        kept = np.float64 if dtype == torch.float64 else np.uint16
        parts = (slice(at_lo, at_step), slice(at_step, None))
        # Groups that lie side by side are taken together, a block of them at a time.
        beside = (stride,) if stride > 1 else ()
        self.shape = (-1, group, *beside)
        self.codes: np.ndarray = buffer[:at_lo].reshape(-1, group * bits // 8, *beside)
        self.los, self.steps = (buffer[part].view(kept).reshape(-1, *beside) for part in parts)
        self.unit = group * stride
        self.size = task_size(numel, self.unit, QUICK) // self.unit
        self.tasks = -(-len(self.los) // self.size)

    def cut(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The whole groups of some values, and an incomplete last one, filled with zeros."""
        whole = values.size // self.unit * self.unit
        tail = np.zeros(self.unit, values.dtype)
        tail[: values.size - whole] = values[whole:]
        return values[:whole].reshape(self.shape), tail.reshape(self.shape)

    def run(self, kernel: Callable, *args: Any) -> None:
        run(kernel, self.tasks, self.size, *args)


def gq_encode(x: Tensor, bits: int, group: int, seed: int, stride: int = 1, signs: bool = False) -> Tensor:
    """Fixed-rate codes of flat float values, with lo and step of each group, in one buffer."""
    numel = x.numel()
    if numel % stride:
        raise ValueError(f"{numel} values cannot be taken in groups that lie {stride} apart")
    out = torch.empty(gq_sizes(numel, bits, group, x.dtype, stride)[2], dtype=torch.uint8)
    if numel:
        rate = Rate(out, numel, bits, group, x.dtype, stride)
        kernel = kernels.rate_kernels(bits, group, signs)[stride > 1][0]
        rate.run(kernel, *rate.cut(elements(x)), *halves(seed), rate.codes, rate.los, rate.steps)
    return out


def gq_decode(
    data: Tensor,
    numel: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    mask: bool,
    seed: int,
    stride: int = 1,
    signs: bool = False,
) -> Tensor:
    """The flat values that gq_encode stored with the same settings, or only whether each is not zero (bool)."""
    # numpy asks for huge pages, torch does not: on large tensors page faults would take most of the time.
    out: np.ndarray = np.empty(numel, np.bool_ if mask else CARRIER[dtype])
    if numel:
        rate = Rate(data, numel, bits, group, dtype, stride)
        whole, tail = rate.cut(out)
        _, decode, find_mask = kernels.rate_kernels(bits, group, signs)[stride > 1]
        if mask:
            rate.run(find_mask, whole, tail, rate.codes, rate.los, rate.steps)
        else:
            rate.run(decode, whole, tail, rate.codes, *halves(seed), rate.los, rate.steps, *ends(dtype))
        out[whole.size :] = tail.reshape(-1)[: numel - whole.size]
    return from_numpy(out, torch.bool if mask else dtype)


def dp_parts(data: np.ndarray, dtype: torch.dtype, places: tuple[int, ...]) -> list[np.ndarray]:
    """The lo, step, average, code and mask arrays in a buffer."""
    lo, step = (np.float64, np.float64) if dtype == torch.float64 else (np.float32, np.uint16)
    kinds = (lo, step, np.uint16, np.uint8, np.uint8)
    return [data[start:end].view(kind) for start, end, kind in zip((0, *places[:4]), places, kinds, strict=True)]


def dp_encode(x: Tensor, height: int, width: int, block: int, bits: int, masked: bool, seed: int) -> Tensor:
    """Planes of height x width values, one after the other, in dual precision: one buffer."""
    numel = x.numel()
    places = dp_sizes(numel, height, width, block, bits, masked, x.dtype)
    out = torch.empty(places[4], dtype=torch.uint8)
    if numel:
        size, tile = task_size(numel, height * width), dp_tiles(height, width, block)[:2]
        parts = dp_parts(out.numpy(), x.dtype, places)
        args = (size, elements(x), height, width, *tile, bits, *halves(seed), *parts)
        run(kernels.dual_encode_task, -(-numel // size), *args)
    return out


def dp_decode(
    data: Tensor,
    numel: int,
    height: int,
    width: int,
    block: int,
    bits: int,
    masked: bool,
    dtype: torch.dtype,
    mask: bool,
) -> Tensor:
    """The values that dp_encode stored, or only whether each was not zero: exactly, where the buffer is `masked`."""
    size = task_size(numel, height * width)
    *parts, masks = dp_parts(data.numpy(), dtype, dp_sizes(numel, height, width, block, bits, masked, dtype))
    if mask and masked:
        flags = torch.empty(numel, dtype=torch.bool)
        args = (size, height * width, masks, flags.view(torch.uint8).numpy())
        run(kernels.dual_mask_task, -(-numel // size), *args)
        return flags
    nan = elements(torch.full((1,), math.nan, dtype=dtype))[0]
    limit = (np.float64 if dtype == torch.float64 else np.float32)(torch.finfo(dtype).max)
    plane = (height, width, *dp_tiles(height, width, block)[:2])
    return decode(kernels.dual_decode_task, size, numel, dtype, mask, *plane, bits, *parts, nan, limit)


def lp_encode(x: Tensor, step: float, far: float, seed: int) -> Tensor:
    """A byte for each flat value: how many steps it lies below zero, at most 254; NaN is 255."""
    out = torch.empty(x.numel(), dtype=torch.uint8)
    size = task_size(x.numel(), 1)
    numbers = (np.float32(-1 / step), np.float32(-1 / far), np.float32(lp_bend(step, far)), *halves(seed))
    run(kernels.log_encode_task, -(-x.numel() // size), size, elements(x), *numbers, out.numpy())
    return out


def lp_decode(data: Tensor, step: float, far: float, shift: float, seed: int, dtype: torch.dtype) -> Tensor:
    """The values that lp_encode stored, the random numbers taken off again, and `shift` lower."""
    size = task_size(data.numel(), 1)
    steps = (np.float32(-step), np.float32(-far), np.float32(lp_bend(step, far)), np.float32(shift))
    numbers = (*steps, *halves(seed), ends(dtype)[0])
    return decode(kernels.log_decode_task, size, data.numel(), dtype, False, data.numpy(), *numbers)


def bits_encode(x: Tensor, bits: int) -> Tensor:
    """Packs flat uint8 (or bool) values below 2^bits, bits 1, 2 or 4: one field over the whole tensor."""
    out = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8)
    size = task_size(x.numel(), 8, QUICK) * bits // 8
    values = x.contiguous().view(torch.uint8).numpy()
    run(kernels.pack_task, -(-out.numel() // size), size, values, bits, out.numpy())
    return out


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """The flat uint8 values that bits_encode stored."""
    out = torch.empty(numel, dtype=torch.uint8)
    size = task_size(numel, 8, QUICK) * bits // 8
    run(kernels.unpack_task, -(-data.numel() // size), size, data.numpy(), bits, out.numpy())
    return out
