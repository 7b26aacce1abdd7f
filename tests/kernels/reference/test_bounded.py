"""The check of the bound in the reference."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from encke.kernels.reference.bounded import exceeds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_errors_are_compared_with_the_bound_before_they_are_rounded(dtype: torch.dtype) -> None:
    ulp = torch.finfo(dtype).eps
    sizes = torch.tensor([0.0, 0.2 * ulp, 0.6 * ulp, 1.2 * ulp, 1.0 - ulp, 1.0, 1.0 + ulp, 1e-30, 2.0], dtype=dtype)
    values = torch.cat([sizes, -sizes])
    a, b = values[:, None], values[None, :]
    for bound in (1.0, 1.0 + ulp, 2.0):
        exact = [[abs(Fraction(x.item()) - Fraction(y.item())) > Fraction(bound) for y in values] for x in values]
        found = exceeds(a, b, torch.tensor(bound, dtype=dtype))
        assert torch.equal(found, torch.tensor(exact))
        # Rounding hides some of them.
        assert bool((found & ((a - b).abs() <= bound)).any())
    assert exceeds(torch.tensor(torch.nan), torch.tensor(0.0), torch.tensor(1.0))
