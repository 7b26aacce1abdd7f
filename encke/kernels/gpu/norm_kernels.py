"""Kernels of batch norm's backward from a packed input: codes are decoded in registers, never in memory.

A value comes from its code and its random number d as lo + (code - first - 0.5 + d) * step. Both stand next to each
other in the mantissa of one fp32 number, 2^bits + code + d, and one fused multiply-add with step and base of its group
makes the value: no conversion from integers. d keeps 23 - bits of its 24 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import narrow, random32, seed_of, widen


@triton.jit
def code_as_mantissa(byte, h, SLICE: tl.constexpr, BITS: tl.constexpr):
    """Return 2^bits + code + d of the values in one slice of their groups, as fp32, from their bytes and hashes."""
    KEEP: tl.constexpr = 23 - BITS
    TURN: tl.constexpr = (4 * BITS * SLICE + 9 + BITS) % 32
    d = h >> TURN
    if SLICE > 0:
        d = (d | (h << (32 - TURN))) & ((1 << KEEP) - 1)
    code = (byte << (KEEP - BITS * SLICE)) & (((1 << BITS) - 1) << KEEP)
    return (code | d | ((127 + BITS) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def group_line(lo, step, BITS: tl.constexpr):
    """Return for each group the offset that turns `mantissa * step` into a value, and the mantissa of its zero."""
    signed = lo < 0
    # What the dropped bits of d are on average is added back.
    first = 2.0**BITS + 0.5 - 2.0 ** (BITS - 24)
    base = tl.fma(step, -tl.where(signed, first, first + 1.0), lo)
    return base, tl.where(signed | (step != step), 0.0, 2.0**BITS + 1.0)


@triton.jit
def load_lo(data, groups, g, mask, LENGTH: tl.constexpr):
    """Load lo of the groups `g`; negative where the mask is false."""
    at = (data + groups * LENGTH).to(tl.pointer_type(tl.int16))
    return widen(tl.load(at + g, mask=mask, other=-0x4080), tl.bfloat16)


@triton.jit
def load_step(data, groups, g, mask, LENGTH: tl.constexpr):
    """Load step of the groups `g`."""
    at = (data + groups * (LENGTH + 2)).to(tl.pointer_type(tl.int16))
    return widen(tl.load(at + g, mask=mask, other=0), tl.bfloat16)


@triton.jit
def rounded(x, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """Round x as a tensor of that dtype would hold it, with ROUND."""
    if ROUND and DTYPE != tl.float32:
        top = 65504.0 if DTYPE == tl.float16 else 3.3895313892515355e38
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -top), top), x)
        return widen(narrow(x, DTYPE), DTYPE)
    else:
        return x


@triton.jit
def column_groups(data, groups, g, there, BITS: tl.constexpr):
    """Return step, base and zero mark of the groups `g`, each repeated for all rows of the tile."""
    LENGTH: tl.constexpr = 16 * BITS
    lo, step = load_lo(data, groups, g, there, LENGTH), load_step(data, groups, g, there, LENGTH)
    base, zero = group_line(lo, step, BITS)
    return step, base, zero


@triton.jit
def column_codes(data, at, place, here, seed_low, seed_high, V: tl.constexpr):
    """Return the bytes of codes from `at` on at these places, V of which lie together, and their hashes."""
    byte = tl.load(data + at + tl.max_contiguous(place, [1, V]), mask=here, other=0).to(tl.uint32)
    return byte, random32(at.to(tl.uint32) + place.to(tl.uint32), seed_low, seed_high)


@triton.jit(do_not_specialize=["pixels", "tiles", "splits", "seed_low", "seed_high"])
def last_reduce_kernel(
    grad, data, mean, sums, seeds, units: tl.int32, pixels: tl.int64, tiles: tl.int32, splits: tl.int32,
    seed_low: tl.int32, seed_high: tl.int32, DTYPE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr,
    V: tl.constexpr, R: tl.constexpr, CH: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Sum g and g * (x - mean) for each channel over every `splits`-th block of pixels, in channels_last memory.

    A tile is R pixels x CH channels, of which a thread has a piece of a row; 128 pixels make a group.
    """
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    channels = units * UNIT
    first_channel = (tl.program_id(0) % tiles) * CH
    row = tl.arange(0, R)[:, None]
    c = row * 0 + (first_channel + tl.arange(0, CH))[None, :]
    here = c < channels
    place = row * channels + c
    middle = tl.load(mean + c, mask=here, other=0.0)
    blocks = ((pixels + 127) // 128).to(tl.int32)
    groups = blocks.to(tl.int64) * channels
    sum_g = tl.zeros((R, CH), tl.float32)
    sum_gx = tl.zeros((R, CH), tl.float32)
    block = tl.program_id(0) // tiles
    while block < blocks:
        start = block.to(tl.int64) * channels
        step, base, zero = column_groups(data, groups, start + c, here, BITS)
        left = tl.minimum(pixels - block.to(tl.int64) * 128, 128).to(tl.int32)
        # Groups without a level for zero, as before a ReLU, are a straight line: group by group, not value by value.
        if ROUND or tl.max(tl.max((zero > 0).to(tl.int32), 1), 0) > 0:
            for u in range(LENGTH // R):
                at = start * LENGTH + u * R * channels
                byte, h = column_codes(data, at, place, here, seed_low, seed_high, V)
                for s in tl.static_range(T):
                    pixel = s * LENGTH + u * R
                    there = (row + pixel < left) & here
                    v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
                    mark = code_as_mantissa(byte, h, s, BITS)
                    x = tl.where(mark < zero, 0.0, tl.fma(mark, step, base))
                    sum_g += v
                    sum_gx = tl.fma(v, rounded(x, DTYPE, ROUND) - middle, sum_gx)
        else:
            block_g = tl.zeros((R, CH), tl.float32)
            block_gm = tl.zeros((R, CH), tl.float32)
            for u in range(LENGTH // R):
                at = start * LENGTH + u * R * channels
                byte, h = column_codes(data, at, place, here, seed_low, seed_high, V)
                for s in tl.static_range(T):
                    pixel = s * LENGTH + u * R
                    there = (row + pixel < left) & here
                    v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
                    block_g += v
                    block_gm = tl.fma(v, code_as_mantissa(byte, h, s, BITS), block_gm)
            sum_g += block_g
            sum_gx = tl.fma(block_gm, step, tl.fma(block_g, base - middle, sum_gx))
        block += splits
    c = first_channel + tl.arange(0, CH)
    out = sums + (tl.program_id(0) // tiles).to(tl.int64) * 2 * channels + c
    tl.store(out, tl.sum(sum_g, 0), mask=c < channels)
    tl.store(out + channels, tl.sum(sum_gx, 0), mask=c < channels)


@triton.jit(do_not_specialize=["pixels", "tiles", "seed_low", "seed_high"])
def last_apply_kernel(
    grad, data, line, out, seeds, units: tl.int32, pixels: tl.int64, tiles: tl.int32, seed_low: tl.int32,
    seed_high: tl.int32, DTYPE: tl.constexpr, BITS: tl.constexpr, UNIT: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    CH: tl.constexpr, ROUND: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Write g * k1 + x * k2 + k3 for one block of 128 pixels and CH channels."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
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
    start = block * channels
    step, base, zero = column_groups(data, (pixels + 127) // 128 * channels, start + c, here, BITS)
    slope, shift = step * k2, tl.fma(base, k2, k3)
    left = tl.minimum(pixels - block * 128, 128).to(tl.int32)
    for u in range(LENGTH // R):
        at = start * LENGTH + u * R * channels
        byte, h = column_codes(data, at, place, here, seed_low, seed_high, V)
        for s in tl.static_range(T):
            pixel = s * LENGTH + u * R
            there = (row + pixel < left) & here
            v = widen(tl.load(grad + start * 128 + pixel * channels + place, mask=there, other=0), DTYPE)
            mark = code_as_mantissa(byte, h, s, BITS)
            if ROUND:
                x = tl.where(mark < zero, 0.0, tl.fma(mark, step, base))
                rest = tl.fma(rounded(x, DTYPE, ROUND), k2, k3)
            else:
                rest = tl.where(mark < zero, k3, tl.fma(mark, slope, shift))
            value = narrow(tl.fma(v, k1, rest), DTYPE)
            tl.store(out + start * 128 + pixel * channels + place, value, mask=there)


@triton.jit
def times_high(a, b):
    """Return the upper half of a product of uint64."""
    return tl.umulhi(a.to(tl.uint64), b.to(tl.uint64))


@triton.jit
def planes_of(first, plane_size, channels, magic, plane_magic, channel_magic, G: tl.constexpr, BIG: tl.constexpr):
    """Return for G groups from value `first` on the channel they begin in, not wrapped, and the rest of its plane."""
    plane = times_high(first, plane_magic).to(tl.int64)
    at = (first - plane * plane_size).to(tl.int32) + tl.arange(0, G) * 128
    if BIG:
        further = (at >= plane_size).to(tl.int32)
    else:
        further = tl.umulhi(at.to(tl.uint32), magic.to(tl.uint32)).to(tl.int32)
    c = (plane - times_high(plane, channel_magic).to(tl.int64) * channels).to(tl.int32)
    return c + further, plane_size - (at - further * plane_size)


@triton.jit
def wrapped(c, channels, ONCE: tl.constexpr):
    """Return channel numbers modulo the number of channels."""
    if ONCE:
        return tl.where(c >= channels, c - channels, c)
    else:
        return c % channels


@triton.jit
def of_part(v, k, ends, plane_size, PART: tl.constexpr, PARTS: tl.constexpr):
    """Return v at the positions k in the PART-th plane that a group meets, else 0; the first one ends at `ends`."""
    if PART < PARTS - 1:
        v = tl.where(k < ends[:, None] + PART * plane_size, v, 0.0)
    if PART > 0:
        v = tl.where(k < ends[:, None] + (PART - 1) * plane_size, 0.0, v)
    return v


@triton.jit
def zeros_of(like, COUNT: tl.constexpr):
    """Return a tuple of so many tensors of zeros."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (tl.zeros(like.shape, tl.float32),)  # type: ignore[assignment]
    return zeros


@triton.jit
def straight_sums(grads, byte, h, step, base, BITS: tl.constexpr):
    """Return sums of g and g * x of groups that lie in one plane each and have no level for zero."""
    sum_g = tl.zeros(byte.shape, tl.float32)
    sum_gm = tl.zeros(byte.shape, tl.float32)
    for s in tl.static_range(8 // BITS):
        sum_g += grads[s]
        sum_gm = tl.fma(grads[s], code_as_mantissa(byte, h, s, BITS), sum_gm)
    group_g = tl.sum(sum_g, 1)
    return group_g, tl.fma(tl.sum(sum_gm, 1), step, group_g * base)


@triton.jit
def part_sums(
    grads, byte, h, step, base, zero, ends, plane_size, PARTS: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr,
    ROUND: tl.constexpr,
):  # fmt: skip
    """Return sums of g and g * x of groups, apart for each of the planes that a group meets: two tuples."""
    T: tl.constexpr = 8 // BITS
    sums_g, sums_gx = zeros_of(byte, PARTS), zeros_of(byte, PARTS)
    for s in tl.static_range(T):
        k = tl.arange(0, 128 // T)[None, :] + s * (128 // T)
        mark = code_as_mantissa(byte, h, s, BITS)
        x = tl.where(mark < zero[:, None], 0.0, tl.fma(mark, step[:, None], base[:, None]))
        x = rounded(x, DTYPE, ROUND)
        more_g, more_gx = zeros_of(byte, 0), zeros_of(byte, 0)
        for part in tl.static_range(PARTS):
            v = of_part(grads[s], k, ends, plane_size, part, PARTS)
            more_g = more_g + (sums_g[part] + v,)
            more_gx = more_gx + (tl.fma(v, x, sums_gx[part]),)
        sums_g, sums_gx = more_g, more_gx
    return sums_g, sums_gx


@triton.jit(do_not_specialize=[
    "groups", "channels", "plane_size", "magic", "plane_magic", "channel_magic", "seed_low", "seed_high",
])  # fmt: skip
def flat_reduce_kernel(
    grad, data, mean, sums, seeds, numel: tl.int64, groups: tl.int64, channels: tl.int32, plane_size: tl.int32,
    magic: tl.int64, plane_magic: tl.int64, channel_magic: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, BIG: tl.constexpr, ONCE: tl.constexpr,
    ROUND: tl.constexpr, V: tl.constexpr, G: tl.constexpr, TILES: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Sum g and g * (x - mean) for each group, apart for each of the planes that it meets, in NCHW memory.

    A tile is a few groups x their bytes; a group may reach into several planes.
    """
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    j = tl.arange(0, LENGTH)[None, :]
    row = tl.arange(0, G)[:, None]
    at = tl.max_contiguous(row * LENGTH + j, [1, V])
    for tile in range(TILES):
        g0 = (tl.program_id(0).to(tl.int64) * TILES + tile) * G
        first = g0 * 128
        g = g0 + tl.arange(0, G)
        here = g < groups
        left = tl.minimum(numel - first, G * 128).to(tl.int32)
        byte = tl.load(data + g0 * LENGTH + at, mask=here[:, None], other=0).to(tl.uint32)
        grads = zeros_of(byte, 0)
        for s in tl.static_range(T):
            i = row * 128 + j + s * LENGTH
            grads = grads + (widen(tl.load(grad + first + i, mask=i < left, other=0), DTYPE),)
        lo, step = load_lo(data, groups, g, here, LENGTH), load_step(data, groups, g, here, LENGTH)
        base, zero = group_line(lo, step, BITS)
        c, ends = planes_of(first, plane_size, channels, magic, plane_magic, channel_magic, G, BIG)
        h = random32((g0 * LENGTH).to(tl.uint32) + (row * LENGTH + j).to(tl.uint32), seed_low, seed_high)
        hard = zero > 0
        if PARTS > 1:
            hard = hard | (ends < 128)
        out = sums + g
        if ROUND or tl.max(hard.to(tl.int32), 0) > 0:
            sums_g, sums_gx = part_sums(grads, byte, h, step, base, zero, ends, plane_size, PARTS, DTYPE, BITS, ROUND)
            for part in tl.static_range(PARTS):
                sum_g, sum_gx = tl.sum(sums_g[part], 1), tl.sum(sums_gx[part], 1)
                middle = tl.load(mean + wrapped(c + part, channels, ONCE))
                tl.store(out + 2 * part * groups, sum_g, mask=here)
                tl.store(out + (2 * part + 1) * groups, tl.fma(sum_g, -middle, sum_gx), mask=here)
        else:
            sum_g, sum_gx = straight_sums(grads, byte, h, step, base, BITS)
            middle = tl.load(mean + wrapped(c, channels, ONCE))
            tl.store(out, sum_g, mask=here)
            tl.store(out + groups, tl.fma(sum_g, -middle, sum_gx), mask=here)


@triton.jit(do_not_specialize=["samples", "channels", "plane_size", "groups", "splits"])
def gather_kernel(
    workspace, sums, samples: tl.int32, channels: tl.int32, plane_size: tl.int32, groups: tl.int64, splits: tl.int32,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add up for one channel the sums of flat_reduce_kernel in every `splits`-th bundle of planes."""
    c = tl.program_id(0) % channels
    split = tl.program_id(0) // channels
    sum_g = tl.zeros((ROWS, WIDTH), tl.float32)
    sum_gx = tl.zeros((ROWS, WIDTH), tl.float32)
    bundle = split
    while bundle * ROWS < samples:
        n = bundle * ROWS + tl.arange(0, ROWS)
        start = (n.to(tl.int64) * channels + c) * plane_size
        from_group, to_group = start // 128, (start + plane_size - 1) // 128
        # The plane's first group may have begun in planes before it; in all others it comes first.
        before = ((start % 128).to(tl.int32) + plane_size - 1) // plane_size
        column = 0
        while column * 128 < plane_size + 127:
            j = column + tl.arange(0, WIDTH)[None, :]
            g = from_group[:, None] + j
            there = (g <= to_group[:, None]) & (n < samples)[:, None]
            at = workspace + tl.where(j == 0, 2 * before[:, None], 0) * groups + g
            sum_g += tl.load(at, mask=there, other=0.0)
            sum_gx += tl.load(at + groups, mask=there, other=0.0)
            column += WIDTH
        bundle += splits
    at = sums + split * 2 * channels + c
    tl.store(at, tl.sum(tl.sum(sum_g, 1), 0))
    tl.store(at + channels, tl.sum(tl.sum(sum_gx, 1), 0))


@triton.jit
def load_line(at, channels):
    """Load k1, k2 and k3 of a channel for each group."""
    return tl.load(at)[:, None], tl.load(at + channels)[:, None], tl.load(at + 2 * channels)[:, None]


@triton.jit(do_not_specialize=[
    "groups", "channels", "plane_size", "magic", "plane_magic", "channel_magic", "seed_low", "seed_high",
])  # fmt: skip
def flat_apply_kernel(
    grad, data, line, out, seeds, numel: tl.int64, groups: tl.int64, channels: tl.int32, plane_size: tl.int32,
    magic: tl.int64, plane_magic: tl.int64, channel_magic: tl.int64, seed_low: tl.int32, seed_high: tl.int32,
    DTYPE: tl.constexpr, BITS: tl.constexpr, PARTS: tl.constexpr, BIG: tl.constexpr, ONCE: tl.constexpr,
    ROUND: tl.constexpr, V: tl.constexpr, G: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """Write g * k1 + x * k2 + k3 for G groups."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    T: tl.constexpr = 8 // BITS
    LENGTH: tl.constexpr = 128 // T
    g0 = tl.program_id(0).to(tl.int64) * G
    first = g0 * 128
    g = g0 + tl.arange(0, G)
    here = g < groups
    j = tl.arange(0, LENGTH)[None, :]
    row = tl.arange(0, G)[:, None]
    left = tl.minimum(numel - first, G * 128).to(tl.int32)
    lo, step = load_lo(data, groups, g, here, LENGTH), load_step(data, groups, g, here, LENGTH)
    base, zero = group_line(lo, step, BITS)
    c, ends = planes_of(first, plane_size, channels, magic, plane_magic, channel_magic, G, BIG)
    lines = zeros_of(step, 0)
    for part in tl.static_range(PARTS):
        lines = lines + (load_line(line + wrapped(c + part, channels, ONCE), channels),)
    at = tl.max_contiguous(row * LENGTH + j, [1, V])
    byte = tl.load(data + g0 * LENGTH + at, mask=here[:, None], other=0).to(tl.uint32)
    h = random32((g0 * LENGTH).to(tl.uint32) + (row * LENGTH + j).to(tl.uint32), seed_low, seed_high)
    for s in tl.static_range(T):
        k = j + s * LENGTH
        i = row * 128 + k
        v = widen(tl.load(grad + first + i, mask=i < left, other=0), DTYPE)
        mark = code_as_mantissa(byte, h, s, BITS)
        x = tl.where(mark < zero[:, None], 0.0, tl.fma(mark, step[:, None], base[:, None]))
        k1, k2, k3 = lines[0]
        for part in tl.static_range(1, PARTS):
            before = k < ends[:, None] + (part - 1) * plane_size
            k1 = tl.where(before, k1, lines[part][0])
            k2 = tl.where(before, k2, lines[part][1])
            k3 = tl.where(before, k3, lines[part][2])
        value = tl.fma(v, k1, tl.fma(rounded(x, DTYPE, ROUND), k2, k3))
        tl.store(out + first + i, narrow(value, DTYPE), mask=i < left)


@triton.jit(do_not_specialize=["splits", "channels"])
def finish_kernel(
    sums, mean, invstd, weight, grad_weight, grad_bias, line, splits: tl.int32, channels: tl.int32, share: tl.float32,
    AFFINE: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr, TOGETHER: tl.constexpr,
    BELOW: tl.constexpr,
):  # fmt: skip
    """Write gradients of weight and bias, and k1, k2, k3 of each channel; `share` is 1 / values of a channel.

    TOGETHER: the gradients are two further rows of `line`. BELOW: `invstd` is a second row of `mean`.
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
