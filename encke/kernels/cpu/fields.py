"""Bit fields and small integers on the CPU.

Blocks are read and written in steps of a fixed number of bytes, which vectorise: what runs past an end is overwritten
or ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.cpu.launch import QUICK, run, task_size
from encke.kernels.cpu.scalars import i32, i64, index, inline, jit, u8, u64
from encke.kernels.formats import BLOCK

SLACK = 128  # bytes: how far past its end a block may be written or read
PIECE = 4096  # bytes that stay in the nearest cache
ONES = u64(0x0101010101010101)


@inline
def field_bytes(n, width):
    """Return the bytes that the fields of n values of `width` bits take."""
    rest = ((width & 4) * n + 7 >> 3) + ((width & 2) * n + 7 >> 3) + ((width & 1) * n + 7 >> 3)
    return (width >> 3) * n + rest


@inline
def get_word(data, at, size):
    """Read an unsigned integer of `size` bytes; eight become one load."""
    word = u64(0)
    for byte in range(size):
        word |= u64(data[index(at) + byte]) << u64(8 * byte)
    return word


@inline
def put_word(out, at, word):
    """Write an unsigned integer of eight bytes."""
    for byte in range(8):
        out[index(at) + byte] = u8(word >> u64(8 * byte))


@inline
def take_bytes(v, b, out, at):
    """Move the low byte of each value of a block to out. With less to do the loop is unrolled, not vectorised."""
    for i in range(BLOCK):
        out[index(at) + i] = u8(v[b, i])
        v[b, i] >>= 8


@inline
def put_slices(out, at, rest, length, b, shift):
    """Write one field of b bits of the bytes in rest, always 8 * b bytes long."""
    mask = ONES * u64((1 << b) - 1)
    for j in range(0, 8 * b, 8):
        word = u64(0)
        for t in range(8 // b):
            word |= (get_word(rest, t * length + j, 8) >> u64(shift & 7) & mask) << u64(t * b)
        put_word(out, at + j, word)


@inline
def get_slices(data, at, length, b, shift, pieces):
    """Read the values of one field of b bits, shifted to their place."""
    at, length = index(at), index(length)
    for t in range(8 // b):  # a slice ends where the next one starts, and is overwritten from there
        for j in range(8 * b):
            pieces[t * length + j] = u8((data[at + j] >> t * b & (1 << b) - 1) << shift)


@inline
def clear(pieces):
    """Set the pieces of a block to zero."""
    for i in range(BLOCK):
        pieces[i] = 0


@inline
def join_pieces(p4, p2, p1, v):
    """Combine the bits that three fields hold of each value."""
    for i in range(BLOCK):
        v[i] = p4[i] | p2[i] | p1[i]


@inline
def add_byte(data, at, v):
    """Put a byte below each value."""
    for i in range(BLOCK):
        v[i] = i32(v[i] << 8) | data[index(at) + i]


@inline
def spread_bits(bitmap, flags, places):
    """Spread a bitmap over 64 bytes and count the bits before each, eight values in a word; return how many are set."""
    n = u64(0)
    for t in range(8):
        flags[t] = bitmap >> u64(t) & ONES
        sums = (flags[t] + n) * ONES
        places[t] = sums - flags[t]
        n = sums >> u64(56)
    return i64(n)


@inline
def pack(values, bits, length, start, stop, out):
    """Write bytes start to stop of one field over the values, a few at a time: each slice passes over them once."""
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
    """Read the values in bytes start to stop of one field."""
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
    """Pack flat uint8 (or bool) values below 2^bits, bits 1, 2 or 4: one field over the whole tensor."""
    out = torch.empty((x.numel() * bits + 7) // 8, dtype=torch.uint8)
    size = task_size(x.numel(), 8, QUICK) * bits // 8
    values = x.contiguous().view(torch.uint8).numpy()
    run(pack_task, -(-out.numel() // size), size, values, bits, out.numpy())
    return out


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """Return the flat uint8 values that `bits_encode` stored."""
    out = torch.empty(numel, dtype=torch.uint8)
    size = task_size(numel, 8, QUICK) * bits // 8
    run(unpack_task, -(-data.numel() // size), size, data.numpy(), bits, out.numpy())
    return out
