"""Hash, bit fields and small integers, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.formats import MASK32


def random24(index: Tensor, seed: int, run: int, length: int) -> Tensor:
    """Return 24 random bits for each value index: the hash of docs/design.md, as int64.

    Values of a run that are `length` apart share one hash, each rotated by another number of bits.
    """
    return hash24(index // run * length + index % length, index % run // length * (32 * length // run), seed)


def hash24(word: Tensor, rotation: Tensor, seed: int) -> Tensor:
    """Return 24 bits of the rotated hash of each word."""
    h = ((word & MASK32) ^ (seed & MASK32)) * ((seed >> 32 & MASK32) | 1) & MASK32
    h = (h ^ h >> 15) * 0x846CA68B & MASK32
    h = h ^ h >> 16
    return (h >> rotation | h << 32 - rotation & MASK32) >> 8


def exponent(x: Tensor) -> Tensor:
    """Return floor(log2 x) of positive normal values, read from the bits."""
    if x.dtype == torch.float64:
        return (x.view(torch.int64) >> 52) - 1023
    return (x.view(torch.int32) >> 23).long() - 127


def bit_width(v: Tensor) -> Tensor:
    """Return the number of bits that a non-negative integer below 2^31 needs."""
    return torch.frexp(v.double())[1].long()


def step_up(step: Tensor, spread: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a step up to bf16, in which it is stored (fp64 stays). The step is zero only if the spread is."""
    if dtype != torch.float64:
        step = ((step.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        step = step.clamp(min=2.0**-100)
    else:
        step = step.clamp(min=2.0**-990)
    return torch.where(spread > 0, step, 0.0)


def pack_fields(code: Tensor, bits: int) -> Tensor:
    """Pack each row into one field of `bits` bits: rows x n -> rows x ceil(n * bits / 8) bytes."""
    rows, n = code.shape
    length = -(-n * bits // 8)
    per_byte = 8 // bits
    padded = torch.zeros(rows, length * per_byte, dtype=torch.uint8, device=code.device)
    padded[:, :n] = code
    slices = padded.view(rows, per_byte, length)
    out = slices[:, 0].clone()
    for t in range(1, per_byte):
        out |= slices[:, t] << t * bits
    return out


def unpack_fields(data: Tensor, bits: int, n: int) -> Tensor:
    """Unpack the result of `pack_fields`: rows x n, uint8."""
    pieces = [data >> t * bits & (1 << bits) - 1 for t in range(8 // bits)]
    return torch.cat(pieces, 1)[:, :n]


def bits_encode(x: Tensor, bits: int) -> Tensor:
    """Pack flat uint8 (or bool) values below 2^bits, where bits is 1, 2 or 4, as one field over the whole tensor."""
    return pack_fields(x.reshape(1, -1).to(torch.uint8), bits)[0]


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """Unpack the result of `bits_encode` to flat uint8 values."""
    return unpack_fields(data.view(1, -1), bits, numel)[0]
