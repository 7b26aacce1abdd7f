"""Bit fields on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.cpu.launch import QUICK, run, task_size
from encke.kernels.cpu.scalars import inline, jit, u8

PIECE = 4096  # bytes that stay in the L1 cache


@inline
def pack(values, bits, length, start, stop, out):
    """Pack the values into the bytes [start, stop) of one field, PIECE bytes at a time, slice by slice."""
    for first in range(start, stop, PIECE):
        end = min(first + PIECE, stop)
        to, slice_ = out[first:end], values[first:end]
        for j in range(to.size):
            to[j] = slice_[j]
        for t in range(1, 8 // bits):
            slice_ = values[t * length + first : t * length + end]
            for j in range(slice_.size):
                to[j] |= u8(slice_[j] << t * bits)


@inline
def unpack(data, bits, length, start, stop, out):
    """Unpack the values in the bytes [start, stop) of one field."""
    codes = data[start:stop]
    for t in range(8 // bits):
        to = out[t * length + start : t * length + stop]
        for j in range(to.size):
            to[j] = codes[j] >> t * bits & (1 << bits) - 1


@jit
def pack_task(task, size, values, bits, out):
    """Pack the bytes of a task."""
    pack(values, bits, out.size, task * size, min((task + 1) * size, out.size), out)


@jit
def unpack_task(task, size, data, bits, out):
    """Unpack the bytes of a task."""
    unpack(data, bits, data.size, task * size, min((task + 1) * size, data.size), out)


def bits_encode(x: Tensor, bits: int) -> Tensor:
    """Pack flat uint8 (or bool) values below 2^bits, where bits is 1, 2 or 4, as one field over the whole tensor."""
    out = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8)
    size = task_size(x.numel(), 8, QUICK) * bits // 8
    values = x.contiguous().view(torch.uint8).numpy()
    run(pack_task, -(-out.numel() // size), size, values, bits, out.numpy())
    return out


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """Unpack the result of `bits_encode` to flat uint8 values."""
    out = torch.empty(numel, dtype=torch.uint8)
    size = task_size(numel, 8, QUICK) * bits // 8
    run(unpack_task, -(-data.numel() // size), size, data.numpy(), bits, out.numpy())
    return out
