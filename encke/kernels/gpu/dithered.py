"""Dithered values within a bound on the GPU: allocation and launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from encke.kernels.formats import PLANE_GROUP, DitheredFormat
from encke.kernels.gpu.bounded import allocate, trimmed
from encke.kernels.gpu.launch import TYPES, launch_kernel, seed_halves
from encke.kernels.gpu.planes_decode import dithered_decode_kernel
from encke.kernels.gpu.planes_encode import dithered_encode_kernel

WARPS = 4  # of a group: 32 values a thread, whose bits are one word


def dithered_encode(x: Tensor, format: DitheredFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload).

    With a capacity there is no synchronisation: the caller compares it later with the size that meta tells.
    """
    meta, payload, bound = allocate(x, format, PLANE_GROUP, capacity)
    if x.numel() == 0:
        return meta, payload
    numbers = (x.numel(), payload.numel(), bound, format.relative, *seed_halves(seed))
    constants = (TYPES[x.dtype], format.relative != math.inf)
    groups = -(-x.numel() // PLANE_GROUP)
    launch_kernel(dithered_encode_kernel, groups, (x, meta, payload), numbers, constants, WARPS, specialised=1)
    return meta, trimmed(meta, payload, capacity)


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
