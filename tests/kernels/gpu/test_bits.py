"""Masks and small integers against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import reference
from tests.kernels.gpu.common import DEVICE

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("numel", [0, 1, 63, 1000, 5003])
def test_bits(bits, numel):
    x = torch.randint(0, 1 << bits, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    data = gpu.bits_encode(x, bits)
    assert torch.equal(data, reference.bits_encode(x, bits))
    assert torch.equal(gpu.bits_decode(data, bits, numel), x)
    if bits == 1:
        assert torch.equal(gpu.bits_encode(x.bool(), 1), data)
