"""Writing of error-bounded values in Triton: a group is composed in shared memory, then copied to the payload."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import INTERPRETED, float_bits
from encke.kernels.gpu.tiles import count_ones, first_thread, gather, join_bits, moves_of, places_of, valid_bits

# Shared memory, which Triton itself does not offer. A block that is not raw is smaller than its values; zeros are
# written up to 1 KiB behind the others.
SPACE_2, SPACE_4, SPACE_8 = (
    tl.constexpr(f"{{.shared .align 16 .b8 words[{4096 * size + 1024}]; mov.u32 $0, words;}}") for size in (2, 4, 8)
)


@triton.jit
def zero_words(words, at):
    """Set 1024 words in shared memory to zero, from word `at` on."""
    word = at + tl.arange(0, 256) * 4
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {0, 0, 0, 0}; mov.b32 $0, 0;", "=r,r", [words + word * 4],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def copy_words(payload, words, at, units):
    """Copy up to 1024 of so many words from shared memory, from word `at` on."""
    word = at + tl.arange(0, 1024)
    bits = tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [words + word * 4], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(payload.to(tl.pointer_type(tl.int32)) + word, bits, mask=word < units)


@triton.jit
def open_words(payload, units, SIZE: tl.constexpr):
    """Return where a group of so many words is composed, all zero: in shared memory, which the interpreter has not."""
    if INTERPRETED:
        at = 0
        while at < units:
            word = at + tl.arange(0, 1024)
            tl.store(payload.to(tl.pointer_type(tl.int32)) + word, 0, mask=word < units)
            at += 1024
        return payload
    else:
        SPACE: tl.constexpr = SPACE_8 if SIZE == 8 else (SPACE_4 if SIZE == 4 else SPACE_2)
        words = tl.inline_asm_elementwise(SPACE, "=r,r", [units], dtype=tl.int32, is_pure=False, pack=1)
        # Few groups need more.
        zero_words(words, 0)
        at = 1024
        while at < units:
            zero_words(words, at)
            at += 1024
        tl.debug_barrier()
        return words


@triton.jit
def close_words(payload, words, units):
    """Copy what was composed to the payload."""
    if not INTERPRETED:
        tl.debug_barrier()
        copy_words(payload, words, 0, units)
        at = 1024
        while at < units:
            copy_words(payload, words, at, units)
            at += 1024


@triton.jit
def put_words(words, bit, word):
    """Write words that end with their highest bit that is set, from a bit on."""
    # Words are shared by threads, and bits are not: the order does not matter.
    if INTERPRETED:
        there = words.to(tl.pointer_type(tl.int32)) + (bit >> 5)
        moved = word.to(tl.uint64) << (bit & 31).to(tl.uint64)
        low, high = moved.to(tl.int32), (moved >> 32).to(tl.int32)
        tl.atomic_or(there, low, mask=low != 0, sem="relaxed")
        tl.atomic_or(there + 1, high, mask=high != 0, sem="relaxed")
    else:
        # Zeros too: there is room, and a condition would become a branch.
        tl.inline_asm_elementwise(
            "{.reg .b32 a, l, h; shr.u32 a, $2, 3; and.b32 a, a, 0x1FFFFFFC; add.u32 a, a, $1;"
            "shf.l.wrap.b32 l, 0, $3, $2; shf.l.wrap.b32 h, $3, 0, $2;"
            "red.shared.or.b32 [a], l; red.shared.or.b32 [a+4], h; mov.b32 $0, 0;}",
            "=r,r,r,r", [words, bit, word], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def put_number(words, bit, number):
    """Write a number of each block."""
    word = tl.where(first_thread(), number[None, None, :], 0)
    put_words(words, bit[None, None, :] + tl.zeros_like(word), word.to(tl.uint32, bitcast=True))


@triton.jit
def put_chunk(words, bit, n, width, some, planes, mask, moves):
    """Write the first `width` of eight planes under the mask of the moves, n bits apart.

    `some` has a bit for each plane that any block has.
    """
    for p in tl.static_range(8):
        if some >= (1 << p):
            word = gather(planes[p] & tl.where((p < width)[None, None, :], mask, 0), moves)
            put_words(words, bit + (p * n)[None, None, :], word)


@triton.jit
def put_planes(words, bit, n, number, FIRST: tl.constexpr, width, mask):
    """Write bits FIRST to `width` of the numbers under the mask, one plane after the other, n bits apart."""
    moves, most = moves_of(mask), tl.max(width, 0)
    p = tl.full((), FIRST, tl.int32)
    while p < most:
        word = tl.where((p < width)[None, None, :], join_bits((number >> p) & 1) & mask, 0)
        put_words(words, bit + (p * n)[None, None, :], gather(word, moves))
        p += 1


@triton.jit
def put_round(words, bit, alive, more):
    """Write a bit of the unary codes that have not ended."""
    put_words(words, bit, gather(more, moves_of(alive)))


@triton.jit
def put_flags(words, at, mask, left):
    """Write the bits of the values that there are; `left` remain in the group."""
    place = tl.arange(0, 2)[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 64 + tl.zeros_like(mask).to(tl.int32)
    if left < 4096:
        valid = valid_bits(left)
        mask = gather(mask & valid, moves_of(valid))
        place, _ = places_of(count_ones(valid))
    put_words(words, at[None, None, :] + place, mask)


@triton.jit
def put_raw(payload, start, x, count, SIZE: tl.constexpr):
    """Copy the first `count` stored values of each block to byte `start`, byte by byte."""
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
    # The first thread of a block writes its head: a tensor of one number for each block would go to other threads.
    head = head[None, None, :] + tl.zeros((2, 4, 16), tl.int32)
    heads = meta + 16 + groups * 5 + (group * 16 + tl.arange(0, 16)[None, None, :] + tl.zeros_like(head)) * 3
    here = first_thread() & (inside > 0)[None, None, :]
    byte = 0
    while byte < 3:
        tl.store(heads + byte, ((head >> (8 * byte)) & 255).to(tl.uint8), mask=here)
        byte += 1
