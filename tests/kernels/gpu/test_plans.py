"""The kernels of the fixed rate against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import GroupFormat, GroupPlan, reference
from tests.kernels.gpu.common import COMPILED_DTYPES, DEVICE, DTYPES, SEED, compile_for_hopper, content, in_pairs, same

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def plans(format: GroupFormat, numel: int) -> tuple[GroupPlan, GroupPlan]:
    device = torch.device(DEVICE)
    return gpu.group_plan(format, numel, device), reference.group_plan(format, numel, device)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "signs"), [(2, False), (3, False), (4, False), (8, False), (4, True), (8, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference(dtype, bits, signs):
    sizes = {"normal": 5000, "relu": 5000, "special": 1000, "largest": 300, "denormal": 300, "far": 1}
    for name, numel in sizes.items():
        x, (ours, theirs) = content(name, numel, dtype), plans(GroupFormat(bits, 256, dtype, 1, signs), numel)
        data, gpu_data = theirs.encode(x, SEED), ours.encode(x, SEED)
        expected = theirs.decode(data, SEED)
        if name not in ("special", "largest"):  # codes of a group that decodes to NaN do not matter
            assert torch.equal(data, gpu_data)
        for kept in (data, gpu_data):
            decoded = ours.decode(kept, SEED)
            assert torch.equal(decoded.isnan(), expected.isnan())
            assert torch.equal(decoded.nan_to_num(0.0), expected.nan_to_num(0.0))
            assert torch.equal(ours.mask(kept), theirs.mask(data))


@pytest.mark.parametrize(("bits", "channels", "pixels"), [(2, 24, 256), (3, 7, 300), (4, 64, 128), (8, 100, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_batch_norms_result_is_that_of_its_decoded_input(dtype, bits, channels, pixels):
    ours, theirs = plans(GroupFormat(bits, 128, dtype, channels), channels * pixels)
    data = theirs.encode(content("normal", channels * pixels, dtype), SEED)
    norm = tuple(torch.randn(channels, device=DEVICE) for _ in range(4))
    size, stride = (1, channels, pixels, 1), (channels * pixels, 1, channels, channels)
    found = ours.decode_strided(data, SEED, size, stride, norm)
    expected = theirs.decode_strided(data, SEED, size, stride, norm)
    assert found.stride() == stride and found.dtype == expected.dtype == dtype
    mean, invstd, weight, bias = (each.double()[:, None, None] for each in norm)
    exact = (theirs.decode_strided(data, SEED, size, stride).double() - mean) * invstd * weight + bias
    # Rounding of the result, and of fp32 products that may cancel.
    bound = torch.finfo(dtype).eps * exact.abs() + 1e-5 * (mean * invstd * weight).abs().add(1)
    for result in (found, expected):
        assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(("bits", "signs", "group", "channels"), [
    (2, False, 128, 1), (3, False, 128, 1), (4, True, 128, 1), (8, False, 256, 1), (2, False, 200, 1),
    (2, False, 128, 24), (4, False, 128, 7),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gate(dtype, bits, signs, group, channels):
    """The gradient where the packed values are not zero."""
    numel = 5000 // channels * channels
    x, gradient = content("relu", numel, dtype), content("special", numel, dtype)
    x[:10] = float("nan")
    ours, theirs = plans(GroupFormat(bits, group, dtype, channels, signs), numel)
    data = theirs.encode(x, SEED)
    mask = theirs.mask(data)
    assert mask[:10].all() and not mask.all()
    assert same(ours.gate(data, gradient), torch.where(mask, gradient, 0))
    assert same(theirs.gate(data, gradient), torch.where(mask, gradient, 0))
    other, out = content("normal", numel, dtype), torch.empty_like(gradient)
    for plan in (ours, theirs):
        plan.gate_into(data, x.nan_to_num(0), out, other)
        assert same(out, torch.where(mask, x.nan_to_num(0) + other, 0))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("row", "channels"), [(0, 1), (343, 1), (0, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gate_with_a_slope(dtype, row, channels, bits):
    """The gradient where the packed values are positive, else a part of it, as from values with these signs."""
    numel = 343 * 24
    x, gradient = content("normal", numel, dtype), content("normal", numel, dtype).flip(0)
    x[::7], x[2000:3000], x[4000:4200] = 0, x[2000:3000].abs(), 1 / 3
    x[1000:1128] = torch.where(x[1000:1128] < 0, -1 / 3, 0.0)
    ours, theirs = plans(GroupFormat(bits, 128, dtype, channels, True, row), numel)
    data = ours.encode(x, SEED)
    expected = torch.ops.aten.leaky_relu_backward(gradient, x, 0.1, True)
    for plan in (ours, theirs):
        assert same(plan.gate(data, gradient, 0.1), expected)


@pytest.mark.parametrize("group", [128, 512, 200, 8192])
def test_groups(group):
    x, (ours, theirs) = content("normal", 3200, torch.float32), plans(GroupFormat(4, group, torch.float32), 3200)
    assert (type(ours) is type(theirs)) == (group == 8192)  # long groups are left to the reference
    data = ours.encode(x, SEED)
    assert torch.equal(data, theirs.encode(x, SEED))
    assert same(ours.decode(data, SEED), theirs.decode(data, SEED))


@pytest.mark.parametrize(
    ("bits", "size", "dtype"),
    in_pairs([2, 3, 4], [(300, 7), (256, 16), (1, 40), (513, 3), (300, 66)]),
)
def test_groups_of_a_channel(bits, size, dtype):
    pixels, channels = size
    x = content("normal", pixels * channels, dtype)
    x[: channels * 2] = x[: channels * 2].relu()
    ours, theirs = plans(GroupFormat(bits, 256, dtype, channels), x.numel())
    data = ours.encode(x, SEED)
    assert torch.equal(data, theirs.encode(x, SEED))
    assert torch.equal(ours.mask(data), theirs.mask(data))
    assert torch.equal(ours.decode(data, SEED), theirs.decode(data, SEED))


@pytest.mark.parametrize(
    ("rate", "rows", "dtype"),
    in_pairs(
        [(2, False), (3, False), (4, True), (8, False)],
        [(96, 1), (130, 1), (49, 6), (1, 3)],
    ),
)
def test_groups_within_rows(rate, rows, dtype):
    (bits, signs), (row, stride) = rate, rows
    names = ("normal", "relu", "zeros", "special", "negative", "far", "largest")
    x = torch.stack([content(name, row, dtype) for name in names for _ in range(stride)])
    x = x.view(-1, stride, row).mT.reshape(-1).contiguous()
    ours, theirs = plans(GroupFormat(bits, 128, dtype, stride, signs, row), x.numel())
    assert type(ours) is not type(theirs)
    data, expected = ours.encode(x, SEED), theirs.encode(x, SEED)
    decoded = ours.decode(data, SEED)
    assert same(decoded.nan_to_num(7.0), theirs.decode(expected, SEED).nan_to_num(7.0))
    assert torch.equal(ours.mask(data), theirs.mask(expected))
    assert same(ours.gate(data, x), torch.where(theirs.mask(expected), x, 0))
    back, given = (t.view(-1, row, stride) for t in (decoded, x))
    assert torch.equal(back[2], given[2]) and torch.equal(back[4], given[4])


@pytest.mark.parametrize(
    ("bits", "planes", "dtype"),
    in_pairs(
        [2, 3, 4, 8],
        [(49, 1, 70), (196, 1, 35), (784, 1, 3), (3136, 1, 3), (3137, 1, 2), (259, 3, 2), (98, 66, 1)],
    ),
)
def test_planes(bits, planes, dtype):
    """Planes that do not fill groups: bytes and values of the reference, from aligned memory and from any other."""
    row, stride, rows = planes
    numel = row * stride * rows
    x = content("normal", numel + 1, dtype)
    x[: numel // 2] = x[: numel // 2].relu()
    format = GroupFormat.in_rows(bits, 128, dtype, False, numel, row, stride)
    assert format.row == row
    ours, theirs = plans(format, numel)
    codes, places = format.groups(numel) * format.length, format.places(numel)
    for values in (x[:-1], x[1:]):
        data, expected = ours.encode(values, SEED), theirs.encode(values, SEED)
        assert torch.equal(data[:codes], expected[:codes]) and torch.equal(data[places[0] :], expected[places[0] :])
        mask = theirs.mask(data)
        assert same(ours.decode(data, SEED), theirs.decode(data, SEED)) and torch.equal(ours.mask(data), mask)
        out = torch.empty(numel + 1, dtype=dtype, device=DEVICE)[1:]
        ours.gate_into(data, values, out)
        assert same(out, torch.where(mask, values, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("bits", "signs"), [(2, False), (3, False), (4, True)])
@pytest.mark.parametrize("stride", [1, 8])
def test_constant_groups_are_exact(stride, bits, signs, dtype):
    """Every bit of a constant comes back, in an incomplete group and beside zeros as well, and zeros stay zeros."""
    constants = torch.tensor([3.7, -3.7, 1 / 3, -0.1, 65504.0, 6e-8, -6e-8, 1.0009765625]).to(dtype)
    x = constants[:, None].repeat(1, 300)
    x[0, 1::2] = 0
    x = (x.T if stride > 1 else x[:, :128]).reshape(-1).to(DEVICE)
    ours, theirs = plans(GroupFormat(bits, 128, dtype, stride, signs), x.numel())
    data = ours.encode(x, SEED)
    assert torch.equal(data, theirs.encode(x, SEED))
    assert same(ours.decode(data, SEED), x) and same(theirs.decode(data, SEED), x)
    assert torch.equal(ours.mask(data), x != 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 24])
def test_seeds_on_the_device_are_those_given_as_numbers(dtype, stride):
    numel = 24 * 300
    x = torch.randn(numel, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
    seeds, format = torch.tensor([7, SEED, -SEED], device=DEVICE), GroupFormat(2, 128, dtype, stride)
    given, read = (gpu.group_plan(format, numel, x.device, table) for table in (False, True))
    data = given.encode(x, SEED)
    assert torch.equal(read.encode(x, (seeds, 1)), data) and not torch.equal(read.encode(x, (seeds, 2)), data)
    assert same(read.decode(data, (seeds, 1)), given.decode(data, SEED))
    assert same(read.decode(data, (seeds, 2)), given.decode(data, -SEED))
    plain = reference.group_plan(format, numel, x.device)
    assert torch.equal(plain.encode(x, (seeds, 1)), data)
    assert given.fuses_forward == (stride > 1 and dtype == torch.bfloat16)
    if given.fuses_forward:
        workspaces = [torch.zeros(2 * 3 * 24, device=DEVICE) for _ in range(2)]
        encoded = given.encode_moments(x, workspaces[0], SEED)
        assert torch.equal(read.encode_moments(x, workspaces[1], (seeds, 1)), encoded)
        assert torch.equal(*workspaces)


COMPILE = """
import torch
from encke.kernels import GroupFormat
from encke.kernels.gpu import ahead, launch, plans

def record(function, programs, tensors, numbers, constants, warps, registers=0, specialised=2):
    arguments = (*[launch.typed(t) for t in tensors], *numbers, *constants)
    function.warmup(*arguments, grid=(1, 1, 1), **launch.compile_options(warps, registers))

triton.runtime.driver.set_active(ahead.OtherTarget(GPUTarget("cuda", 90, 32)))
launch.launch_kernel, dtype = record, getattr(torch, sys.argv[1])
for bits, signs, table in ((2, False, False), (3, False, False), (4, True, True)):
    seed = (torch.empty(8, dtype=torch.int64, device="meta"), 0) if table else 0
    for row, stride in ((3136, 1), (49, 1), (1024, 16)) if bits == 3 else ((196, 1), (49, 6)):
        format = GroupFormat.in_rows(bits, 128, dtype, signs, 4 * row * stride, row, stride)
        x = torch.empty(4 * row * stride, dtype=dtype, device="meta")
        plan = plans.GpuPlan(format, x.numel(), ahead.META, table)
        data = plan.encode(x, seed)
        plan.decode(data, seed), plan.gate(data, x), plan.mask(data), plan.gate_into(data, x, x, x)
        if plan.pairs is not None:
            plan.pairs = None
            plan.encode(x, seed)
        if plan.fuses_forward:
            plan.encode_relu(x, x, seed), plan.encode_moments(x, torch.empty(1000, device="meta"), seed)
        if plan.fuses_norm_relu:
            row = (torch.empty(stride, device="meta"),) * 4
            plan.encode_norm_relu(x, row, x, seed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", COMPILED_DTYPES)
def test_compiles_for_hopper(dtype):
    compile_for_hopper(COMPILE, dtype)
