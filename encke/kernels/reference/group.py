"""Fixed-rate codes of groups, in plain torch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from encke.kernels.formats import GroupFormat, Seed, compute_dtype
from encke.kernels.plans import GroupPlan, flat_memory, seed_number
from encke.kernels.reference.fields import hash24, pack_fields, step_up, unpack_fields
from encke.kernels.reference.slow import warn_if_large


class ReferencePlan(GroupPlan):
    """Plan whose methods are plain torch operations."""

    __slots__ = ()

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        warn_if_large(x)
        if self.numel:
            data.copy_(encode(flat_memory(x), self.format, seed_number(seed, self.format)))

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        if self.numel:
            flat_memory(out).copy_(decode(data, self.format, self.numel, seed_number(seed, self.format)))

    def mask_into(self, data: Tensor, out: Tensor) -> None:
        if self.numel:
            flat_memory(out).copy_(mask(data, self.format, self.numel))


@functools.lru_cache(maxsize=4096)
def group_plan(format: GroupFormat, numel: int, device: torch.device, seed_table: bool = False) -> GroupPlan:
    """Return the plan for tensors of `numel` values in that format.

    Args:
        format: Format of the packed values.
        numel: Number of values.
        device: Device of the tensors.
        seed_table: Whether seeds are given as a tensor and a row. Only GPU kernels are specialised on it.
    """
    return ReferencePlan(format, numel, device)


def encode(x: Tensor, format: GroupFormat, seed: int) -> Tensor:
    """Encode flat float values: codes, then lo and step of each group."""
    bits, signs = format.bits, format.signs
    numel, work = x.numel(), compute_dtype(format.dtype)
    v = in_groups(x.to(work), format)
    a = v.abs()
    signed = (v < 0).any(1)
    affine = torch.zeros_like(signed) if signs else signed
    lo = torch.where(a > 0, a, torch.inf).amin(1)
    lo = torch.where(affine, v.amin(1), torch.where(torch.isinf(lo), 0.0, lo))
    hi = torch.where(affine, v.amax(1), a.amax(1))
    finite = torch.isfinite(v).all(1)
    rest = low_bits(lo)
    constant = finite & (hi == lo) & (v[:, 0] != 0) & (rest > 0)
    lo = torch.where(constant, lo, torch.where(finite, lo_down(lo, signed & ~affine), 0.0))
    n = torch.where(signed, 2.0 ** (bits - 1) - 2 if signs else 2.0**bits - 1, 2.0**bits - 2).to(work)
    step = step_up(hi * (1.0 / n) - lo * (1.0 / n), hi - lo, format.dtype)
    step = torch.where(finite, step, torch.nan)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    t = (torch.where(affine[:, None], v, a) - lo[:, None]) * inverse[:, None]
    t = torch.minimum(t.clamp(min=0.0), n[:, None]).nan_to_num(0.0)
    q = t.floor()
    q = (q + (random_of_values(numel, format, seed, x.device) < ((t - q) * 2.0**24).long())).long()
    # All codes of a constant group are the lowest code; the last bit of the constant is added to them.
    q = q + (constant & (rest & 1 > 0))[:, None]
    sign = (v < 0).long() << bits - 1
    code = torch.where(affine[:, None], q, torch.where(a > 0, (q + 1) | sign, 0))
    lo = torch.where(signed & ~affine, -lo, lo)
    blocks = format.groups(numel) // format.stride
    packed = pack_codes(code.to(torch.uint8), format).view(blocks, format.stride, -1).transpose(1, 2)
    gap = packed.new_zeros(-packed.numel() % 8)
    arrays = (packed, gap, *stored_scales(lo, step, constant, rest))
    return torch.cat([array.contiguous().view(-1).view(torch.uint8) for array in arrays])


def decode(data: Tensor, format: GroupFormat, numel: int, seed: int) -> Tensor:
    """Decode the result of `encode` with the same seed to flat values."""
    bits, signs, work = format.bits, format.signs, compute_dtype(format.dtype)
    code, lo, step = unpack(data, format, numel)
    signed = lo < 0
    affine, magnitude = magnitudes(code, signed, format)
    if signs:
        value = lo.abs() + (magnitude - 1).to(work) * step
    else:
        # Subtract the random number that was added before rounding.
        base = lo - torch.where(signed, 0.5, 1.5).to(work) * step
        fixed = (code << 24) + random_of_values(numel, format, seed, data.device)
        value = base + fixed.to(work) * (step * 2.0**-24)
    limit = torch.finfo(format.dtype).max
    value = value.clamp(-limit, limit)
    value = torch.where(~affine & (magnitude == 0), 0.0, value)
    value = torch.where(signed & ~affine & (code >> bits - 1 > 0), -value, value)
    value = torch.where(torch.isnan(step), torch.nan, value)
    return in_memory_order(value.to(format.dtype), format, numel)


def mask(data: Tensor, format: GroupFormat, numel: int) -> Tensor:
    """Return which values are not zero. Without `signs`, all values of groups with negative ones count as non-zero."""
    code, lo, step = unpack(data, format, numel)
    affine, magnitude = magnitudes(code, lo < 0, format)
    return in_memory_order(affine | (magnitude != 0) | torch.isnan(step), format, numel)


def in_groups(x: Tensor, format: GroupFormat) -> Tensor:
    """Arrange flat values as [group, value]. Fill the last group of a row with copies of its last value."""
    row, each = format.row or x.numel() // format.stride, format.extent
    i = torch.arange(format.groups_in_row(x.numel()) * each, device=x.device).clamp(max=row - 1)
    v = x.reshape(-1, row, format.stride)[:, i]
    return v.view(-1, each, format.stride).transpose(1, 2).reshape(-1, each)


def in_memory_order(rows: Tensor, format: GroupFormat, numel: int) -> Tensor:
    """Arrange [group, value] as flat values in memory order."""
    row, stride, each = format.row or numel // format.stride, format.stride, format.extent
    blocks = rows.view(-1, stride, each).transpose(1, 2)
    return blocks.reshape(-1, format.groups_in_row(numel) * each, stride)[:, :row].reshape(-1).clone()


def unpack(data: Tensor, format: GroupFormat, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes as [group, value], and lo and step of each group as columns."""
    at_lo, at_step, end = format.places(numel)
    groups = format.groups(numel)
    codes = data[: groups * format.length].view(-1, format.length, format.stride)
    rows = codes.transpose(1, 2).reshape(groups, -1)
    code = unpack_codes(rows, format).long()
    lo, step = (scale.clone().view(format.scale_dtype) for scale in (data[at_lo:at_step], data[at_step:end]))
    if format.dtype != torch.float64:
        high, low = (scale.view(torch.int16).int() for scale in (lo, step))
        constant = low < 0
        last = torch.where((high < 0) & ~torch.tensor(format.signs), code[:, 0], code[:, 0] >> 1).int() & 1
        lo = (high << 16 | torch.where(constant, (low & 0x7FFF) << 1 | last, 0)).view(torch.float32)
        step = torch.where(constant, 0.0, step.float())
    return code, lo[:, None], step[:, None]


def pack_codes(code: Tensor, format: GroupFormat) -> Tensor:
    """Pack rows of codes: their field and, for 3-bit codes, the third bits of the four codes of each byte."""
    if format.bits != 3:
        return pack_fields(code, format.bits)
    length = format.field_length
    third = torch.zeros(len(code), length + length % 2, dtype=torch.uint8, device=code.device)
    for t in range(4):
        third[:, :length] |= code[:, t * length : (t + 1) * length] >> 2 << t
    return torch.cat([pack_fields(code & 3, 2), third[:, ::2] | third[:, 1::2] << 4], 1)


def unpack_codes(rows: Tensor, format: GroupFormat) -> Tensor:
    """Unpack the result of `pack_codes`."""
    length = format.field_length
    code = unpack_fields(rows[:, :length], format.field, format.extent)
    if format.bits == 3:
        both = rows[:, length:]
        third = torch.stack([both & 15, both >> 4], 2).flatten(1)[:, :length]
        code = code | torch.cat([third >> t & 1 for t in range(4)], 1) << 2
    return code


def low_bits(lo: Tensor) -> Tensor:
    """Return the bits of fp32 values that bf16 drops; none for fp64, which is stored unchanged."""
    return torch.zeros_like(lo, dtype=torch.int32) if lo.dtype == torch.float64 else lo.view(torch.int32) & 0xFFFF


def stored_scales(lo: Tensor, step: Tensor, constant: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Return lo and step in the stored form: bf16, or in constant groups the first 31 bits of the constant."""
    if lo.dtype == torch.float64:
        return lo, step
    high = (lo.view(torch.int32) >> 16).to(torch.int16)
    low = torch.where(constant, (rest >> 1) - 0x8000, (step.view(torch.int32) >> 16)).to(torch.int16)
    return high, torch.where(torch.isnan(step), 0x7FC0, low)


def magnitudes(code: Tensor, signed: Tensor, format: GroupFormat) -> tuple[Tensor, Tensor]:
    """Return which groups have no code for zero, and the codes without the sign bit."""
    affine = torch.zeros_like(signed) if format.signs else signed
    return affine, torch.where(signed & ~affine, code & (1 << format.bits - 1) - 1, code)


def lo_down(lo: Tensor, negated: Tensor) -> Tensor:
    """Round a group's lo down to bf16 (fp64 stays), to a finite value, and not to zero if its sign has a meaning."""
    if lo.dtype == torch.float64:
        return lo
    size = lo.view(torch.int32) & 0x7FFFFFFF
    away = ((size + 0xFFFF) & -0x10000).clamp(max=0x7F7F0000).view(torch.float32)
    near = size & -0x10000
    near = torch.where(negated, near.clamp(min=0x10000), near).view(torch.float32)
    return torch.where(lo < 0, -away, near)


def random_of_values(numel: int, format: GroupFormat, seed: int, device: torch.device) -> Tensor:
    """Return 24 random bits for each value, as [group, value]: the hash of its byte, rotated according to its slice."""
    length, field = format.field_length, format.field
    byte = torch.arange(format.groups(numel) * format.length, device=device).view(-1, format.length, format.stride)
    word = byte[:, :length].transpose(1, 2).reshape(-1, length).repeat(1, 8 // field)
    return hash24(word, torch.arange(format.extent, device=device) // length * (4 * field), seed)
