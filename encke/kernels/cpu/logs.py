"""Codes of log-probabilities on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from encke.kernels.cpu.launch import decode, elements, nan_and_limit, run, seed_halves, task_size
from encke.kernels.cpu.scalars import f32, jit, narrow, random24, u8, u32, widen
from encke.kernels.formats import LogFormat


@jit
def log_encode_task(task, size, x, inverse, far, bend, seed_low, seed_high, out):
    """Encode the values of a task."""
    for i in range(task * size, min((task + 1) * size, x.size)):
        u = f32(random24(u32(i), u32(0), seed_low, seed_high)) * f32(2.0**-24)
        v = widen(x[i])
        t = min(max(max(v * inverse, v * far - bend) + u, f32(0)), f32(254))
        out[i] = u8(t) if v == v else u8(255)


@jit
def log_decode_task(task, size, numel, out, start, data, step, far, bend, shift, seed_low, seed_high, nan):
    """Decode the values of a task to `out`, whose first element is value `start`."""
    for i in range(task * size, min((task + 1) * size, numel)):
        u = f32(random24(u32(i), u32(0), seed_low, seed_high)) * f32(2.0**-24)
        t = f32(data[i]) + f32(0.5) - u
        v = max(t * step, (t + bend) * far) - shift
        out[i - start] = narrow(v, nan) if data[i] != 255 else nan


def log_encode(x: Tensor, format: LogFormat, seed: int) -> Tensor:
    """Encode each flat value as a byte: its distance below zero in steps, at most 254; NaN is 255."""
    out = torch.empty(x.numel(), dtype=torch.uint8)
    size = task_size(x.numel(), 1)
    steps = (np.float32(-1 / format.step), np.float32(-1 / format.far), np.float32(format.bend))
    run(log_encode_task, -(-x.numel() // size), size, elements(x), *steps, *seed_halves(seed), out.numpy())
    return out


def log_decode(data: Tensor, format: LogFormat, seed: int) -> Tensor:
    """Decode the result of `log_encode`; the random numbers are subtracted again."""
    numel = data.numel()
    steps = (np.float32(-format.step), np.float32(-format.far), np.float32(format.bend), np.float32(format.shift))
    numbers = (*steps, *seed_halves(seed), nan_and_limit(format.dtype)[0])
    return decode(log_decode_task, task_size(numel, 1), numel, format.dtype, False, data.numpy(), *numbers)
