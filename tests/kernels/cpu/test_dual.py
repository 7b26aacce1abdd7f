"""Dual precision from numba against the reference: the same bytes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.common import DTYPES
from tests.kernels.dual import CONTENTS, SETTINGS, SHAPES, check

cpu = pytest.importorskip("encke.kernels.cpu", reason="needs numba")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_stores_the_bytes_of_the_reference(content: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for i, shape in enumerate(SHAPES):
        x = CONTENTS[content](shape).to(dtype)
        for settings in SETTINGS if content == "relu" else (SETTINGS[i % 4], SETTINGS[(i + 1) % 4]):
            check(cpu, "cpu", x, *settings)


def test_shares_planes_out_among_threads() -> None:
    check(cpu, "cpu", torch.randn(700, 13, 31), 8, 2, True)
