"""Activations of packed values, and their products with other values: decoded in registers, written once.

Kernels process rows, within which groups stay. If groups are contiguous, each group is a row. See row_norm.py.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import GroupFormat
from encke.kernels.gpu.common import narrow, widen
from encke.kernels.gpu.launch import TYPES, Launch, seed_halves
from encke.kernels.gpu.row_norm import TAKEN, VALUES, WIDEST, columns, inside, load_packed, readable, tile_of, unpack
from encke.kernels.gpu.smooth import GELU, GELU_TANH, SILU, activated

KINDS = {"silu": SILU.value, "gelu": GELU.value, "gelu tanh": GELU_TANH.value}
"""Number of each activation in the kernel, by name."""
ALONE, VALUES_BESIDE, CODES_BESIDE = 0, 1, 2


@triton.jit(do_not_specialize=["rows", "seed_low", "seed_high", "factor_low", "factor_high"])
def activate_kernel(
    data, factor, out, rows: tl.int32, seed_low: tl.int32, seed_high: tl.int32, factor_low: tl.int32,
    factor_high: tl.int32,
    KIND: tl.constexpr, BESIDE: tl.constexpr, FACTOR: tl.constexpr, OUT: tl.constexpr, PACKED: tl.constexpr,
    DTYPE: tl.constexpr, BITS: tl.constexpr, T: tl.constexpr, W: tl.constexpr, COUNT: tl.constexpr, L: tl.constexpr,
    EXTENT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, LP: tl.constexpr,
):  # fmt: skip
    """Write the activation of R rows of codes. With BESIDE, multiply it by values, or by codes in the same format."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    here = row < rows
    groups = rows.to(tl.int64) * COUNT
    byte, third, h, step, base, zero = load_packed(
        data, row, here, groups, seed_low, seed_high, DTYPE, BITS, COUNT, L, K, LP
    )
    if BESIDE == 2:
        byte_2, third_2, h_2, step_2, base_2, zero_2 = load_packed(
            factor, row, here, groups, factor_low, factor_high, DTYPE, BITS, COUNT, L, K, LP
        )
    at, here = row[:, None, None] * W, here[:, None, None]
    for s in tl.static_range(T):
        c = columns(s, L, EXTENT, K, LP)
        there = inside(c, here, W, COUNT, L, EXTENT, K, LP)
        y = activated(unpack(byte, third, h, step, base, zero, s, BITS), KIND)
        if BESIDE == 1:
            y = y * widen(tl.load(factor + at + c, mask=there, other=0), FACTOR)
        elif BESIDE == 2:
            y = y * unpack(byte_2, third_2, h_2, step_2, base_2, zero_2, s, BITS)
        tl.store(out + at + c, narrow(y, OUT), mask=there)


def row_width(format: GroupFormat, numel: int) -> int | None:
    """Return the width of the rows in which the kernel reads codes of `numel` values; None if it cannot read them."""
    width = format.row or format.group
    return width if numel and numel % width == 0 and width <= WIDEST and readable(format, width) else None


@functools.lru_cache(maxsize=4096)
def activation_launch(
    kind: str, beside: int, factor: torch.dtype, out: torch.dtype, format: GroupFormat, numel: int, device: torch.device
) -> tuple[Launch, int] | None:
    """Return the launch of `activate` and the number of rows; None if the kernel does not support such values."""
    width = row_width(format, numel)
    if width is None or not {factor, out, format.dtype} <= TAKEN or numel // width >= 1 << 30:
        return None
    tile, warps, constants = tile_of(width, format.dtype, format, VALUES)
    rows = numel // width
    fixed = (KINDS[kind], beside, TYPES[factor], TYPES[out], *constants)
    return Launch(activate_kernel, -(-rows // tile), fixed, warps, 0), rows


def activate(
    kind: str, data: Tensor, seed: int, format: GroupFormat, factor: Tensor | tuple[Tensor, int] | None,
    size: tuple[int, ...], out: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """Return an activation of packed values, times a factor if given; None if the kernel does not support them.

    Args:
        kind: One of `KINDS`.
        data: Codes of contiguous values.
        seed: Seed of the codes.
        format: Format of the codes.
        factor: Contiguous values, or codes in the same format and their seed.
        size: Size of the values.
        out: Dtype of the result.
    """
    beside = ALONE if factor is None else VALUES_BESIDE if isinstance(factor, Tensor) else CODES_BESIDE
    other, other_seed = (factor, 0) if isinstance(factor, Tensor) else factor or (data, 0)
    dtype = other.dtype if beside == VALUES_BESIDE else format.dtype
    numel = torch.Size(size).numel()
    known = activation_launch(kind, beside, dtype, out, format, numel, data.device)
    if known is None:
        return None
    launch, rows = known
    result = torch.empty(size, dtype=out, device=data.device)
    launch((data, other, result), (rows, *seed_halves(seed), *seed_halves(other_seed)))
    return result
