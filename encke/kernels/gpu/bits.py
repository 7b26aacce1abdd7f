"""Packing of masks and small integers on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.gpu.launch import launch_kernel

SIZE = 4096  # bytes that a program packs


@triton.jit
def bits_encode_kernel(x, data, numel: tl.int64, length: tl.int64, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Write SIZE packed bytes."""
    T: tl.constexpr = 8 // BITS
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.zeros((SIZE,), tl.uint8)
    for t in tl.static_range(T):
        at = j + t * length
        byte |= tl.load(x + at, mask=(j < length) & (at < numel), other=0) << (t * BITS)
    tl.store(data + j, byte, mask=j < length)


@triton.jit
def bits_decode_kernel(data, out, numel: tl.int64, length: tl.int64, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Unpack SIZE packed bytes."""
    T: tl.constexpr = 8 // BITS
    j = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    byte = tl.load(data + j, mask=j < length, other=0)
    for t in tl.static_range(T):
        at = j + t * length
        tl.store(out + at, (byte >> (t * BITS)) & ((1 << BITS) - 1), mask=(j < length) & (at < numel))


def bits_encode(x: Tensor, bits: int) -> Tensor:
    """Pack flat uint8 (or bool) values below 2^bits, where bits is 1, 2 or 4, as one field over the whole tensor."""
    numel = x.numel()
    length = (numel * bits + 7) // 8
    data = torch.empty(length, dtype=torch.uint8, device=x.device)
    if numel:
        launch_kernel(bits_encode_kernel, -(-length // SIZE), (x, data), (numel, length), (bits, SIZE), 8)
    return data


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """Unpack the result of `bits_encode` to flat uint8 values."""
    out = torch.empty(numel, dtype=torch.uint8, device=data.device)
    if numel:
        length = data.numel()
        launch_kernel(bits_decode_kernel, -(-length // SIZE), (data, out), (numel, length), (bits, SIZE), 8)
    return out
