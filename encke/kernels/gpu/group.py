"""Fixed-rate kernels in Triton for groups of adjacent values: encode, decode and gate. See places.py."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.codes import (
    below_code,
    bits_of,
    codes_of,
    first_values,
    fixed_codes,
    flags_of,
    gated,
    group_max,
    group_min,
    inverted_random32,
    join_thirds,
    load_scales,
    of_group,
    origin_of,
    scales_at,
    signed_bits,
    slices_of,
    split_thirds,
    steps_of,
    store_scales,
    values_of,
)
from encke.kernels.gpu.common import random32, seed_of, widen
from encke.kernels.gpu.places import all_groups, byte_places, group_bytes, group_places, pair_places


@triton.jit
def load_codes(
    data, codes, j, length, BITS: tl.constexpr, LENGTH: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Load the bytes `j` of groups whose codes begin at `codes`, and the third bits of these bytes."""
    packed = tl.load(data + (codes[None, :, None, None] + j))
    third = packed
    if BITS == 3:
        third = tl.load(data + (codes[None, :, None, None] + pair_places(length, LENGTH, THREADS, LANES)))
        third = split_thirds(third, packed.shape)
    return packed, third


@triton.jit(do_not_specialize=["full", "rest", "rows", "magic", "shift", "length", "seed_low", "seed_high"])
def gq_encode_kernel(
    x, data, seeds, full: tl.int32, rest: tl.int32, rows: tl.int32, magic: tl.int32, shift: tl.int32, length: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr,
    WHOLE: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Encode G groups. WHOLE: the field of a group has LENGTH bytes."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    length = LENGTH if WHOLE else length // UNIT * UNIT
    _, g, start, valid = group_places(full, rest, rows, magic, shift, length, T, G, UNIT)
    place = byte_places(length, LENGTH, THREADS, LANES)
    j = tl.minimum(place, length - 1) if UNIT < LANES else place
    t = tl.arange(0, T)[None, None, None, :, None]
    i = t * length + j[:, :, :, None, :]
    if UNIT > 1 and valid == length * T:
        v = widen(tl.load(x + (of_group(start) + i)), DTYPE)
    else:
        # Fill the last group of a row with copies of its last value.
        v = widen(tl.load(x + (of_group(start) + tl.minimum(i, valid - 1))), DTYPE)
    bits = bits_of(v)
    size = bits_of(tl.abs(v)) if SIGNS else bits
    here = tl.full((G,), True, tl.int1)
    lo, step, inverse, steps, signed, extra = steps_of(
        group_max(bits), group_max(signed_bits(size)), group_min(size - 1), first_values(x, start, here, DTYPE),
        DTYPE, BITS, SIGNS,
    )  # fmt: skip
    # The values of a byte share one hash.
    codes = g.to(tl.int64) * group_bytes(length, BITS, UNIT)
    h = inverted_random32(codes.to(tl.uint32)[None, :, None, None] + j.to(tl.uint32), seed_low, seed_high)
    hash = below_code(tl.zeros(bits.shape, tl.uint32), h[:, :, :, None, :], t, FIELD)
    code = codes_of(
        v, hash, of_group(lo), of_group(inverse), of_group(steps), of_group(signed), of_group(extra), BITS, SIGNS
    )
    field = code & 3 if BITS == 3 else code
    tl.store(data + (codes[None, :, None, None] + j), tl.sum(field << (t * FIELD).to(tl.uint32), 3).to(tl.uint8))
    if BITS == 3:
        third = tl.sum((code >> 2) << t.to(tl.uint32), 3)
        if UNIT < LANES:
            third = tl.where(place < length, third, 0)
        at = codes[None, :, None, None] + pair_places(length, LENGTH, THREADS, LANES)
        tl.store(data + at, join_thirds(third))
    groups = all_groups(full, rest, rows)
    at_lo = scales_at(data, groups, group_bytes(length, BITS, UNIT))
    store_scales(at_lo, g, here, groups, lo, step, signed, SIGNS)


@triton.jit(do_not_specialize=["full", "rest", "rows", "magic", "shift", "length", "seed_low", "seed_high"])
def gq_decode_kernel(
    data, out, seeds, full: tl.int32, rest: tl.int32, rows: tl.int32, magic: tl.int32, shift: tl.int32,
    length: tl.int32, seed_low: tl.int32, seed_high: tl.int32, limit: tl.float64,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr,
    WHOLE: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr,
    MASK: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Decode G groups. With MASK, write the mask of the non-zero values instead."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    WORK: tl.constexpr = tl.float64 if DTYPE == tl.float64 else tl.float32
    length = LENGTH if WHOLE else length // UNIT * UNIT
    _, g, start, valid = group_places(full, rest, rows, magic, shift, length, T, G, UNIT)
    groups, codes = all_groups(full, rest, rows), g.to(tl.int64) * group_bytes(length, BITS, UNIT)
    here = tl.full((G,), True, tl.int1)
    at_lo = scales_at(data, groups, group_bytes(length, BITS, UNIT))
    lo, step = load_scales(at_lo, data + codes, g, here, groups, DTYPE, SIGNS)
    origin, unit = origin_of(lo, step)
    j = byte_places(length, LENGTH, THREADS, LANES)
    packed, third = load_codes(data, codes, j, length, BITS, LENGTH, THREADS, LANES)
    packed, third = packed[:, :, :, None, :], third[:, :, :, None, :]
    t = tl.arange(0, T)[None, None, None, :, None]
    if MASK:
        value = flags_of(slices_of(packed, third, t, BITS), of_group(lo), of_group(step), BITS, SIGNS)
    else:
        h = random32(codes.to(tl.uint32)[None, :, None, None] + j.to(tl.uint32), seed_low, seed_high)
        if LANES >= 4 and BITS != 3:
            fixed = fixed_codes(packed, h[:, :, :, None, :], t, BITS)
        else:
            fixed = below_code(slices_of(packed, third, t, BITS), h[:, :, :, None, :], t, FIELD)
        top = tl.full((), limit, tl.float64).to(WORK)
        value = values_of(
            fixed >> 24, fixed, of_group(lo), of_group(step), of_group(origin), of_group(unit), top, DTYPE, BITS, SIGNS
        )
    i = t * length + j[:, :, :, None, :]
    if UNIT > 1 and valid == length * T:
        tl.store(out + (of_group(start) + i), value)
    else:
        tl.store(out + (of_group(start) + i), value, mask=(i < valid) & (j < length)[:, :, :, None, :])


@triton.jit(do_not_specialize=["full", "rest", "rows", "magic", "shift", "length"])
def gq_gate_kernel(
    data, x, other, out, full: tl.int32, rest: tl.int32, rows: tl.int32, magic: tl.int32, shift: tl.int32,
    length: tl.int32, slope: tl.float32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, SIGNS: tl.constexpr, G: tl.constexpr, LENGTH: tl.constexpr,
    WHOLE: tl.constexpr, THREADS: tl.constexpr, LANES: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write x, or x + other, where the packed values are not zero, else zero; see `gated`."""
    FIELD: tl.constexpr = 2 if BITS == 3 else BITS
    T: tl.constexpr = 8 // FIELD
    length = LENGTH if WHOLE else length // UNIT * UNIT
    _, g, start, valid = group_places(full, rest, rows, magic, shift, length, T, G, UNIT)
    groups, codes = all_groups(full, rest, rows), g.to(tl.int64) * group_bytes(length, BITS, UNIT)
    here = tl.full((G,), True, tl.int1)
    at_lo = scales_at(data, groups, group_bytes(length, BITS, UNIT))
    lo, step = load_scales(at_lo, data + codes, g, here, groups, DTYPE, SIGNS)
    j = byte_places(length, LENGTH, THREADS, LANES)
    packed, third = load_codes(data, codes, j, length, BITS, LENGTH, THREADS, LANES)
    t = tl.arange(0, T)[None, None, None, :, None]
    code = slices_of(packed[:, :, :, None, :], third[:, :, :, None, :], t, BITS)
    lo, step = of_group(lo), of_group(step)
    at = of_group(start) + (t * length + j[:, :, :, None, :])
    if UNIT > 1 and valid == length * T:
        tl.store(out + at, gated(x, other, at, None, code, lo, step, slope, DTYPE, BITS, SIGNS, KIND))
    else:
        there = (t * length + j[:, :, :, None, :] < valid) & (j < length)[:, :, :, None, :]
        value = gated(x, other, at, there, code, lo, step, slope, DTYPE, BITS, SIGNS, KIND)
        tl.store(out + at, value, mask=there)
