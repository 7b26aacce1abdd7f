"""Codes of log-probabilities in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.formats import LogFormat
from encke.kernels.reference.fields import hash24


def log_encode(x: Tensor, format: LogFormat, seed: int) -> Tensor:
    """Encode each flat value as a byte: its distance below zero in steps, at most 254; NaN is 255."""
    v = x.float()
    steps = torch.maximum(v * (-1 / format.step), v * (-1 / format.far) - format.bend) + dither(x, seed)
    return steps.clamp_(0, 254).nan_to_num_(nan=255).to(torch.uint8)


def log_decode(data: Tensor, format: LogFormat, seed: int) -> Tensor:
    """Decode the result of `log_encode`; the random numbers are subtracted again."""
    t = data.float() + 0.5 - dither(data, seed)
    values = torch.maximum(t * -format.step, (t + format.bend) * -format.far) - format.shift
    return values.masked_fill_(data == 255, float("nan")).to(format.dtype)


def dither(x: Tensor, seed: int) -> Tensor:
    """Return a random number between 0 and 1 for each value."""
    index = torch.arange(x.numel(), device=x.device)
    return hash24(index, torch.zeros_like(index), seed).float() * 2.0**-24
