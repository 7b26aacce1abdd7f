"""Fixed-rate codes from numba against the reference: the same bytes, the same values."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import GroupFormat, GroupPlan, reference
from tests.kernels.common import CONTENTS, SEEDS, SIZES, content, one_thread, plain_nan, with_dtypes

pytestmark = pytest.mark.slow

cpu = pytest.importorskip("encke.kernels.cpu", reason="needs numba")
CPU = torch.device("cpu")
FORMATS = [(2, False), (3, False), (4, True), (8, False)]


def plans(format: GroupFormat, numel: int) -> tuple[GroupPlan, GroupPlan]:
    return cpu.group_plan(format, numel, CPU), reference.group_plan(format, numel, CPU)


def check(x: torch.Tensor, format: GroupFormat, seed: int) -> None:
    """Both store the same, and decode it to the same values and the same mask."""
    n, (ours, theirs) = x.numel(), plans(format, x.numel())
    data = ours.encode(x, seed)
    with one_thread():
        expected = theirs.encode(x.detach(), seed)
        values, mask = theirs.decode(expected, seed), theirs.mask(expected)
    (at_lo, at_step, _), kept = format.places(n), format.scale_dtype
    codes = format.groups(n) * format.length  # nobody writes what is left before the scales
    assert torch.equal(data[:codes], expected[:codes]), format
    assert torch.equal(data[at_lo:at_step], expected[at_lo:at_step]), format
    # torch's cast to bf16 gives NaNs other bits on other machines
    a, b = (plain_nan(t[at_step:].clone().view(kept)) for t in (data, expected))
    assert torch.equal(a, b), format
    for a, b in ((ours.decode(data, seed), values), (ours.mask(data), mask)):
        assert a.dtype == b.dtype and torch.equal(plain_nan(a), plain_nan(b)), format


@pytest.mark.parametrize(("width", "signs", "dtype"), with_dtypes([(2, False), (3, False), (4, True), (8, True)]))
def test_equals_reference(width: int, signs: bool, dtype: torch.dtype) -> None:
    for i, name in enumerate(CONTENTS):
        for n in (SIZES[i % 5], SIZES[5 + i % 5], 3000 + i, *SIZES[10:][: i % 6 == 0]):
            format = GroupFormat(width, 128, dtype, signs=signs and n % 2 == 1)
            check(content(name, n, dtype), format, SEEDS[(i + width) % len(SEEDS)])


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_groups_of_a_channel_equal_reference(width: int) -> None:
    for pixels, channels in ((300, 7), (256, 16), (1, 40), (5000, 130), (0, 4)):
        x = torch.randn(pixels, channels).mul(torch.logspace(-3, 3, channels)).view(-1)
        check(x, GroupFormat(width, 128, x.dtype, channels), 5)
    for module in (cpu, reference):
        with pytest.raises(ValueError, match="a stride of 7"):
            module.group_plan(GroupFormat(width, 128, torch.float32, 7), 100, CPU)


@pytest.mark.parametrize(("width", "signs", "dtype"), with_dtypes(FORMATS, shift=1))
def test_channels_of_any_content_equal_reference(width: int, signs: bool, dtype: torch.dtype) -> None:
    names = [*CONTENTS, *CONTENTS][: 2 * len(CONTENTS) - 1]  # an odd number of channels, of every kind side by side
    for pixels in (100, 128, 300):
        x = torch.stack([content(name, pixels, dtype) for name in names], 1).reshape(-1)
        check(x, GroupFormat(width, 128, dtype, len(names), signs), -(2**63) + 77)


@pytest.mark.parametrize(("width", "signs", "dtype"), with_dtypes(FORMATS))
def test_rows_equal_reference(width: int, signs: bool, dtype: torch.dtype) -> None:
    check_rows(1, width, signs, dtype)


@pytest.mark.parametrize(("width", "signs", "dtype"), with_dtypes(FORMATS, shift=3, fp32=False))
def test_rows_side_by_side_equal_reference(width: int, signs: bool, dtype: torch.dtype) -> None:
    check_rows(5, width, signs, dtype)


def check_rows(stride: int, width: int, signs: bool, dtype: torch.dtype) -> None:
    """Groups within rows of any width, whose contents differ from row to row; constant ones come back exactly."""
    for row in (1, 3, 49, 64, 96, 130, 320):
        x = torch.stack([content(name, row, dtype) for name in CONTENTS])
        x = x.repeat_interleave(stride, 0).view(-1, stride, row).mT.reshape(-1)
        format = GroupFormat(width, 128, dtype, stride, signs, row)
        check(x, format, 3)
        plan = plans(format, x.numel())[0]
        back = plan.decode(plan.encode(x, 3), 3).view(-1, row, stride)
        for name in ("zeros", "constant"):
            i = list(CONTENTS).index(name)
            assert torch.equal(back[i], x.view(-1, row, stride)[i]), (row, name)
    with pytest.raises(ValueError, match="rows of 7 values with a stride of 2"):
        cpu.group_plan(GroupFormat(width, 128, dtype, 2, row=7), 100, CPU)


@pytest.mark.parametrize(
    ("width", "signs", "dtype"),
    [
        (2, False, torch.float16),
        *((*format, torch.float32) for format in FORMATS[:3]),
        *(pytest.param(*format, torch.float16, marks=pytest.mark.soak) for format in FORMATS[1:3]),
    ],
)
def test_constant_groups_are_exact(width: int, signs: bool, dtype: torch.dtype) -> None:
    """Every bit of a constant comes back, beside zeros as well, and zeros stay zeros."""
    constants = torch.tensor([3.7, -3.7, 1e-3, -0.1, 65504.0, 6e-8, -6e-8, 1 / 3, -2.0, 1.0009765625]).to(dtype)
    if dtype == torch.float32:
        constants = torch.cat([constants, torch.nextafter(constants, constants * 2), constants * 1e-36])
    x = constants[:, None].expand(-1, 96)
    sparse = torch.where(torch.arange(96) % 3 == 0, x.abs(), 0)
    for values in (x, sparse):
        flat = values.contiguous().view(-1)
        format = GroupFormat(width, 128, dtype, 1, signs, 96)
        check(flat, format, 5)
        for plan in plans(format, flat.numel()):
            data = plan.encode(flat, 5)
            assert torch.equal(plan.decode(data, 5), flat)
            assert torch.equal(plan.mask(data), flat != 0)


@pytest.mark.parametrize("group", [64, 256, *(pytest.param(size, marks=pytest.mark.soak) for size in (512, 1024))])
def test_every_group_size_equals_reference(group: int) -> None:
    for n in (group - 1, 3 * group, 5 * group + 7):
        x = torch.cat([content("normal", n // 2, torch.float32), content("relu", n - n // 2, torch.float32)])
        check(x, GroupFormat(2, group, x.dtype), 9)


def test_many_tasks_equal_reference() -> None:
    x = content("outlier", 2_000_003, torch.float32)
    check(x, GroupFormat(2, 128, x.dtype), 9)


def test_views_and_grad() -> None:
    check(torch.randn(3000, requires_grad=True), GroupFormat(4, 128, torch.float32), 1)
    check(torch.randn(3001)[1:], GroupFormat(4, 128, torch.float32), 1)
