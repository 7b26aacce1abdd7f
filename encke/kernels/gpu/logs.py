"""Codes of log-probabilities on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import LogFormat
from encke.kernels.gpu.common import narrow, random32, widen
from encke.kernels.gpu.launch import TYPES, launch_kernel, seed_halves

SIZE = 4096  # values that a program processes


@triton.jit
def dither(i, seed_low, seed_high):
    """Return a random number between 0 and 1 for each index."""
    return (random32(i, seed_low, seed_high) >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit(do_not_specialize=["numel", "seed_low", "seed_high"])
def lp_encode_kernel(
    x, data, numel: tl.int64, seed_low: tl.int32, seed_high: tl.int32, inverse: tl.float32, far: tl.float32,
    bend: tl.float32, DTYPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Encode SIZE values."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    j = tl.arange(0, SIZE)
    left = numel - first
    v = widen(tl.load(x + first + j) if left >= SIZE else tl.load(x + first + j, mask=j < left, other=0), DTYPE)
    u = dither(first.to(tl.uint32) + j.to(tl.uint32), seed_low, seed_high)
    steps = tl.minimum(tl.maximum(tl.maximum(v * inverse, v * far - bend) + u, 0.0), 254.0)
    code = tl.where(v == v, steps, 255.0).to(tl.int32).to(tl.uint8)
    if left >= SIZE:
        tl.store(data + first + j, code)
    else:
        tl.store(data + first + j, code, mask=j < left)


@triton.jit(do_not_specialize=["numel", "seed_low", "seed_high"])
def lp_decode_kernel(
    data, out, numel: tl.int64, seed_low: tl.int32, seed_high: tl.int32, step: tl.float32, far: tl.float32,
    bend: tl.float32, shift: tl.float32, DTYPE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Decode SIZE values."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    j = tl.arange(0, SIZE)
    left = numel - first
    code = (tl.load(data + first + j) if left >= SIZE else tl.load(data + first + j, mask=j < left, other=0)).to(
        tl.int32
    )
    u = dither(first.to(tl.uint32) + j.to(tl.uint32), seed_low, seed_high)
    t = code.to(tl.float32) + 0.5 - u
    v = narrow(tl.where(code == 255, float("nan"), tl.maximum(t * step, (t + bend) * far) - shift), DTYPE)
    if left >= SIZE:
        tl.store(out + first + j, v)
    else:
        tl.store(out + first + j, v, mask=j < left)


def log_encode(x: Tensor, format: LogFormat, seed: int) -> Tensor:
    """Encode each flat value as a byte: its distance below zero in steps, at most 254; NaN is 255."""
    numel = x.numel()
    data = torch.empty(numel, dtype=torch.uint8, device=x.device)
    if numel:
        numbers = (numel, *seed_halves(seed), -1 / format.step, -1 / format.far, format.bend)
        constants = (TYPES[x.dtype], SIZE)
        launch_kernel(lp_encode_kernel, -(-numel // SIZE), (x, data), numbers, constants, 8, specialised=0)
    return data


def log_decode(data: Tensor, format: LogFormat, seed: int) -> Tensor:
    """Decode the result of `log_encode`; the random numbers are subtracted again."""
    numel = data.numel()
    out = torch.empty(numel, dtype=format.dtype, device=data.device)
    if numel:
        numbers = (numel, *seed_halves(seed), -format.step, -format.far, format.bend, format.shift)
        constants = (TYPES[format.dtype], SIZE)
        launch_kernel(lp_decode_kernel, -(-numel // SIZE), (data, out), numbers, constants, 8, specialised=0)
    return out
