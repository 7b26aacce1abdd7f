"""Values and comparisons for the tests of the kernels."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterator

import pytest
import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SIZES = [0, 1, 63, 64, 65, 1000, 1023, 1024, 1025, 5000, 70000]
SEEDS = [0, 1, -1, -(2**63), 2**63 + 12345, 2**64 - 1, 0x123456789ABCDEF]


def with_dtypes(formats: list[tuple[int, bool]], shift: int = 0, fp32: bool = True) -> list:
    """Return cases of bits, signs and dtype: each format with fp32 and one other dtype, which `shift` changes.

    Kernels are compiled for each pair, which takes seconds. All pairs are tested at length. Without `fp32`
    each format has one dtype only: for kernels that no other tests compile.
    """

    def chosen(i: int, j: int) -> bool:
        return j in (0, 1 + (i + shift) % 3) if fp32 else j == (i + shift) % 4

    return [
        pytest.param(
            *(bits, signs, dtype),
            marks=[] if chosen(i, j) else pytest.mark.soak,
            id=f"{bits}-{signs}-{dtype}",
        )
        for i, (bits, signs) in enumerate(formats)
        for j, dtype in enumerate(DTYPES)
    ]


def spread_out(n: int, g: torch.Generator) -> torch.Tensor:
    """Return magnitudes from the smallest denormals of fp16 to its largest values."""
    return torch.randn(n, generator=g, dtype=torch.float64) * torch.exp2(torch.rand(n, generator=g) * 42 - 25)


def with_specials(n: int, g: torch.Generator) -> torch.Tensor:
    """Return noise with NaN, infinities and negative zeros."""
    x = torch.randn(n, generator=g, dtype=torch.float64)
    at = torch.rand(n, generator=g) < 0.002
    x[at] = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).double().repeat(n)[: int(at.sum())]
    return x


CONTENTS = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "relu": lambda n, g: torch.randn(n, generator=g).relu(),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.03),
    "zeros": lambda n, g: torch.zeros(n),
    "negative zeros": lambda n, g: torch.zeros(n) * -1,
    "constant": lambda n, g: torch.full((n,), -3.7),
    "far from zero": lambda n, g: 1e4 + torch.rand(n, generator=g, dtype=torch.float64) * 2 - 1,
    "near base limits": lambda n, g: (
        torch.randint(-140, 140, (n // 64 + 1, 1), generator=g).expand(-1, 64).reshape(-1)[:n]
        + torch.rand(n, generator=g)
    ),
    "huge": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e37,
    "denormals": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e-39,
    "small": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 2.0**-23,
    "spread out": spread_out,
    "specials": with_specials,
    "all special": lambda n, g: torch.full((n,), math.nan),
    "largest": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, 1.0, -1.0).double() * 3.4028234663852886e38,
    "outlier": lambda n, g: torch.cat([torch.randn(n, generator=g)[1:], torch.full((min(n, 1),), 1e5)]),
    "integers": lambda n, g: torch.randint(-5, 200, (n,), generator=g).double(),
}


def content(name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return n values of one of the CONTENTS."""
    return CONTENTS[name](n, torch.Generator().manual_seed(zlib.crc32(name.encode()) + n)).to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return t.contiguous().view(torch.uint8)


def plain_nan(t: torch.Tensor) -> torch.Tensor:
    """Return the bits, the same for all NaNs."""
    return bits(torch.where(torch.isnan(t), torch.tensor(math.nan, dtype=t.dtype), t))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread: the reference's many small operations are slower on threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
