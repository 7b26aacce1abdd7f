"""Error-bounded codes on the GPU: allocation and launches. The kernels are in encode.py and decode.py."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from encke.kernels.formats import GROUP, SMALLEST_BOUND, BoundedFormat, DitheredFormat
from encke.kernels.gpu.decode import decode_kernel, decode_maps_kernel
from encke.kernels.gpu.encode import encode_kernel, range_kernel
from encke.kernels.gpu.launch import TYPES, launch_kernel, seed_halves

RANGE_SIZE = 16384  # values that a program of the range kernel reads
MAP_PROGRAMS = 132 * 8  # programs of a bitmap encoding: each has a scratch of one tile
TILE = {2: 1, 4: 2, 8: 2}  # itemsize -> groups that a program encodes, one warp each: fastest on an H200


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


def allocate(
    x: Tensor, format: BoundedFormat | DitheredFormat, group: int, capacity: int
) -> tuple[Tensor, Tensor, float]:
    """Return metadata, payload, and the bound for the kernel; a bound relative to the range has that measured.

    With a negative capacity the payload has room for values stored as they are.
    """
    numel, dtype, device = x.numel(), x.dtype, x.device
    if capacity < 0:
        capacity = -(-numel // group) * group * dtype.itemsize  # no block takes more than its values
    meta = torch.zeros(format.meta_size(numel), dtype=torch.uint8, device=device)
    payload = torch.empty(capacity, dtype=torch.uint8, device=device)
    if format.relative == math.inf:
        return meta, payload, usable_bound(format.bound, dtype)
    if numel:
        constants = (TYPES[dtype], RANGE_SIZE)
        launch_kernel(range_kernel, -(-numel // RANGE_SIZE), (x, meta), (numel,), constants, 8, specialised=1)
    return meta, payload, format.bound


def trimmed(meta: Tensor, payload: Tensor, capacity: int) -> Tensor:
    """Return the payload; without a given capacity the part of it that was written, for which the host waits."""
    return payload if capacity >= 0 else payload[: 4 * int(meta[8:16].view(torch.int64))].clone()


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload).

    With a capacity there is no synchronisation: the caller compares it later with the size that meta tells.
    """
    numel, dtype, stochastic, bitmap = x.numel(), x.dtype, format.stochastic, format.bitmap
    meta, payload, bound = allocate(x, format, GROUP, capacity)
    if numel == 0:
        return meta, payload
    groups = -(-numel // GROUP)
    tile = 1 if bitmap else TILE[dtype.itemsize]
    tiles = -(-groups // tile)
    programs = min(tiles, MAP_PROGRAMS) if bitmap else tiles
    scratch = torch.empty(programs * tile * GROUP + 64, dtype=torch.uint8, device=x.device) if bitmap else meta
    # Nearest fits in 96 registers, which lets 20 warps share a multiprocessor; what would spill is left alone.
    registers = 0 if bitmap or stochastic or dtype == torch.float64 else 96
    launch_kernel(
        encode_kernel, programs, (x, meta, payload, scratch),
        (numel, payload.numel(), bound, format.relative, *seed_halves(seed), tiles),
        (TYPES[dtype], format.relative != math.inf, stochastic, bitmap, tile), tile, registers, 1,
    )  # fmt: skip
    return meta, trimmed(meta, payload, capacity)


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Return the flat values that `bounded_encode` stored, or with `mask` only whether each is not zero."""
    out = torch.empty(numel, dtype=torch.bool if mask else format.dtype, device=meta.device)
    if numel:
        groups = -(-numel // GROUP)
        tensors, constants = (meta, payload, out), (TYPES[format.dtype], mask, 1)
        launch_kernel(decode_kernel, groups, tensors, (numel,), constants, 1, specialised=1)
        if format.bitmap:
            # Groups that a program looks through for bitmaps: many where there are many, so that finding none is quick.
            each = 1 if groups <= 4096 else 4 if groups <= 32768 else 16
            launch_kernel(
                decode_maps_kernel, -(-groups // each), tensors, (numel,), (*constants, each), 1, specialised=1
            )
    return out
