"""Dual precision on the GPU, as in docs/design.md: averages of tiles, and codes of the differences from them.

A program of the encoder processes P planes twice: first TILES tiles at a time, then BYTES bytes of codes at a time. The
second time, the values are in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import DualFormat
from encke.kernels.gpu.codes import step_up
from encke.kernels.gpu.common import divide, highest, lowest, nan_max, nan_min, narrow, random32, rotate_right, widen
from encke.kernels.gpu.launch import TYPES, launch_kernel, power_of_two, seed_halves

PROGRAM_COLUMNS = 512  # columns of tiles that a program sums at a time, with four warps
PROGRAM_BYTES = 1024  # bytes of codes or mask bits that a program packs at a time


@triton.jit
def arrays_of(data, planes, tiles, length, DTYPE: tl.constexpr):
    """Return the addresses of steps, averages, codes and mask bits in the buffer."""
    at_step = data + planes * (8 if DTYPE == tl.float64 else 4)
    at_low = at_step + planes * (8 if DTYPE == tl.float64 else 2)
    at_codes = at_low + planes * tiles * 2
    return at_step, at_low.to(tl.pointer_type(tl.int16)), at_codes, at_codes + planes * length


@triton.jit
def tile_of(i, width, across, magic, TALL: tl.constexpr, WIDE: tl.constexpr, DIVIDE: tl.constexpr):
    """Return the tile of value i of a plane. Unless DIVIDE, division by width is a multiplication by `magic`."""
    i = i.to(tl.uint32)
    y = i // width.to(tl.uint32) if DIVIDE else tl.umulhi(i, magic.to(tl.uint32))
    return (y // TALL * across.to(tl.uint32) + (i - y * width.to(tl.uint32)) // WIDE).to(tl.int32)


@triton.jit
def averages(sums, count, WIDE: tl.constexpr):
    """Compute the stored averages of tiles from the sums of their columns: [P, TILES, columns] -> [P, TILES]."""
    column = tl.arange(0, sums.shape[2])[None, None, :]
    total = tl.zeros((sums.shape[0], sums.shape[1]), sums.dtype)
    for j in range(WIDE):
        total += tl.sum(tl.where(column == j, sums, 0.0), 2)  # adds one column and zeros, so the order is fixed
    low = narrow(divide(total, count).to(tl.float32), tl.bfloat16)
    return tl.where(tl.abs(widen(low, tl.bfloat16)) < float("inf"), low, 0)


@triton.jit
def keep_averages(
    x, at_low, here, height, width, tiles, across,
    DTYPE: tl.constexpr, WORK: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
    P: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Store the averages of all tiles; return the smallest and largest difference from them in each plane."""
    least = tl.full((P, TILES, COLUMNS), float("inf"), WORK)
    most = tl.full((P, TILES, COLUMNS), -float("inf"), WORK)
    column = tl.arange(0, COLUMNS)[None, :]
    first = 0
    while first < tiles:
        tile = first + tl.arange(0, TILES)
        top, left = tile // across * TALL, tile % across * WIDE
        inside = (tile < tiles)[:, None] & (column < WIDE) & (left[:, None] + column < width)
        inside = here[:, None, None] & inside[None, :, :]
        at = x[:, :, None] + (top[:, None] * width + left[:, None] + column)[None, :, :]
        rows = tl.minimum(height - top, TALL)
        sums = tl.zeros((P, TILES, COLUMNS), WORK)
        for i in range(TALL):
            sums += widen(tl.load(at + i * width, mask=inside & (i < rows)[None, :, None], other=0), DTYPE)
        count = tl.maximum(rows * tl.minimum(width - left, WIDE), 1).to(WORK)
        low = averages(sums, tl.broadcast_to(count[None, :], (P, TILES)), WIDE)
        tl.store(at_low + tile[None, :], low, mask=here[:, None] & (tile < tiles)[None, :])
        mean = widen(low, tl.bfloat16).to(WORK)[:, :, None]
        for i in range(TALL):
            valid = inside & (i < rows)[None, :, None]
            rest = widen(tl.load(at + i * width, mask=valid, other=0), DTYPE) - mean
            least = nan_min(least, tl.where(valid, rest, float("inf")))
            most = nan_max(most, tl.where(valid, rest, -float("inf")))
        first += TILES
    return lowest(lowest(least, 2), 1) + 0.0, highest(highest(most, 2), 1)


@triton.jit
def keep_mask(x, masks, here, values, DTYPE: tl.constexpr, P: tl.constexpr, BYTES: tl.constexpr):
    """Store a bit for each value: whether it is not zero."""
    length = (values + 7) // 8
    first = 0
    while first < length:
        j = first + tl.arange(0, BYTES)[None, :]
        byte = tl.zeros((P, BYTES), tl.uint32)
        for s in tl.static_range(8):
            i = j + s * length
            v = widen(tl.load(x + i, mask=here[:, None] & (j < length) & (i < values), other=0), DTYPE)
            byte |= (v != 0).to(tl.uint32) << s
        tl.store(masks + j, byte.to(tl.uint8), mask=here[:, None] & (j < length))
        first += BYTES


@triton.jit(do_not_specialize=["height", "width", "magic", "seed_low", "seed_high"])
def dp_encode_kernel(
    x, data, planes: tl.int64, values: tl.int32, height: tl.int32, width: tl.int32, magic: tl.int64,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, MASKED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, DIVIDE: tl.constexpr, P: tl.constexpr, TILES: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Encode P planes."""
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    across = (width + WIDE - 1) // WIDE
    tiles, length = (height + TALL - 1) // TALL * across, (values * BITS + 7) // 8
    at_step, at_low, at_codes, at_mask = arrays_of(data, planes, tiles, length, DTYPE)
    p = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    here = p < planes
    x += p[:, None] * values
    at_low += p[:, None] * tiles
    at_codes += p[:, None] * length
    lo, hi = keep_averages(x, at_low, here, height, width, tiles, across, DTYPE, WORK, TALL, WIDE, COLUMNS, P, TILES)
    spread = hi - lo
    finite = spread < float("inf")
    n = tl.full((P,), (1 << BITS) - 1, WORK)
    lo = tl.where(finite, lo, 0.0)
    step = tl.where(finite, step_up(divide(hi, n) - divide(lo, n), spread), float("nan"))
    inverse = tl.where(step > 0, divide(tl.full((P,), 1.0, WORK), step), 0.0)
    tl.store(data.to(tl.pointer_type(WORK)) + p, lo, mask=here)
    if DTYPE == tl.float64:
        tl.store(at_step.to(tl.pointer_type(WORK)) + p, step, mask=here)
    else:
        half_bits = (step.to(tl.int32, bitcast=True) >> 16).to(tl.int16)
        tl.store(at_step.to(tl.pointer_type(tl.int16)) + p, half_bits, mask=here)
    tl.debug_barrier()  # the averages are read by other threads than those that stored them

    first = 0
    while first < length:
        j = first + tl.arange(0, BYTES)[None, :]
        # The values of a byte share one hash.
        hash = random32((p * length).to(tl.uint32)[:, None] + j.to(tl.uint32), seed_low, seed_high)
        byte = tl.zeros((P, BYTES), tl.uint32)
        for s in tl.static_range(8 // BITS):
            i = j + s * length
            valid = here[:, None] & (j < length) & (i < values)
            tile = tile_of(i, width, across, magic, TALL, WIDE, DIVIDE)
            mean = widen(tl.load(at_low + tile, mask=valid, other=0), tl.bfloat16).to(WORK)
            rest = widen(tl.load(x + i, mask=valid, other=0), DTYPE) - mean
            t = (rest - lo[:, None]) * inverse[:, None]
            t = tl.minimum(tl.where(t > 0, t, 0.0), (1 << BITS) - 1.0)
            # floor(t) + (hash < fraction * 2^24), in fixed point with the whole part above bit 24.
            code = ((t * 16777216.0).to(tl.uint32) + ((rotate_right(hash, 4 * BITS * s) ^ 0xFFFFFFFF) >> 8)) >> 24
            byte |= tl.where(valid, code, 0) << (BITS * s)
        tl.store(at_codes + j, byte.to(tl.uint8), mask=here[:, None] & (j < length))
        first += BYTES
    if MASKED:
        keep_mask(x, at_mask + p[:, None] * ((values + 7) // 8), here, values, DTYPE, P, BYTES)


@triton.jit(do_not_specialize=["height", "width", "magic", "chunks"])
def dp_decode_kernel(
    data, out, planes: tl.int64, values: tl.int32, height: tl.int32, width: tl.int32, magic: tl.int64,
    chunks: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, DIVIDE: tl.constexpr,
    MASK: tl.constexpr, P: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Decode BYTES bytes of codes of P planes."""
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    across = (width + WIDE - 1) // WIDE
    tiles, length = (height + TALL - 1) // TALL * across, (values * BITS + 7) // 8
    at_step, at_low, at_codes, _ = arrays_of(data, planes, tiles, length, DTYPE)
    program = tl.program_id(0)
    p = (program // chunks).to(tl.int64) * P + tl.arange(0, P)
    here = p < planes
    lo = tl.load(data.to(tl.pointer_type(WORK)) + p, mask=here, other=0.0)
    if DTYPE == tl.float64:
        step = tl.load(at_step.to(tl.pointer_type(WORK)) + p, mask=here, other=0.0)
    else:
        step = widen(tl.load(at_step.to(tl.pointer_type(tl.int16)) + p, mask=here, other=0), tl.bfloat16)
    j = (program % chunks) * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(at_codes + (p * length)[:, None] + j, mask=here[:, None] & (j < length), other=0).to(tl.uint32)
    top = tl.full((), limit, tl.float64).to(WORK)
    for s in tl.static_range(8 // BITS):
        i = j + s * length
        valid = here[:, None] & (j < length) & (i < values)
        tile = tile_of(i, width, across, magic, TALL, WIDE, DIVIDE)
        at = at_low + (p * tiles)[:, None] + tile
        mean = widen(tl.load(at, mask=valid, other=0), tl.bfloat16).to(WORK)
        code = ((byte >> (BITS * s)) & ((1 << BITS) - 1)).to(tl.int32).to(WORK)
        value = mean + (lo[:, None] + code * step[:, None])
        value = narrow(nan_max(nan_min(value, top), -top), DTYPE)
        if MASK:
            value = (widen(value, DTYPE) != 0).to(tl.uint8)
        tl.store(out + (p * values)[:, None] + i, value, mask=valid)


@triton.jit(do_not_specialize=["chunks"])
def dp_mask_kernel(
    masks, out, planes: tl.int64, values: tl.int32, chunks: tl.int32, P: tl.constexpr, BYTES: tl.constexpr
):
    """Unpack BYTES bytes of the mask bits of P planes."""
    length = (values + 7) // 8
    program = tl.program_id(0)
    p = (program // chunks).to(tl.int64) * P + tl.arange(0, P)
    here = p < planes
    j = (program % chunks) * BYTES + tl.arange(0, BYTES)[None, :]
    byte = tl.load(masks + (p * length)[:, None] + j, mask=here[:, None] & (j < length), other=0)
    for s in tl.static_range(8):
        i = j + s * length
        tl.store(out + (p * values)[:, None] + i, (byte >> s) & 1, mask=here[:, None] & (j < length) & (i < values))


def reciprocal(height: int, width: int) -> tuple[int, bool]:
    """Return 2^32 / width rounded up, to divide indices of a plane by width, and whether that would not be exact."""
    divide = width == 1 or height * width * width >= 1 << 32
    return 0 if divide else -(-(1 << 32) // width), divide


def shared_out(planes: int, length: int) -> tuple[int, int, int]:
    """Divide `length` bytes of each plane: (planes of a program, bytes of a program, programs for a plane)."""
    each = min(power_of_two(length), PROGRAM_BYTES)
    return min(PROGRAM_BYTES // each, power_of_two(planes)), each, -(-length // each)


def dual_encode(x: Tensor, format: DualFormat, seed: int) -> Tensor:
    """Encode contiguous planes of height x width values into one buffer."""
    numel, bits, values = x.numel(), format.bits, format.plane
    data = torch.empty(format.nbytes(numel), dtype=torch.uint8, device=x.device)
    if numel:
        planes = numel // values
        (tall, wide), (down, across) = format.tile, format.tiles
        columns, (magic, divide) = power_of_two(wide), reciprocal(format.height, format.width)
        tiles = min(power_of_two(down * across), max(PROGRAM_COLUMNS // columns, 1))
        each = min(max(PROGRAM_COLUMNS // (tiles * columns), 1), power_of_two(planes))
        length = min(power_of_two(-(-values * bits // 8)), PROGRAM_BYTES // each)
        numbers = (planes, values, format.height, format.width, magic, *seed_halves(seed))
        constants = (TYPES[x.dtype], bits, format.masked, tall, wide, columns, divide, each, tiles, length)
        launch_kernel(dp_encode_kernel, -(-planes // each), (x, data), numbers, constants, 4)
    return data


def dual_decode(data: Tensor, format: DualFormat, numel: int, mask: bool) -> Tensor:
    """Decode the result of `dual_encode`.

    With `mask`, return the mask of the non-zero values instead. It is exact if the format is `masked`.
    """
    dtype, values = format.dtype, format.plane
    out = torch.empty(numel, dtype=torch.bool if mask else dtype, device=data.device)
    planes = numel // values
    if numel and mask and format.masked:
        masks = data[format.places(numel)[3] :]
        each, length, chunks = shared_out(planes, -(-values // 8))
        programs = -(-planes // each) * chunks
        launch_kernel(dp_mask_kernel, programs, (masks, out), (planes, values, chunks), (each, length), 4)
    elif numel:
        each, length, chunks = shared_out(planes, -(-values * format.bits // 8))
        magic, divide = reciprocal(format.height, format.width)
        numbers = (planes, values, format.height, format.width, magic, chunks, torch.finfo(dtype).max)
        constants = (TYPES[dtype], format.bits, *format.tile, divide, mask, each, length)
        launch_kernel(dp_decode_kernel, -(-planes // each) * chunks, (data, out), numbers, constants, 4)
    return out
