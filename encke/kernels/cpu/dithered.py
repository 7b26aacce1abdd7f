"""Dithered values within a bound on the CPU: allocation and tasks."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.bounded import encode_in_tasks, write_header
from encke.kernels.cpu.launch import CARRIER, elements, huge_empty, run, seed_halves, task_size
from encke.kernels.cpu.planes_decode import decode_task, mask_task
from encke.kernels.cpu.planes_encode import encode_task
from encke.kernels.formats import PLANE_GROUP, PLANE_HEADER, DitheredFormat

HEADER = "<dqqqQ"
"""Numbers at the beginning of the metadata: bound, size of the payload in words, two that are not used here, seed."""


def dithered_encode(x: Tensor, format: DitheredFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload), of exact size whatever the capacity."""
    if x.numel() == 0:
        return torch.zeros(PLANE_HEADER, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    meta, payload, eb = encode_in_tasks(x, format, encode_task, seed_halves(seed), PLANE_GROUP, PLANE_HEADER)
    write_header(meta, HEADER, eb, payload.numel() // 4, 0, 0, seed & (1 << 64) - 1)
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
    eb, _, _, _, seed = struct.unpack(HEADER, meta_bytes[:PLANE_HEADER].tobytes())
    work = np.float64 if format.dtype == torch.float64 else np.float32
    halves = seed_halves(seed)
    run(decode_task, tasks, size, numel, elements(out), meta_bytes, data, work(eb), *halves)
    return out
