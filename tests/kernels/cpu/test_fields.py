"""Small integers packed by numba against the reference."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import reference
from tests.kernels.common import SIZES

cpu = pytest.importorskip("encke.kernels.cpu", reason="needs numba")


@pytest.mark.parametrize("width", [1, 2, 4])
def test_small_integers_equal_reference(width: int) -> None:
    for n in [*SIZES, 300_001]:
        x = torch.randint(0, 1 << width, (n,), dtype=torch.uint8)
        for values in (x, x.bool()) if width == 1 else (x,):
            packed = cpu.bits_encode(values, width)
            assert torch.equal(packed, reference.bits_encode(values, width))
            assert torch.equal(cpu.bits_decode(packed, width, n), x)
