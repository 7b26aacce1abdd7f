"""Bits in words of 64 on the CPU: gathered under a mask, spread under it, written to and read from a stream.

Bit `b` of a word belongs to value `8 * (b % 8) + b // 8` of 64, so that eight bytes become eight bits by shift and or.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from encke.kernels.cpu.scalars import i64, index, inline, jit, u64

ONES = u64(0x0101010101010101)


def has_bit_instructions() -> bool:
    """Whether the processor gathers and spreads bits quickly: x86 with BMI2, but for the first two Zens."""
    quick = binding.get_host_cpu_name() not in ("znver1", "znver2")
    return quick and bool(binding.get_host_cpu_features().get("bmi2"))


def bit_instruction(name: str) -> Any:
    """Return an instruction on a word and a mask as a function for compiled code."""

    @intrinsic
    def instruction(context, word, mask):
        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 2)
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

        return types.uint64(types.uint64, types.uint64), generate

    return instruction


@intrinsic
def count_ones(context, word):
    """Return the number of bits that are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@inline
def get_word(data, at, size):
    """Read an unsigned integer of `size` bytes; eight become one load."""
    word = u64(0)
    for byte in range(size):
        word |= u64(data[index(at) + byte]) << u64(8 * byte)
    return word


@inline
def copy_bytes(source, at, n, out, to):
    """Copy n bytes."""
    for i in range(n):
        out[index(to) + i] = source[index(at) + i]


@jit
def gather_one_by_one(word, mask):
    """Move the bits under a mask to the lowest places, in order."""
    gathered, place = u64(0), u64(1)
    while mask:
        lowest = mask & (~mask + u64(1))
        gathered |= place if word & lowest else u64(0)
        place <<= u64(1)
        mask ^= lowest
    return gathered


@jit
def spread_one_by_one(word, mask):
    """Move the lowest bits to the places under a mask, in order."""
    spread = u64(0)
    while mask:
        lowest = mask & (~mask + u64(1))
        spread |= lowest if word & u64(1) else u64(0)
        word >>= u64(1)
        mask ^= lowest
    return spread


gather = bit_instruction("llvm.x86.bmi.pext.64") if has_bit_instructions() else gather_one_by_one
spread = bit_instruction("llvm.x86.bmi.pdep.64") if has_bit_instructions() else spread_one_by_one


@inline
def get_plane(rows, first, shift):
    """Return one bit of each of 64 bytes, which are eight words of `rows`."""
    word = u64(0)
    for t in range(8):
        word |= (rows[index(first) + t] >> shift & ONES) << u64(t)
    return word


@inline
def add_plane(word, rows, first, shift):
    """Add one bit to each of 64 bytes."""
    for t in range(8):
        rows[index(first) + t] += (word >> u64(t) & ONES) << shift


@inline
def put_bits(stream, at, carry, word, count):
    """Write the lowest bits of a word, which has no others, at bit `at`; return the end and the unfinished word."""
    shift = u64(at) & u64(63)
    low = carry | word << shift
    high = word >> u64(1) >> u64(63) - shift
    place = index(at >> 6)
    stream[place], stream[place + 1] = low, high
    return at + i64(count), high if shift + count >= u64(64) else low


@inline
def get_bits(data, at):
    """Read up to 64 bits from bit `at` of bytes; those behind them come along."""
    place, shift = at >> 3, u64(at) & u64(7)
    return get_word(data, place, 8) >> shift | u64(data[index(place + 8)]) << u64(1) << u64(63) - shift
