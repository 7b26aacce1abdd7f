"""Form of a block of error-bounded levels in Triton: numbers, low bits, quotients. docs/design.md explains it."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import divide
from encke.kernels.gpu.tiles import lanes_sum


@triton.jit
def bit_width(v):
    """Return the number of bits that an integer between 0 and 2^24 needs."""
    return tl.maximum((v.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def rice_parameter(n, total):
    """Return the number of low bits for n values with that sum, which is at most 2^31."""
    each = (n * 3).to(tl.uint32)
    # k is one or two more than the difference of the exact widths; rounding may make that of the sum one too large.
    k = tl.maximum(bit_width(total) - bit_width(each), 0)
    for _ in tl.static_range(2):
        k += (total > ((each << k.to(tl.uint32)) >> 1)).to(tl.int32)
    return k


@triton.jit
def estimate(n, total, k):
    """Estimate the number of bits of n values with that sum, with k low bits each."""
    each, shift = n.to(tl.uint32), k.to(tl.uint32)
    half = ((each << shift) - each) >> 1
    return n * (k + 1) + (tl.where(total > half, total - half, 0) >> shift).to(tl.int32)


@triton.jit
def number_of(level, slope, shift):
    """Return the numbers of levels: distances from the base, plain or in zigzag order. fp32 is exact here."""
    return tl.abs(level * slope + shift) - 0.5


@triton.jit
def integers_of(level, slope, shift):
    """Return the numbers as int32 with 75 in the highest byte, without a conversion."""
    return (tl.abs(tl.fma(level, slope, shift)) + 8388607.5).to(tl.int32, bitcast=True)


@triton.jit
def choose_forms(levels, low, high, total, n):
    """Return slope, shift and maximum of the numbers to store; base, order, low bits, and whether all bits are low."""
    mean = divide(total.to(tl.float32), tl.maximum(n, 1).to(tl.float32))
    centre = tl.floor(mean + 0.5)
    down = mean < centre
    # Order 2 is order 1 of negated levels.
    slope = tl.where(down, -2.0, 2.0)
    shift = centre * -slope - 0.5
    of_zero = number_of(0.0, slope, shift).to(tl.int32)
    turned = tl.zeros((2, 4, 16, 4), tl.int32)
    for slice in tl.static_range(0, 8, 2):
        even = integers_of(levels[slice], slope[None, None, :, None], shift[None, None, :, None])
        turned += even + integers_of(levels[slice + 1], slope[None, None, :, None], shift[None, None, :, None])
    # The highest bytes of 256 numbers add up to zero modulo 2^32.
    sum_turned = (lanes_sum(turned) - (256 - n) * of_zero).to(tl.uint32)
    sum_plain = (total - n * low).to(tl.uint32)
    k_plain, k_turned = rice_parameter(n, sum_plain), rice_parameter(n, sum_turned)
    bits_plain, bits_turned = estimate(n, sum_plain, k_plain), estimate(n, sum_turned, k_turned)
    width = bit_width(high - low)
    fixed = n * width <= tl.minimum(bits_plain, bits_turned)
    zigzag = (fixed == 0) & (bits_turned < bits_plain)
    k = tl.where(fixed, width, tl.where(zigzag, k_turned, k_plain))
    base = tl.where(zigzag, centre.to(tl.int32), low)
    order = tl.where(zigzag, tl.where(down, 2, 1), 0)
    slope, shift = tl.where(zigzag, slope, 1.0), tl.where(zigzag, shift, 0.5 - low.to(tl.float32))
    ends = tl.maximum(number_of(low.to(tl.float32), slope, shift), number_of(high.to(tl.float32), slope, shift))
    return slope, shift, ends.to(tl.int32), base, order, k, fixed


@triton.jit
def shift_planes(planes, k):
    """Return the planes of numbers below 256, shifted right by k bits."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    zero, one, two, four = tl.zeros_like(p0), (k & 1) > 0, (k & 2) > 0, (k & 4) > 0
    p0, p1, p2, p3 = tl.where(four, p4, p0), tl.where(four, p5, p1), tl.where(four, p6, p2), tl.where(four, p7, p3)
    p4, p5, p6, p7 = tl.where(four, 0, p4), tl.where(four, 0, p5), tl.where(four, 0, p6), tl.where(four, 0, p7)
    p0, p1, p2, p3 = tl.where(two, p2, p0), tl.where(two, p3, p1), tl.where(two, p4, p2), tl.where(two, p5, p3)
    p4, p5, p6, p7 = tl.where(two, p6, p4), tl.where(two, p7, p5), tl.where(two, 0, p6), tl.where(two, 0, p7)
    p0, p1, p2, p3 = tl.where(one, p1, p0), tl.where(one, p2, p1), tl.where(one, p3, p2), tl.where(one, p4, p3)
    return p0, p1, p2, p3, tl.where(one, p5, p4), tl.where(one, p6, p5), tl.where(one, p7, p6), tl.where(one, zero, p7)


@triton.jit
def less_four(planes):
    """Subtract 4 from the planes of numbers of at least 4: invert bit 2, and propagate the borrow to higher bits."""
    p0, p1, p2, p3, p4, p5, p6, p7 = planes
    some3, none = p2 | p3, 0xFFFFFFFF
    some4 = some3 | p4
    some5 = some4 | p5
    some6 = some5 | p6
    p7, p6, p5 = p7 ^ some6 ^ none, p6 ^ some5 ^ none, p5 ^ some4 ^ none
    return p0, p1, p2 ^ none, p3 ^ p2 ^ none, p4 ^ some3 ^ none, p5, p6, p7
