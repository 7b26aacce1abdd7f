"""Batch norm's backward from values in memory against the formula in float64: on a GPU, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.common import DEVICE, compile_for_hopper
from tests.kernels.gpu.test_norm_backward import formula, tensors

norm_backward = pytest.importorskip("encke.kernels.gpu.norm_backward", reason="needs triton")
norm_planes = pytest.importorskip("encke.kernels.gpu.norm_planes", reason="needs triton")
norm_values = pytest.importorskip("encke.kernels.gpu.norm_values", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    norm_values.values_plan.cache_clear()


def check(size: tuple[int, ...], last: bool, dtype: torch.dtype, affine: torch.dtype | None = torch.float32) -> None:
    grad, mean, invstd, weight = tensors(size, last, dtype, affine)
    x = (torch.randn_like(grad, dtype=torch.float32) * 2 + 1).to(dtype)
    before = x.clone()
    plan = norm_values.values_plan(size, dtype, last, affine, torch.device(DEVICE))
    ones = torch.ones_like(mean) if weight is None else weight
    expected = formula(x.double(), grad.double(), mean, invstd, ones)
    found = norm_backward.norm_backward(grad, x, mean, invstd, weight, plan, 0)
    assert torch.equal(x, before)
    over = norm_backward.norm_backward(grad, x, mean, invstd, weight, plan, 0, out=x)
    assert over[0] is x
    for out, grad_weight, grad_bias in (found, over):
        assert out.dtype == dtype and out.stride() == grad.stride()
        half = 2**-8 if dtype == torch.bfloat16 else 2**-10 if dtype == torch.float16 else 1e-5
        assert (out - expected[0]).abs().max() <= half * expected[0].abs().max()
        if weight is None:
            assert grad_weight is None and grad_bias is None
            continue
        narrow = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(affine, 1e-5)
        for got, want in ((grad_weight, expected[1]), (grad_bias, expected[2])):
            assert got.dtype == affine
            assert (got - want).abs().max() <= narrow * (want.abs().max() + x.numel() ** 0.5 / size[1])


SIZES = [(3, 5, 7, 7), (2, 3, 40, 33), (70, 2, 4), (1, 1, 5), (2, 70, 3, 1, 2), (3, 72, 8, 9), (1, 2, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_contiguous(size, dtype):
    check(size, False, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [size for size in SIZES if len(size) > 3], ids=str)
def test_channels_last(size, dtype):
    check(size, True, dtype)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("affine", [None, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(last, affine):
    check((2, 8, 9, 9), last, torch.float16, affine)


@pytest.mark.parametrize("last", [False, True])
def test_work_that_is_shared_out(last, monkeypatch):
    """Few programs go through many tiles, and sums have several parts."""
    for module, values in ((norm_values, {"CHANNELS": 4}), (norm_planes, {"WIDTH": 16, "NARROWEST": 4})):
        for name, value in ({"PROGRAMS": 6, "TILE": 16} | values).items():
            monkeypatch.setattr(module, name, value)
    norm_values.values_plan.cache_clear()
    check((9, 6, 5, 7), last, torch.float32)


def test_what_is_left_to_others():
    def takes(size, dtype=torch.float32, weight=torch.float32):
        return norm_values.values_plan(size, dtype, False, weight, torch.device(DEVICE)) is not None

    assert takes((2, 3, 4, 4)) and takes((2, 3, 4), torch.float16, None)
    assert not takes((2, 3, 4, 4), torch.float64) and not takes((0, 3, 4, 4))
    assert not takes((2, 3, 4, 4), torch.float32, torch.float64)
    assert not takes((1, 1, 1 << 31), torch.bfloat16, None)  # places in a plane have 31 bits


COMPILE = """
from encke.kernels.gpu import norm_values
for dtype, name in (TYPES[each] for each in ("float32", "float16", "bfloat16")):
    pointers = dict.fromkeys(("mean", "sums", "line"), "*fp32") | {"grad": name, "values": name, "out": name}
    for unit, rows, width in ((4, 2, 1024), (1, 32, 64)):
        constants = {"DTYPE": dtype, "UNIT": unit, "ROWS": rows, "WIDTH": width}
        build(norm_values.plane_sums_kernel, pointers, constants)
        build(norm_values.last_sums_kernel, pointers, constants)
        build(norm_values.last_gradient_kernel, pointers, constants)
"""


@pytest.mark.soak
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
