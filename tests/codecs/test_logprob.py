"""LogProb: within the bound, right on average in the exponential, and visible where there is no number."""

from __future__ import annotations

import math

import pytest
import torch

from encke.codecs import ErrorBounded, GroupQuant, LogProb
from encke.codecs.logprob import STEPS
from encke.kernels import mix

DTYPES = pytest.mark.parametrize(
    ("dtype", "lowest"), [(torch.float32, -25), (torch.float16, -21), (torch.bfloat16, -18)], ids=str
)


@DTYPES
def test_the_bound_holds_and_what_lies_lower_has_no_weight(dtype: torch.dtype, lowest: float) -> None:
    x = torch.cat([torch.linspace(-40, 0, 100_001), torch.tensor([-math.inf, -3e4, 0.0])]).to(dtype)
    for seed in range(5):
        packed = LogProb(seed).encode(x)
        y = packed.decode()
        near = x >= lowest
        assert y.dtype == dtype and packed.nbytes == x.numel()
        assert ((y.double() - x.double())[near].abs() <= 0.05).all()
        assert (y[~near].double().exp() < 2 * math.exp(lowest)).all()


@DTYPES
def test_exponentials_are_right_on_average(dtype: torch.dtype, lowest: float) -> None:
    """Without the shift they would be 4e-4 too large: the error of this mean is a tenth of that."""
    for value in (-1.234, -2.5, -5.1, -7.9, -9.3):
        x = torch.full((500_000,), value).to(dtype)
        error = LogProb().encode(x).decode().double() - x.double()
        assert float(error.exp().mean()) == pytest.approx(1, abs=1.5e-4), value


def test_bfloat16_keeps_every_bit_of_small_probabilities() -> None:
    """Its steps are larger than the bound there."""
    x = torch.linspace(-18, -8.1, 20_000).bfloat16()
    assert torch.equal(LogProb().encode(x).decode(), x)


def test_errors_differ_from_step_to_step() -> None:
    x = torch.log_softmax(torch.randn(64, 512), -1)
    errors = [LogProb(mix(step, 0)).encode(x).decode() - x for step in range(64)]
    assert float(sum(errors).norm() / 64) < float(errors[0].norm()) / 6


def test_nan_stays_nan() -> None:
    x = torch.full((300,), -1.0)
    x[7] = math.nan
    assert LogProb().encode(x).decode().isnan().equal(x.isnan())


def test_what_it_takes_and_whom_it_serves() -> None:
    codec = LogProb()
    assert all(codec.takes(dtype) for dtype in STEPS) and not codec.takes(torch.float64)
    assert codec.covers(LogProb(1)) and not codec.covers(ErrorBounded(0.1)) and not codec.covers(GroupQuant(2))
    with pytest.raises(TypeError, match="cannot take torch.float64"):
        codec.encode(torch.zeros(10, dtype=torch.float64))
