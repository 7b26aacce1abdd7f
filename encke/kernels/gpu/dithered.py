"""Dithered values within a bound on the GPU: allocation and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.formats import PLANE_GROUP, DitheredFormat
from encke.kernels.gpu.bounded import RANGE_SIZE, usable_bound
from encke.kernels.gpu.encode import range_kernel
from encke.kernels.gpu.launch import TYPES, launch_kernel, seed_halves
from encke.kernels.gpu.planes_decode import dithered_decode_kernel
from encke.kernels.gpu.planes_encode import dithered_encode_kernel

WARPS = 4  # of a group: 32 values a thread, whose bits are one word


def dithered_encode(x: Tensor, format: DitheredFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload).

    With a capacity there is no synchronisation: the caller compares it later with the size that meta tells.
    """
    numel, dtype, device = x.numel(), x.dtype, x.device
    bound, rel = format.bound, format.relative
    relative = rel != float("inf")
    groups = -(-numel // PLANE_GROUP)
    exact = capacity < 0
    if exact:
        capacity = groups * PLANE_GROUP * dtype.itemsize  # no block takes more than its values
    meta = torch.zeros(format.meta_size(numel), dtype=torch.uint8, device=device)
    payload = torch.empty(capacity, dtype=torch.uint8, device=device)
    if numel == 0:
        return meta, payload
    kind = TYPES[dtype]
    if relative:
        launch_kernel(range_kernel, -(-numel // RANGE_SIZE), (x, meta), (numel,), (kind, RANGE_SIZE), 8, specialised=1)
    else:
        bound = usable_bound(bound, dtype)
    numbers = (numel, capacity, bound, rel, *seed_halves(seed))
    constants = (kind, relative)
    launch_kernel(dithered_encode_kernel, groups, (x, meta, payload), numbers, constants, WARPS, specialised=1)
    if exact:
        payload = payload[: 4 * int(meta[8:16].view(torch.int64))].clone()
    return meta, payload


def dithered_decode(meta: Tensor, payload: Tensor, format: DitheredFormat, numel: int, mask: bool) -> Tensor:
    """Return the flat values that `dithered_encode` stored, or with `mask` only whether each is not zero."""
    out = torch.empty(numel, dtype=torch.bool if mask else format.dtype, device=meta.device)
    if numel:
        constants = (TYPES[format.dtype], mask)
        launch_kernel(
            dithered_decode_kernel,
            -(-numel // PLANE_GROUP),
            (meta, payload, out),
            (numel,),
            constants,
            WARPS,
            specialised=1,
        )
    return out
