"""Batch norm's forward in NCHW memory against float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.gpu.common import DEVICE, compile_for_hopper

norm_planes = pytest.importorskip("encke.kernels.gpu.norm_planes", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS, MOMENTUM = 1e-5, 0.1
SIZES = [(3, 5, 7, 7), (2, 3, 40, 33), (70, 2, 4), (1, 6, 5, 9, 16), (2, 9, 1, 8), (1, 3, 2500)]


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    norm_planes.planes_forward.cache_clear()


def check(size: tuple[int, ...], dtype: torch.dtype, affine: torch.dtype | None = torch.float32, offset=1.0) -> None:
    torch.manual_seed(sum(size))
    channels, count = size[1], size[0] * torch.Size(size[2:]).numel()
    x = (torch.randn(size) * (0.5 + torch.rand(channels).view(1, -1, *[1] * (len(size) - 2))) + offset).to(dtype)
    x = x.to(DEVICE)
    weight = bias = None
    if affine is not None:
        weight = (torch.rand(channels) + 0.5).to(DEVICE, affine)
        bias = torch.randn(channels).to(DEVICE, affine)
    running = torch.randn(channels, device=DEVICE), torch.rand(channels, device=DEVICE), torch.tensor(6, device=DEVICE)
    before = [t.double() for t in running]
    plan = norm_planes.planes_forward(size, dtype, affine, x.device)
    out, kept = plan.run(x, weight, bias, running, MOMENTUM, EPS)
    again, alone = plan.run(x, weight, bias, None, MOMENTUM, EPS)
    assert torch.equal(out, again) and torch.equal(kept, alone) and running[2] == 7
    exact, over = x.double(), [0, *range(2, len(size))]
    var, mean = torch.var_mean(exact, over, correction=0)
    inverse = 1 / (var + EPS).sqrt()
    scale = inverse if weight is None else inverse * weight.double()
    shift = torch.zeros_like(scale) if bias is None else bias.double()
    assert (kept[0] - mean).abs().max() <= 1e-6 * exact.abs().max()
    assert (kept[1] / inverse - 1).abs().max() <= 1e-5
    assert (kept[2] / scale - 1).abs().max() <= 1e-5 and torch.equal(kept[3].double(), shift)
    one = [1, -1, *[1] * (len(size) - 2)]
    expected = (exact - mean.view(one)) * scale.view(one) + shift.view(one)
    half = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 1e-6)
    assert out.dtype == dtype and out.stride() == x.stride()
    assert ((out - expected).abs() <= 1.01 * half * (expected.abs() + 0.02) + 1e-6 * abs(offset)).all()
    wanted = mean, var * count / max(count - 1, 1)
    for got, old, new in zip(running[:2], before[:2], wanted, strict=True):
        assert (got - (0.9 * old + 0.1 * new)).abs().max() <= 1e-5 * (1 + new.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_forward(size, dtype):
    check(size, dtype)


@pytest.mark.parametrize("affine", [None, torch.bfloat16, torch.float16])
def test_weights_of_other_dtypes(affine):
    check((2, 8, 9, 9), torch.float16, affine)


@pytest.mark.parametrize("samples", [1, 9])
def test_work_that_is_shared_out(samples, monkeypatch):
    """Many programs share a channel, and each goes through several tiles; means are far from zero."""
    for name, value in {"PROGRAMS": 24, "TILE": 32, "WIDTH": 16, "NARROWEST": 4, "MERGED": 2}.items():
        monkeypatch.setattr(norm_planes, name, value)
    norm_planes.planes_forward.cache_clear()
    check((samples, 6, 15, 17), torch.float32, offset=300.0)


def test_tiles_leave_few_lanes_idle():
    """Planes of usual CNNs, and volumes of one sample."""
    widths = {side: norm_planes.tile_width(side * side, 1024) for side in (7, 14, 28, 56, 112)}
    assert widths == {7: 64, 14: 32, 28: 64, 56: 128, 112: 512}
    assert norm_planes.tile_width(128**3, 2048) == 2048 and norm_planes.tile_width(3, 1024) == 4


def test_values_that_are_not_finite_stay_in_their_channels():
    x = torch.randn(2, 4, 6, 6, device=DEVICE)
    x[0, 1, 2, 3], x[1, 2, 0, 0] = float("nan"), float("inf")
    out, kept = norm_planes.planes_forward((2, 4, 6, 6), x.dtype, None, x.device).run(x, None, None, None, 0.1, EPS)
    good = torch.tensor([True, False, False, True], device=DEVICE)
    assert torch.equal(out.isfinite().all(0).all(1).all(1), good) and out[:, ~good].isnan().all()
    assert torch.equal(kept[1].isfinite(), good)


def test_what_is_left_to_others():
    def takes(size, dtype=torch.float32, weight=torch.float32):
        return norm_planes.planes_forward(size, dtype, weight, torch.device(DEVICE)) is not None

    assert takes((2, 3, 4, 4)) and takes((2, 3, 4), torch.float16, None)
    assert not takes((2, 3, 4, 4), torch.float64) and not takes((0, 3, 4, 4)) and not takes((2, 3))
    assert not takes((2, 3, 4, 4), torch.float32, torch.float64)
    assert not takes((1 << 11, 3, 1 << 11, 1025))  # the kernels count units of values with 31 bits
    assert not takes((1, 1, 1 << 31), torch.bfloat16, None)  # and places in a plane


COMPILE = """
from encke.kernels.gpu import norm_planes
for dtype, name in (TYPES[each] for each in ("float32", "float16", "bfloat16")):
    floats = ("moments", "weight", "bias", "running_mean", "running_var", "kept", "line")
    pointers = dict.fromkeys(floats, "*fp32") | dict.fromkeys(("x", "out", "grad", "values"), name)
    pointers["batches"] = "*i64"
    for unit in (4, 1):
        constants = {"DTYPE": dtype, "UNIT": unit, "UNITS": 2048 // unit}
        build(norm_planes.plane_normalise_kernel, pointers, constants)
        build(norm_planes.plane_gradient_kernel, pointers, constants)
        for rows, width in ((1, 2048), (32, 64)):
            constants = {"DTYPE": dtype, "UNIT": unit, "ROWS": rows, "WIDTH": width}
            build(norm_planes.plane_moments_kernel, pointers, constants)
for affine, running in ((True, True), (False, False)):
    constants = {"AFFINE": affine, "WEIGHT": tl.float32, "RUNNING": running, "ROWS": 64, "CH": 8}
    build(norm_planes.plane_statistics_kernel, pointers, constants)
"""


@pytest.mark.slow
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
