"""Error-bounded codes at variable rate on a GPU. docs/design.md explains the format."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from encke.kernels.formats import DITHERED, PLANE_GROUP, SMALLEST_BOUND, BoundedFormat
from encke.kernels.gpu.launch import TYPES, launch_kernel, seed_halves
from encke.kernels.gpu.planes_decode import decode_kernel
from encke.kernels.gpu.planes_encode import encode_kernel, range_kernel

WARPS = 4  # of a group: 32 values a thread, whose bits are one word
RANGE_SIZE = 16384  # values that a program of the range kernel reads


def usable_bound(bound: float, dtype: torch.dtype) -> float:
    """Return the bound as the kernels use it: rounded down to fp32, clamped, zero where too small."""
    bound = min(bound, 2.0**120)
    if bound < SMALLEST_BOUND[dtype]:
        return 0.0
    if dtype == torch.float64:
        return bound
    bits = struct.unpack("<i", struct.pack("<f", bound))[0]
    near = struct.unpack("<f", struct.pack("<i", bits))[0]
    return near if near <= bound else struct.unpack("<f", struct.pack("<i", bits - 1))[0]


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload).

    With a capacity there is no synchronisation: the caller compares it later with the size that meta tells.
    """
    numel, dtype, relative, bound = x.numel(), x.dtype, format.relative != math.inf, format.bound
    groups, exact = -(-numel // PLANE_GROUP), capacity < 0
    if exact:
        capacity = groups * PLANE_GROUP * dtype.itemsize  # no block takes more than its values
    meta = torch.zeros(format.meta_size(numel), dtype=torch.uint8, device=x.device)
    payload = torch.empty(capacity, dtype=torch.uint8, device=x.device)
    if numel == 0:
        return meta, payload
    kind = TYPES[dtype]
    if relative:
        launch_kernel(range_kernel, -(-numel // RANGE_SIZE), (x, meta), (numel,), (kind, RANGE_SIZE), 8, specialised=1)
    else:
        bound = usable_bound(bound, dtype)
    numbers = (numel, capacity, bound, format.relative, *seed_halves(seed))
    constants = (kind, relative, format.rounding)
    launch_kernel(encode_kernel, groups, (x, meta, payload), numbers, constants, WARPS, specialised=1)
    if exact:
        payload = payload[: 4 * int(meta[8:16].view(torch.int64))].clone()
    return meta, payload


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Return the flat values that `bounded_encode` stored, or with `mask` only whether each is not zero."""
    out = torch.empty(numel, dtype=torch.bool if mask else format.dtype, device=meta.device)
    if numel:
        buffers, constants = (meta, payload, out), (TYPES[format.dtype], mask, format.rounding == DITHERED)
        launch_kernel(decode_kernel, -(-numel // PLANE_GROUP), buffers, (numel,), constants, WARPS, specialised=1)
    return out
