"""Kernels of batch norm's backward from a packed input. Codes are decoded in registers, never to memory.

A value is lo + (code - first - 0.5 + d) * step, where d is its random number. Code and d are adjacent in the mantissa
of one fp32 number, 2^bits + code + d, and one fused multiply-add with step and base of the group yields the value,
without a conversion from integers. d keeps 23 - bits of its 24 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.codes import join_scales, scales_at, split_thirds
from encke.kernels.gpu.common import INTERPRETED, narrow, random32, seed_of, widen
from encke.kernels.gpu.places import all_groups, byte_range, group_bytes, group_places, pair_places, quotient
from encke.kernels.gpu.smooth import slope_of


def _passed() -> str:
    """Return PTX that keeps each of four numbers if its code, in a byte of a word, is not zero, and else returns zero.

    It takes two instructions for each number. Operands: four results; three words of codes, of the third bits of 3-bit
    codes, and of bytes that are set where numbers are kept whatever their code; the shifts of the first two words, four
    times each; the mask of a code in each byte, four times; the four numbers.
    """
    lines = [".reg .b32 code, third, one;", ".reg .pred pass;", "shr.b32 code, $4, $7;", "and.b32 code, code, $15;"]
    lines += ["shr.b32 third, $5, $11;", "and.b32 third, third, 0x01010101;", "or.b32 code, code, third;"]
    lines += ["or.b32 code, code, $6;"]
    for i in range(4):
        lines += [f"and.b32 one, code, 0x{0xFF << (8 * i):08X};", "setp.ne.u32 pass, one, 0;"]
        lines += [f"selp.f32 ${i}, ${19 + i}, 0f00000000, pass;"]
    return "{ " + " ".join(lines) + " }"


RELU = tl.constexpr(1)
"""Number of ReLU after a batch norm. The codes of its result gate the gradient; it does not need the norm's result."""
PASSED = tl.constexpr(_passed())
PASSED_REGISTERS = tl.constexpr(",".join(["=&r"] * 4 + ["r"] * 19))


@triton.jit
def code_as_mantissa(byte, third, h, SLICE: tl.constexpr, BITS: tl.constexpr):
    """Return 2^bits + code + d in fp32 for the values of one slice, from the bytes of codes and their hashes.

    `third` holds the third bits of 3-bit codes, four for each byte.
    """
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    KEEP: tl.constexpr = 23 - BITS
    TURN: tl.constexpr = (4 * FIELD * SLICE + 9 + BITS) % 32
    d = h >> TURN
    if SLICE > 0:
        d = (d | (h << (32 - TURN))) & ((1 << KEEP) - 1)
    code = (byte << (KEEP - FIELD * SLICE)) & (((1 << FIELD) - 1) << KEEP)
    if BITS == 3:
        code |= (third << (22 - SLICE)) & (1 << 22)
    return (code | d | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def group_line(lo, step, BITS: tl.constexpr):
    """Return for each group the base in `mantissa * step + base`, and the mantissa below which values are zero."""
    signed = lo < 0
    # Add back the average of the dropped bits of d.
    first = 2.0**BITS + 0.5 - 2.0 ** (BITS - 24)
    base = tl.fma(step, -tl.where(signed, first, first + 1.0), lo)
    return base, tl.where(signed | (step != step), 0.0, 2.0**BITS + 1.0)


@triton.jit
def load_group(codes, first, at_lo, groups, g, mask, DTYPE: tl.constexpr):
    """Load lo and step of the groups `g`, whose codes begin at codes + first. lo is negative where `mask` is false."""
    at = at_lo.to(tl.pointer_type(tl.int16))
    high = tl.load(at + g, mask=mask, other=-0x4080)
    low = tl.load(at + groups + g, mask=mask, other=0)
    return join_scales(high, low, codes + first, mask, DTYPE, False)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """Round x to DTYPE with ROUND, as decoding to memory does; else return x."""
    if ROUND and DTYPE != tl.float32:
        top = 65504.0 if DTYPE == tl.float16 else 3.3895313892515355e38
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -top), top), x)
        return widen(narrow(x, DTYPE), DTYPE)
    else:
        return x


@triton.jit
def column_groups(data, groups, start, c, there, DTYPE: tl.constexpr, BITS: tl.constexpr):
    """Return step, base and zero mark of the groups start + c, repeated for all rows of the tile."""
    LENGTH: tl.constexpr = 16 * BITS
    lo, step = load_group(data + start * LENGTH, c, data + groups * LENGTH, groups, start + c, there, DTYPE)
    base, zero = group_line(lo, step, BITS)
    return step, base, zero


@triton.jit
def column_codes(
    data, start, u, row, c, channels, here, seed_low, seed_high, BITS: tl.constexpr, R: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Return the bytes [u * R, u * R + R) of the groups from `start` on; those of V channels are contiguous.

    Also return the third bits of 3-bit codes, and the hashes of the bytes.
    """
    LENGTH: tl.constexpr = 32 if BITS == 3 else 16 * BITS
    at = start * (16 * BITS) + u * R * channels
    place = row * channels + c
    byte = tl.load(data + at + tl.max_contiguous(place, [1, V]), mask=here, other=0).to(tl.uint32)
    third = byte
    if BITS == 3:
        behind = start * (16 * BITS) + (LENGTH + u * (R // 2)) * channels
        both = tl.load(data + behind + tl.max_contiguous(row // 2 * channels + c, [1, V]), mask=here, other=0)
        third = both.to(tl.uint32) >> (row % 2 * 4).to(tl.uint32)
    return byte, third, random32(at.to(tl.uint32) + place.to(tl.uint32), seed_low, seed_high)


@triton.jit
def through_smooth(v, x, middle, scale, shift, DTYPE: tl.constexpr, GATE: tl.constexpr):
    """Propagate gradients through a smooth activation of the normalised x, which is rounded to DTYPE."""
    y = tl.fma(x - middle, scale, shift)
    return v * slope_of(rounded(y, DTYPE, True), GATE)


@triton.jit
def affine_rows(rows, c, channels, here, GATE: tl.constexpr):
    """Return mean, scale and bias of channels from rows of statistics; unused values without a smooth activation."""
    if GATE > RELU:
        middle = tl.load(rows + c, mask=here, other=0.0)
        scale = tl.load(rows + 2 * channels + c, mask=here, other=0.0)
        return middle, scale, tl.load(rows + 3 * channels + c, mask=here, other=0.0)
    else:
        return here, here, here


@triton.jit
def open_gates(gate, groups, start, c, here, bits, DTYPE: tl.constexpr, GATE: tl.constexpr):
    """Return 255 for the groups start + c without a code for zero, which pass all gradients, and 0 for the others.

    `gate` holds the codes of a ReLU's result, with `bits` bits. The result is unused without a ReLU.
    """
    if GATE == RELU:
        length = bits * 16
        lo, step = load_group(gate + start * length, c, gate + groups * length, groups, start + c, here, DTYPE)
        return tl.where((lo < 0) | (step != step), 255, 0).to(tl.uint8)
    else:
        return here


@triton.jit
def gated(
    v, gate, opened, start, pixel, row, c, channels, here, bits, GATE: tl.constexpr, V: tl.constexpr
):  # fmt: skip
    """Return the gradients of the pixels from `pixel` on. For a ReLU, set them to zero where its codes are zero."""
    if GATE != RELU:
        return v
    else:
        # Fields have 2, 4 or 8 bits; 3-bit codes have 2 there. A field takes 16 bytes of a group for each of its bits.
        turn = (bits > 3).to(tl.int32) + (bits > 4).to(tl.int32)
        field = 2 << turn
        first, slice = pixel & ((32 << turn) - 1), pixel >> (5 + turn)
        at = start * (bits * 16) + first * channels
        byte = tl.load(gate + at + tl.max_contiguous(row * channels + c, [1, V]), mask=here, other=0)
        behind = start * (bits * 16) + (32 + first // 2) * channels
        place = tl.max_contiguous(row // 2 * channels + c, [1, V])
        third = tl.load(gate + behind + place, mask=here & (bits == 3), other=0)
        shift, third_shift = row * 0 + slice * field, row % 2 * 4 + slice
        if INTERPRETED:
            code = (byte >> shift.to(tl.uint8)) & ((1 << field) - 1).to(tl.uint8)
            code |= (third >> third_shift.to(tl.uint8)) & 1
            return tl.where((code | opened) != 0, v, 0.0)
        else:
            marks = row * 0 + ((1 << field) - 1) * 0x01010101
            return tl.inline_asm_elementwise(
                PASSED, PASSED_REGISTERS, [byte, third, opened, shift, third_shift, marks, v], dtype=tl.float32,
                is_pure=True, pack=4,
            )  # fmt: skip


@triton.jit(do_not_specialize=["pixels", "tiles", "splits", "gate_bits", "seed_low", "seed_high"])
def last_reduce_kernel(
    grad, data, gate, mean, sums, seeds, units: tl.int32, pixels: tl.int64, tiles: tl.int32, splits: tl.int32,
    gate_bits: tl.int32, seed_low: tl.int32, seed_high: tl.int32, DTYPE: tl.constexpr, BITS: tl.constexpr,
    UNIT: tl.constexpr, V: tl.constexpr, R: tl.constexpr, CH: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Sum g and g * (x - mean) for each channel over every `splits`-th block of pixels, in channels_last memory.

    A tile has R pixels x CH channels, and a thread has a piece of a row. A group has 128 pixels. With GATE, g is the
    gradient of the result of an activation after the norm: a ReLU, whose codes of `gate_bits` bits are in `gate`, or a
    smooth activation, whose input is recomputed from x and the rows of statistics in `gate`.
    """
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 4 if BITS == 3 else 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    channels = units * UNIT
    first_channel = (tl.program_id(0) % tiles) * CH
    row = tl.arange(0, R)[:, None]
    c = row * 0 + (first_channel + tl.arange(0, CH))[None, :]
    here = c < channels
    place = row * channels + c
    middle = tl.load(mean + c, mask=here, other=0.0)
    own, scale, shift = affine_rows(gate, c, channels, here, GATE)
    blocks = ((pixels + 127) // 128).to(tl.int32)
    groups = blocks.to(tl.int64) * channels
    sum_g = tl.zeros((R, CH), tl.float32)
    sum_gx = tl.zeros((R, CH), tl.float32)
    block = tl.program_id(0) // tiles
    while block < blocks:
        start = block.to(tl.int64) * channels
        step, base, zero = column_groups(data, groups, start, c, here, DTYPE, BITS)
        opened = open_gates(gate, groups, start, c, here, gate_bits, DTYPE, GATE)
        left = tl.minimum(pixels - block.to(tl.int64) * 128, 128).to(tl.int32)
        # Without a level for zero, as before a ReLU, values are linear in codes: apply step and base once per group.
        if ROUND or GATE > RELU or tl.max(tl.max((zero > 0).to(tl.int32), 1), 0) > 0:
            for u in range(LENGTH // R):
                byte, third, h = column_codes(data, start, u, row, c, channels, here, seed_low, seed_high, BITS, R, V)
                for s in tl.static_range(T):
                    pixel = s * LENGTH + u * R
                    there = (row + pixel < left) & here
                    v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
                    v = gated(v, gate, opened, start, pixel, row, c, channels, here, gate_bits, GATE, V)
                    mark = code_as_mantissa(byte, third, h, s, BITS)
                    x = rounded(tl.where(mark < zero, 0.0, tl.fma(mark, step, base)), DTYPE, ROUND)
                    if GATE > RELU:
                        v = through_smooth(v, x, own, scale, shift, DTYPE, GATE)
                    sum_g += v
                    sum_gx = tl.fma(v, x - middle, sum_gx)
        else:
            block_g = tl.zeros((R, CH), tl.float32)
            block_gm = tl.zeros((R, CH), tl.float32)
            for u in range(LENGTH // R):
                byte, third, h = column_codes(data, start, u, row, c, channels, here, seed_low, seed_high, BITS, R, V)
                for s in tl.static_range(T):
                    pixel = s * LENGTH + u * R
                    there = (row + pixel < left) & here
                    v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
                    v = gated(v, gate, opened, start, pixel, row, c, channels, here, gate_bits, GATE, V)
                    block_g += v
                    block_gm = tl.fma(v, code_as_mantissa(byte, third, h, s, BITS), block_gm)
            sum_g += block_g
            sum_gx = tl.fma(block_gm, step, tl.fma(block_g, base - middle, sum_gx))
        block += splits
    c = first_channel + tl.arange(0, CH)
    out = sums + (tl.program_id(0) // tiles).to(tl.int64) * 2 * channels + c
    tl.store(out, tl.sum(sum_g, 0), mask=c < channels)
    tl.store(out + channels, tl.sum(sum_gx, 0), mask=c < channels)


@triton.jit(do_not_specialize=["pixels", "tiles", "gate_bits", "seed_low", "seed_high"])
def last_apply_kernel(
    grad, data, gate, line, out, seeds, units: tl.int32, pixels: tl.int64, tiles: tl.int32, gate_bits: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, DTYPE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, CH: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Write g * k1 + x * k2 + k3 for one block of 128 pixels and CH channels; see `last_reduce_kernel` for GATE."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 4 if BITS == 3 else 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    channels = units * UNIT
    row = tl.arange(0, R)[:, None]
    c = row * 0 + ((tl.program_id(0) % tiles) * CH + tl.arange(0, CH))[None, :]
    here = c < channels
    place = row * channels + c
    block = (tl.program_id(0) // tiles).to(tl.int64)
    k1 = tl.load(line + c, mask=here, other=0.0)
    k2 = tl.load(line + channels + c, mask=here, other=0.0)
    k3 = tl.load(line + 2 * channels + c, mask=here, other=0.0)
    own, scale, bias = affine_rows(gate, c, channels, here, GATE)
    start = block * channels
    groups = (pixels + 127) // 128 * channels
    step, base, zero = column_groups(data, groups, start, c, here, DTYPE, BITS)
    opened = open_gates(gate, groups, start, c, here, gate_bits, DTYPE, GATE)
    slope, shift = step * k2, tl.fma(base, k2, k3)
    left = tl.minimum(pixels - block * 128, 128).to(tl.int32)
    for u in range(LENGTH // R):
        byte, third, h = column_codes(data, start, u, row, c, channels, here, seed_low, seed_high, BITS, R, V)
        for s in tl.static_range(T):
            pixel = s * LENGTH + u * R
            there = (row + pixel < left) & here
            v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
            v = gated(v, gate, opened, start, pixel, row, c, channels, here, gate_bits, GATE, V)
            mark = code_as_mantissa(byte, third, h, s, BITS)
            if ROUND or GATE > RELU:
                x = rounded(tl.where(mark < zero, 0.0, tl.fma(mark, step, base)), DTYPE, ROUND)
                if GATE > RELU:
                    v = through_smooth(v, x, own, scale, bias, DTYPE, GATE)
                rest = tl.fma(x, k2, k3)
            else:
                rest = tl.where(mark < zero, k3, tl.fma(mark, slope, shift))
            value = narrow(tl.fma(v, k1, rest), DTYPE)
            tl.store(out + start * 128 + pixel * channels + place, value, mask=there)


@triton.jit
def of_group(v):
    """Broadcast one number for each group to a tile of bytes."""
    return v[None, :, None, None]


@triton.jit
def group_sum(v):
    """Return the sum of each group of a tile of bytes."""
    return tl.sum(tl.sum(tl.sum(v, 3), 2), 0)


@triton.jit
def exists(j, s, length, valid, WHOLE: tl.constexpr):
    """Return which values of slice s exist in groups with `valid` values."""
    if WHOLE:
        return s * length + j < valid
    else:
        return (j < length) & (s * length + j < valid)


@triton.jit
def group_codes(
    data, g, j, length, seed_low, seed_high, BITS: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Return the bytes `j` of groups, the third bits of 3-bit codes, and the hashes of the bytes."""
    codes = g.to(tl.int64) * group_bytes(length, BITS, UNIT)
    byte = tl.load(data + (of_group(codes) + j), mask=(j >= 0) if WHOLE else (j < length), other=0).to(tl.uint32)
    third = byte
    if BITS == 3:
        both = tl.load(data + (of_group(codes) + pair_places(length, LENGTH, THREADS, LANES)))
        third = split_thirds(both, byte.shape)
    return byte, third, random32(of_group(codes).to(tl.uint32) + j.to(tl.uint32), seed_low, seed_high)


@triton.jit(do_not_specialize=[
    "full", "rest", "rows", "magic", "shift", "length", "channels", "channel_magic", "channel_shift", "seed_low",
    "seed_high",
])  # fmt: skip
def plane_reduce_kernel(
    grad, data, mean, sums, seeds, full: tl.int32, rest: tl.int32, rows: tl.int32, magic: tl.int32, shift: tl.int32,
    length: tl.int32, channels: tl.int32, channel_magic: tl.int32, channel_shift: tl.int32, seed_low: tl.int32,
    seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Sum g and g * (x - mean) in each of G groups in NCHW memory, where groups stay within planes; see places.py."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 4 if BITS == 3 else 8 // BITS
    length = LENGTH if WHOLE else length // UNIT * UNIT
    plane, g, start, valid = group_places(full, rest, rows, magic, shift, length, T, G, UNIT)
    valid = valid // UNIT * UNIT  # no change, as there are several planes: tells the compiler the divisibility
    c = plane - quotient(plane, channel_magic, channel_shift) * channels
    j = byte_range(LENGTH, THREADS, LANES)
    groups, here = all_groups(full, rest, rows), tl.full((G,), True, tl.int1)
    byte, third, h = group_codes(data, g, j, length, seed_low, seed_high, BITS, LENGTH, WHOLE, THREADS, LANES, UNIT)
    at_lo = scales_at(data, groups, group_bytes(length, BITS, UNIT))
    lo, step = load_group(data, g.to(tl.int64) * group_bytes(length, BITS, UNIT), at_lo, groups, g, here, DTYPE)
    base, zero = group_line(lo, step, BITS)
    sum_g = tl.zeros(byte.shape, tl.float32)
    sum_gx = tl.zeros(byte.shape, tl.float32)
    at = grad + (of_group(start) + j)
    if ROUND or tl.max((zero > 0).to(tl.int32), 0) > 0:
        for s in tl.static_range(T):
            v = widen(tl.load(at + s * length, mask=exists(j, s, length, valid, WHOLE), other=0), DTYPE)
            mark = code_as_mantissa(byte, third, h, s, BITS)
            x = tl.where(mark < of_group(zero), 0.0, tl.fma(mark, of_group(step), of_group(base)))
            sum_g += v
            sum_gx = tl.fma(v, rounded(x, DTYPE, ROUND), sum_gx)
        group_g, group_gx = group_sum(sum_g), group_sum(sum_gx)
    else:
        # Without a level for zero, values are linear in codes: apply step and base once per group.
        for s in tl.static_range(T):
            v = widen(tl.load(at + s * length, mask=exists(j, s, length, valid, WHOLE), other=0), DTYPE)
            sum_g += v
            sum_gx = tl.fma(v, code_as_mantissa(byte, third, h, s, BITS), sum_gx)
        group_g = group_sum(sum_g)
        group_gx = tl.fma(group_sum(sum_gx), step, group_g * base)
    middle = tl.load(mean + c)
    tl.store(sums + g, group_g)
    tl.store(sums + groups + g, tl.fma(group_g, -middle, group_gx))


@triton.jit(do_not_specialize=["samples", "channels", "count", "groups", "splits"])
def gather_kernel(
    workspace, sums, samples: tl.int32, channels: tl.int32, count: tl.int32, groups: tl.int64, splits: tl.int32,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up the sums of `plane_reduce_kernel` for one channel over every `splits`-th bundle of ROWS planes."""
    c = tl.program_id(0) % channels
    split = tl.program_id(0) // channels
    sum_g = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_gx = tl.zeros((ROWS, WIDTH), tl.float32)
    bundle = split
    while bundle * ROWS < samples:
        n = bundle * ROWS + tl.arange(0, ROWS)[:, None]
        first = (n.to(tl.int64) * channels + c) * count
        column = 0
        while column < count:
            j = column + tl.arange(0, WIDTH)[None, :]
            there = (j < count) & (n < samples)
            sum_g += tl.load(workspace + first + j, mask=there, other=0.0)
            sum_gx += tl.load(workspace + groups + first + j, mask=there, other=0.0)
            column += WIDTH
        bundle += splits
    at = sums + split * 2 * channels + c
    tl.store(at, tl.sum(tl.sum(sum_g, 1), 0))
    tl.store(at + channels, tl.sum(tl.sum(sum_gx, 1), 0))


@triton.jit(do_not_specialize=[
    "full", "rest", "rows", "magic", "shift", "length", "channels", "channel_magic", "channel_shift", "seed_low",
    "seed_high",
])  # fmt: skip
def plane_apply_kernel(
    grad, data, line, out, seeds, full: tl.int32, rest: tl.int32, rows: tl.int32, magic: tl.int32, shift: tl.int32,
    length: tl.int32, channels: tl.int32, channel_magic: tl.int32, channel_shift: tl.int32, seed_low: tl.int32,
    seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr, WHOLE: tl.constexpr,
    THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Write g * k1 + x * k2 + k3 for G groups in NCHW memory."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 4 if BITS == 3 else 8 // BITS
    length = LENGTH if WHOLE else length // UNIT * UNIT
    plane, g, start, valid = group_places(full, rest, rows, magic, shift, length, T, G, UNIT)
    valid = valid // UNIT * UNIT  # no change, as there are several planes: tells the compiler the divisibility
    c = plane - quotient(plane, channel_magic, channel_shift) * channels
    j = byte_range(LENGTH, THREADS, LANES)
    groups, here = all_groups(full, rest, rows), tl.full((G,), True, tl.int1)
    byte, third, h = group_codes(data, g, j, length, seed_low, seed_high, BITS, LENGTH, WHOLE, THREADS, LANES, UNIT)
    at_lo = scales_at(data, groups, group_bytes(length, BITS, UNIT))
    lo, step = load_group(data, g.to(tl.int64) * group_bytes(length, BITS, UNIT), at_lo, groups, g, here, DTYPE)
    base, zero = group_line(lo, step, BITS)
    k1, k2 = of_group(tl.load(line + c)), of_group(tl.load(line + channels + c))
    k3 = of_group(tl.load(line + 2 * channels + c))
    at = of_group(start) + j
    for s in tl.static_range(T):
        there = exists(j, s, length, valid, WHOLE)
        v = widen(tl.load(grad + at + s * length, mask=there, other=0), DTYPE)
        mark = code_as_mantissa(byte, third, h, s, BITS)
        x = tl.where(mark < of_group(zero), 0.0, tl.fma(mark, of_group(step), of_group(base)))
        value = narrow(tl.fma(v, k1, tl.fma(rounded(x, DTYPE, ROUND), k2, k3)), DTYPE)
        tl.store(out + at + s * length, value, mask=there)


@triton.jit(do_not_specialize=["splits", "channels"])
def finish_kernel(
    sums, mean, invstd, weight, grad_weight, grad_bias, line, splits: tl.int32, channels: tl.int32, share: tl.float32,
    AFFINE: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr, TOGETHER: tl.constexpr,
    BELOW: tl.constexpr,
):  # fmt: skip
    """Write the gradients of weight and bias, and k1, k2, k3, of each channel.

    `share` is 1 / number of values of a channel. TOGETHER: the gradients are two more rows of `line`. BELOW: `invstd`
    is the second row of `mean`.
    """
    if BELOW:
        invstd = mean + channels
    if TOGETHER:
        grad_weight, grad_bias = line + 3 * channels, line + 4 * channels
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    here = c < channels
    row = tl.arange(0, ROWS)[:, None]
    total_g = tl.zeros((ROWS, CH), tl.float32)
    total_gx = tl.zeros((ROWS, CH), tl.float32)
    start = 0
    while start < splits:
        at = sums + (start + row) * 2 * channels + c[None, :]
        there = (start + row < splits) & here[None, :]
        total_g += tl.load(at, mask=there, other=0.0)
        total_gx += tl.load(at + channels, mask=there, other=0.0)
        start += ROWS
    sum_g, sum_gx = tl.sum(total_g, 0), tl.sum(total_gx, 0)
    middle = tl.load(mean + c, mask=here, other=0.0)
    inverse = tl.load(invstd + c, mask=here, other=0.0)
    k1 = inverse
    if AFFINE:
        k1 = inverse * widen(tl.load(weight + c, mask=here, other=0), WEIGHT)
        tl.store(grad_weight + c, narrow(sum_gx * inverse, WEIGHT), mask=here)
        tl.store(grad_bias + c, narrow(sum_g, WEIGHT), mask=here)
    k2 = -k1 * inverse * inverse * (sum_gx * share)
    tl.store(line + c, k1, mask=here)
    tl.store(line + channels + c, k2, mask=here)
    tl.store(line + 2 * channels + c, -k1 * (sum_g * share) - middle * k2, mask=here)
