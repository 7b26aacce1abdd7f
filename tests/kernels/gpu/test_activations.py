"""Activations of codes, and products with them, against the same in float64: on a GPU, else in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from encke.kernels import GroupFormat, reference
from tests.kernels.gpu.common import DEVICE, SEED

activations = pytest.importorskip("encke.kernels.gpu.activations", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FUNCTIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
NEAR = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def pack(numel: int, bits: int, dtype: torch.dtype, seed: int, row: int = 0) -> tuple[Tensor, GroupFormat, Tensor]:
    """Codes, their format, and the values they stand for."""
    x = 2 * torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    format = GroupFormat(bits, 128, dtype, 1, False, row)
    data = reference.group_plan(format, numel, x.device).encode(x, seed)
    return data, format, reference.group_plan(replace(format, dtype=torch.float32), numel, x.device).decode(data, seed)


def near(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    assert got.dtype == dtype
    return bool((got.double().flatten() - wanted).abs().max() <= NEAR[dtype] * wanted.abs().max())


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize(
    ("bits", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float16), (8, torch.bfloat16)]
)
def test_activations(kind, bits, dtype):
    data, format, x = pack(5 * 128, bits, dtype, SEED)
    assert near(
        activations.activate(kind, data, SEED, format, None, (5, 128), dtype), FUNCTIONS[kind](x.double()), dtype
    )


@pytest.mark.parametrize("row", [0, 80])
@pytest.mark.parametrize("bits", [3, 4])
def test_products(bits, row):
    numel = 8 * 80 if row else 5 * 128
    data, format, x = pack(numel, bits, torch.float32, SEED, row)
    other, _, y = pack(numel, bits, torch.float32, 7, row)
    wanted = functional.silu(x.double()) * y.double()
    for factor in (y, (other, 7)):
        assert near(
            activations.activate("silu", data, SEED, format, factor, (numel,), torch.float32), wanted, torch.float32
        )


def test_what_is_not_taken():
    format = GroupFormat(4, 128, torch.float32)
    assert activations.row_width(format, 256) == 128 and activations.row_width(replace(format, row=96), 192) == 96
    assert (
        activations.row_width(format, 200) is None and activations.row_width(replace(format, signs=True), 256) is None
    )
    assert activations.row_width(replace(format, stride=2), 256) is None
    data = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    assert activations.activate("silu", data, 0, format, None, (200,), torch.float32) is None
    assert activations.activate("silu", data, 0, format, None, (256,), torch.float64) is None
