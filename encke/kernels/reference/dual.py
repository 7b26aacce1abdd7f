"""Dual precision in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.formats import DualFormat, compute_dtype
from encke.kernels.reference.fields import pack_fields, random24, step_up, unpack_fields
from encke.kernels.reference.slow import warn_if_large


def tile_averages(v: Tensor, format: DualFormat) -> Tensor:
    """Return the average of each tile of planes x height x width values as bf16; zero if it is not finite.

    The columns of a tile are summed from top to bottom, then their sums from left to right.
    """
    planes, height, width = v.shape
    (tall, wide), (down, across) = format.tile, format.tiles
    padded = v.new_zeros(planes, down * tall, across * wide)
    padded[:, :height, :width] = v
    tiles = padded.view(planes, down, tall, across, wide)
    columns = v.new_zeros(planes, down, across, wide)
    for i in range(tall):
        columns = columns + tiles[:, :, i]
    total = v.new_zeros(planes, down, across)
    for j in range(wide):
        total = total + columns[..., j]
    heights = (height - torch.arange(down, device=v.device) * tall).clamp(max=tall)
    widths = (width - torch.arange(across, device=v.device) * wide).clamp(max=wide)
    low = (total / (heights[:, None] * widths).to(v.dtype)).float().to(torch.bfloat16)
    return torch.where(torch.isfinite(low), low, 0.0)


def spread_averages(low: Tensor, format: DualFormat) -> Tensor:
    """Repeat the average of each tile for all its values: planes x height x width."""
    tall, wide = format.tile
    rows = low.repeat_interleave(tall, 1)[:, : format.height]
    return rows.repeat_interleave(wide, 2)[:, :, : format.width]


def dual_encode(x: Tensor, format: DualFormat, seed: int) -> Tensor:
    """Encode contiguous planes of height x width values into one buffer."""
    warn_if_large(x)
    values, bits, work = format.plane, format.bits, compute_dtype(format.dtype)
    planes = x.numel() // values
    if planes == 0:
        return torch.zeros(0, dtype=torch.uint8, device=x.device)
    v = x.reshape(planes, format.height, format.width).to(work)
    low = tile_averages(v, format)
    rest = (v - spread_averages(low.to(work), format)).view(planes, values)
    lo, hi = rest.amin(1) + 0.0, rest.amax(1)  # plus 0.0: never -0.0
    n = 2.0**bits - 1
    finite = hi - lo < torch.inf
    lo = torch.where(finite, lo, 0.0)
    step = torch.where(finite, step_up(hi / n - lo / n, hi - lo, format.dtype), torch.nan)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    t = ((rest - lo[:, None]) * inverse[:, None]).nan_to_num(0.0).clamp(0.0, n)
    q = t.floor()
    length = -(-values * bits // 8)
    slots = 8 // bits * length
    index = (torch.arange(planes, device=x.device) * slots)[:, None] + torch.arange(values, device=x.device)
    q = q + (random24(index, seed, slots, length) < ((t - q) * 2.0**24).long())
    double = format.dtype == torch.float64
    stored = step.view(torch.uint8) if double else (step.view(torch.int32) >> 16).to(torch.int16)
    arrays = [lo, stored, low, pack_fields(q.to(torch.uint8), bits)]
    if format.masked:
        arrays.append(pack_fields((v != 0).view(planes, values).to(torch.uint8), 1))
    return torch.cat([array.contiguous().view(-1).view(torch.uint8) for array in arrays])


def dual_decode(data: Tensor, format: DualFormat, numel: int, mask: bool) -> Tensor:
    """Decode the result of `dual_encode`.

    With `mask`, return the mask of the non-zero values instead. It is exact if the format is `masked`.
    """
    dtype, values, work = format.dtype, format.plane, compute_dtype(format.dtype)
    planes = numel // values
    if planes == 0:
        return torch.zeros(0, dtype=torch.bool if mask else dtype, device=data.device)
    at_step, at_low, at_codes, at_mask, end = format.places(numel)
    if mask and format.masked:
        return unpack_fields(data[at_mask:end].view(planes, -1), 1, values).reshape(-1).bool()
    lo = data[:at_step].clone().view(work)[:, None]
    step = data[at_step:at_low].clone().view(work if dtype == torch.float64 else torch.bfloat16).to(work)[:, None]
    low = data[at_low:at_codes].clone().view(torch.bfloat16).to(work).view(planes, *format.tiles)
    code = unpack_fields(data[at_codes:at_mask].view(planes, -1), format.bits, values).to(work)
    limit = torch.finfo(dtype).max
    value = spread_averages(low, format).reshape(planes, values) + (lo + code * step)
    value = torch.where(torch.isnan(step), torch.nan, value.clamp(-limit, limit))
    flat = value.to(dtype).view(-1)
    return flat != 0 if mask else flat
