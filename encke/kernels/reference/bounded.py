"""Error-bounded codes at variable rate, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encke.kernels.formats import (
    BLOCK,
    BLOCKS,
    FLOATS,
    GROUP,
    HEADER,
    MASK32,
    RAW,
    SMALLEST_BOUND,
    BoundedFormat,
    DitheredFormat,
    compute_dtype,
)
from encke.kernels.reference.fields import bit_width, exponent, field_bytes, get_fields, put_fields, random24
from encke.kernels.reference.slow import warn_if_large


def usable_bound(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound as the kernels use it: rounded down to the computing dtype, clamped, zero where too small."""
    work = compute_dtype(dtype)
    eb = bound.double().clamp(max=2.0**120).to(work)
    eb = torch.where(eb.double() > bound, torch.nextafter(eb, eb.new_zeros(())), eb)
    return torch.where(eb < SMALLEST_BOUND[dtype], 0.0, eb)


def bound_of(x: Tensor, format: BoundedFormat | DitheredFormat) -> Tensor:
    """Return min(bound, relative * range of the finite values) as the kernels use it: 0-dim."""
    eb = torch.tensor(format.bound, dtype=torch.float64, device=x.device)
    if format.relative != float("inf"):
        finite = x[torch.isfinite(x)].double()
        spread = finite.max() - finite.min() if finite.numel() else torch.zeros_like(eb)
        eb = torch.minimum(eb, format.relative * spread)
    return usable_bound(eb, format.dtype)


def shrink(eb: Tensor, code: Tensor) -> Tensor:
    """Return eb_c of docs/design.md."""
    e0 = exponent(eb) - 1
    return torch.where(code == 0, eb * 0.5, eb - torch.ldexp(torch.ones_like(eb), e0 - code + 1))


def rounded_levels(x: Tensor, eb: Tensor, code: Tensor, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Return the levels of groups x blocks x 64 values, and the half step of each group."""
    eb_c = shrink(eb.expand(len(code)), code)[:, None, None]
    a = x.abs()
    if stochastic:
        q = a * (1.0 / eb_c) + 0.5
        k = q.floor()
        index = torch.arange(x.numel(), device=x.device).view(x.shape)
        k = k + (random24(index, seed, BLOCK, BLOCK // 4) < ((q - k) * 2.0**24).long())
        half = eb_c * 0.5
    else:
        k = (a * (0.5 / eb_c)).ceil()
        half = eb_c
    k = torch.where(a > 0, k.clamp(min=1), 0).long()
    return torch.where(x < 0, -k, k), half


def values_of(k: Tensor, half: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of levels."""
    magnitude = (2 * k.abs() - 1).to(half.dtype) * half
    return torch.where(k == 0, 0.0, torch.where(k < 0, -magnitude, magnitude)).to(dtype)


@dataclass
class Levels:
    """Levels of all blocks: groups x blocks (x 64)."""

    k: Tensor
    code: Tensor
    """Shrink code of each group."""
    must_raw: Tensor
    """Blocks that no level represents within the bound."""
    valid: Tensor
    """Number of values of each block; zero after the end."""


def find_levels(raw: Tensor, numel: int, eb: Tensor, format: BoundedFormat, seed: int) -> Levels:
    """Round values (padded with zeros to whole groups) to levels, and check each against the bound."""
    dtype, device, groups = format.dtype, raw.device, raw.numel() // GROUP
    v = raw.to(compute_dtype(dtype)).view(groups, BLOCKS, BLOCK)
    valid = (numel - torch.arange(groups * BLOCKS, device=device).view(groups, BLOCKS) * BLOCK).clamp(0, BLOCK)
    if eb == 0:
        code = torch.zeros(groups, dtype=torch.int64, device=device)
        k = torch.zeros(v.shape, dtype=torch.int64, device=device)
        return Levels(k, code, (raw.view(torch.uint8).view(groups, BLOCKS, -1) != 0).any(2), valid)
    mantissa, smallest, extra = FLOATS[dtype]
    fits = v.abs() < eb * 2.0**22
    m = torch.where(fits, v.abs(), 0.0).amax((1, 2))
    r = exponent(m + eb).clamp(min=smallest) - mantissa - 1 + extra
    e0 = exponent(eb) - 1
    code = torch.where(r > e0, 0, (e0 - r + 1).clamp(max=15))
    k, half = rounded_levels(torch.where(fits, v, 0.0), eb, code, format.stochastic, seed)
    decoded = values_of(k, half, dtype).to(v.dtype)
    must_raw = (~fits | ~((decoded - v).abs() <= eb)).any(2)
    return Levels(torch.where(must_raw[:, :, None], 0, k), code, must_raw, valid)


@dataclass
class Forms:
    """Forms in which blocks are stored: `total` and `kind` for each group, the others for each block."""

    total: Tensor
    """Bytes of a group."""
    kind: Tensor
    """Bytes of a base: 0 none, 1 one byte, 2 four bytes."""
    size: Tensor
    """Bytes of a block."""
    head: Tensor
    """Width of a block; 32 more with a bitmap, or RAW."""
    base: Tensor
    """Subtracted from the levels of a block."""

    def smaller(self, other: Forms) -> Forms:
        """Return for each group the form that takes fewer bytes, this one where they are equal."""
        better = other.total < self.total

        def pick(name: str) -> Tensor:
            ours, theirs = getattr(self, name), getattr(other, name)
            return torch.where(better if ours.dim() == 1 else better[:, None], theirs, ours)

        return Forms(*(pick(name) for name in ("total", "kind", "size", "head", "base")))


def choose_forms(levels: Levels, format: BoundedFormat) -> Forms:
    """Choose for each group how bases are stored, and for each block a width, a bitmap or raw values."""
    k, bitmap = levels.k, format.bitmap
    low, high = k.amin(2), k.amax(2)
    nonzero = k != 0
    count = nonzero.sum(2)
    big = 1 << 30
    low_nz = torch.where(count == 0, 1, torch.where(nonzero, k, big).amin(2))
    high_nz = torch.where(count == 0, 1, torch.where(nonzero, k, -big).amax(2))
    raw_size, exists = levels.valid * format.dtype.itemsize, levels.valid > 0
    unfits = (low < 0, (low < -128) | ((low_nz if bitmap else low) > 127), torch.zeros_like(levels.must_raw))
    chosen: Forms | None = None
    for kind, base_bytes in enumerate((0, 1, 4)):
        base = torch.zeros_like(low) if kind == 0 else low
        map_base = torch.ones_like(low) if kind == 0 else low_nz
        width, map_width = bit_width((high - base).clamp(min=0)), bit_width((high_nz - map_base).clamp(min=0))
        size, map_size = field_bytes(BLOCK, width), 8 + field_bytes(count, map_width)
        use_map = (map_size < size) & bitmap
        size = torch.where(use_map, map_size, size)
        use_raw = levels.must_raw | unfits[kind] | (raw_size < size)
        size = torch.where(exists, torch.where(use_raw, raw_size, size), 0)
        total = size.sum(1) + (exists.sum(1) * base_bytes + 3) // 4 * 4
        head = torch.where(use_raw, RAW, torch.where(use_map, map_width + 32, width))
        forms = Forms(total, torch.full_like(total, kind), size, head, torch.where(use_map, map_base, base))
        chosen = forms if chosen is None else chosen.smaller(forms)
    assert chosen is not None
    return chosen


def base_bytes_of(kind: Tensor, blocks: Tensor) -> Tensor:
    """Return the bytes that the bases of groups with so many blocks take."""
    return torch.where(kind == 1, (blocks + 3) // 4 * 4, torch.where(kind == 2, blocks * 4, 0))


def raw_bytes_at(start: Tensor, size: Tensor, item: int) -> tuple[Tensor, Tensor]:
    """Return which bytes of raw blocks are stored, and where in the payload: blocks x (64 * item)."""
    column = torch.arange(BLOCK * item, device=start.device)
    return column < size[:, None], start[:, None] + column


def compact(v: Tensor, flags: Tensor) -> Tensor:
    """Move the flagged values of each row to its front, in order."""
    order = torch.sort((~flags).to(torch.uint8), dim=1, stable=True).indices
    return v.gather(1, order)


def write_payload(payload: Tensor, raw: Tensor, levels: Levels, forms: Forms, offset: Tensor) -> Tensor:
    """Write bases and blocks of all groups, `offset` words from the start; return the heads of all blocks."""
    exists, kind, item = levels.valid > 0, forms.kind, raw.element_size()
    slot = torch.arange(BLOCKS, device=payload.device)
    for stored_kind, base_bytes in ((1, 1), (2, 4)):
        keep = (kind == stored_kind)[:, None] & exists
        for byte in range(base_bytes):
            at = (offset * 4)[:, None] + slot * base_bytes + byte
            payload[at[keep]] = (forms.base[keep] >> 8 * byte & 255).to(torch.uint8)
    start = (offset * 4 + base_bytes_of(kind, exists.sum(1)))[:, None] + torch.cumsum(forms.size, 1) - forms.size

    flat = exists.view(-1)
    start, head, base, k, valid = (
        t.reshape(-1, *t.shape[2:])[flat] for t in (start, forms.head, forms.base, levels.k, levels.valid)
    )
    is_raw, is_map, width = head == RAW, head >= 32, head & 31
    plain, flags = ~is_raw & ~is_map, k[is_map] != 0
    full, one = torch.full_like(start, BLOCK), torch.ones_like(start)
    put_fields(payload, start[plain], k[plain] - base[plain, None], full[plain], width[plain])
    put_fields(payload, start[is_map], flags.long(), full[is_map], one[is_map])
    values = compact(k[is_map], flags) - base[is_map, None]
    put_fields(payload, start[is_map] + 8, values, flags.sum(1), width[is_map])
    stored, at = raw_bytes_at(start[is_raw], valid[is_raw] * item, item)
    source = raw.view(torch.uint8).view(-1, BLOCK * item)
    payload[at[stored]] = source[: len(is_raw)][is_raw][stored]
    return head


def bounded_encode(x: Tensor, format: BoundedFormat, seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Encode flat values within the bound: (meta, payload). The size is exact, `capacity` unused."""
    warn_if_large(x)
    numel, device = x.numel(), x.device
    if numel == 0:
        return torch.zeros(HEADER, dtype=torch.uint8, device=device), torch.zeros(0, dtype=torch.uint8, device=device)
    eb, groups = bound_of(x, format), -(-numel // GROUP)
    raw = torch.zeros(groups * GROUP, dtype=x.dtype, device=device)
    raw[:numel] = x.reshape(-1)
    levels = find_levels(raw, numel, eb, format, seed)
    forms = choose_forms(levels, format)
    units = (forms.total + 3) // 4
    offset = torch.cumsum(units, 0) - units
    payload = torch.zeros(int(units.sum()) * 4, dtype=torch.uint8, device=device)
    head = write_payload(payload, raw, levels, forms, offset)

    meta = torch.zeros(format.meta_size(numel), dtype=torch.uint8, device=device)
    meta[:8] = (-eb if format.stochastic else eb).double().reshape(1).view(torch.uint8)
    meta[8:16] = units.sum().reshape(1).view(torch.uint8)
    meta[HEADER : HEADER + 4 * groups] = offset.to(torch.int32).view(torch.uint8)
    meta[HEADER + 4 * groups : HEADER + 5 * groups] = (levels.code + 16 * forms.kind).to(torch.uint8)
    meta[HEADER + 5 * groups :] = head.to(torch.uint8)
    return meta, payload


@dataclass
class Blocks:
    """Metadata of all blocks, as it is stored."""

    group: Tensor
    slot: Tensor
    """Number of a block in its group."""
    valid: Tensor
    head: Tensor
    base: Tensor
    cursor: Tensor
    """Byte at which the first block of each group starts."""

    @property
    def is_raw(self) -> Tensor:
        return self.head == RAW

    @property
    def is_map(self) -> Tensor:
        return self.head >= 32

    @property
    def width(self) -> Tensor:
        return self.head & 31


def read_blocks(meta: Tensor, payload: Tensor, numel: int) -> Blocks:
    """Read the metadata and the bases."""
    groups, blocks = -(-numel // GROUP), -(-numel // BLOCK)
    offset = meta[HEADER : HEADER + 4 * groups].clone().view(torch.int32).long() & MASK32
    kind = meta[HEADER + 4 * groups : HEADER + 5 * groups].long() >> 4
    head = meta[HEADER + 5 * groups :].long()
    group = torch.arange(blocks, device=meta.device) // BLOCKS
    slot = torch.arange(blocks, device=meta.device) % BLOCKS
    base = torch.where((head >= 32) & (kind[group] == 0), 1, 0)
    for stored_kind, base_bytes in ((1, 1), (2, 4)):
        keep = kind[group] == stored_kind
        at = (offset[group] * 4 + slot * base_bytes)[keep]
        value = sum((payload[at + byte].long() << 8 * byte for byte in range(base_bytes)), torch.zeros_like(at))
        base[keep] = value - ((value >> 8 * base_bytes - 1) << 8 * base_bytes)
    cursor = offset * 4 + base_bytes_of(kind, torch.bincount(group, minlength=groups))
    valid = (numel - torch.arange(blocks, device=meta.device) * BLOCK).clamp(max=BLOCK)
    return Blocks(group, slot, valid, head, base, cursor)


def find_starts(payload: Tensor, blocks: Blocks, item: int) -> tuple[Tensor, Tensor]:
    """Return the byte at which each block starts, and the bitmaps.

    A block's start is known only after the sizes before it, a bitmap block's size only after its bitmap.
    """
    head, width = blocks.head, blocks.width
    full = torch.full_like(head, BLOCK)
    flags = torch.zeros(len(head), BLOCK, dtype=torch.int64, device=head.device)
    start, cursor = torch.zeros_like(head), blocks.cursor.clone()
    for s in range(BLOCKS):
        here = torch.nonzero(blocks.slot == s)[:, 0]
        g = blocks.group[here]
        start[here] = cursor[g]
        maps = here[blocks.is_map[here]]
        flags[maps] = get_fields(payload, start[maps], full[maps], torch.ones_like(maps))
        map_size = 8 + field_bytes(flags[here].sum(1), width[here])
        coded = torch.where(blocks.is_map[here], map_size, field_bytes(BLOCK, width[here]))
        cursor[g] += torch.where(blocks.is_raw[here], blocks.valid[here] * item, coded)
    return start, flags


def bounded_decode(meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool) -> Tensor:
    """Return the flat values that `bounded_encode` stored, or with `mask` only whether each is not zero."""
    dtype, device = format.dtype, meta.device
    if numel == 0:
        return torch.zeros(0, dtype=torch.bool if mask else dtype, device=device)
    groups = -(-numel // GROUP)
    eb = meta[:8].clone().view(torch.float64).to(compute_dtype(dtype))
    code = meta[HEADER + 4 * groups : HEADER + 5 * groups].long() & 15
    blocks = read_blocks(meta, payload, numel)
    start, flags = find_starts(payload, blocks, dtype.itemsize)
    is_raw, is_map, width, base = blocks.is_raw, blocks.is_map, blocks.width, blocks.base

    k = torch.zeros(flags.shape, dtype=torch.int64, device=device)
    plain = ~is_raw & ~is_map
    k[plain] = get_fields(payload, start[plain], torch.full_like(start, BLOCK)[plain], width[plain])
    k[plain] += base[plain, None]
    packed = get_fields(payload, start[is_map] + 8, flags[is_map].sum(1), width[is_map]) + base[is_map, None]
    rank = (torch.cumsum(flags[is_map], 1) - 1).clamp(min=0)
    k[is_map] = torch.where(flags[is_map] > 0, packed.gather(1, rank), 0)

    if eb == 0:
        out = torch.zeros(flags.shape, dtype=dtype, device=device)
    else:
        half = shrink(eb.abs().expand(groups), code) * torch.where(eb < 0, 0.5, 1.0).to(eb.dtype)
        out = values_of(k, half[blocks.group][:, None], dtype)
    stored, at = raw_bytes_at(start[is_raw], blocks.valid[is_raw] * dtype.itemsize, dtype.itemsize)
    raw = torch.zeros(at.shape, dtype=torch.uint8, device=device)
    raw[stored] = payload[at[stored]]
    out.view(torch.uint8)[is_raw] = raw
    flat = out.view(-1)[:numel]
    return flat != 0 if mask else flat.clone()
