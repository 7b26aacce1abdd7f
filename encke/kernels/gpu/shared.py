"""Payload of a group of error-bounded values in shared memory, in which its bits are written and read.

Triton does not expose shared memory, so this is inline PTX. The interpreter has none, and accesses the payload itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import INTERPRETED

# A block that is not raw is smaller than its values. Zeros are written, and bits are read, up to 1 KiB after the last.
SPACE_2, SPACE_4, SPACE_8 = (
    tl.constexpr(f"{{.shared .align 16 .b8 words[{4096 * size + 1024}]; mov.u32 $0, words;}}") for size in (2, 4, 8)
)
USUAL = tl.constexpr(1024)  # words that are processed without a loop; few groups have more


@triton.jit
def shared_words(units, SIZE: tl.constexpr):
    """Return the address of shared memory for a group of values of SIZE bytes."""
    SPACE: tl.constexpr = SPACE_8 if SIZE == 8 else (SPACE_4 if SIZE == 4 else SPACE_2)
    return tl.inline_asm_elementwise(SPACE, "=r,r", [units], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def zero_words(words, at):
    """Set USUAL words to zero, from word `at` on."""
    word = at + tl.arange(0, USUAL // 4) * 4
    tl.inline_asm_elementwise(
        "st.shared.v4.b32 [$1], {0, 0, 0, 0}; mov.b32 $0, 0;", "=r,r", [words + word * 4],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def save_words(payload, words, at, units):
    """Copy up to USUAL of `units` words to the payload, from word `at` on."""
    word = at + tl.arange(0, USUAL)
    bits = tl.inline_asm_elementwise(
        "ld.shared.b32 $0, [$1];", "=r,r", [words + word * 4], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.store(payload.to(tl.pointer_type(tl.int32)) + word, bits, mask=word < units)


@triton.jit
def fetch_words(payload, words, at, units):
    """Copy up to USUAL of `units` words from the payload, from word `at` on."""
    word = at + tl.arange(0, USUAL)
    bits = tl.load(payload.to(tl.pointer_type(tl.int32)) + word, mask=word < units, other=0)
    tl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, 0;", "=r,r,r", [words + word * 4, bits],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def reserve(counter, units):
    """Add to a counter and return its previous value, in one thread, so that no thread waits before `reserved_of`."""
    thread = tl.arange(0, 128)
    return tl.atomic_add(counter + thread * 0, units.to(tl.int64) + thread * 0, mask=thread == 0, sem="relaxed")


@triton.jit
def reserved_of(reservation):
    """Broadcast the result of `reserve` to all threads. Offsets have 32 bits."""
    return tl.sum(tl.where(tl.arange(0, 128) == 0, tl.minimum(reservation, 0xFFFFFFFF), 0).to(tl.uint32), 0).to(
        tl.int64
    )


@triton.jit
def open_words(payload, reservation, units, capacity, SIZE: tl.constexpr):
    """Return the address at which to compose a group of `units` words, all zero.

    It is null in the interpreter if the payload has no space for the group.
    """
    if INTERPRETED:
        reserved = reserved_of(reservation)
        fits = (reserved + units) * 4 <= capacity
        at = 0
        while at < units:
            word = at + tl.arange(0, USUAL)
            tl.store((payload + reserved * 4).to(tl.pointer_type(tl.int32)) + word, 0, mask=fits & (word < units))
            at += USUAL
        return tl.where(fits, (payload + reserved * 4).to(tl.int64), 0).to(tl.pointer_type(tl.uint8))
    else:
        words = shared_words(units, SIZE)
        zero_words(words, 0)
        at = tl.full((), USUAL, tl.int32)
        while at < units:
            zero_words(words, at)
            at += USUAL
        tl.debug_barrier()
        return words


@triton.jit
def close_words(payload, words, units):
    """Copy the composed words to the payload."""
    if not INTERPRETED:
        tl.debug_barrier()
        save_words(payload, words, 0, units)
        at = tl.full((), USUAL, tl.int32)
        while at < units:
            save_words(payload, words, at, units)
            at += USUAL


@triton.jit
def read_words(payload, units, SIZE: tl.constexpr):
    """Return the address from which to read the bits of a group of `units` words.

    This is the payload itself for fp64: there is not enough shared memory besides what Triton itself needs.
    """
    if INTERPRETED or SIZE == 8:
        return payload
    else:
        words = shared_words(units, SIZE)
        fetch_words(payload, words, 0, units)
        at = tl.full((), USUAL, tl.int32)
        while at < units:
            fetch_words(payload, words, at, units)
            at += USUAL
        tl.debug_barrier()
        return words


@triton.jit
def put_words(words, bit, word):
    """Write words, which end at their highest set bit, from bit `bit` on."""
    # Threads share words but not bits, so the order does not matter.
    if INTERPRETED:
        there = words.to(tl.pointer_type(tl.int32)) + (bit >> 5)
        moved = word.to(tl.uint64) << (bit & 31).to(tl.uint64)
        low, high, fits = moved.to(tl.int32), (moved >> 32).to(tl.int32), words.to(tl.int64) != 0
        tl.atomic_or(there, low, mask=fits & (low != 0), sem="relaxed")
        tl.atomic_or(there + 1, high, mask=fits & (high != 0), sem="relaxed")
    else:
        # Write zeros too: there is room, and a condition would become a branch.
        tl.inline_asm_elementwise(
            "{.reg .b32 a, l, h; shr.u32 a, $2, 3; and.b32 a, a, 0x1FFFFFFC; add.u32 a, a, $1;"
            "shf.l.wrap.b32 l, 0, $3, $2; shf.l.wrap.b32 h, $3, 0, $2;"
            "red.shared.or.b32 [a], l; red.shared.or.b32 [a+4], h; mov.b32 $0, 0;}",
            "=r,r,r,r", [words, bit, word], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def load_words(payload, bit, count):
    """Read `count` bits of a payload in global memory from bit `bit` on. Higher bits of the result are arbitrary."""
    there = payload.to(tl.pointer_type(tl.uint32)) + (bit >> 5)
    low = tl.load(there, mask=count > 0, other=0).to(tl.uint64)
    high = tl.load(there + 1, mask=(bit & 31) + count > 32, other=0).to(tl.uint64)
    return ((low | (high << 32)) >> (bit & 31).to(tl.uint64)).to(tl.uint32)


@triton.jit
def get_words(words, bit, count):
    """Read `count` bits from bit `bit` on. Higher bits of the result are arbitrary."""
    if INTERPRETED:
        return load_words(words, bit, count)
    elif words.dtype.is_ptr():
        # Inline PTX, because Triton would search for the best layout of each of its own loads, for half a minute.
        return tl.inline_asm_elementwise(
            "{.reg .pred p, q; .reg .b32 l, h; setp.gt.s32 p, $3, 0; setp.gt.s32 q, $4, 32; mov.b32 l, 0; mov.b32 h, 0;"
            "@p ld.global.nc.b32 l, [$1]; @q ld.global.nc.b32 h, [$1+4]; shf.r.wrap.b32 $0, l, h, $2;}",
            "=r,l,r,r,r",
            [(words.to(tl.pointer_type(tl.uint32)) + (bit >> 5)).to(tl.int64), bit, count, (bit & 31) + count],
            dtype=tl.uint32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{.reg .b32 a, l, h; shr.u32 a, $2, 3; and.b32 a, a, 0x1FFFFFFC; add.u32 a, a, $1;"
            "ld.shared.b32 l, [a]; ld.shared.b32 h, [a+4]; shf.r.wrap.b32 $0, l, h, $2;}",
            "=r,r,r", [words, bit], dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip
