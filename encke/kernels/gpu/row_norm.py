"""Layer norm and RMS norm over rows: forward, backward from a packed input, and recomputation of the result.

    n = (x - mean) * rstd          an RMS norm has no mean
    y = round(n) * (weight + offset) + bias

A program processes whole rows. The codes of a packed row are a tile [row, group, byte] (docs/design.md, `GroupQuant`);
the values of a byte are processed slice by slice, so that the hash of a byte and the scales of a group are computed
once. A row that is not packed counts as one group with one slice.

The input and its gradient may have transposed rows (`rows_inside` in codecs/layout.py), as after
`nn.MultiheadAttention`: programs process them in memory order. Results, their gradients and statistics are contiguous.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import GroupFormat
from encke.kernels.gpu.codes import scales_at
from encke.kernels.gpu.common import narrow, random32, widen
from encke.kernels.gpu.launch import TYPES, Launch, power_of_two, seed_halves
from encke.kernels.gpu.norm_kernels import code_as_mantissa, group_line, load_group
from encke.kernels.reference.row_norm import RowNorm

VALUES = 4096  # values that a program processes at a time, with four warps
BACKWARD = 1024  # values that a program of backward processes at a time: more need twice the registers for the sums
WIDEST = 1 << 15  # values of the widest row that a program can process
PROGRAMS = 132 * 8  # largest number of programs of backward, each with a sum for each column
SUMMED = 256  # number of these sums that a program adds up at a time, for COLUMNS columns
COLUMNS = 8
TAKEN = {torch.float32, torch.bfloat16, torch.float16}

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of input, weight and bias."""


@triton.jit
def rounded(v, DTYPE: tl.constexpr):
    """Round values to DTYPE and return them in fp32."""
    return v if DTYPE == tl.float32 else widen(narrow(v, DTYPE), DTYPE)


@triton.jit
def columns(s, L: tl.constexpr, EXTENT: tl.constexpr, K: tl.constexpr, LP: tl.constexpr):
    """Return the column of each value in slice `s` of a row: [1, group, byte]."""
    b = tl.arange(0, K)[None, :, None]
    return b * EXTENT + s * L + tl.arange(0, LP)[None, None, :]


@triton.jit
def inside(
    c, here, W: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr, EXTENT: tl.constexpr, K: tl.constexpr,
    LP: tl.constexpr,
):  # fmt: skip
    """Return which values exist: columns `c` of the rows where `here`."""
    there = here & (c >= 0)
    if K != COUNT:
        there = there & (tl.arange(0, K)[None, :, None] < COUNT)
    if LP != L:
        there = there & (tl.arange(0, LP)[None, None, :] < L)
    if COUNT * EXTENT != W:
        there = there & (c < W)
    return there


@triton.jit
def load_packed(
    data, row, here, groups, seed_low, seed_high, DTYPE: tl.constexpr, BITS: tl.constexpr, COUNT: tl.constexpr,
    L: tl.constexpr, K: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Load packed rows: bytes, third bits of 3-bit codes, and hashes; step, base and zero mark of the groups."""
    LENGTH: tl.constexpr = L + (L + 1) // 2 if BITS == 3 else L
    # Scales are loaded in two dimensions, [row, group]: in three, several threads would load the same one.
    b = tl.arange(0, K)[None, :]
    g = row[:, None] * COUNT + b
    there = here[:, None] & (b < COUNT)
    lo, step = load_group(data, g * LENGTH, scales_at(data, groups, LENGTH), groups, g, there, DTYPE)
    base, zero = group_line(lo, step, BITS)
    codes, there = (g * LENGTH)[:, :, None], there[:, :, None]
    j = tl.arange(0, LP)[None, None, :]
    byte = tl.load(data + codes + j, mask=there & (j < L), other=0).to(tl.uint32)
    third = byte
    if BITS == 3:
        both = tl.load(data + codes + L + j // 2, mask=there & (j < L), other=0).to(tl.uint32)
        third = both >> (j % 2 * 4).to(tl.uint32)
    h = random32(codes.to(tl.uint32) + j.to(tl.uint32), seed_low, seed_high)
    return byte, third, h, step[:, :, None], base[:, :, None], zero[:, :, None]


@triton.jit
def unpack(byte, third, h, step, base, zero, s: tl.constexpr, BITS: tl.constexpr):
    """Decode the values of slice `s`."""
    mark = code_as_mantissa(byte, third, h, s, BITS)
    return tl.where(mark < zero, 0.0, tl.fma(mark, step, base))


@triton.jit
def place_of(row, rows, inner, TRANSPOSED: tl.constexpr):
    """Return the indices in the tensor of rows given in memory order."""
    return (row % inner) * (rows // inner) + row // inner if TRANSPOSED else row


@triton.jit
def row_sum(v):
    """Return the sum of each row of a tile: [row, 1, 1]."""
    return tl.sum(tl.sum(v, 2), 1)[:, None, None]


@triton.jit
def load_weight(weight, c, there, OFFSET: tl.constexpr, AFFINE: tl.constexpr, WEIGHT: tl.constexpr):
    """Return weight + OFFSET of the columns `c`; ones without a weight."""
    if AFFINE:
        return widen(tl.load(weight + c, mask=there, other=0), WEIGHT) + OFFSET
    else:
        return tl.full(c.shape, 1.0, tl.float32)


@triton.jit(do_not_specialize=["rows", "inner", "eps"])
def row_forward_kernel(
    x, weight, bias, out, mean, rstd, rows: tl.int32, inner: tl.int32, eps: tl.float32,
    TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, INNER: tl.constexpr, OUT: tl.constexpr, WEIGHT: tl.constexpr,
    AFFINE: tl.constexpr,
    BIAS: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr, W: tl.constexpr, R: tl.constexpr, WP: tl.constexpr,
):  # fmt: skip
    """Write result, mean and 1 / deviation of R rows."""
    row = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.arange(0, WP)[None, :]
    here = row < rows
    there = here & (c < W)
    v = widen(tl.load(x + row.to(tl.int64) * W + c, mask=there, other=0), DTYPE)
    place = place_of(row, rows, inner, TRANSPOSED)
    if CENTRED:
        middle = tl.sum(v, 1)[:, None] / W
        tl.store(mean + place, middle, mask=here)
        v = tl.where(there, v - middle, 0.0)
    r = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(v * v, 1)[:, None] / W + eps))
    tl.store(rstd + place, r, mask=here)
    y = rounded(v * r, INNER)
    if AFFINE:
        y = y * load_weight(weight, c, c < W, OFFSET, AFFINE, WEIGHT)
    if BIAS:
        y = y + widen(tl.load(bias + c, mask=c < W, other=0), WEIGHT)
    tl.store(out + place.to(tl.int64) * W + c, narrow(y, OUT), mask=there)


@triton.jit(do_not_specialize=["rows", "inner", "seed_low", "seed_high"])
def row_again_kernel(
    data, mean, rstd, weight, bias, out, rows: tl.int32, inner: tl.int32, seed_low: tl.int32, seed_high: tl.int32,
    TRANSPOSED: tl.constexpr,
    OUT: tl.constexpr, WEIGHT: tl.constexpr, AFFINE: tl.constexpr, BIAS: tl.constexpr, CENTRED: tl.constexpr,
    OFFSET: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr,
    W: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr, EXTENT: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    LP: tl.constexpr,
):  # fmt: skip
    """Recompute the result of R rows from their codes (or values), and from forward's mean and 1 / deviation."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    here = row < rows
    place = place_of(row, rows, inner, TRANSPOSED)
    r = tl.load(rstd + place, mask=here, other=0.0)[:, None, None]
    shift = tl.load(mean + place, mask=here, other=0.0)[:, None, None] if CENTRED else 0.0
    if PACKED:
        groups = rows.to(tl.int64) * COUNT
        byte, third, h, step, base, zero = load_packed(
            data, row, here, groups, seed_low, seed_high, DTYPE, BITS, COUNT, L, K, LP
        )
    at, to, here = row[:, None, None] * W, place[:, None, None] * W, here[:, None, None]
    for s in tl.static_range(T):
        c = columns(s, L, EXTENT, K, LP)
        there = inside(c, here, W, COUNT, L, EXTENT, K, LP)
        if PACKED:
            v = unpack(byte, third, h, step, base, zero, s, BITS)
        else:
            v = widen(tl.load(data + at + c, mask=there, other=0), DTYPE)
        y = (v - shift) * r
        if AFFINE:
            y = y * load_weight(weight, c, c < W, OFFSET, AFFINE, WEIGHT)
        if BIAS:
            y = y + widen(tl.load(bias + c, mask=c < W, other=0), WEIGHT)
        tl.store(out + to + c, narrow(y, OUT), mask=there)


@triton.jit(do_not_specialize=["rows", "inner", "seed_low", "seed_high"])
def row_backward_kernel(
    grad, data, mean, rstd, weight, out, sums, rows: tl.int32, inner: tl.int32, seed_low: tl.int32, seed_high: tl.int32,
    TRANSPOSED: tl.constexpr,
    GRAD: tl.constexpr, INNER: tl.constexpr, WEIGHT: tl.constexpr, AFFINE: tl.constexpr, CENTRED: tl.constexpr,
    OFFSET: tl.constexpr, INPUT: tl.constexpr, SUMS: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
    COUNT: tl.constexpr, L: tl.constexpr, EXTENT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """With INPUT, write the gradient of rows. With SUMS, add up g * n, and if SUMS == 2 also g, for each column."""
    weight_0 = tl.zeros((R, K, LP), tl.float32)
    weight_1 = tl.zeros((R, K, LP), tl.float32)
    weight_2 = tl.zeros((R, K, LP), tl.float32)
    weight_3 = tl.zeros((R, K, LP), tl.float32)
    bias_0 = tl.zeros((R, K, LP), tl.float32)
    bias_1 = tl.zeros((R, K, LP), tl.float32)
    bias_2 = tl.zeros((R, K, LP), tl.float32)
    bias_3 = tl.zeros((R, K, LP), tl.float32)
    first = tl.program_id(0) * R
    while first < rows:
        row = first.to(tl.int64) + tl.arange(0, R)
        here = row < rows
        place = place_of(row, rows, inner, TRANSPOSED)
        r = tl.load(rstd + place, mask=here, other=0.0)[:, None, None]
        shift = tl.load(mean + place, mask=here, other=0.0)[:, None, None] if CENTRED else 0.0
        if PACKED:
            groups = rows.to(tl.int64) * COUNT
            byte, third, h, step, base, zero = load_packed(
                data, row, here, groups, seed_low, seed_high, DTYPE, BITS, COUNT, L, K, LP
            )
        at, of, here = row[:, None, None] * W, place[:, None, None] * W, here[:, None, None]
        if INPUT:
            sum_g = tl.zeros((R, K, LP), tl.float32)
            sum_gn = tl.zeros((R, K, LP), tl.float32)
            for s in tl.static_range(T):
                c = columns(s, L, EXTENT, K, LP)
                there = inside(c, here, W, COUNT, L, EXTENT, K, LP)
                v = widen(tl.load(grad + of + c, mask=there, other=0), GRAD)
                if PACKED:
                    x = unpack(byte, third, h, step, base, zero, s, BITS)
                else:
                    x = widen(tl.load(data + at + c, mask=there, other=0), DTYPE)
                v = rounded(v * load_weight(weight, c, c < W, OFFSET, AFFINE, WEIGHT), INNER)
                sum_g += v
                sum_gn = tl.fma(v, (x - shift) * r, sum_gn)
            mean_gn = row_sum(sum_gn) / W
            mean_g = row_sum(sum_g) / W if CENTRED else 0.0
        for s in tl.static_range(T):
            c = columns(s, L, EXTENT, K, LP)
            there = inside(c, here, W, COUNT, L, EXTENT, K, LP)
            v = widen(tl.load(grad + of + c, mask=there, other=0), GRAD)
            if PACKED:
                x = unpack(byte, third, h, step, base, zero, s, BITS)
            else:
                x = widen(tl.load(data + at + c, mask=there, other=0), DTYPE)
            n = (x - shift) * r
            if INPUT:
                scaled = rounded(v * load_weight(weight, c, c < W, OFFSET, AFFINE, WEIGHT), INNER)
                value = ((scaled - mean_g) - n * mean_gn) * r
                tl.store(out + at + c, narrow(value, DTYPE), mask=there)
            if SUMS > 0:
                # v is zero where there is no column.
                part = v * rounded(n, INNER)
                if s == 0:
                    weight_0 += part
                    bias_0 += v
                elif s == 1:
                    weight_1 += part
                    bias_1 += v
                elif s == 2:
                    weight_2 += part
                    bias_2 += v
                else:
                    weight_3 += part
                    bias_3 += v
        first += tl.num_programs(0) * R
    if SUMS > 0:
        to = sums + tl.program_id(0).to(tl.int64) * (SUMS * W)
        for s in tl.static_range(T):
            c = columns(s, L, EXTENT, K, LP)
            there = inside(c, c >= 0, W, COUNT, L, EXTENT, K, LP)
            of_weight = weight_0 if s == 0 else weight_1 if s == 1 else weight_2 if s == 2 else weight_3
            tl.store(to + c, tl.sum(of_weight, 0)[None, :, :], mask=there)
            if SUMS == 2:
                of_bias = bias_0 if s == 0 else bias_1 if s == 1 else bias_2 if s == 2 else bias_3
                tl.store(to + W + c, tl.sum(of_bias, 0)[None, :, :], mask=there)


@triton.jit(do_not_specialize=["parts", "width"])
def column_sums_kernel(
    sums, grad_weight, grad_bias, parts: tl.int32, width: tl.int32,
    WEIGHT: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of `row_backward_kernel` to the gradients of weight and bias."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    start = 0
    while start < parts:
        there = (start + row < parts) & (c < SUMS * width)[None, :]
        total += tl.load(sums + (start + row).to(tl.int64) * (SUMS * width) + c[None, :], mask=there, other=0.0)
        start += ROWS
    value = narrow(tl.sum(total, 0), WEIGHT)
    tl.store(grad_weight + c, value, mask=c < width)
    if SUMS == 2:
        tl.store(grad_bias + (c - width), value, mask=(c >= width) & (c < 2 * width))


def readable(format: GroupFormat, width: int) -> bool:
    """Return whether the kernels can read codes in that format as rows of `width` values."""
    if format.stride != 1 or format.signs or format.dtype == torch.float64:
        return False
    return format.row == width or (format.row == 0 and width % format.group == 0)


def program_of(each: int, values: int) -> tuple[int, int]:
    """Return rows and warps of a program that processes `values` values with four warps; a row has room for `each`."""
    return max(values // each, 1), min(max(each * 4 // values, 4), 16)


def tile_of(width: int, dtype: torch.dtype, format: GroupFormat | None, values: int) -> tuple[int, int, tuple]:
    """Return rows and warps of a program, and the constants from PACKED to LP; `format` is None for unpacked rows."""
    if format is None:
        bits, slices, count, length, extent = 8, 1, 1, width, width
    else:
        bits, slices, length, extent = format.bits, 8 // format.field, format.field_length, format.extent
        count = -(-width // format.group)
    groups, room = power_of_two(count), power_of_two(length)
    rows, warps = program_of(slices * groups * room, values)
    constants = (format is not None, TYPES[dtype], bits, slices, width, count, length, extent, rows, groups, room)
    return rows, warps, constants


class RowPlan:
    """Plan of a norm's kernels for inputs of one size and dtype on one device."""

    def __init__(
        self, norm: RowNorm, rows: int, inner: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, bias: bool,
        dims: int,
    ) -> None:  # fmt: skip
        self.dimensions = dims
        """Number of dimensions that form a row."""
        self.norm, self.rows, self.inner, self.dtype, self.bias = norm, rows, inner, dtype, bias
        self.transposed = inner != rows
        self.affine = (tl.float32 if weight_dtype is None else TYPES[weight_dtype], weight_dtype is not None)
        self.kinds = (TYPES[norm.inner], TYPES[norm.out])
        each = power_of_two(norm.width)
        tile, warps = program_of(each, VALUES)
        constants = (
            self.transposed, TYPES[dtype], *self.kinds, *self.affine, bias, norm.centred, norm.offset, norm.width, tile,
            each,
        )  # fmt: skip
        self.launch = Launch(row_forward_kernel, -(-rows // tile), constants, warps, 0)
        self.launches: dict[Any, tuple[Launch, Launch, int]] = {}
        """Launches of backward and the number of partial sums, by format, wanted gradients, and transposed or not."""

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the contiguous result, and mean and 1 / deviation of rows. An RMS norm returns the latter twice."""
        norm = self.norm
        out = torch.empty(x.shape, dtype=norm.out, device=x.device)
        rstd = torch.empty(self.rows, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if norm.centred else rstd
        tensors = (x, rstd if weight is None else weight, rstd if bias is None else bias, out, mean, rstd)
        self.launch(tensors, (self.rows, self.inner, norm.eps))
        return out, mean, rstd

    def backward(
        self, grad: Tensor, data: Tensor, seed: int, format: GroupFormat | None, mean: Tensor, rstd: Tensor,
        weight: Tensor | None, wanted: tuple[bool, bool, bool], stride: tuple[int, ...] | None = None,
    ) -> Gradients:  # fmt: skip
        """Return the wanted gradients of input, weight and bias.

        Args:
            grad: Contiguous gradient of the result.
            data: Contiguous input, or its codes.
            seed: Seed of the codes.
            format: Format of the codes; None for the input itself.
            mean: Mean of each row, as `forward` returned it.
            rstd: 1 / deviation of each row.
            weight: The weight.
            wanted: Which of the gradients to return.
            stride: Strides of the input, if its codes and its gradient have transposed rows.
        """
        transposed = stride is not None
        known = self.launches.get((format, wanted, transposed))
        if known is None:
            known = self.launches[format, wanted, transposed] = self._plan_backward(format, wanted, transposed)
        launch, finish, parts = known
        want_input, want_weight, want_bias = wanted
        summed, width = parts > 0, self.norm.width
        out = rstd
        if want_input:
            out = torch.empty_strided(grad.shape, stride or grad.stride(), dtype=self.dtype, device=grad.device)
        sums = torch.empty(parts * (1 + self.bias) * width, dtype=torch.float32, device=grad.device) if summed else rstd
        tensors = (grad, data, mean, rstd, rstd if weight is None else weight, out, sums)
        launch(tensors, (self.rows, self.inner, *seed_halves(seed)))
        grad_weight = grad_bias = None
        if summed and weight is not None:
            grad_weight = torch.empty_like(weight)
            grad_bias = torch.empty_like(weight) if self.bias else grad_weight
            finish((sums, grad_weight, grad_bias), (parts, width))
        return out if want_input else None, grad_weight if want_weight else None, grad_bias if want_bias else None

    def _plan_backward(
        self, format: GroupFormat | None, wanted: tuple[bool, bool, bool], transposed: bool
    ) -> tuple[Launch, Launch, int]:
        """Return the launches of backward, and the number of partial sums of each column."""
        norm = self.norm
        tile, warps, constants = tile_of(norm.width, self.dtype, format, BACKWARD)
        sums = 1 + self.bias if any(wanted[1:]) else 0
        programs = -(-self.rows // tile)
        if sums:
            programs = min(programs, PROGRAMS)
        kinds = (transposed, self.kinds[1], self.kinds[0])
        fixed = (*kinds, *self.affine, norm.centred, norm.offset, wanted[0], sums, *constants)
        launch = Launch(row_backward_kernel, programs, fixed, warps, 0)
        finish = Launch(
            column_sums_kernel, -(-sums * norm.width // COLUMNS), (self.affine[0], sums, SUMMED, COLUMNS), 4, 0
        )
        return launch, finish, programs if sums else 0


@functools.lru_cache(maxsize=4096)
def row_plan(
    norm: RowNorm, rows: int, inner: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, bias: bool, dims: int,
    device: torch.device,
) -> RowPlan | None:  # fmt: skip
    """Return the plan for inputs of `rows` rows; None if the kernels do not support them.

    `inner` describes the order of rows in memory (`rows_inside`). `weight_dtype` is the dtype of weight and bias, None
    if there is no weight. `dims` is the number of dimensions that form a row.
    """
    fits = 0 < norm.width <= WIDEST and 0 < rows < 1 << 30
    dtypes = {norm.inner, norm.out, dtype, weight_dtype or dtype}
    return RowPlan(norm, rows, inner, dtype, weight_dtype, bias, dims) if fits and dtypes <= TAKEN else None


@functools.lru_cache(maxsize=4096)
def again_launch(
    width: int, rows: int, transposed: bool, centred: bool, offset: float, out: torch.dtype, dtype: torch.dtype,
    format: GroupFormat | None, weight_dtype: torch.dtype | None, bias: bool, device: torch.device,
) -> Launch | None:  # fmt: skip
    """Return the launch of `normalise_again`; None if the kernel does not support such rows."""
    if not (0 < width <= WIDEST and 0 < rows < 1 << 30) or not {out, dtype, weight_dtype or dtype} <= TAKEN:
        return None
    tile, warps, constants = tile_of(width, dtype, format, VALUES)
    weight = tl.float32 if weight_dtype is None else TYPES[weight_dtype]
    fixed = (transposed, TYPES[out], weight, weight_dtype is not None, bias, centred, offset, *constants)
    return Launch(row_again_kernel, -(-rows // tile), fixed, warps, 0)


def normalise_again(
    data: Tensor, seed: int, format: GroupFormat | None, dtype: torch.dtype, size: tuple[int, ...],
    mean: Tensor | None, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float, out: torch.dtype,
    inner: int | None = None,
) -> Tensor | None:  # fmt: skip
    """Recompute a norm's result from its input or the input's codes; return None if the kernel does not support them.

    Args:
        data: Contiguous input, or the codes of an input whose rows may be transposed.
        seed: Seed of the codes.
        format: Format of the codes; None for the input itself.
        dtype: Dtype of the input.
        size: Size of the input and of the result. The values of a row are contiguous.
        mean: Mean of each row in fp32; None for an RMS norm.
        rstd: 1 / deviation of each row in fp32.
        weight: The weight, of as many values as a row has.
        bias: The bias, of the weight's dtype.
        offset: Added to the weight.
        out: Dtype of the result.
        inner: Order of the packed rows in memory (`rows_inside`); None: as in the tensor.
    """
    rows = rstd.numel()
    inner = inner or rows
    width = math.prod(size) // max(rows, 1)
    if format is not None and not readable(format, width):
        return None
    weight_dtype = None if weight is None else weight.dtype
    launch = again_launch(
        width,
        rows,
        inner != rows,
        mean is not None,
        offset,
        out,
        dtype,
        format,
        weight_dtype,
        bias is not None,
        data.device,
    )
    if launch is None:
        return None
    result = torch.empty(size, dtype=out, device=data.device)
    others = (rstd if mean is None else mean, rstd, rstd if weight is None else weight, rstd if bias is None else bias)
    launch((data, *others, result), (rows, inner, *seed_halves(seed)))
    return result
