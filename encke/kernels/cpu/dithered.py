"""Dithered values within a bound on the CPU: allocation and tasks."""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.bounded import range_task, usable_bound
from encke.kernels.cpu.launch import CARRIER, MIN_TASK, elements, huge_empty, run, seed_halves, task_size
from encke.kernels.cpu.planes_decode import decode_task, mask_task
from encke.kernels.cpu.planes_encode import encode_task, gather_task
from encke.kernels.formats import FLOATS, PLANE_GROUP, PLANE_HEADER, DitheredFormat


def dithered_encode(x: Tensor, format: DitheredFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload), of exact size whatever the capacity."""
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
    eb = usable_bound(bound, x.dtype)
    meta = torch.empty(format.meta_size(numel), dtype=torch.uint8)
    slot = min(size, groups * PLANE_GROUP) * x.element_size()
    # Most of a slot is never touched: no huge pages, so not from numpy.
    scratch = torch.empty(tasks * slot, dtype=torch.uint8).numpy()
    units, meta_bytes = np.empty(tasks, np.int64), meta.numpy()
    place = (meta_bytes, scratch, slot)
    rounding = (*FLOATS[x.dtype], *seed_halves(seed))
    run(encode_task, tasks, size, values, values.view(np.uint8), *place, units, eb, *rounding)
    base, total = np.cumsum(units) - units, int(units.sum())
    payload = torch.empty(4 * total, dtype=torch.uint8)
    run(gather_task, tasks, size, groups, *place, base, units, payload.numpy(), wake=total > MIN_TASK)
    header = struct.pack("<dqqqQ", eb, total, 0, 0, seed & (1 << 64) - 1)
    meta_bytes[:PLANE_HEADER] = np.frombuffer(header, np.uint8)
    return meta, payload


def dithered_decode(meta: Tensor, payload: Tensor, format: DitheredFormat, numel: int, mask: bool) -> Tensor:
    """Return the flat values that `dithered_encode` stored, or with `mask` only whether each is not zero."""
    out = huge_empty(numel, torch.bool if mask else format.dtype)
    if numel == 0:
        return out
    meta_bytes, size = meta.numpy(), task_size(numel, PLANE_GROUP)
    tasks, data = -(-numel // size), payload.numpy()
    if mask:
        run(mask_task, tasks, size, numel, out.numpy(), meta_bytes, data, np.empty(0, CARRIER[format.dtype]))
        return out
    eb, _, _, _, seed = struct.unpack("<dqqqQ", meta_bytes[:PLANE_HEADER].tobytes())
    work = np.float64 if format.dtype == torch.float64 else np.float32
    halves = seed_halves(seed)
    run(decode_task, tasks, size, numel, elements(out), meta_bytes, data, work(eb), *halves)
    return out
