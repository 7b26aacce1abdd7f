"""Batch norm's backward from a packed input against the formula in float64: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from encke.kernels import GroupFormat, reference
from encke.kernels.formats import SMOOTH
from encke.kernels.reference.fields import hash24
from tests.kernels.gpu.common import DEVICE, SEED, compile_for_hopper

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
norm_backward = pytest.importorskip("encke.kernels.gpu.norm_backward", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

GROUP = 128
SLOPES = {
    "Silu": torch.ops.aten.silu_backward,
    "Hardswish": torch.ops.aten.hardswish_backward,
}
"""Gradients of smooth activations, from that of the result and the input."""


def format_for(size: tuple[int, ...], dtype: torch.dtype, bits: int, last: bool) -> GroupFormat:
    """The format in which capture packs batch norm's input: groups of a channel, or of a plane."""
    plane, channels = math.prod(size[2:]), size[1]
    if last:
        return GroupFormat(bits, GROUP, dtype, channels)
    return GroupFormat.in_rows(bits, GROUP, dtype, False, math.prod(size), plane, 1)


def plan_for(size: tuple[int, ...], dtype: torch.dtype, bits: int, last: bool, affine: torch.dtype | None, table=False):
    """The plan for gradients of that size; there is one."""
    format = format_for(size, dtype, bits, last)
    plan = norm_backward.norm_plan(size, format, last, affine, torch.device(DEVICE), table)
    assert plan is not None
    return plan


def packed(format: GroupFormat, numel: int, positive: bool) -> torch.Tensor:
    """A buffer as a plan encodes them, of random codes; with `positive`, every third group is not negative."""
    generator = torch.Generator().manual_seed(numel + format.bits)
    groups = format.groups(numel)
    codes = torch.randint(0, 256, (format.places(numel)[0],), dtype=torch.uint8, generator=generator)
    step = torch.rand(groups, generator=generator) + 0.5
    lo = -1 - torch.rand(groups, generator=generator)
    if positive:
        lo[::3] = lo[::3].abs()
    return torch.cat([codes, *(part.to(torch.bfloat16).view(torch.uint8) for part in (lo, step))]).to(DEVICE)


def decoded(data: torch.Tensor, format: GroupFormat, numel: int) -> torch.Tensor:
    """Return the decoded values in float64, in the order of memory."""
    i = torch.arange(numel, device=data.device)
    bits, stride, length, groups = format.bits, format.stride, format.length, format.groups(numel)
    row = format.row or numel // stride
    place, c = i // stride, i % stride
    block = place // row * format.groups_in_row(numel) + place % row // format.extent
    k, field = place % row % format.extent, format.field_length
    group, byte = block * stride + c, (block * length + k % field) * stride + c
    codes = format.places(numel)[0]
    lo = data[codes : codes + 2 * groups].clone().view(torch.bfloat16).double()[group]
    step = data[codes + 2 * groups :].clone().view(torch.bfloat16).double()[group]
    code = (data[byte].long() >> k // field * format.field) & ((1 << format.field) - 1)
    if bits == 3:
        third = data[(block * length + field + k % field // 2) * stride + c].long()
        code |= (third >> k % field % 2 * 4 + k // field & 1) << 2
    hash = hash24(byte, k // field * (4 * format.field), SEED)
    value = lo + (code - (lo >= 0).long() + hash * 2.0**-24 - 0.5) * step
    return torch.where((code == 0) & (lo >= 0) & ~step.isnan(), 0.0, value)


def formula(x, grad, mean, invstd, weight):
    """Gradients of input, weight and bias in float64; the channel is the second dimension."""
    over = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean, invstd, weight = (t.double().view(shape) for t in (mean, invstd, weight))
    count = x.numel() // x.shape[1]
    sum_g, sum_gx = grad.sum(over, keepdim=True), (grad * (x - mean)).sum(over, keepdim=True)
    out = (grad - sum_g / count - (x - mean) * invstd**2 * sum_gx / count) * invstd * weight
    return out, (sum_gx * invstd).flatten(), sum_g.flatten()


def tensors(size: tuple[int, ...], last: bool, dtype: torch.dtype, affine: torch.dtype | None):
    """Gradient, mean, invstd and weight for a tensor of that size."""
    torch.manual_seed(sum(size))
    grad = torch.randn(size).to(dtype).to(DEVICE)
    if last:
        grad = grad.contiguous(memory_format=torch.channels_last if len(size) == 4 else torch.channels_last_3d)
    channels = size[1]
    mean, invstd = torch.randn(channels) * 0.5, torch.rand(channels) + 0.5
    weight = torch.rand(channels).to(affine) + 0.5 if affine is not None else None
    return grad, mean.to(DEVICE), invstd.to(DEVICE), weight.to(DEVICE) if weight is not None else None


def in_memory(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values in the order of memory as a tensor that lies as `like` does."""
    return flat.as_strided(like.shape, like.stride())


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    norm_backward.norm_plan.cache_clear()


def check(size, last, dtype, bits, affine=torch.float32, positive=True) -> None:
    grad, mean, invstd, weight = tensors(size, last, dtype, affine)
    numel, plan = grad.numel(), plan_for(size, dtype, bits, last, affine)
    data = packed(plan.format, numel, positive)
    x = in_memory(decoded(data, plan.format, numel), grad)
    if norm_backward.ROUND:
        x = x.to(dtype).double()
    ones = torch.ones_like(mean) if weight is None else weight
    expected = formula(x, grad.double(), mean, invstd, ones)
    out, grad_weight, grad_bias = norm_backward.norm_backward(grad, data, mean, invstd, weight, plan, SEED)
    assert out.dtype == dtype and out.stride() == grad.stride()
    half = 2**-8 if dtype == torch.bfloat16 else 2**-10 if dtype == torch.float16 else 1e-5
    assert (out - expected[0]).abs().max() <= half * expected[0].abs().max()
    if weight is None:
        assert grad_weight is None and grad_bias is None
        return
    narrow = 2**-8 if affine == torch.bfloat16 else 1e-5
    for got, want in ((grad_weight, expected[1]), (grad_bias, expected[2])):
        assert got.dtype == affine
        assert (got - want).abs().max() <= narrow * (want.abs().max() + numel**0.5 / size[1])


SIZES = [(2, 3, 7, 7), (1, 7, 14, 14), (3, 64, 7, 7), (2, 5, 8, 16), (1, 2, 56, 56), (1, 2, 3137, 1), (5, 2, 6, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_planes(size, positive):
    check(size, False, torch.float32, 2, positive=positive)


@pytest.mark.slow
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("size", [(3, 7, 7, 7), (1, 64, 12, 12), (2, 3, 1, 1), (5, 72, 9, 9)], ids=str)
def test_channels_last(size, positive):
    check(size, True, torch.bfloat16, 2, positive=positive)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.soak)])
@pytest.mark.parametrize("last", [False, True])
def test_dtypes_and_bits(last, dtype, bits):
    affine = {2: torch.float32, 3: torch.float32, 4: None, 8: torch.bfloat16}[bits]
    check((2, 8, 14, 14), last, dtype, bits, affine, positive=last)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 7, 7), (2, 2, 14, 14), (1, 2, 16, 16)], ids=str)
def test_three_bits(size, last):
    check(size, last, torch.float32, 3)


@pytest.mark.parametrize("last", [False, True])
def test_work_that_is_shared_out(last, monkeypatch):
    """Programs with several tiles, sums with several parts."""
    for name, value in {"PROGRAMS": 6, "GATHER": 32}.items():
        monkeypatch.setattr(norm_backward, name, value)
    norm_backward.norm_plan.cache_clear()
    check((9, 3, 12, 12), last, torch.float32, 2)


@pytest.mark.parametrize("last", [False, True])
def test_values_rounded_to_the_dtype(last, monkeypatch):
    monkeypatch.setattr(norm_backward, "ROUND", True)
    norm_backward.norm_plan.cache_clear()
    check((2, 8, 14, 14), last, torch.bfloat16, 2)


def test_volumes():
    check((2, 8, 3, 6, 7), True, torch.float32, 2)
    check((2, 8, 3, 6, 7), False, torch.float32, 2)


@pytest.mark.parametrize("last", [False, True])
def test_decoded_as_the_reference_decodes(last):
    """The format in this file is that of the kernels: the same values up to the bits of the hash that are dropped."""
    for bits in (2, 3, 4, 8):
        format = format_for((4, 8, 10, 16), torch.float32, bits, last)
        data = packed(format, 8 * 640, True)
        expected = reference.group_plan(format, 8 * 640, torch.device(DEVICE)).decode(data, SEED)
        assert (decoded(data, format, 8 * 640) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("last", [False, True])
def test_a_group_that_is_not_finite_spoils_its_channel_alone(last):
    size = (2, 4, 16, 16)
    grad, mean, invstd, weight = tensors(size, last, torch.float32, torch.float32)
    plan = plan_for(size, torch.float32, 2, last, torch.float32)
    data = packed(plan.format, grad.numel(), True)
    data[-2 * plan.format.groups(grad.numel()) :].view(torch.bfloat16)[0] = float("nan")
    out, grad_weight, grad_bias = norm_backward.norm_backward(grad, data, mean, invstd, weight, plan, SEED)
    assert grad_weight.isnan().tolist() == [True, False, False, False] and out.isnan().any((0, 2, 3)).sum() == 1
    assert grad_bias.isfinite().all()


def test_parameters_alone():
    grad, mean, invstd, weight = tensors((2, 8, 14, 14), False, torch.float32, torch.float32)
    plan = plan_for((2, 8, 14, 14), torch.float32, 2, False, torch.float32)
    data = packed(plan.format, grad.numel(), True)
    args = (grad, data, mean, invstd, weight, plan, SEED)
    out, *rest = norm_backward.norm_backward(*args, apply=False)
    assert out is None and all(
        torch.equal(a, b) for a, b in zip(rest, norm_backward.norm_backward(*args)[1:], strict=True)
    )


def test_spreads_below_the_means():
    grad, mean, invstd, weight = tensors((2, 8, 16, 16), True, torch.bfloat16, torch.float32)
    plan = plan_for((2, 8, 16, 16), torch.bfloat16, 2, True, torch.float32)
    data = packed(plan.format, grad.numel(), True)
    apart = norm_backward.norm_backward(grad, data, mean, invstd, weight, plan, SEED)
    below = norm_backward.norm_backward(grad, data, torch.stack([mean, invstd]), None, weight, plan, SEED)
    assert all(torch.equal(a, b) for a, b in zip(apart, below, strict=True))


@pytest.mark.parametrize("size", [(2, 8, 14, 14), (2, 6, 9, 9)])
@pytest.mark.parametrize("last", [False, True])
def test_two_parts_give_what_the_whole_gives(size, last):
    grad, mean, invstd, weight = tensors(size, last, torch.bfloat16, torch.float32)
    plan = plan_for(size, torch.bfloat16, 2, last, torch.float32)
    data = packed(plan.format, grad.numel(), True)
    whole = norm_backward.norm_backward(grad, data, mean, invstd, weight, plan, SEED)
    sums, out = torch.empty(5, size[1], device=DEVICE), torch.empty_like(grad)
    codes = reference.group_plan(plan.format, grad.numel(), grad.device)
    norm_backward.norm_sums(grad, data, mean, invstd, weight, codes, SEED, sums)
    norm_backward.norm_apply(grad, data, sums, codes, SEED, out)
    assert all(torch.equal(a, b) for a, b in zip(whole, (out, sums[3], sums[4]), strict=True))
    # The same with a seed that is on the device.
    seeds, read, there = torch.tensor([3, SEED], device=DEVICE), torch.empty_like(sums), torch.empty_like(grad)
    norm_backward.norm_sums(grad, data, mean, invstd, weight, codes, (seeds, 1), read)
    norm_backward.norm_apply(grad, data, read, codes, (seeds, 1), there)
    assert torch.equal(read, sums) and torch.equal(there, out)
    # The reference computes the same from decoded values.
    reference.norm_sums(grad, data, mean, invstd, weight, codes, SEED, read)
    reference.norm_apply(grad, data, sums, codes, SEED, there)
    assert torch.allclose(read, sums, rtol=1e-2, atol=1e-2 * float(sums.abs().max()))
    assert torch.allclose(there.float(), out.float(), rtol=2e-2, atol=2e-2 * float(out.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "gate_bits"), [(2, 2), (2, 3), (3, 4), (4, 2), (8, 8), (4, 3)])
def test_a_relu_between_batch_norm_and_gradient(bits, gate_bits):
    """Its codes are read instead of a gradient that was gated before: the same bits."""
    size = (2, 8, 9, 15)
    grad, mean, invstd, weight = tensors(size, True, torch.bfloat16, torch.float32)
    plan = plan_for(size, torch.bfloat16, bits, True, torch.float32)
    data = packed(plan.format, grad.numel(), True)
    plans = [gpu.group_plan(replace(plan.format, bits=each), grad.numel(), grad.device) for each in (bits, gate_bits)]
    y = torch.randn_like(grad).relu()
    # Groups with negative values and with a NaN have no code for zero.
    y[0, 0, 0, 0], y[0, 1, 0, 0] = -1, torch.nan
    gate = plans[1].encode(y, SEED)
    found, expected = (torch.empty(5, size[1], device=DEVICE) for _ in range(2))
    out, wanted, gated = (torch.empty_like(grad) for _ in range(3))
    plans[1].gate_into(gate, grad, gated)
    assert 0 < (gated == 0).float().mean() < 1
    for sums, result, given, codes in ((found, out, grad, (gate, plans[1])), (expected, wanted, gated, None)):
        norm_backward.norm_sums(given, data, mean, invstd, weight, plans[0], SEED, sums, codes)
        norm_backward.norm_apply(given, data, sums, plans[0], SEED, result, codes)
    assert torch.equal(found, expected) and torch.equal(out, wanted)


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize(("size", "dtype"), [((2, 8, 9, 15), torch.bfloat16), ((3, 24, 8, 8), torch.float32)], ids=str)
@pytest.mark.parametrize("activation", SLOPES)
def test_a_smooth_activation_between_batch_norm_and_gradient(activation, size, dtype, bits):
    """Its slope comes from the decoded input: the gradients are those of both, by the formula."""
    grad, mean, invstd, weight = tensors(size, True, dtype, torch.float32)
    bias, numel = torch.rand_like(mean) - 0.5, grad.numel()
    act = SMOOTH[activation]
    plan = norm_backward.norm_plan(size, format_for(size, dtype, bits, True), True, torch.float32, grad.device, act=act)
    data = packed(plan.format, numel, True)
    x = in_memory(decoded(data, plan.format, numel), grad)
    rows = torch.stack([mean, invstd, invstd * weight, bias])
    y = (x - mean.double().view(1, -1, 1, 1)) * rows[2].double().view(1, -1, 1, 1) + bias.double().view(1, -1, 1, 1)
    through = SLOPES[activation](grad.double(), y.to(dtype).double())
    expected = formula(x, through, mean, invstd, weight)
    found = norm_backward.norm_backward(grad, data, rows, None, weight, plan, SEED, gate=rows)
    half = 2**-7 if dtype == torch.bfloat16 else 1e-5
    for got, want in zip(found, expected, strict=True):
        assert (got - want).abs().max() <= half * want.abs().max()


def test_what_is_left_to_others():
    """Planes of a few values, one channel, groups across channels, other settings."""
    size, good = (2, 8, 16, 16), GroupFormat(2, GROUP, torch.float32)

    def takes(size=size, last=False, **other):
        return norm_backward.norm_plan(size, replace(good, **other), last, None, torch.device(DEVICE)) is not None

    assert takes() and takes(last=True, stride=8) and takes((2, 8, 14, 14), row=196)
    assert not any(map(takes, ((2, 8, 14, 14), (2, 1, 16, 16), (0, 8, 16, 16), (8, 32))))
    assert not takes((2, 8, 5, 5), row=25) and not takes(row=128) and not takes(last=True, stride=8, row=512)
    assert not takes(last=True) and not takes(stride=8) and not takes(group=256) and not takes(dtype=torch.float64)
    assert not takes(bits=4, signs=True) and takes(bits=3)
    assert norm_backward.norm_plan(size, good, False, None, torch.device(DEVICE), act=SMOOTH["Silu"]) is None


COMPILE = """
from encke.kernels.gpu import norm_kernels
floats = ("mean", "invstd", "sums", "line", "workspace", "weight", "grad_weight", "grad_bias")
for dtype, name in (TYPES[each] for each in ("float32", "float16", "bfloat16")):
    pointers = dict.fromkeys(floats, "*fp32") | {"data": "*u8", "gate": "*u8", "seeds": "*i64"}
    pointers |= {"grad": name, "out": name}
    common = {"DTYPE": dtype, "BITS": 2, "ROUND": False, "TABLE": dtype == tl.bfloat16}
    last = common | {"UNIT": 8, "V": 8, "R": 4, "CH": 64}
    planes = common | {"G": 8, "LENGTH": 32, "WHOLE": dtype == tl.float32, "THREADS": 4, "LANES": 8, "UNIT": 8}
    ragged = planes | {"BITS": 3, "WHOLE": False, "LANES": 2, "UNIT": 1}
    for bits, gate in ((2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3)):
        beside = pointers | {"gate": "*fp32" if gate > 1 else "*u8"}
        build(norm_kernels.last_reduce_kernel, beside, last | {"BITS": bits, "GATE": gate}, num_warps=1)
        build(norm_kernels.last_apply_kernel, beside, last | {"BITS": bits, "GATE": gate}, num_warps=1)
    build(norm_kernels.plane_reduce_kernel, pointers, planes, num_warps=1)
    build(norm_kernels.plane_reduce_kernel, pointers, ragged, num_warps=1)
    build(norm_kernels.plane_apply_kernel, pointers, planes | {"BITS": 3})
    build(norm_kernels.plane_apply_kernel, pointers, ragged)
build(norm_kernels.gather_kernel, pointers, {"ROWS": 32, "WIDTH": 32})
for together, below in ((False, False), (False, True), (True, False)):
    constants = {"AFFINE": True, "WEIGHT": tl.float32, "ROWS": 256, "CH": 8, "TOGETHER": together, "BELOW": below}
    build(norm_kernels.finish_kernel, pointers, constants)
"""


@pytest.mark.soak
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
