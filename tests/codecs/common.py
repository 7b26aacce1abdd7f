"""Helpers shared by tests of the codecs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from encke.codecs import Codec, Packed
from encke.kernels import backend_for, reference


class RoundedPacked(Packed):
    def decode(self) -> Tensor:
        return self.buffers[0].to(self.dtype)


@dataclass(frozen=True)
class Rounded(Codec):
    """A codec of somebody else's, with nothing but what it must have."""

    def encode(self, tensor: Tensor) -> Packed:
        return RoundedPacked.like(self, tensor, tensor.to(torch.bfloat16))


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Kernels are compiled for each dtype, which takes seconds.
SOME_SLOW = [
    torch.float32,
    *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64)),
]
ALL_SOME_SLOW = [*SOME_SLOW, pytest.param(torch.float16, marks=pytest.mark.slow)]
IMPLEMENTATIONS = {"reference": reference, "cpu": backend_for("cpu"), "gpu": backend_for("cuda")}
DEVICES = {"reference": "cpu", "cpu": "cpu", "gpu": "cuda" if torch.cuda.is_available() else "cpu"}
EXAMPLES = {"reference": 100, "cpu": 300, "gpu": 12}

CONTENT = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "relu": lambda n, g: torch.randn(n, generator=g).relu(),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.05),
    "zeros": lambda n, g: torch.zeros(n),
    "equal": lambda n, g: torch.full((n,), 3.3),
    "outlier": lambda n, g: torch.randn(n, generator=g).index_fill(0, torch.tensor([n // 2]), 1e30),
    "offset": lambda n, g: 1e5 + torch.rand(n, generator=g) * 2 - 1,
    "tiny": lambda n, g: torch.randn(n, generator=g) * 1e-38,
    "denormal": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e-42,
    "huge": lambda n, g: torch.randn(n, generator=g).sign() * torch.finfo(torch.float32).max,
    "special": lambda n, g: torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -2.5])[
        torch.randint(0, 7, (n,), generator=g)
    ],
    "wide": lambda n, g: torch.randn(n, generator=g) * 10.0 ** torch.randint(-30, 30, (n,), generator=g),
    "smallest_half": lambda n, g: torch.randint(-3, 4, (n,), generator=g) * 2.0**-24,
    "integers": lambda n, g: torch.randint(-3, 4, (n,), generator=g).float(),
}


def bits(t: Tensor) -> Tensor:
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
