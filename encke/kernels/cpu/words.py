"""Bits in 64-bit words on the CPU: gather and spread under a mask, write to and read from a stream.

Bit `b` of a word belongs to value `8 * (b % 8) + b // 8` of 64, because threads of a GPU join their bytes by shift and
or. Here bytes are permuted to the order of the bits first; a plane is then a comparison of 64 bytes.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from encke.kernels.cpu.scalars import i64, index, inline, jit, u64
from encke.kernels.formats import PLANE_BLOCK, PLANE_WORD


def has_bit_instructions() -> bool:
    """Return whether the processor has fast gather and spread of bits: x86 with BMI2, except Zen 1 and Zen 2."""
    quick = binding.get_host_cpu_name() not in ("znver1", "znver2")
    return quick and bool(binding.get_host_cpu_features().get("bmi2"))


def bit_instruction(name: str) -> Any:
    """Return a function for compiled code that runs one instruction on a word and a mask."""

    @intrinsic
    def instruction(context, word, mask):
        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)] * 2)
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)

        return types.uint64(types.uint64, types.uint64), generate

    return instruction


@intrinsic
def count_ones(context, word):
    """Return the number of set bits."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


@inline
def get_word(data, at, size):
    """Read an unsigned integer of `size` bytes; eight bytes become one load."""
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
    """Move the bits under a mask to the lowest positions, in order."""
    gathered, place = u64(0), u64(1)
    while mask:
        lowest = mask & (~mask + u64(1))
        gathered |= place if word & lowest else u64(0)
        place <<= u64(1)
        mask ^= lowest
    return gathered


@jit
def spread_one_by_one(word, mask):
    """Move the lowest bits to the positions under a mask, in order."""
    spread = u64(0)
    while mask:
        lowest = mask & (~mask + u64(1))
        spread |= lowest if word & u64(1) else u64(0)
        word >>= u64(1)
        mask ^= lowest
    return spread


gather = bit_instruction("llvm.x86.bmi.pext.64") if has_bit_instructions() else gather_one_by_one
spread = bit_instruction("llvm.x86.bmi.pdep.64") if has_bit_instructions() else spread_one_by_one


def bytes_at(context, builder, kind, rows, first):
    """Return a pointer to 64 bytes in an array of words."""
    place = builder.gep(context.make_array(kind)(context, builder, rows).data, [first])
    return builder.bitcast(place, ir.VectorType(ir.IntType(8), PLANE_WORD).as_pointer())


def repeated(builder, shift):
    """Return a vector of 64 bytes in which bit `shift` is set."""
    kind = ir.VectorType(ir.IntType(8), PLANE_WORD)
    bit = builder.shl(ir.Constant(ir.IntType(8), 1), builder.trunc(shift, ir.IntType(8)))
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), bit, ir.Constant(ir.IntType(32), 0))
    places = ir.Constant(ir.VectorType(ir.IntType(32), PLANE_WORD), [0] * PLANE_WORD)
    return builder.shuffle_vector(one, one, places)


@intrinsic
def turn_bytes(context, rows, first):
    """Permute 64 bytes from the order of the values to that of the bits, or back: transpose 8 x 8 bytes."""

    def generate(context, builder, signature, arguments):
        place = bytes_at(context, builder, signature.args[0], *arguments)
        order = [8 * (b % 8) + b // 8 for b in range(PLANE_WORD)]
        value = builder.load(place, align=8)
        places = ir.Constant(ir.VectorType(ir.IntType(32), PLANE_WORD), order)
        builder.store(builder.shuffle_vector(value, value, places), place, align=8)
        return context.get_dummy_value()

    return types.void(rows, first), generate


@intrinsic
def get_plane(context, rows, first, shift):
    """Return one bit of each of 64 bytes, given as eight words of `rows` in the order of the bits."""

    def generate(context, builder, signature, arguments):
        value = builder.load(bytes_at(context, builder, signature.args[0], *arguments[:2]), align=8)
        chosen = builder.and_(value, repeated(builder, arguments[2]))
        return builder.bitcast(builder.icmp_unsigned("!=", chosen, ir.Constant(chosen.type, None)), ir.IntType(64))

    return types.uint64(rows, first, types.uint64), generate


@intrinsic
def add_plane(context, word, rows, first, shift):
    """Add one bit to each of 64 bytes, in the order of the bits."""

    def generate(context, builder, signature, arguments):
        place = bytes_at(context, builder, signature.args[1], *arguments[1:3])
        bits = builder.bitcast(arguments[0], ir.VectorType(ir.IntType(1), PLANE_WORD))
        value = repeated(builder, arguments[3])
        added = builder.select(bits, value, ir.Constant(value.type, None))
        builder.store(builder.add(builder.load(place, align=8), added), place, align=8)
        return context.get_dummy_value()

    return types.void(types.uint64, rows, first, types.uint64), generate


@inline
def turn_block(rows):
    """Permute the bytes of a block from the order of the values to that of the bits, or back."""
    for w in range(PLANE_BLOCK // PLANE_WORD):
        turn_bytes(rows, 8 * w)


@inline
def put_bits(stream, at, carry, word, count):
    """Write the lowest bits of a word, which has no others, from bit `at` on; return the end and the partial word."""
    shift = u64(at) & u64(63)
    low = carry | word << shift
    high = word >> u64(1) >> u64(63) - shift
    place = index(at >> 6)
    stream[place], stream[place + 1] = low, high
    return at + i64(count), high if shift + count >= u64(64) else low


@inline
def get_bits(data, at):
    """Read 64 bits from bit `at` of bytes on."""
    place, shift = at >> 3, u64(at) & u64(7)
    return get_word(data, place, 8) >> shift | u64(data[index(place + 8)]) << u64(1) << u64(63) - shift
