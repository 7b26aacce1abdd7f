"""Batch norm and ReLU computed while encoding, against float64 and torch: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from encke.kernels import GroupFormat, GroupPlan
from encke.kernels.formats import SMOOTH
from tests.kernels.gpu.common import DEVICE, SEED, compile_for_hopper

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
norm_forward = pytest.importorskip("encke.kernels.gpu.norm_forward", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS, MOMENTUM = 1e-5, 0.1
SIZES = [(4, 8, 16, 16), *(pytest.param(size, marks=pytest.mark.slow) for size in ((5, 24, 23, 23), (4, 72, 16, 16)))]
"""A whole number of groups, a last one that is not full, channels for two programs of which one is not full."""


def values(size: tuple[int, ...], dtype: torch.dtype, offset: float = 0.0) -> torch.Tensor:
    torch.manual_seed(sum(size))
    x = (torch.randn(size) * (0.5 + torch.rand(size[1]).view(-1, 1, 1)) + offset).to(dtype)
    return x.to(DEVICE).contiguous(memory_format=torch.channels_last)


def plan_of(x: torch.Tensor, bits: int) -> GroupPlan:
    plan = gpu.group_plan(GroupFormat(bits, 128, x.dtype, x.shape[1]), x.numel(), x.device)
    assert plan.fuses_forward
    return plan


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "bits", "offset"), [
    (torch.bfloat16, 2, 0.0), (torch.bfloat16, 3, 0.0), (torch.float16, 4, 30.0),
])  # fmt: skip
def test_norm(size, dtype, bits, offset):
    x = values(size, dtype, offset)
    channels = size[1]
    weight, bias = torch.rand(channels, device=DEVICE) + 0.5, torch.randn(channels, device=DEVICE)
    running = torch.randn(channels, device=DEVICE), torch.rand(channels, device=DEVICE), torch.tensor(6, device=DEVICE)
    before = [t.double() for t in running]
    forward = norm_forward.forward_plan(x.shape, x.stride(), dtype, x.device)
    assert forward is not None
    plan = plan_of(x, bits)
    workspace, kept = torch.empty(forward.workspace_numel, device=DEVICE), torch.empty(4, channels, device=DEVICE)
    out = torch.empty_like(x)
    data = plan.encode_moments(x, workspace, SEED)
    forward.gather(workspace, weight, bias, running, MOMENTUM, EPS, kept)
    forward.normalise(x, kept, out)
    assert torch.equal(data, plan.encode(x, SEED)) and running[2] == 7
    exact = x.double()
    over, shape = [0, 2, 3], (1, -1, 1, 1)
    var, mean = torch.var_mean(exact, over, correction=0)
    alone = torch.empty(2, channels, device=DEVICE)
    forward.measure(workspace, alone[0], alone[1])
    assert torch.equal(alone[0], kept[0])
    assert (alone[1] / var - 1).abs().max() <= 1e-5
    invstd = 1 / (var + EPS).sqrt()
    assert (kept[0] - mean).abs().max() <= 1e-6 * exact.abs().max()
    assert (kept[1] / invstd - 1).abs().max() <= 1e-5
    expected = (exact - mean.view(shape)) * (invstd * weight).view(shape) + bias.view(shape)
    half = 2**-8 if dtype == torch.bfloat16 else 2**-11
    assert out.stride() == x.stride()
    assert ((out - expected).abs() <= 1.01 * half * (expected.abs() + 2e-2)).all()
    pixels = x.numel() // channels
    wanted = mean, var * pixels / (pixels - 1)
    for got, old, new in zip(running[:2], before[:2], wanted, strict=True):
        assert (got - (0.9 * old + 0.1 * new)).abs().max() <= 1e-5 * (1 + new.abs().max())


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "function"), [("Silu", functional.silu), ("Hardswish", functional.hardswish)])
def test_smooth_activation_behind_norm(name, function, dtype, inplace):
    """It is that of batch norm's result as a tensor holds it."""
    x = values((5, 24, 23, 23), dtype, 1.0) * 2
    kept = torch.stack([torch.rand(24, device=DEVICE) + offset for offset in (0.5, 0.5, 0.5, -0.5)])
    forward = norm_forward.forward_plan(x.shape, x.stride(), dtype, x.device)
    y = torch.empty_like(x)
    forward.normalise(x, kept, y)
    out = x if inplace else torch.empty_like(x)
    forward.normalise(x, kept, out, SMOOTH[name])
    expected = function(y)
    assert (y < -3).any() and (y > 3).any()
    half = 2**-8 if dtype == torch.bfloat16 else 2**-11
    assert ((out.double() - expected.double()).abs() <= 2 * half * expected.double().abs() + 1e-6).all()
    assert (out == expected).float().mean() > 0.99


def test_many_groups_are_merged_first(monkeypatch):
    x = values((5, 24, 40, 23), torch.bfloat16, 20.0)
    monkeypatch.setattr(norm_forward, "MANY", 8)
    monkeypatch.setattr(norm_forward, "MOMENTS", 128)
    forward, plan = norm_forward.ForwardPlan(x.numel() // 24, 24, x.dtype, x.device), plan_of(x, 2)
    assert forward.workspace_numel == 2 * 36 * 24 and forward.merged == (2, 3, 24)
    workspace, found = torch.empty(forward.workspace_numel, device=DEVICE), torch.empty(2, 24, device=DEVICE)
    plan.encode_moments(x, workspace, SEED)
    forward.measure(workspace, found[0], found[1])
    var, mean = torch.var_mean(x.double(), [0, 2, 3], correction=0)
    assert (found[0] / mean - 1).abs().max() <= 1e-6 and (found[1] / var - 1).abs().max() <= 1e-5


def test_norm_without_running_statistics_and_with_values_that_are_not_numbers():
    x = values((8, 16, 16, 16), torch.bfloat16)
    x[1, 3, 2, 2] = torch.nan
    x[1, 5, 2, 2] = torch.inf
    forward, plan = norm_forward.forward_plan(x.shape, x.stride(), x.dtype, x.device), plan_of(x, 2)
    weight, bias = torch.ones(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    workspace, kept, out = (
        torch.empty(forward.workspace_numel, device=DEVICE),
        torch.empty(4, 16, device=DEVICE),
        torch.empty_like(x),
    )
    plan.encode_moments(x, workspace, SEED)
    forward.gather(workspace, weight, bias, None, MOMENTUM, EPS, kept)
    forward.normalise(x, kept, out)
    expected = torch.nn.functional.batch_norm(x.float(), None, None, weight, bias, True, MOMENTUM, EPS)
    bad = torch.zeros(16, dtype=torch.bool, device=DEVICE)
    bad[3] = bad[5] = True
    assert torch.equal(out.isnan().all(0).all(1).all(1), bad) and torch.equal(kept[0].isfinite(), ~bad)
    assert torch.allclose(out[:, ~bad].float(), expected[:, ~bad], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("size", "memory"),
    [((4, 12, 16, 16), torch.channels_last), ((8, 16, 16, 16), torch.contiguous_format), ((2, 16, 5, 5), None)],
)
def test_what_the_kernels_do_not_take(size, memory):
    """Channels that fill no 16 bytes, another memory format, too few pixels for groups; and fp32."""
    x = torch.zeros(size, dtype=torch.bfloat16).contiguous(memory_format=memory or torch.channels_last)
    assert norm_forward.forward_plan(x.shape, x.stride(), x.dtype, x.device) is None
    good = torch.zeros(8, 16, 16, 16).contiguous(memory_format=torch.channels_last)
    assert norm_forward.forward_plan(good.shape, good.stride(), good.dtype, good.device) is None
    assert norm_forward.forward_plan(good.shape, good.stride(), torch.float16, good.device) is not None
    gap = good[:, :8]
    assert norm_forward.forward_plan(gap.shape, gap.stride(), torch.float16, gap.device) is None


@pytest.mark.parametrize(("dtype", "inplace"), [(torch.bfloat16, False), (torch.float16, True)])
@pytest.mark.parametrize("size", SIZES)
def test_relu(size, dtype, inplace):
    x = values(size, dtype)
    special = [torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, 0.0, torch.finfo(dtype).tiny / 8]
    x[0, : len(special), 0, 0] = torch.tensor(special, dtype=dtype)
    plan, expected = plan_of(x, 2), torch.relu(x)
    y = x if inplace else torch.empty_like(x)
    data = plan.encode_relu(x, y, SEED)
    same = y.view(torch.int16) == expected.view(torch.int16)
    assert (same | (y.isnan() & expected.isnan()) | ((y == 0) & (expected == 0))).all()
    assert not (y == 0).logical_and(y.signbit()).any()
    finite = expected.isfinite().permute(0, 2, 3, 1).reshape(-1, size[1])
    whole = plan.decode(data, SEED).view(-1, size[1])
    wanted = plan.decode(plan.encode(expected, SEED), SEED).view(-1, size[1])
    assert torch.equal(whole.isnan(), wanted.isnan()) and not whole[:, len(special) :].isnan().any()
    assert torch.equal(whole[finite & ~whole.isnan()], wanted[finite & ~whole.isnan()])


COMPILE = """
from encke.kernels.formats import SMOOTH
from encke.kernels.gpu import norm_forward, pairs
floats = ("workspace", "weight", "bias", "running_mean", "running_var", "kept")
for dtype, name in ((tl.float16, "*fp16"), (tl.bfloat16, "*i16")):
    pointers = dict.fromkeys(floats, "*fp32") | {"data": "*u8", "seeds": "*i64", "x": name, "out": name}
    pointers["batches"] = "*i64"
    encode = {"DTYPE": dtype, "BITS": 2, "GROUP": 128, "SIGNS": False, "CHANNELS": 64}
    for beside, kind in enumerate(("*u8", name, "*fp32")):
        for full in (True, False):
            more = {"WITH": beside, "FULL": full, "TABLE": full}
            build(pairs.gq_encode_channels_pairs_kernel, pointers | {"beside": kind}, encode | more, maxnreg=96)
    for act in (0, *SMOOTH.values()):
        constants = {"DTYPE": dtype, "UNIT": 8, "ROWS": 64, "CH": 64, "ACT": act}
        build(norm_forward.normalise_kernel, pointers, constants)
for running in (True, False):
    constants = {"RUNNING": running, "ROWS": 512, "CH": 8, "GROUP": 128}
    build(norm_forward.statistics_kernel, pointers, constants, num_warps=8)
moments = dict.fromkeys(("workspace", "mean", "var", "merged"), "*fp32")
build(norm_forward.merge_kernel, moments, {"ROWS": 512, "CH": 8, "GROUP": 128}, num_warps=8)
build(norm_forward.moments_kernel, moments, {"ROWS": 512, "CH": 8, "GROUP": 128}, num_warps=8)
"""


@pytest.mark.slow
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
