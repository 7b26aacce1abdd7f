"""The kernels in plain torch: slow, readable, the oracle for the other two. docs/design.md explains the format."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
BLOCKS = 16
GROUP = BLOCK * BLOCKS
HEADER = 32
LP_KNEE = 8.0  # so far below zero the steps of log-probabilities change
RAW = 31
MASK32 = 0xFFFFFFFF

# dtype -> (mantissa bits, smallest exponent, extra exponent for the reciprocal multiplication)
FLOATS = {
    torch.float16: (10, -14, 0),
    torch.bfloat16: (7, -126, 0),
    torch.float32: (23, -126, 3),
    torch.float64: (52, -1022, 3),
}

# Smaller bounds count as zero: below them a level could be a denormal, which not every processor keeps.
SMALLEST_BOUND = {
    torch.float16: 2.0**-22,
    torch.bfloat16: 2.0**-100,
    torch.float32: 2.0**-100,
    torch.float64: 2.0**-900,
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def meta_size(numel: int) -> int:
    """Bytes of metadata of an error-bounded encoding of `numel` values."""
    return HEADER + 5 * -(-numel // GROUP) + -(-numel // BLOCK)


def random24(index: Tensor, seed: int, run: int, length: int) -> Tensor:
    """24 random bits for each value index: the hash of docs/design.md, as int64.

    Within a run of values those at a distance of `length` share one hash, each turned by its own number of bits.
    """
    return hash24(index // run * length + index % length, index % run // length * (32 * length // run), seed)


def hash24(word: Tensor, turn: Tensor, seed: int) -> Tensor:
    """24 bits of the hash of each word, turned."""
    h = ((word & MASK32) ^ (seed & MASK32)) * ((seed >> 32 & MASK32) | 1) & MASK32
    h = (h ^ h >> 15) * 0x846CA68B & MASK32
    h = h ^ h >> 16
    return (h >> turn | h << 32 - turn & MASK32) >> 8


def exponent(x: Tensor) -> Tensor:
    """floor(log2 x) of positive normal values, read from the bits."""
    if x.dtype == torch.float64:
        return (x.view(torch.int64) >> 52) - 1023
    return (x.view(torch.int32) >> 23).long() - 127


def usable_bound(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The bound as the kernels use it: rounded down to the computing dtype, clamped, zero where too small."""
    work = compute_dtype(dtype)
    eb = bound.double().clamp(max=2.0**120).to(work)
    eb = torch.where(eb.double() > bound, torch.nextafter(eb, eb.new_zeros(())), eb)
    return torch.where(eb < SMALLEST_BOUND[dtype], 0.0, eb)


def shrink(eb: Tensor, code: Tensor) -> Tensor:
    """eb_c of docs/design.md."""
    e0 = exponent(eb) - 1
    return torch.where(code == 0, eb * 0.5, eb - torch.ldexp(torch.ones_like(eb), e0 - code + 1))


def bits_of(v: Tensor) -> Tensor:
    """How many bits a non-negative integer below 2^31 needs."""
    return torch.frexp(v.double())[1].long()


def field_bytes(n: Tensor | int, width: Tensor) -> Tensor:
    """Bytes that the fields of `n` values of `width` bits take."""
    total = (width >> 3) * n
    for b in (4, 2, 1):
        total = total + torch.where((width & b) > 0, (n * b + 7) // 8, 0)
    return total


def put_fields(out: Tensor, start: Tensor, v: Tensor, n: Tensor, width: Tensor) -> None:
    """Writes the fields of each row of v (blocks x 64, the first n valid) at byte `start` of out."""
    column = torch.arange(BLOCK, device=v.device)
    v = torch.where(column < n[:, None], v, 0)
    padded = torch.cat([v, v.new_zeros(len(v), 8 * BLOCK)], 1)
    shift = torch.zeros_like(width)
    for b, present in [(8, width >= 8 * (i + 1)) for i in range(3)] + [(b, (width & b) > 0) for b in (4, 2, 1)]:
        length = (n * b + 7) // 8
        j = column[None, :]
        byte = torch.zeros_like(v)
        for t in range(8 // b):
            piece = padded.gather(1, j + t * length[:, None]) >> shift[:, None] & (1 << b) - 1
            byte |= piece << t * b
        keep = present[:, None] & (j < length[:, None])
        out[(start[:, None] + j)[keep]] = byte[keep].to(torch.uint8)
        start = start + torch.where(present, length, 0)
        shift = shift + torch.where(present, b, 0)


def get_fields(payload: Tensor, start: Tensor, n: Tensor, width: Tensor) -> Tensor:
    """Reads what put_fields wrote: blocks x 64, valid in the first n columns."""
    column = torch.arange(BLOCK, device=payload.device)[None, :]
    v = torch.zeros(len(n), BLOCK, dtype=torch.int64, device=payload.device)
    shift = torch.zeros_like(width)
    for b, present in [(8, width >= 8 * (i + 1)) for i in range(3)] + [(b, (width & b) > 0) for b in (4, 2, 1)]:
        length = ((n * b + 7) // 8).clamp(min=1)
        at = start[:, None] + column % length[:, None]
        keep = present[:, None] & (column < n[:, None])
        byte = torch.zeros_like(v)
        byte[keep] = payload[at[keep]].long()
        piece = byte >> column // length[:, None] * b & (1 << b) - 1
        v |= torch.where(keep, piece << shift[:, None], 0)
        start = start + torch.where(present, (n * b + 7) // 8, 0)
        shift = shift + torch.where(present, b, 0)
    return v


def raw_bytes_at(start: Tensor, size: Tensor, item: int) -> tuple[Tensor, Tensor]:
    """Which bytes of raw blocks are stored, and where in the payload: blocks x (64 * item)."""
    column = torch.arange(BLOCK * item, device=start.device)
    return column < size[:, None], start[:, None] + column


def compact(v: Tensor, flags: Tensor) -> Tensor:
    """Moves the flagged values of each row to its front, in order."""
    order = torch.sort((~flags).to(torch.uint8), dim=1, stable=True).indices
    return v.gather(1, order)


def bound_of(x: Tensor, bound: float, rel: float) -> Tensor:
    """min(bound, rel * range of the finite values) as the kernels use it: 0-dim."""
    eb = torch.tensor(bound, dtype=torch.float64, device=x.device)
    if rel != float("inf"):
        finite = x[torch.isfinite(x)].double()
        spread = finite.max() - finite.min() if finite.numel() else torch.zeros_like(eb)
        eb = torch.minimum(eb, rel * spread)
    return usable_bound(eb, x.dtype)


def levels_of(x: Tensor, eb: Tensor, code: Tensor, stochastic: bool, seed: int) -> tuple[Tensor, Tensor]:
    """Levels of groups x blocks x 64 values, and the half step of each group."""
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
    magnitude = (2 * k.abs() - 1).to(half.dtype) * half
    return torch.where(k == 0, 0.0, torch.where(k < 0, -magnitude, magnitude)).to(dtype)


def eb_encode(
    x: Tensor, bound: float, rel: float, stochastic: bool, seed: int, bitmap: bool, capacity: int
) -> tuple[Tensor, Tensor]:
    """Encodes flat values under min(bound, rel * range): (meta, payload). The size is exact, `capacity` unused."""
    dtype, numel, device = x.dtype, x.numel(), x.device
    if numel == 0:
        return torch.zeros(HEADER, dtype=torch.uint8, device=device), torch.zeros(0, dtype=torch.uint8, device=device)
    mant, emin, extra = FLOATS[dtype]
    work = compute_dtype(dtype)
    eb = bound_of(x, bound, rel)
    groups, blocks = -(-numel // GROUP), -(-numel // BLOCK)
    raw_bytes = torch.zeros(groups * GROUP, dtype=dtype, device=device)
    raw_bytes[:numel] = x.reshape(-1)
    v = raw_bytes.to(work).view(groups, BLOCKS, BLOCK)
    exists = (torch.arange(groups * BLOCKS, device=device) < blocks).view(groups, BLOCKS)
    valid = (numel - torch.arange(groups * BLOCKS, device=device).view(groups, BLOCKS) * BLOCK).clamp(0, BLOCK)

    if eb == 0:
        code = torch.zeros(groups, dtype=torch.int64, device=device)
        k = torch.zeros(v.shape, dtype=torch.int64, device=device)
        must_raw = (raw_bytes.view(torch.uint8).view(groups, BLOCKS, -1) != 0).any(2)
    else:
        fits = v.abs() < eb * 2.0**22
        m = torch.where(fits, v.abs(), 0.0).amax((1, 2))
        r = exponent(m + eb).clamp(min=emin) - mant - 1 + extra
        e0 = exponent(eb) - 1
        code = torch.where(r > e0, 0, (e0 - r + 1).clamp(max=15))
        k, half = levels_of(torch.where(fits, v, 0.0), eb, code, stochastic, seed)
        decoded = values_of(k, half, dtype).to(work)
        must_raw = (~fits | ~((decoded - v).abs() <= eb)).any(2)
        k = torch.where(must_raw[:, :, None], 0, k)

    low, high = k.amin(2), k.amax(2)
    nonzero = k != 0
    count = nonzero.sum(2)
    big = 1 << 30
    low_nz = torch.where(nonzero, k, big).amin(2)
    high_nz = torch.where(nonzero, k, -big).amax(2)
    low_nz, high_nz = torch.where(count == 0, 1, low_nz), torch.where(count == 0, 1, high_nz)
    raw_size = valid * x.element_size()
    per_group = exists.sum(1)
    chosen: dict[str, Tensor] = {}
    for base_kind, base_bytes in enumerate((0, 1, 4)):
        for_base = torch.zeros_like(low) if base_kind == 0 else low
        map_base = torch.ones_like(low) if base_kind == 0 else low_nz
        for_width, map_width = bits_of((high - for_base).clamp(min=0)), bits_of((high_nz - map_base).clamp(min=0))
        for_size = field_bytes(BLOCK, for_width)
        map_size = 8 + field_bytes(count, map_width)
        use_map = (map_size < for_size) & bitmap
        size = torch.where(use_map, map_size, for_size)
        if base_kind == 0:
            unfit = low < 0
        elif base_kind == 1:
            unfit = (low < -128) | ((low_nz if bitmap else low) > 127)
        else:
            unfit = torch.zeros_like(must_raw)
        use_raw = must_raw | unfit | (raw_size < size)
        size = torch.where(use_raw, raw_size, size)
        size = torch.where(exists, size, 0)
        total = size.sum(1) + (per_group * base_bytes + 3) // 4 * 4
        head = torch.where(use_raw, RAW, torch.where(use_map, map_width + 32, for_width))
        option = {
            "total": total,
            "kind": torch.full_like(total, base_kind),
            "size": size,
            "head": head,
            "base": torch.where(use_map, map_base, for_base),
        }
        if base_kind == 0:
            chosen = option
        else:
            better = option["total"] < chosen["total"]
            chosen = {
                name: torch.where(better if new.dim() == 1 else better[:, None], new, chosen[name])
                for name, new in option.items()
            }

    units = (chosen["total"] + 3) // 4
    offset = torch.cumsum(units, 0) - units
    payload = torch.zeros(int(units.sum()) * 4, dtype=torch.uint8, device=device)
    kind, head, base = chosen["kind"], chosen["head"], chosen["base"]
    base_size = torch.where(kind == 1, (per_group + 3) // 4 * 4, torch.where(kind == 2, per_group * 4, 0))
    slot = torch.arange(BLOCKS, device=device)
    for kind_value, base_bytes in ((1, 1), (2, 4)):
        keep = (kind == kind_value)[:, None] & exists
        for byte in range(base_bytes):
            at = (offset * 4)[:, None] + slot * base_bytes + byte
            payload[at[keep]] = (base[keep] >> 8 * byte & 255).to(torch.uint8)
    start = (offset * 4 + base_size)[:, None] + torch.cumsum(chosen["size"], 1) - chosen["size"]

    flat = exists.view(-1)
    start, head, base, k, valid = (t.reshape(-1, *t.shape[2:])[flat] for t in (start, head, base, k, valid))
    is_raw, is_map, width = head == RAW, head >= 32, head & 31
    plain = ~is_raw & ~is_map
    full = torch.full_like(start, BLOCK)
    put_fields(payload, start[plain], k[plain] - base[plain, None], full[plain], width[plain])
    one = torch.ones_like(start)
    put_fields(payload, start[is_map], (k[is_map] != 0).long(), full[is_map], one[is_map])
    n = (k[is_map] != 0).sum(1)
    put_fields(payload, start[is_map] + 8, compact(k[is_map], k[is_map] != 0) - base[is_map, None], n, width[is_map])
    stored, at = raw_bytes_at(start[is_raw], valid[is_raw] * x.element_size(), x.element_size())
    source = raw_bytes.view(torch.uint8).view(-1, BLOCK * x.element_size())
    payload[at[stored]] = source[: len(is_raw)][is_raw][stored]

    meta = torch.zeros(meta_size(numel), dtype=torch.uint8, device=device)
    meta[:8] = (-eb if stochastic else eb).double().reshape(1).view(torch.uint8)
    meta[8:16] = units.sum().reshape(1).view(torch.uint8)
    meta[HEADER : HEADER + 4 * groups] = offset.to(torch.int32).view(torch.uint8)
    meta[HEADER + 4 * groups : HEADER + 5 * groups] = (code + 16 * kind).to(torch.uint8)
    meta[HEADER + 5 * groups :] = head.to(torch.uint8)
    return meta, payload


def eb_decode(meta: Tensor, payload: Tensor, numel: int, dtype: torch.dtype, mask: bool, bitmap: bool = True) -> Tensor:
    """The flat values that eb_encode stored, or only whether each is not zero. `bitmap`: there may be bitmaps."""
    device = meta.device
    if numel == 0:
        return torch.zeros(0, dtype=torch.bool if mask else dtype, device=device)
    groups, blocks = -(-numel // GROUP), -(-numel // BLOCK)
    eb = meta[:8].clone().view(torch.float64).to(compute_dtype(dtype))
    offset = meta[HEADER : HEADER + 4 * groups].clone().view(torch.int32).long() & MASK32
    info = meta[HEADER + 4 * groups : HEADER + 5 * groups].long()
    head = meta[HEADER + 5 * groups :].long()
    code, kind = info & 15, info >> 4
    group = torch.arange(blocks, device=device) // BLOCKS
    slot = torch.arange(blocks, device=device) % BLOCKS
    per_group = torch.bincount(group, minlength=groups)
    valid = (numel - torch.arange(blocks, device=device) * BLOCK).clamp(max=BLOCK)
    is_raw, is_map, width = head == RAW, head >= 32, head & 31

    base = torch.where(is_map & (kind[group] == 0), 1, 0)
    for kind_value, base_bytes in ((1, 1), (2, 4)):
        keep = kind[group] == kind_value
        at = (offset[group] * 4 + slot * base_bytes)[keep]
        value = sum((payload[at + byte].long() << 8 * byte for byte in range(base_bytes)), torch.zeros_like(at))
        base[keep] = value - ((value >> 8 * base_bytes - 1) << 8 * base_bytes)
    base_size = torch.where(kind == 1, (per_group + 3) // 4 * 4, torch.where(kind == 2, per_group * 4, 0))

    full = torch.full_like(head, BLOCK)
    flags = torch.zeros(blocks, BLOCK, dtype=torch.int64, device=device)
    # A block's start is known only after the sizes before it, a bitmap block's size only after its bitmap.
    start = torch.zeros_like(head)
    cursor = offset * 4 + base_size
    for s in range(BLOCKS):
        here = torch.nonzero(slot == s)[:, 0]
        g = group[here]
        start[here] = cursor[g]
        maps = here[is_map[here]]
        flags[maps] = get_fields(payload, start[maps], full[maps], torch.ones_like(maps))
        size = torch.where(
            is_raw[here],
            valid[here] * dtype.itemsize,
            torch.where(
                is_map[here],
                8 + field_bytes(flags[here].sum(1), width[here]),
                field_bytes(BLOCK, width[here]),
            ),
        )
        cursor[g] += size

    k = torch.zeros(blocks, BLOCK, dtype=torch.int64, device=device)
    plain = ~is_raw & ~is_map
    k[plain] = get_fields(payload, start[plain], full[plain], width[plain]) + base[plain, None]
    n = flags[is_map].sum(1)
    packed = get_fields(payload, start[is_map] + 8, n, width[is_map]) + base[is_map, None]
    rank = (torch.cumsum(flags[is_map], 1) - 1).clamp(min=0)
    k[is_map] = torch.where(flags[is_map] > 0, packed.gather(1, rank), 0)

    if eb == 0:
        out = torch.zeros(blocks, BLOCK, dtype=dtype, device=device)
    else:
        half = shrink(eb.abs().expand(groups), code) * torch.where(eb < 0, 0.5, 1.0).to(eb.dtype)
        out = values_of(k, half[group][:, None], dtype)
    stored, at = raw_bytes_at(start[is_raw], valid[is_raw] * dtype.itemsize, dtype.itemsize)
    raw = torch.zeros(at.shape, dtype=torch.uint8, device=device)
    raw[stored] = payload[at[stored]]
    out.view(torch.uint8)[is_raw] = raw
    flat = out.view(-1)[:numel]
    return flat != 0 if mask else flat.clone()


def step_up(step: Tensor, spread: Tensor, dtype: torch.dtype) -> Tensor:
    """The step as it is stored: bf16 rounded up (fp64 as it is), not too small where there is a spread at all."""
    if dtype != torch.float64:
        step = ((step.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
        step = step.clamp(min=2.0**-100)
    else:
        step = step.clamp(min=2.0**-990)
    return torch.where(spread > 0, step, 0.0)


def lo_down(lo: Tensor, marked: Tensor) -> Tensor:
    """A group's lo as it is stored: bf16 rounded down (fp64 as it is), finite; not zero where its sign is a mark."""
    if lo.dtype == torch.float64:
        return lo
    size = lo.view(torch.int32) & 0x7FFFFFFF
    away = ((size + 0xFFFF) & -0x10000).clamp(max=0x7F7F0000).view(torch.float32)
    near = size & -0x10000
    near = torch.where(marked, near.clamp(min=0x10000), near).view(torch.float32)
    return torch.where(lo < 0, -away, near)


def pack_fields(code: Tensor, bits: int) -> Tensor:
    """One field of `bits` bits over each row: rows x n -> rows x ceil(n * bits / 8) bytes."""
    rows, n = code.shape
    length = -(-n * bits // 8)
    per_byte = 8 // bits
    padded = torch.zeros(rows, length * per_byte, dtype=torch.uint8, device=code.device)
    padded[:, :n] = code
    slices = padded.view(rows, per_byte, length)
    out = slices[:, 0].clone()
    for t in range(1, per_byte):
        out |= slices[:, t] << t * bits
    return out


def unpack_fields(data: Tensor, bits: int, n: int) -> Tensor:
    """Reads what pack_fields wrote: rows x n, uint8."""
    pieces = [data >> t * bits & (1 << bits) - 1 for t in range(8 // bits)]
    return torch.cat(pieces, 1)[:, :n]


def gq_groups(numel: int, group: int, stride: int) -> int:
    """How many groups there are: each takes `group` values that lie `stride` apart."""
    return -(-(numel // stride) // group) * stride


def gq_sizes(numel: int, bits: int, group: int, dtype: torch.dtype, stride: int = 1) -> tuple[int, int, int]:
    """Where the lo and step arrays start, and the size of the whole buffer, in bytes."""
    groups = gq_groups(numel, group, stride)
    codes = groups * group * bits // 8
    each = 8 if dtype == torch.float64 else 2
    return codes, codes + groups * each, codes + groups * 2 * each


def gq_encode(x: Tensor, bits: int, group: int, seed: int, stride: int = 1, signs: bool = False) -> Tensor:
    """Fixed-rate codes of flat float values, with lo and step of each group, in one buffer.

    The values of a group lie `stride` apart: with the channels of channels_last memory, each group has one channel.
    `signs`: zeros and signs are exact in signed groups too (4 or 8 bits).
    """
    dtype, numel = x.dtype, x.numel()
    if numel % stride:
        raise ValueError(f"{numel} values cannot be taken in groups that lie {stride} apart")
    if numel == 0:
        return torch.zeros(0, dtype=torch.uint8, device=x.device)
    work = compute_dtype(dtype)
    blocks = gq_groups(numel, group, stride) // stride
    v = torch.zeros(blocks * group, stride, dtype=work, device=x.device)
    v[: numel // stride] = x.reshape(-1, stride).to(work)
    v = v.view(blocks, group, stride).transpose(1, 2).reshape(-1, group)
    a = v.abs()
    signed = (v < 0).any(1)
    affine = torch.zeros_like(signed) if signs else signed
    lo = torch.where(a > 0, a, torch.inf).amin(1)
    lo = torch.where(affine, v.amin(1), torch.where(torch.isinf(lo), 0.0, lo))
    hi = torch.where(affine, v.amax(1), a.amax(1))
    finite = torch.isfinite(v).all(1)
    lo = torch.where(finite, lo_down(lo, signed & ~affine), 0.0)
    n = torch.where(signed, 2.0 ** (bits - 1) - 2 if signs else 2.0**bits - 1, 2.0**bits - 2).to(work)
    step = step_up(hi * (1.0 / n) - lo * (1.0 / n), hi - lo, dtype)
    step = torch.where(finite, step, torch.nan)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    t = (torch.where(affine[:, None], v, a) - lo[:, None]) * inverse[:, None]
    t = torch.minimum(t.clamp(min=0.0), n[:, None]).nan_to_num(0.0)
    q = t.floor()
    q = (q + (gq_random(blocks, group, bits, stride, seed, x.device) < ((t - q) * 2.0**24).long())).long()
    sign = (v < 0).long() << bits - 1
    code = torch.where(affine[:, None], q, torch.where(a > 0, (q + 1) | sign, 0))
    lo = torch.where(signed & ~affine, -lo, lo)
    kept = torch.float64 if dtype == torch.float64 else torch.bfloat16
    packed = pack_fields(code.to(torch.uint8), bits).view(blocks, stride, -1).transpose(1, 2)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (packed, lo.to(kept), step.to(kept))])


def gq_random(blocks: int, group: int, bits: int, stride: int, seed: int, device: torch.device) -> Tensor:
    """24 random bits for every value, in rows of groups: the hash of the byte its code is in, turned by its slice."""
    length = group * bits // 8
    byte = torch.arange(blocks * length * stride, device=device).view(blocks, length, stride)
    word = byte.transpose(1, 2).reshape(-1, length).repeat(1, 8 // bits)
    return hash24(word, torch.arange(group, device=device) // length * (4 * bits), seed)


def gq_decode(
    data: Tensor,
    numel: int,
    bits: int,
    group: int,
    dtype: torch.dtype,
    mask: bool,
    seed: int,
    stride: int = 1,
    signs: bool = False,
) -> Tensor:
    """The flat values that gq_encode stored with the same settings, or only whether each is not zero (bool)."""
    if numel == 0:
        return torch.zeros(0, dtype=torch.bool if mask else dtype, device=data.device)
    work = compute_dtype(dtype)
    at_lo, at_step, end = gq_sizes(numel, bits, group, dtype, stride)
    blocks = gq_groups(numel, group, stride) // stride
    rows = data[:at_lo].view(blocks, -1, stride).transpose(1, 2).reshape(blocks * stride, -1)
    code = unpack_fields(rows, bits, group).long()
    kept = torch.float64 if dtype == torch.float64 else torch.bfloat16
    lo, step = (part.clone().view(kept).to(work) for part in (data[at_lo:at_step], data[at_step:end]))
    signed = lo < 0
    affine = (torch.zeros_like(signed) if signs else signed)[:, None]
    magnitude = torch.where((signed[:, None] & ~affine), code & (1 << bits - 1) - 1, code)
    if signs:
        value = lo.abs()[:, None] + (magnitude - 1).to(work) * step[:, None]
    else:
        # What was added by chance before rounding is known, and taken off again.
        base = lo - torch.where(signed, 0.5, 1.5).to(work) * step
        fixed = (code << 24) + gq_random(blocks, group, bits, stride, seed, data.device)
        value = base[:, None] + fixed.to(work) * (step * 2.0**-24)[:, None]
    limit = torch.finfo(dtype).max
    value = value.clamp(-limit, limit)
    value = torch.where(~affine & (magnitude == 0), 0.0, value)
    value = torch.where(signed[:, None] & ~affine & (code >> bits - 1 > 0), -value, value)
    value = torch.where(torch.isnan(step)[:, None], torch.nan, value)
    if mask:
        out, kept = affine | (magnitude != 0) | torch.isnan(step)[:, None], torch.bool
    else:
        out, kept = value.to(dtype), dtype
    out = out.view(-1, stride, group).transpose(1, 2).reshape(-1, stride)[: numel // stride]
    return out.reshape(-1).to(kept).clone()


def lp_bend(step: float, far: float) -> float:
    """What continues, from LP_KNEE below zero on, a count of steps with one of `far` steps, which are not larger."""
    return LP_KNEE * (1 / far - 1 / step)


def lp_encode(x: Tensor, step: float, far: float, seed: int) -> Tensor:
    """A byte for each flat value: how many steps it lies below zero, at most 254; NaN is 255."""
    v = x.float()
    steps = torch.maximum(v * (-1 / step), v * (-1 / far) - lp_bend(step, far)) + lp_random(x, seed)
    return steps.clamp_(0, 254).nan_to_num_(nan=255).to(torch.uint8)


def lp_decode(data: Tensor, step: float, far: float, shift: float, seed: int, dtype: torch.dtype) -> Tensor:
    """The values that lp_encode stored, the random numbers taken off again, and `shift` lower."""
    t = data.float() + 0.5 - lp_random(data, seed)
    values = torch.maximum(t * -step, (t + lp_bend(step, far)) * -far) - shift
    return values.masked_fill_(data == 255, float("nan")).to(dtype)


def lp_random(x: Tensor, seed: int) -> Tensor:
    """A random number between 0 and 1 for every value."""
    index = torch.arange(x.numel(), device=x.device)
    return hash24(index, torch.zeros_like(index), seed).float() * 2.0**-24


def bits_encode(x: Tensor, bits: int) -> Tensor:
    """Packs flat uint8 (or bool) values below 2^bits, bits 1, 2 or 4: one field over the whole tensor."""
    return pack_fields(x.reshape(1, -1).to(torch.uint8), bits)[0]


def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    """The flat uint8 values that bits_encode stored."""
    return unpack_fields(data.view(1, -1), bits, numel)[0]


def dp_tiles(height: int, width: int, block: int) -> tuple[int, int, int, int]:
    """Height and width of a tile, and how many tiles lie below and beside each other in a plane."""
    tall, wide = min(block, height), min(block, width)
    return tall, wide, -(-height // tall), -(-width // wide)


def dp_sizes(
    numel: int, height: int, width: int, block: int, bits: int, masked: bool, dtype: torch.dtype
) -> tuple[int, int, int, int, int]:
    """Where the steps, averages, codes and mask bits start, and the size of the whole buffer, in bytes."""
    values = height * width
    planes = numel // values
    _, _, down, across = dp_tiles(height, width, block)
    lo, step = (8, 8) if dtype == torch.float64 else (4, 2)
    at_low = planes * (lo + step)
    at_codes = at_low + 2 * planes * down * across
    at_mask = at_codes + planes * -(-values * bits // 8)
    return planes * lo, at_low, at_codes, at_mask, at_mask + (planes * -(-values // 8) if masked else 0)


def tile_averages(v: Tensor, block: int) -> Tensor:
    """The average of each tile of planes x height x width values as bf16, zero where that is not finite.

    The columns of a tile are summed from top to bottom, then their sums from left to right.
    """
    planes, height, width = v.shape
    tall, wide, down, across = dp_tiles(height, width, block)
    padded = v.new_zeros(planes, down * tall, across * wide)
    padded[:, :height, :width] = v
    tiles = padded.view(planes, down, tall, across, wide)
    columns = v.new_zeros(planes, down, across, wide)
    for i in range(tall):
        columns = columns + tiles[:, :, i]
    total = v.new_zeros(planes, down, across)
    for j in range(wide):
        total = total + columns[..., j]
    tall_of = (height - torch.arange(down, device=v.device) * tall).clamp(max=tall)
    wide_of = (width - torch.arange(across, device=v.device) * wide).clamp(max=wide)
    low = (total / (tall_of[:, None] * wide_of).to(v.dtype)).float().to(torch.bfloat16)
    return torch.where(torch.isfinite(low), low, 0.0)


def spread_averages(low: Tensor, height: int, width: int, block: int) -> Tensor:
    """Each tile's average at all places of the tile: planes x height x width."""
    tall, wide, _, _ = dp_tiles(height, width, block)
    return low.repeat_interleave(tall, 1)[:, :height].repeat_interleave(wide, 2)[:, :, :width]


def dp_encode(x: Tensor, height: int, width: int, block: int, bits: int, masked: bool, seed: int) -> Tensor:
    """Planes of height x width values, one after the other, in dual precision: one buffer."""
    dtype, values = x.dtype, height * width
    work, planes = compute_dtype(dtype), x.numel() // values
    if planes == 0:
        return torch.zeros(0, dtype=torch.uint8, device=x.device)
    v = x.reshape(planes, height, width).to(work)
    low = tile_averages(v, block)
    rest = (v - spread_averages(low.to(work), height, width, block)).view(planes, values)
    lo, hi = rest.amin(1) + 0.0, rest.amax(1)  # plus 0.0: never -0.0
    n = 2.0**bits - 1
    finite = hi - lo < torch.inf
    lo = torch.where(finite, lo, 0.0)
    step = torch.where(finite, step_up(hi / n - lo / n, hi - lo, dtype), torch.nan)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    t = ((rest - lo[:, None]) * inverse[:, None]).nan_to_num(0.0).clamp(0.0, n)
    q = t.floor()
    length = -(-values * bits // 8)
    slots = 8 // bits * length
    index = (torch.arange(planes, device=x.device) * slots)[:, None] + torch.arange(values, device=x.device)
    q = q + (random24(index, seed, slots, length) < ((t - q) * 2.0**24).long())
    kept = step.view(torch.uint8) if dtype == torch.float64 else (step.view(torch.int32) >> 16).to(torch.int16)
    parts = [lo, kept, low, pack_fields(q.to(torch.uint8), bits)]
    if masked:
        parts.append(pack_fields((v != 0).view(planes, values).to(torch.uint8), 1))
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def dp_decode(
    data: Tensor,
    numel: int,
    height: int,
    width: int,
    block: int,
    bits: int,
    masked: bool,
    dtype: torch.dtype,
    mask: bool,
) -> Tensor:
    """The values that dp_encode stored, or only whether each was not zero: exactly, where the buffer is `masked`."""
    work, values = compute_dtype(dtype), height * width
    planes = numel // values
    if planes == 0:
        return torch.zeros(0, dtype=torch.bool if mask else dtype, device=data.device)
    at_step, at_low, at_codes, at_mask, end = dp_sizes(numel, height, width, block, bits, masked, dtype)
    if mask and masked:
        return unpack_fields(data[at_mask:end].view(planes, -1), 1, values).reshape(-1).bool()
    _, _, down, across = dp_tiles(height, width, block)
    lo = data[:at_step].clone().view(work)[:, None]
    step = data[at_step:at_low].clone().view(work if dtype == torch.float64 else torch.bfloat16).to(work)[:, None]
    low = data[at_low:at_codes].clone().view(torch.bfloat16).to(work).view(planes, down, across)
    code = unpack_fields(data[at_codes:at_mask].view(planes, -1), bits, values).to(work)
    limit = torch.finfo(dtype).max
    value = spread_averages(low, height, width, block).reshape(planes, values) + (lo + code * step)
    value = torch.where(torch.isnan(step), torch.nan, value.clamp(-limit, limit))
    flat = value.to(dtype).view(-1)
    return flat != 0 if mask else flat
