"""Log-probabilities from numba against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from encke.kernels import LogFormat, reference
from tests.kernels.common import SIZES, plain_nan

cpu = pytest.importorskip("encke.kernels.cpu", reason="needs numba")


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 0.1), (torch.float16, 0.08), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("n", [*SIZES, 300_001])
def test_log_probabilities_equal_reference(n: int, dtype: torch.dtype, far: float) -> None:
    x = (-torch.rand(n) * 27).to(dtype)
    x[::97], x[5::301] = math.nan, -math.inf
    format = LogFormat(0.1, far, 1e-3, dtype)
    ours = cpu.log_encode(x, format, 5)
    assert torch.equal(ours, reference.log_encode(x, format, 5))
    values, theirs = (backend.log_decode(ours, format, 5) for backend in (cpu, reference))
    assert torch.equal(plain_nan(values), plain_nan(theirs)) and values.isnan().equal(x.isnan())
