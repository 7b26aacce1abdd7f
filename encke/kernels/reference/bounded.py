"""Error-bounded values at variable rate, in plain torch. docs/design.md explains the format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encke.kernels.formats import (
    ALL_ZERO,
    AS_IS,
    COIN,
    DITHERED,
    FLOATS,
    MASK32,
    NEAREST,
    PLANE_BLOCK,
    PLANE_GROUP,
    PLANE_HEADER,
    PLANE_WORD,
    REPEATED,
    ROUNDS,
    SIGNED,
    SMALLEST_BOUND,
    STOCHASTIC,
    BoundedFormat,
    compute_dtype,
)
from encke.kernels.reference.fields import bit_width, exponent, random24
from encke.kernels.reference.slow import warn_if_large

BLOCKS = PLANE_GROUP // PLANE_BLOCK


def usable_bound(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound as the kernels use it: rounded down to the computing dtype, clamped, zero if too small."""
    work = compute_dtype(dtype)
    eb = bound.double().clamp(max=2.0**120).to(work)
    eb = torch.where(eb.double() > bound, torch.nextafter(eb, eb.new_zeros(())), eb)
    return torch.where(eb < SMALLEST_BOUND[dtype], 0.0, eb)


def bound_of(x: Tensor, format: BoundedFormat) -> Tensor:
    """Return min(bound, relative * range of the finite values) as the kernels use it, zero-dimensional."""
    eb = torch.tensor(format.bound, dtype=torch.float64, device=x.device)
    if format.relative != float("inf"):
        finite = x[torch.isfinite(x)].double()
        spread = finite.max() - finite.min() if finite.numel() else torch.zeros_like(eb)
        eb = torch.minimum(eb, format.relative * spread)
    return usable_bound(eb, format.dtype)


def bit_order(device: torch.device) -> Tensor:
    """Return the index in a block of the value that each bit of a plane belongs to."""
    bit = torch.arange(PLANE_BLOCK, device=device)
    return bit // PLANE_WORD * PLANE_WORD + bit % 8 * 8 + bit % PLANE_WORD // 8


def power(e: Tensor, like: Tensor) -> Tensor:
    """Return 2^e in the dtype of `like`."""
    return torch.ldexp(torch.ones_like(like), e)


def shrink(eb: Tensor, code: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shrunk bound eb_c of docs/design.md."""
    e = exponent(eb)
    if dtype.itemsize == 2:
        return torch.where(code == 0, eb * 0.5, eb - power(e - code, eb))
    unit = power(e - code, eb)
    return torch.where(code == 0, power(e - 1, eb), (eb / unit).floor() * unit - unit)


def least_of(eb: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest magnitude that a non-zero value decodes to with SIGNED rounding: a power of two."""
    e = exponent(eb) - 12
    return power(e.clamp(-24, 15) if dtype == torch.float16 else e, eb)


@dataclass
class Rounding:
    """Rounding of blocks, with their half steps and random numbers."""

    kind: int
    eb_c: Tensor
    hash: Tensor
    """24 random bits for each value."""
    coin: Tensor
    """24 more random bits for each value, used by SIGNED only."""
    least: Tensor
    """Smallest magnitude of SIGNED."""

    def levels(self, v: Tensor) -> Tensor:
        """Return the levels of finite values that are not zero."""
        if self.kind == SIGNED:
            cell = self.cells(v.abs())
            return torch.where(v < 0, -1 - cell, cell)
        inverse = 0.5 / self.eb_c
        shifted = v - self.eb_c if self.kind == STOCHASTIC else v
        level = (shifted * inverse).floor()
        if self.kind != NEAREST:
            # The product is exact, and so is the remainder: the reciprocal adds no bias.
            rest = (shifted - level * (self.eb_c * 2)) * inverse
            level += self.hash < (rest * 2.0**24).long()
        if self.kind != DITHERED:
            level = torch.where(v < 0, level.clamp(max=-1), level.clamp(min=0))
        return level.long()

    def cells(self, magnitude: Tensor) -> Tensor:
        """Return the cells of magnitudes, from zero outwards. The first cell, 0, decodes to the smallest magnitude.

        Next to zero, the mean of dithered magnitudes is too large, because negative ones move to the first cell. Other
        magnitudes move there at random, so that the mean is unbiased.
        """
        inverse = 0.5 / self.eb_c
        cell = (magnitude * inverse).floor()
        rest = (magnitude - cell * (self.eb_c * 2)) * inverse
        cell += ((rest * 2.0**24).long() - self.hash + 3 * 2**23 - 1) >> 24
        above = ((magnitude - self.least) * inverse).clamp(max=0.5)
        kept = self.coin.to(above.dtype) * 2.0**-24 * ((above + 0.5) * (above + 0.5)) < above * 2
        return torch.where(kept, cell, 0.0).long()

    def values(self, level: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode levels to values."""
        if self.kind == SIGNED:
            cell = torch.where(level < 0, -1 - level, level).to(self.eb_c.dtype)
            magnitude = (cell + (self.hash.to(cell.dtype) * 2.0**-24 - 1)) * (self.eb_c * 2)
            magnitude = torch.maximum(magnitude, self.least)
            return torch.where(level < 0, -magnitude, magnitude).to(dtype)
        u = self.hash.to(self.eb_c.dtype) * 2.0**-24 - 0.5 if self.kind == DITHERED else 0.5
        return ((level.to(self.eb_c.dtype) + u) * (self.eb_c * 2)).to(dtype)


def rounding_of(kind: int, blocks: int, eb: Tensor, code: Tensor, dtype: torch.dtype, seed: int) -> Rounding:
    """Return the rounding of all blocks for the shrink codes of their groups."""
    index = torch.arange(blocks * PLANE_BLOCK, device=eb.device).view(-1, PLANE_BLOCK)[:, bit_order(eb.device)]
    eb_c = shrink(eb.expand(len(code)), code, dtype).repeat_interleave(BLOCKS)[:blocks, None]
    hash, coin = (random24(index, each, PLANE_WORD, PLANE_WORD // 4) for each in (seed, seed ^ COIN))
    return Rounding(kind, eb_c, hash, coin, least_of(eb, dtype))


def exceeds(a: Tensor, b: Tensor, bound: Tensor) -> Tensor:
    """Return where |a - b| exceeds a bound, even if the computed difference is rounded to the bound."""
    near = a - b
    part = near - a
    rest = (a - (near - part)) - (b + part)
    return ~(near.abs() <= bound) | (near.abs() == bound) & torch.where(near < 0, rest < 0, rest > 0)


def shrink_codes(magnitude: Tensor, eb: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the shrink code of groups with these largest magnitudes."""
    mantissa, smallest, extra = FLOATS[dtype]
    r = exponent(magnitude + eb).clamp(min=smallest) - mantissa - 1 + extra
    return (exponent(eb) - r).clamp(0, 15)


@dataclass
class Form:
    """Form in which blocks are stored. All fields except `v` have one number for each block."""

    v: Tensor
    """Non-negative integers to store, blocks x 256."""
    base: Tensor
    order: Tensor
    """0: level - base, 1: zigzag from the base, upwards first, 2: downwards first."""
    k: Tensor
    """Number of low bits that are stored as planes."""
    fixed: Tensor
    """Whether there are only low bits."""
    rest: Tensor
    """Number of bits of a quotient's remainder after the unary code."""
    wide: Tensor
    nbytes: Tensor


def rice_parameter(n: Tensor, total: Tensor) -> Tensor:
    """Return the number of low bits for n values with that sum."""
    k = torch.zeros_like(n)
    for i in range(24):
        k += total > (3 * n << i) >> 1
    return k


def estimate(n: Tensor, total: Tensor, k: Tensor) -> Tensor:
    """Estimate the number of bits of n values with that sum, with k low bits each."""
    return n * (k + 1) + ((total - ((n << k) - n >> 1)).clamp(min=0) >> k)


def zigzag(d: Tensor) -> Tensor:
    """Map 0, 1, -1, 2, -2 ... to 0, 1, 2, 3, 4 ..."""
    return torch.where(d > 0, 2 * d - 1, -2 * d)


def choose_forms(level: Tensor, coded: Tensor, valid: Tensor) -> Form:
    """Choose base, order and number of low bits from sums over the values that are coded; other levels are 0."""
    n, low, high, total = coded.sum(1), level.amin(1), level.amax(1), level.sum(1)
    mean = total.float() / n.float()
    centre = (mean + 0.5).floor().nan_to_num(0.0).long()
    down = mean < centre
    distance = level - centre[:, None]
    turned = zigzag(torch.where(down[:, None], -distance, distance))
    plain = level - low[:, None]

    sum_plain, sum_turned = (torch.where(coded, v, 0).sum(1) for v in (plain, turned))
    k_plain, k_turned = rice_parameter(n, sum_plain), rice_parameter(n, sum_turned)
    bits_plain, bits_turned = estimate(n, sum_plain, k_plain), estimate(n, sum_turned, k_turned)
    width = bit_width(high - low)
    fixed = n * width <= torch.minimum(bits_plain, bits_turned)
    zig = ~fixed & (bits_turned < bits_plain)
    k = torch.where(fixed, width, torch.where(zig, k_turned, k_plain))
    v = torch.where(zig[:, None], turned, plain)
    base = torch.where(zig, centre, low)
    order = torch.where(zig, torch.where(down, 2, 1), 0)

    quotient = v >> k[:, None]
    unary = torch.where(coded, (quotient + 1).clamp(max=ROUNDS), 0).sum(1)
    escaped = (coded & (quotient >= ROUNDS)).sum(1)
    rest = bit_width((quotient.amax(1) - ROUNDS).clamp(min=0))
    unary += torch.where(escaped > 0, 5 + escaped * rest, 0)
    bits = n * k + torch.where(fixed, 0, unary) + torch.where(n < valid.sum(1), valid.sum(1), 0)
    nbytes = bits + 7 >> 3
    wide = (base < -128) | (base > 127) | (k > 7) | (v.amax(1) > 255) | (nbytes > 255)
    return Form(v, base, order, k, fixed, rest, wide, nbytes + 4 * wide)


def put_plane(bits: Tensor, at: Tensor, plane: Tensor, where: Tensor) -> Tensor:
    """Write the bits of a plane for the values `where`, contiguous from bit `at` on; return the position after them."""
    place = at[:, None] + where.cumsum(1) - 1
    bits[place[where]] = plane[where].to(torch.uint8)
    return at + where.sum(1)


def get_plane(bits: Tensor, at: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Read the result of `put_plane`: return the plane, zero elsewhere, and the position after it."""
    plane = torch.zeros(where.shape, dtype=torch.int64, device=bits.device)
    plane[where] = bits[(at[:, None] + where.cumsum(1) - 1)[where]].long()
    return plane, at + where.sum(1)


def put_number(bits: Tensor, at: Tensor, number: Tensor, width: int, rows: Tensor) -> Tensor:
    """Write one number for each of the `rows`, lowest bit first; return the position after it."""
    column = torch.arange(width, device=bits.device)
    return put_plane(bits, at, number[:, None] >> column & 1, rows[:, None].expand(-1, width))


def get_number(bits: Tensor, at: Tensor, width: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Read the result of `put_number`; return the numbers and the positions after them."""
    plane, end = get_plane(bits, at, rows[:, None].expand(-1, width))
    return (plane << torch.arange(width, device=bits.device)).sum(1), end


def to_bits(data: Tensor) -> Tensor:
    """Unpack bytes to bits, lowest first."""
    return (data[:, None] >> torch.arange(8, device=data.device, dtype=torch.uint8) & 1).view(-1)


def from_bits(bits: Tensor) -> Tensor:
    """Pack bits into bytes, lowest first."""
    weights = 1 << torch.arange(8, device=bits.device, dtype=torch.uint8)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def put_blocks(bits: Tensor, at: Tensor, form: Form, coded: Tensor, valid: Tensor) -> None:
    """Write blocks from the bits `at` on."""
    n, sparse = coded.sum(1), coded.sum(1) < valid.sum(1)
    at = put_number(bits, at, form.base, 32, form.wide)
    at = put_plane(bits, at, coded, valid & sparse[:, None])
    for p in range(int(form.k.max()) if len(n) else 0):
        at = put_plane(bits, at, form.v >> p & 1, coded & (p < form.k)[:, None])
    quotient = form.v >> form.k[:, None]
    alive = coded & ~form.fixed[:, None]
    for j in range(ROUNDS):
        at = put_plane(bits, at, quotient > j, alive)
        alive = alive & (quotient > j)
    at = put_number(bits, at, form.rest, 5, alive.any(1))
    for p in range(int(form.rest.max()) if len(n) else 0):
        at = put_plane(bits, at, quotient - ROUNDS >> p & 1, alive & (p < form.rest)[:, None])


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload)."""
    warn_if_large(x)
    numel, device, dtype = x.numel(), x.device, x.dtype
    meta = torch.zeros(format.meta_size(numel), dtype=torch.uint8, device=device)
    if numel == 0:
        return meta, meta[:0].clone()
    largest, groups, blocks = bound_of(x, format), -(-numel // PLANE_GROUP), -(-numel // PLANE_BLOCK)
    eb = largest / 2 if format.rounding == STOCHASTIC else largest
    raw = torch.zeros(groups * PLANE_GROUP, dtype=dtype, device=device)
    raw[:numel] = x.reshape(-1)
    order = bit_order(device)
    v = raw.to(compute_dtype(dtype)).view(-1, PLANE_BLOCK)[:blocks, order]
    valid = (torch.arange(blocks * PLANE_BLOCK, device=device) < numel).view(-1, PLANE_BLOCK)[:, order]
    stored = raw.view(torch.uint8).view(-1, PLANE_BLOCK, dtype.itemsize)[:blocks, order]
    same = ((stored == stored[:, :1]).all(2) | ~valid).all(1)

    code = torch.zeros(groups, dtype=torch.int64, device=device)
    if eb == 0:
        coded = (stored != 0).any(2)
        level, must_raw = torch.zeros(v.shape, dtype=torch.int64, device=device), coded.any(1)
    else:
        fits, coded = v.abs() < eb * 2.0**20, v != 0
        magnitude = torch.zeros(groups * BLOCKS, dtype=v.dtype, device=device)
        magnitude[:blocks] = torch.where(fits, v.abs(), 0.0).amax(1)
        code = shrink_codes(magnitude.view(groups, BLOCKS).amax(1), eb, dtype)
        rounding = rounding_of(format.rounding, blocks, eb, code, dtype, seed)
        level = torch.where(fits & coded, rounding.levels(torch.where(fits, v, 0.0)), 0)
        back = rounding.values(level, dtype).to(v.dtype)
        must_raw = (~fits | coded & exceeds(back, v, largest)).any(1)
    form = choose_forms(level, coded, valid)

    n, raw_size = coded.sum(1), valid.sum(1) * dtype.itemsize
    use_raw = must_raw | (form.nbytes >= raw_size)
    special = torch.where(n == 0, ALL_ZERO, torch.where(same, REPEATED, torch.where(use_raw, AS_IS, 0)))
    plain = special == 0
    size = torch.where(plain, form.nbytes, torch.where(special == AS_IS, raw_size, 0))
    size = torch.where(special == REPEATED, dtype.itemsize, size)
    padded = torch.zeros(groups * BLOCKS, dtype=torch.int64, device=device)
    padded[:blocks] = size
    padded = padded.view(groups, BLOCKS)
    units = padded.sum(1) + 3 >> 2
    offset = units.cumsum(0) - units
    start = (offset[:, None] * 4 + padded.cumsum(1) - padded).view(-1)[:blocks]

    payload = torch.zeros(int(units.sum()) * 4, dtype=torch.uint8, device=device)
    bits = to_bits(payload)
    rows = Form(
        *(getattr(form, name)[plain] for name in ("v", "base", "order", "k", "fixed", "rest", "wide", "nbytes"))
    )
    put_blocks(bits, start[plain] * 8, rows, coded[plain], valid[plain])
    payload = from_bits(bits)
    bytes_of = raw.view(torch.uint8).view(-1, PLANE_BLOCK * dtype.itemsize)[:blocks]
    column = torch.arange(PLANE_BLOCK * dtype.itemsize, device=device)
    copied = ~plain[:, None] & (column < size[:, None])
    payload[(start[:, None] + column)[copied]] = bytes_of[copied]

    flags = form.fixed << 4 | form.order << 5 | (n < valid.sum(1)).long() << 3
    narrow = (size, form.base & 255, flags | form.k)
    wide = (size & 255, size >> 8 | form.k << 3, flags | 128)
    heads = [torch.where(plain, torch.where(form.wide, w, s), 0) for s, w in zip(narrow, wide, strict=True)]
    heads[2] += special
    meta[:8] = eb.double().reshape(1).view(torch.uint8)
    meta[8:16] = torch.tensor([(seed + 2**63) % 2**64 - 2**63], device=device).view(torch.uint8)
    meta[PLANE_HEADER : PLANE_HEADER + 4 * groups] = offset.to(torch.int32).view(torch.uint8)
    meta[PLANE_HEADER + 4 * groups : PLANE_HEADER + 5 * groups] = code.to(torch.uint8)
    meta[PLANE_HEADER + 5 * groups :] = torch.stack(heads, 1).view(-1).to(torch.uint8)
    return meta, payload


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Decode the result of `bounded_encode` to flat values; with `mask`, return the mask of the non-zero values."""
    dtype, device = format.dtype, meta.device
    if numel == 0:
        return torch.zeros(0, dtype=torch.bool if mask else dtype, device=device)
    groups, blocks = -(-numel // PLANE_GROUP), -(-numel // PLANE_BLOCK)
    eb = meta[:8].clone().view(torch.float64).to(compute_dtype(dtype))[0]
    seed = int(meta[8:16].clone().view(torch.int64))
    offset = meta[PLANE_HEADER : PLANE_HEADER + 4 * groups].clone().view(torch.int32).long() & MASK32
    code = meta[PLANE_HEADER + 4 * groups : PLANE_HEADER + 5 * groups].long()
    heads = meta[PLANE_HEADER + 5 * groups :].view(blocks, 3).long()
    valid = (torch.arange(blocks * PLANE_BLOCK, device=device) < numel).view(-1, PLANE_BLOCK)[:, bit_order(device)]

    first, second, flags = heads.unbind(1)
    plain = flags & 0x60 != 0x60
    wide = plain & (flags >= 128)
    k = torch.where(wide, second >> 3, flags & 7)
    order, fixed, sparse = flags >> 5 & 3, flags & 16 > 0, flags & 8 > 0
    size = torch.where(wide, first | (second & 7) << 8, first)
    size = torch.where(flags == AS_IS, valid.sum(1) * dtype.itemsize, torch.where(plain, size, 0))
    size = torch.where(flags == REPEATED, dtype.itemsize, size)
    padded = torch.zeros(groups * BLOCKS, dtype=torch.int64, device=device)
    padded[:blocks] = size
    padded = padded.view(groups, BLOCKS)
    start = (offset[:, None] * 4 + padded.cumsum(1) - padded).view(-1)[:blocks]

    bits = to_bits(payload)
    base, at = get_number(bits, start * 8, 32, wide)
    base = torch.where(wide, base - (base >> 31 << 32), second - (second >> 7 << 8))
    coded, at = get_plane(bits, at, valid & (plain & sparse)[:, None])
    coded = torch.where(sparse[:, None], coded > 0, valid) & plain[:, None]
    v = torch.zeros_like(coded, dtype=torch.int64)
    for p in range(int(k[plain].max()) if plain.any() else 0):
        plane, at = get_plane(bits, at, coded & (p < k)[:, None])
        v |= plane << p
    alive = coded & ~fixed[:, None]
    quotient = torch.zeros_like(v)
    for _ in range(ROUNDS):
        plane, at = get_plane(bits, at, alive)
        quotient += plane
        alive = plane > 0
    width, at = get_number(bits, at, 5, alive.any(1))
    for p in range(int(width.max())):
        plane, at = get_plane(bits, at, alive & (p < width)[:, None])
        quotient += plane << p
    v += quotient << k[:, None]
    turned = torch.where(v & 1 > 0, v + 1 >> 1, -(v >> 1))
    turned = torch.where((order == 2)[:, None], -turned, turned)
    level = base[:, None] + torch.where((order == 0)[:, None], v, turned)

    out = torch.zeros(blocks, PLANE_BLOCK, dtype=dtype, device=device)
    nonzero = torch.zeros(blocks, PLANE_BLOCK, dtype=torch.bool, device=device)
    if eb != 0:
        value = rounding_of(format.rounding, blocks, eb, code, dtype, seed).values(level, dtype)
        out[:, bit_order(device)] = torch.where(coded, value, 0.0)
    nonzero[:, bit_order(device)] = coded
    column = torch.arange(PLANE_BLOCK * dtype.itemsize, device=device)
    place = start[:, None] + torch.where((flags == REPEATED)[:, None], column % dtype.itemsize, column)
    copied = ((flags == AS_IS) | (flags == REPEATED))[:, None].expand(-1, len(column))
    inside = copied & (torch.arange(blocks * len(column), device=device).view(blocks, -1) < numel * dtype.itemsize)
    out.view(torch.uint8).view(blocks, -1)[inside] = payload[place[inside]]
    nonzero |= (copied[:, :PLANE_BLOCK]) & (out != 0)
    return (nonzero if mask else out).view(-1)[:numel].clone()
