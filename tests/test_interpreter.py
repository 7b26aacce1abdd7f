"""The quickened interpreter of Triton computes, and refuses, what the plain one does."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on a GPU")

from triton import language as tl  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402


@triton.jit
def mix(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    table = (v[:, None] + v[None, :]) * 2
    tl.store(out + i, 3 - v + tl.sum(table, 1) / 2)


@triton.jit
def add(x, out, number: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + number)


@triton.jit
def add_lengths(x, out):
    tl.store(out + tl.arange(0, 8), tl.load(x + tl.arange(0, 8)) + tl.arange(0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64], ids=str)
def test_numbers_and_shapes_beside_tensors(dtype: torch.dtype) -> None:
    x, out = torch.arange(8).to(dtype), torch.zeros(8, dtype=torch.float64)
    mix[(1,)](x, out, 8)
    assert torch.equal(out, 3.0 - x + 8 * x + x.sum())


@pytest.mark.parametrize(("dtype", "number"), [(torch.uint8, 100), (torch.uint8, 200), (torch.int16, -5)], ids=str)
def test_a_number_has_the_dtype_of_the_tensor(dtype: torch.dtype, number: int) -> None:
    x, out = torch.arange(248, 256).to(dtype), torch.zeros(8, dtype=dtype)
    add[(1,)](x, out, number, 8)
    assert torch.equal(out, x + number)


def test_what_does_not_go_together_is_refused() -> None:
    x = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(InterpreterError, match="unsigned tensor and a negative scalar"):
        add[(1,)](x, x, -1, 8)
    with pytest.raises(InterpreterError, match="out of range"):
        add[(1,)](x, x, 256, 8)
    with pytest.raises(InterpreterError, match="incompatible dimensions"):
        add_lengths[(1,)](x, x)
    with pytest.raises(InterpreterError, match="power of 2"):
        add[(1,)](x, x, 1, 6)
