"""Dual precision in plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from encke.kernels import DualFormat, reference


@pytest.mark.parametrize("block", [2, 8])
@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (2, 3, 13, 19), (1, 2, 5, 40)])
def test_averages_are_those_of_pooling(block: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) + 3
    height, width = shape[-2:]
    kernel = (min(block, height), min(block, width))
    expected = F.avg_pool2d(x.double(), kernel, kernel, ceil_mode=True, count_include_pad=False)
    format = DualFormat(height, width, block, 2, False, x.dtype)
    _, at_low, at_codes, _, _ = format.places(x.numel())
    kept = reference.dual_encode(x.view(-1), format, 0)[at_low:at_codes].view(torch.bfloat16)
    assert torch.allclose(kept.double(), expected.view(-1), rtol=2**-8, atol=0)
    assert not torch.allclose(kept.double(), expected.view(-1), rtol=2**-12, atol=0)  # bf16 it is
