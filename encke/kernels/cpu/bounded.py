"""Error-bounded codes at variable rate on the CPU. docs/design.md explains the format."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.launch import CARRIER, MIN_TASK, elements, huge_empty, run, seed_halves, task_size
from encke.kernels.cpu.planes_decode import decode_task, mask_task
from encke.kernels.cpu.planes_encode import encode_task
from encke.kernels.cpu.scalars import as_float, from_ordered, jit, magnitude, ordered, u32, widen
from encke.kernels.cpu.words import copy_bytes
from encke.kernels.formats import (
    FLOATS,
    PLANE_GROUP,
    PLANE_HEADER,
    SMALLEST_BOUND,
    STOCHASTIC,
    BoundedFormat,
)

HEADER = "<dQ"
"""Header of the metadata, as a `struct` format: bound and seed."""


@jit
def range_task(task, size, x, found):
    """Find the smallest and largest finite value of a task; infinity and -infinity if there is none."""
    none_low = ordered(as_float(math.inf, widen(x[0])))
    none_high = ordered(as_float(-math.inf, widen(x[0])))
    low, high = none_low, none_high
    mine = x[task * size : (task + 1) * size]
    for i in range(mine.size):
        v = widen(mine[i])
        finite, key = magnitude(v) < none_low, ordered(v)
        low, high = min(low, key if finite else none_low), max(high, key if finite else none_high)
    found[task, 0], found[task, 1] = from_ordered(low), from_ordered(high)


@jit
def gather_task(task, size, groups, meta, scratch, slot, base, units, payload):
    """Move the bytes of a task to their position in the payload."""
    offsets = meta[PLANE_HEADER : PLANE_HEADER + 4 * groups].view(u32)
    for group in range(task * size // PLANE_GROUP, min((task + 1) * size // PLANE_GROUP, groups)):
        offsets[group] += base[task]
    copy_bytes(scratch, task * slot, 4 * units[task], payload, 4 * base[task])


def usable_bound(bound: float, dtype: torch.dtype) -> np.floating:
    """Return the bound as the kernels use it: rounded down to the computing dtype, clamped, zero if too small."""
    work = np.float64 if dtype == torch.float64 else np.float32
    eb = work(min(bound, 2.0**120))
    if float(eb) > bound:
        eb = np.nextafter(eb, work(0))
    return eb if float(eb) >= SMALLEST_BOUND[dtype] else work(0)


def least_of(eb: np.floating, dtype: torch.dtype) -> np.floating:
    """Return the smallest magnitude that a non-zero value decodes to with SIGNED rounding: a power of two."""
    e = math.frexp(eb)[1] - 13
    return type(eb)(math.ldexp(1.0, min(max(e, -24), 15) if dtype == torch.float16 else e))


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload)."""
    numel, bound = x.numel(), format.bound
    if numel == 0:
        return torch.zeros(PLANE_HEADER, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    values, size = elements(x), task_size(numel, PLANE_GROUP)
    tasks, groups = -(-numel // size), -(-numel // PLANE_GROUP)
    if format.relative != math.inf:
        ends = np.empty((tasks, 2))
        run(range_task, tasks, size, values, ends)
        low, high = ends[:, 0].min(), ends[:, 1].max()
        bound = min(bound, format.relative * float(high - low) if low <= high else 0.0)
    allowed = usable_bound(bound, x.dtype)
    eb = allowed / type(allowed)(2) if format.rounding == STOCHASTIC else allowed
    meta = torch.empty(format.meta_size(numel), dtype=torch.uint8)
    slot = min(size, groups * PLANE_GROUP) * x.element_size()
    # Most of a slot is never touched, so it must not have huge pages, which numpy would request.
    scratch = torch.empty(tasks * slot, dtype=torch.uint8).numpy()
    units, meta_bytes = np.empty(tasks, np.int64), meta.numpy()
    place = (meta_bytes, scratch, slot)
    least = least_of(eb, x.dtype)
    rounding = (eb, allowed, least, *FLOATS[x.dtype], format.rounding, *seed_halves(seed))
    run(encode_task, tasks, size, values, values.view(np.uint8), *place, units, *rounding)
    base, total = np.cumsum(units) - units, int(units.sum())
    payload = torch.empty(4 * total, dtype=torch.uint8)
    run(gather_task, tasks, size, groups, *place, base, units, payload.numpy(), wake=total > MIN_TASK)
    header = struct.pack(HEADER, eb, seed & (1 << 64) - 1)
    meta_bytes[:PLANE_HEADER] = np.frombuffer(header, np.uint8)
    return meta, payload


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Decode the result of `bounded_encode` to flat values; with `mask`, return the mask of the non-zero values."""
    out = huge_empty(numel, torch.bool if mask else format.dtype)
    if numel == 0:
        return out
    meta_bytes, size = meta.numpy(), task_size(numel, PLANE_GROUP)
    tasks, data = -(-numel // size), payload.numpy()
    if mask:
        run(mask_task, tasks, size, numel, out.numpy(), meta_bytes, data, np.empty(0, CARRIER[format.dtype]))
        return out
    eb, seed = struct.unpack(HEADER, meta_bytes[:PLANE_HEADER].tobytes())
    bound = np.float64(eb) if format.dtype == torch.float64 else np.float32(eb)
    rounding = (bound, least_of(bound, format.dtype), format.rounding, *seed_halves(seed))
    run(decode_task, tasks, size, numel, elements(out), meta_bytes, data, *rounding)
    return out
