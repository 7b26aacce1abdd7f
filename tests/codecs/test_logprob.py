"""LogProb: within the bound, right on average in the exponential, and visible where there is no number."""

from __future__ import annotations

import math

import pytest
import torch

from halley.codecs import ErrorBounded, GroupQuant, LogProb
from halley.codecs.base import mix


def test_the_bound_holds_down_to_minus_25_and_the_rest_has_no_weight() -> None:
    x = torch.cat([torch.linspace(-40, 0, 100_001), torch.tensor([-math.inf, -1e30, 0.0])])
    for seed in range(5):
        packed = LogProb(seed).encode(x)
        y = packed.decode()
        near = x >= -25
        assert ((y - x)[near].abs() <= 0.05).all() and packed.nbytes == x.numel()
        assert (y[~near].exp() < 2e-11).all()


def test_exponentials_are_right_on_average() -> None:
    """Without the shift they would be 4e-4 too large: the error of this mean is a tenth of that."""
    x = torch.full((500_000,), -1.234)
    assert float((LogProb().encode(x).decode() - x).exp().double().mean()) == pytest.approx(1, abs=1.5e-4)


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
    assert codec.takes(torch.float32) and not codec.takes(torch.bfloat16) and not codec.takes(torch.float64)
    assert codec.covers(LogProb(1)) and not codec.covers(ErrorBounded(0.1)) and not codec.covers(GroupQuant(2))
    with pytest.raises(TypeError, match="cannot take torch.bfloat16"):
        codec.encode(torch.zeros(10, dtype=torch.bfloat16))
