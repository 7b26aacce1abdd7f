"""Smooth activations of values in registers, and their slopes: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.fused.smooth import SMOOTH as LAYERS
from encke.kernels.formats import SMOOTH
from tests.kernels.gpu.common import DEVICE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from encke.kernels.gpu import smooth  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@triton.jit
def both_kernel(x, y, slopes, KIND: tl.constexpr):
    at = tl.arange(0, 256)
    v = tl.load(x + at)
    tl.store(y + at, smooth.activated(v, KIND))
    tl.store(slopes + at, smooth.slope_of(v, KIND))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=lambda layer: layer.operation)
def test_values_and_slopes_are_those_of_torch(layer):
    """At the corners of hard swish, too, and for what is not finite."""
    corners = torch.tensor([-3.0, 3.0])
    special = [corners, corners.nextafter(corners * 0), corners.nextafter(corners * 2)]
    special.append(torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf]))
    x = torch.cat([*special, torch.linspace(-6, 6, 245)]).to(DEVICE)
    y, slopes = torch.empty_like(x), torch.empty_like(x)
    both_kernel[(1,)](x, y, slopes, SMOOTH[layer.operation])
    torch.testing.assert_close(y, layer.function(x), rtol=1e-6, atol=1e-7, equal_nan=True)
    finite = x.isfinite()
    expected = layer.gradient(torch.ones_like(x), x)
    torch.testing.assert_close(slopes[finite], expected[finite], rtol=1e-6, atol=1e-6)
    assert torch.equal(layer.function_(x.clone()).nan_to_num(), layer.function(x).nan_to_num())
