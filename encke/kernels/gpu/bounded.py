"""Error-bounded codes at variable rate on a GPU. docs/design.md explains the format."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from encke.kernels.formats import NEAREST, PLANE_GROUP, SMALLEST_BOUND, STOCHASTIC, BoundedFormat
from encke.kernels.gpu.launch import TYPES, launch_kernel, seed_halves
from encke.kernels.gpu.planes_decode import decode_kernel
from encke.kernels.gpu.planes_encode import encode_kernel, range_kernel

WARPS = 4  # of a group: a thread has 32 values, whose bits form one word
ENCODE_REGISTERS, DECODE_REGISTERS = 96, 80  # of a thread; only rare paths spill
MORE_REGISTERS = 128  # for encoding with random rounding, and for fp64
RANGE_SIZE = 16384  # values that a program of the range kernel reads
FIRST_SHARE = 0.3  # of the source's bytes: first capacity of a payload of unknown size
SIZES = 8  # words of the encoder's counters: sizes of up to 4 attempts, largest and smallest value


def usable_bound(bound: float, dtype: torch.dtype) -> float:
    """Return the bound as the kernels use it: rounded down to fp32 (fp64 stays), clamped, zero if too small."""
    bound = min(bound, 2.0**120)
    if bound < SMALLEST_BOUND[dtype]:
        return 0.0
    if dtype == torch.float64:
        return bound
    bits = struct.unpack("<i", struct.pack("<f", bound))[0]
    near = struct.unpack("<f", struct.pack("<i", bits))[0]
    return near if near <= bound else struct.unpack("<f", struct.pack("<i", bits - 1))[0]


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload). The host waits for the size."""
    capacity = int(x.numel() * x.element_size() * FIRST_SHARE) + 4096
    while True:
        sizes = torch.zeros(SIZES, dtype=torch.int64, device=x.device)
        meta, payload = bounded_encode_within(x, format, seed, capacity, sizes)
        used = 4 * int(sizes[0])
        if used <= capacity:
            return meta, payload if used == capacity else payload[:used].clone()
        capacity = used


def bounded_encode_within(
    x: Tensor, format: BoundedFormat, seed: int, capacity: int, sizes: Tensor, factors: tuple[float, ...] = (1.0,)
) -> tuple[Tensor, Tensor]:
    """Encode flat values into a payload of `capacity` bytes: (meta, payload). The host does not wait.

    Args:
        x: The values.
        format: Format of the codes.
        seed: Seed of random rounding.
        capacity: Bytes of the payload.
        sizes: 8 int64 zeros. The first ones are set to the size of each attempt in units of 4 bytes, 0 if not made.
        factors: Bound of each attempt, as a multiple of the format's bound. An attempt is made if the one before
            exceeded the capacity. If all did, the payload is incomplete, and missing groups decode to NaN.
    """
    numel, dtype, relative = x.numel(), x.dtype, format.relative != math.inf
    meta = torch.empty(format.meta_size(numel), dtype=torch.uint8, device=x.device)
    payload = torch.empty(capacity, dtype=torch.uint8, device=x.device)
    if numel == 0:
        return meta.zero_(), payload
    kind, halves = TYPES[dtype], seed_halves(seed)
    if relative:
        launch_kernel(range_kernel, -(-numel // RANGE_SIZE), (x, sizes), (numel,), (kind, RANGE_SIZE), 8, specialised=1)
    groups, tensors, constants = -(-numel // PLANE_GROUP), (x, meta, payload, sizes), (kind, relative, format.rounding)
    usual = format.rounding == NEAREST and dtype != torch.float64
    registers = ENCODE_REGISTERS if usual else MORE_REGISTERS
    for attempt, factor in enumerate(factors):
        bound = format.bound * factor if relative else usable_bound(format.bound * factor, dtype)
        numbers = (numel, capacity, attempt, bound, format.relative * factor, *halves)
        launch_kernel(encode_kernel, groups, tensors, numbers, constants, WARPS, registers, specialised=1)
    return meta, payload


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Decode the result of `bounded_encode` to flat values; with `mask`, return the mask of the non-zero values."""
    out = torch.empty(numel, dtype=torch.bool if mask else format.dtype, device=meta.device)
    if numel:
        _launch_decoder(meta, payload, format, out, out, mask, False)
    return out


def bounded_gate(meta: Tensor, payload: Tensor, format: BoundedFormat, grad: Tensor) -> Tensor:
    """Return `grad` where the values are not zero, else zero. Both must have the same memory format."""
    out = torch.empty_like(grad)
    if grad.numel():
        _launch_decoder(meta, payload, format, out, grad, False, True)
    return out


def _launch_decoder(
    meta: Tensor, payload: Tensor, format: BoundedFormat, out: Tensor, grad: Tensor, mask: bool, gate: bool
) -> None:
    """Launch the decoder of values, of their mask, or of a gradient that the mask gates."""
    numel, buffers = out.numel(), (meta, payload, out, grad)
    # The decoder needs no random number for NEAREST and STOCHASTIC, and decodes them alike.
    constants = (TYPES[format.dtype], mask, gate, NEAREST if format.rounding == STOCHASTIC else format.rounding)
    numbers = (numel, payload.numel())
    launch_kernel(decode_kernel, -(-numel // PLANE_GROUP), buffers, numbers, constants, WARPS, DECODE_REGISTERS, 1)
