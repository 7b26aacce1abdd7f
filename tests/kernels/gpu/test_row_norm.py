"""Layer norm and RMS norm over rows, from values and from codes, against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from encke.codecs.layout import layout_of, rows_inside
from encke.kernels import GroupFormat, reference
from tests.kernels.gpu.common import DEVICE, SEED, compile_for_hopper

row_norm = pytest.importorskip("encke.kernels.gpu.row_norm", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EPS = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nobody has written holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    row_norm.row_plan.cache_clear()
    row_norm.again_launch.cache_clear()


def near(got: Tensor | None, wanted: Tensor, dtype: torch.dtype, scale: float = 1.0) -> bool:
    assert got is not None and got.dtype == dtype and got.shape == wanted.shape
    return bool((got.double() - wanted.double()).abs().max() <= scale * EPS[dtype] * wanted.abs().max())


def pack(x: Tensor, bits: int) -> tuple[Tensor, GroupFormat, Tensor]:
    """Codes of rows, their format, and the values that they decode to before they are rounded to the dtype."""
    format = GroupFormat.in_rows(bits, 128, x.dtype, False, x.numel(), x.shape[-1], 1)
    data = reference.group_plan(format, x.numel(), x.device).encode(x, SEED)
    # All have the scales of fp32, but for groups of one value in bf16, and there are none.
    unrounded = replace(format, dtype=FP32)
    return data, format, reference.group_plan(unrounded, x.numel(), x.device).decode(data, SEED).view(x.shape)


def tensors(rows: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> tuple:
    torch.manual_seed(rows + width)
    x = (torch.randn(rows, width) * torch.linspace(0.5, 3, rows)[:, None] + 0.3).to(dtype)
    x[rows // 2] = x[rows // 2].abs()  # a row with groups that have a level for zero
    if weight_dtype is None:
        return x.to(DEVICE), None, None
    weight, bias = torch.rand(width) + 0.5, torch.randn(width)
    return x.to(DEVICE), weight.to(weight_dtype).to(DEVICE), bias.to(weight_dtype).to(DEVICE)


def gradients(norm, x, grad, mean, rstd, weight):
    """Gradients in float64 with the mean and deviation given; normalised values rounded as the formula says."""
    x, g, r = x.double(), grad.double(), rstd.double()[:, None]
    n = (x - mean.double()[:, None] if norm.centred else x) * r
    scaled = g if weight is None else (g * (weight.double() + norm.offset)).to(norm.inner).double()
    out = r * (scaled - n * (scaled * n).mean(-1, keepdim=True))
    if norm.centred:
        out = out - r * scaled.mean(-1, keepdim=True)
    return out, (g * n.to(norm.inner).double()).sum(0), g.sum(0)


def check(rows, width, dtype, bits, weight_dtype=FP32, centred=False, inner=FP32, out=None, offset=0.0, has_bias=None):
    """Forward, backward and the result once more, from values (bits 0) or codes."""
    x, weight, bias = tensors(rows, width, dtype, weight_dtype)
    bias = bias if (centred if has_bias is None else has_bias) else None
    norm = row_norm.RowNorm(width, centred, 1e-6, offset, inner, out or dtype)
    plan = row_norm.row_plan(norm, rows, rows, dtype, weight_dtype, bias is not None, 1, x.device)
    y, mean, rstd = plan.forward(x, weight, bias)
    wanted = norm.compute(x.float(), weight, bias)
    assert near(y, wanted, norm.out, 2)
    v = x.double()
    v = v - v.mean(-1, keepdim=True) if centred else v
    assert near(rstd, (v.square().mean(-1) + 1e-6).rsqrt(), FP32)
    assert not centred or near(mean, x.double().mean(-1), FP32)
    data, format, decoded = pack(x, bits) if bits else (x, None, x)
    grad = torch.randn(rows, width).to(norm.out).to(DEVICE)
    expected = gradients(norm, decoded, grad, mean, rstd, weight)
    needs = (True, weight is not None, bias is not None)
    found = plan.backward(grad, data, SEED, format, mean, rstd, weight, needs)
    assert near(found[0], expected[0], dtype, 2) and found[0].is_contiguous()
    for got, want, need in zip(found[1:], expected[1:], needs[1:], strict=True):
        assert (got is not None) == need
        assert not need or near(got, want, weight_dtype, 2 if inner == FP32 else 2**-6 / EPS[weight_dtype])
    again = row_norm.normalise_again(
        data, SEED, format, dtype, (rows, width), mean if centred else None, rstd, weight, bias, offset, norm.out
    )
    n = (decoded.double() - mean[:, None] if centred else decoded.double()) * rstd[:, None]
    n = n if weight is None else n * (weight.double() + offset)
    assert near(again, n if bias is None else n + bias.double(), norm.out, 2)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [33, 96, 128, 200, 384])
def test_rows_of_any_width(width, centred):
    check(5, width, FP32, 2, centred=centred)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("bits", [0, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_dtypes_and_bits(dtype, bits, centred):
    weight = {0: None, 2: FP32, 3: dtype, 4: FP32, 8: dtype}[bits]
    check(3, 160, dtype, bits, weight, centred)


@pytest.mark.parametrize("bits", [0, 2])
def test_normalised_values_are_rounded_before_the_weight_as_llama_does(bits):
    check(6, 256, BF16, bits, FP32, inner=BF16, out=FP32)
    check(6, 256, BF16, bits, BF16, inner=BF16, out=BF16)


def test_weights_with_an_offset():
    check(4, 96, FP32, 4, offset=1.0)


@pytest.mark.parametrize("bits", [0, 8])
def test_layer_norm_of_16_bits_with_a_result_of_32(bits):
    check(4, 96, BF16, bits, FP32, centred=True, out=FP32)


def test_layer_norm_without_a_bias():
    check(4, 96, FP32, 2, centred=True, has_bias=False)


@pytest.mark.parametrize("bits", [0, 2, 3])
def test_programs_that_take_several_tiles(bits, monkeypatch):
    for name, value in {"PROGRAMS": 2, "VALUES": 128, "BACKWARD": 128, "SUMMED": 1}.items():
        monkeypatch.setattr(row_norm, name, value)
    check(5, 96, FP32, bits, centred=True)


@pytest.mark.parametrize(("dtype", "bits", "centred"), [(FP32, 2, True), (BF16, 3, True), (FP16, 8, False)])
def test_transposed_rows_have_the_bits_of_rows_in_order(dtype, bits, centred):
    """Rows of a batch of 3 with 5 each, whose memory holds the first rows of all three first."""
    x, weight, bias = tensors(15, 160, dtype, FP32)
    bias = bias if centred else None
    turned = x.view(3, 5, 160).transpose(0, 1).contiguous().transpose(0, 1)
    norm = row_norm.RowNorm(160, centred, 1e-6, 0.0, FP32, dtype)
    plan, other = (
        row_norm.row_plan(norm, 15, inner, dtype, FP32, centred, 1, x.device) for inner in (15, rows_of_3(turned))
    )
    wanted, found = plan.forward(x, weight, bias), other.forward(turned, weight, bias)
    assert found[0].is_contiguous() and torch.equal(found[0].view(15, 160), wanted[0])
    assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])
    # Codes of the memory of each, and what they decode to: the random numbers differ.
    data, format, decoded = pack(turned.transpose(0, 1).reshape(15, 160), bits)
    decoded = decoded.view(5, 3, 160).transpose(0, 1).reshape(15, 160)
    grad = torch.randn(15, 160, device=DEVICE).to(dtype)
    mean, rstd = wanted[1:]
    expected, needs = gradients(norm, decoded, grad, mean, rstd, weight), (True, True, centred)
    got = other.backward(grad.view(3, 5, 160), data, SEED, format, mean, rstd, weight, needs, turned.stride())
    assert got[0].stride() == turned.stride() and near(got[0].reshape(15, 160), expected[0], dtype, 2)
    assert near(got[1], expected[1], FP32, 2) and (not centred or near(got[2], expected[2], FP32, 2))
    again = row_norm.normalise_again(
        data, SEED, format, dtype, (3, 5, 160), mean if centred else None, rstd, weight, bias, 0.0, dtype, 3
    )
    n = (decoded.double() - mean[:, None] if centred else decoded.double()) * rstd[:, None] * weight.double()
    assert again.is_contiguous() and near(again.view(15, 160), n + bias.double() if centred else n, dtype, 2)
    # From values, which are contiguous copies, everything is in the order of the tensor.
    got = other.backward(grad.view(3, 5, 160), x, 0, None, mean, rstd, weight, needs)
    expected = plan.backward(grad, x, 0, None, mean, rstd, weight, needs)
    assert all(a is b is None or torch.equal(a.view_as(b), b) for a, b in zip(got, expected, strict=True))


def rows_of_3(x: Tensor) -> int | None:
    """How the rows of a batch of 3 lie in memory: three next to each other, one of each."""
    inner = rows_inside(layout_of(x.shape, x.stride())[0], x.shape[-1])
    assert inner == 3
    return inner


def test_gradients_that_are_not_wanted_are_not_computed():
    x, weight, bias = tensors(4, 96, FP32, FP32)
    norm = row_norm.RowNorm(96, True, 1e-5)
    plan = row_norm.row_plan(norm, 4, 4, FP32, FP32, True, 1, x.device)
    _, mean, rstd = plan.forward(x, weight, bias)
    grad = torch.randn_like(x)
    everything = plan.backward(grad, x, 0, None, mean, rstd, weight, (True, True, True))
    for wanted in [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]:
        found = plan.backward(grad, x, 0, None, mean, rstd, weight, wanted)
        for got, want, need in zip(found, everything, wanted, strict=True):
            assert torch.equal(got, want) if need else got is None


def test_a_row_that_is_not_finite_spoils_itself_alone():
    x, weight, _ = tensors(4, 200, FP32, FP32)
    norm = row_norm.RowNorm(200, False, 1e-5)
    plan = row_norm.row_plan(norm, 4, 4, FP32, FP32, False, 1, x.device)
    _, mean, rstd = plan.forward(x, weight, None)
    x[1, 150] = float("nan")
    data, format, _ = pack(x, 2)
    grad_x = plan.backward(torch.ones_like(x), data, SEED, format, mean, rstd, weight, (True, False, False))[0]
    assert grad_x.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "format",
    [
        GroupFormat(4, 128, FP32, 8),
        GroupFormat(4, 128, FP32, 1, True),
        GroupFormat(4, 128, FP32, 1, False, 100),
        GroupFormat(4, 128, FP32),
        GroupFormat(4, 128, torch.float64, 1, False, 96),
    ],
    ids=str,
)
def test_formats_with_other_rows_are_not_read(format):
    assert not row_norm.readable(format, 96)
    rstd = torch.ones(2, device=DEVICE)
    data = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
    assert row_norm.normalise_again(data, 0, format, FP32, (2, 96), None, rstd, None, None, 0.0, FP32) is None


def test_sizes_that_are_not_taken():
    norm = row_norm.RowNorm(96, False, 1e-5)
    device = torch.device(DEVICE)
    assert row_norm.row_plan(norm, 0, 0, FP32, FP32, False, 1, device) is None
    assert row_norm.row_plan(norm, 4, 4, torch.float64, FP32, False, 1, device) is None
    assert row_norm.row_plan(replace(norm, width=row_norm.WIDEST + 1), 4, 4, FP32, None, False, 1, device) is None


COMPILE = """
import torch
from encke.kernels.formats import GroupFormat
from encke.kernels.gpu import row_norm

dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

def constants(kernel, values):
    return dict(zip((p.name for p in kernel.params if p.is_constexpr), values, strict=True))

for (name, dtype), bits, width in zip(dtypes.items(), (2, 3, 0), (1024, 1000, 96), strict=True):
    kind, pointer = TYPES[name]
    format = GroupFormat.in_rows(bits, 128, dtype, False, 8 * width, width, 1) if bits else None
    _, warps, tile = row_norm.tile_of(width, dtype, format, row_norm.VALUES)
    floats = ("mean", "rstd", "weight", "bias", "sums", "grad_weight", "grad_bias")
    pointers = dict.fromkeys(floats, "*fp32") | {"grad": pointer, "x": pointer, "out": pointer}
    pointers["data"] = "*u8" if bits else pointer
    for centred, transposed in ((False, False), (True, False), (True, True)):
        norm = (True, centred, centred, 0.0)
        kernel, each = row_norm.row_forward_kernel, row_norm.power_of_two(width)
        values = (transposed, kind, kind, kind, tl.float32, *norm, width, 2, each)
        build(kernel, pointers, constants(kernel, values), num_warps=warps)
        kernel = row_norm.row_again_kernel
        build(kernel, pointers, constants(kernel, (transposed, kind, tl.float32, *norm, *tile)), num_warps=warps)
        kernel = row_norm.row_backward_kernel
        values = (transposed, kind, kind, tl.float32, True, centred, 0.0, True, 1 + centred, *tile)
        build(kernel, pointers, constants(kernel, values), num_warps=warps)
        build(row_norm.column_sums_kernel, pointers, constants(row_norm.column_sums_kernel, (tl.float32, 1, 256, 8)))
"""


@pytest.mark.soak
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
