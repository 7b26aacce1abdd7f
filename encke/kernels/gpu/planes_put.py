"""Output of the error-bounded encoder in Triton: planes, flags, numbers, raw values and metadata of a group."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import float_bits
from encke.kernels.gpu.shared import put_words
from encke.kernels.gpu.tiles import (
    count_ones,
    first_thread,
    full_places,
    gather,
    join_bits,
    moves_of,
    places_of,
    valid_bits,
)


@triton.jit
def put_number(words, bit, number):
    """Write one 32-bit number for each block."""
    word = tl.where(first_thread(), number[None, None, :], 0)
    put_words(words, bit[None, None, :] + tl.zeros_like(word), word.to(tl.uint32, bitcast=True))


@triton.jit
def put_chunk(words, bit, n, width, some, planes, mask, moves, dense):
    """Write the first `width` of eight planes, n bits apart; keep the bits under the mask of the moves.

    `some` has a bit for each plane that any block has. `dense`: the mask of each block has all bits or none.
    """
    for p in tl.static_range(8):
        if some >= (1 << p):
            word = planes[p] & tl.where((p < width)[None, None, :], mask, 0)
            if not dense:
                word = gather(word, moves)
            put_words(words, bit + (p * n)[None, None, :], word)


@triton.jit
def put_planes(words, bit, n, number, FIRST: tl.constexpr, width, mask):
    """Write the bits from FIRST to `width` of the numbers under the mask, plane by plane, n bits apart."""
    moves, most = moves_of(mask), tl.max(width, 0)
    p = tl.full((), FIRST, tl.int32)
    while p < most:
        word = tl.where((p < width)[None, None, :], join_bits((number >> p) & 1) & mask, 0)
        put_words(words, bit + (p * n)[None, None, :], gather(word, moves))
        p += 1


@triton.jit
def put_round(words, bit, alive, more):
    """Write the next bit of the unary codes that have not ended."""
    put_words(words, bit, gather(more, moves_of(alive)))


@triton.jit
def put_flags(words, at, mask, left):
    """Write one bit for each existing value; `left` values remain in the group."""
    place = full_places()
    if left < 4096:
        valid = valid_bits(left)
        mask = gather(mask & valid, moves_of(valid))
        place, _ = places_of(count_ones(valid))
    put_words(words, at[None, None, :] + place, mask)


@triton.jit
def put_raw(payload, start, x, count, SIZE: tl.constexpr):
    """Copy the first `count` stored values of each block to the payload from byte `start` on, byte by byte."""
    first = 0
    while first < 256:
        i = (first + tl.arange(0, 16))[None, :]
        here = i < count[:, None]
        bits = float_bits(tl.load(x + (tl.arange(0, 16) * 256)[:, None] + i, mask=here, other=0))
        part = 0
        while part < SIZE:
            tl.store(payload + start[:, None] + i * SIZE + part, ((bits >> (8 * part)) & 255).to(tl.uint8), mask=here)
            part += 1
        first += 16


@triton.jit
def put_tables(meta, group, groups, offset, code, head, inside):
    """Write the metadata of a group."""
    tl.store((meta + 16).to(tl.pointer_type(tl.int32)) + group, offset.to(tl.int32))
    tl.store(meta + 16 + groups * 4 + group, code.to(tl.uint8))
    # The first thread of a block writes its head: a tensor of one number for each block would be in other threads.
    head = head[None, None, :] + tl.zeros((2, 4, 16), tl.int32)
    heads = meta + 16 + groups * 5 + (group * 16 + tl.arange(0, 16)[None, None, :] + tl.zeros_like(head)) * 3
    here = first_thread() & (inside > 0)[None, None, :]
    byte = 0
    while byte < 3:
        tl.store(heads + byte, ((head >> (8 * byte)) & 255).to(tl.uint8), mask=here)
        byte += 1
