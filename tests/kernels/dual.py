"""Planes of values, and the comparison of two backends, for the tests of dual precision."""

from __future__ import annotations

import math

import torch

from encke.kernels import Backend, DualFormat, reference
from tests.kernels.common import plain_nan

SEED = 0x9E3779B97F4A7C15 >> 1
# Planes, height, width: full and partial tiles, planes smaller than a tile, single rows and columns, odd numbers.
SHAPES = [(3, 8, 8), (33, 7, 7), (5, 14, 14), (2, 1, 40), (3, 19, 1), (6, 5, 19), (2, 33, 9), (1, 40, 71), (2, 16, 17)]
SETTINGS = [(8, 2, False), (8, 2, True), (2, 4, True), (5, 8, False)]


def specials(shape: tuple[int, int, int]) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    x[0].view(-1)[7::97] = math.nan
    x[1 % shape[0], 0, 0] = -math.inf
    x[-1, -1, -1] = -0.0
    return x


CONTENTS = {
    "normal": lambda shape: torch.randn(shape),
    "relu": lambda shape: torch.randn(shape).relu(),
    "zeros": lambda shape: torch.zeros(shape),
    "negative zeros": lambda shape: -torch.zeros(shape),
    "constant": lambda shape: torch.full(shape, -3.7),
    "far from zero": lambda shape: 1e4 + torch.rand(shape, dtype=torch.float64),
    "denormals": lambda shape: torch.randn(shape, dtype=torch.float64) * 1e-41,
    "huge": lambda shape: torch.randn(shape, dtype=torch.float64) * 1e37,
    "largest": lambda shape: torch.randn(shape).sign().double() * 3.4028234663852886e38,
    "specials": specials,
}


def check(backend: Backend, device: str, x: torch.Tensor, block: int, bits: int, masked: bool) -> None:
    """The backend stores what the reference stores (on the CPU the same bytes), and decodes it to the same values."""
    flat, numel = x.reshape(-1), x.numel()
    format = DualFormat(*x.shape[1:], block, bits, masked, x.dtype)
    theirs = reference.dual_encode(flat, format, SEED)
    ours = backend.dual_encode(flat.to(device), format, SEED)
    assert ours.numel() == format.nbytes(numel), format
    if backend.NAME == "numba":
        assert torch.equal(ours, theirs), format
    for mask in (False, True):
        expected = reference.dual_decode(theirs, format, numel, mask)
        for data in (ours, theirs.to(device)):
            decoded = backend.dual_decode(data, format, numel, mask).cpu()
            assert decoded.dtype == expected.dtype and torch.equal(plain_nan(decoded), plain_nan(expected)), format
        if mask and masked:
            assert torch.equal(expected, flat != 0), format
