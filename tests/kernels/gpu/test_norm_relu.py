"""Batch norm's last step and ReLU computed while encoding: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import GroupFormat, reference
from tests.kernels.gpu.common import DEVICE, SEED

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = [(4, 8, 16, 16), *(pytest.param(size, marks=pytest.mark.slow) for size in ((5, 24, 23, 23), (4, 72, 16, 16)))]
"""A whole number of groups, a last one that is not full, channels for two programs of which one is not full."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_the_result_and_its_codes(size: tuple[int, ...], bits: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(size).bfloat16().to(DEVICE).contiguous(memory_format=torch.channels_last)
    x[0, :2, 0, :2] = torch.tensor([torch.inf, torch.nan], dtype=x.dtype, device=DEVICE)
    mean, invstd, weight, bias = (torch.rand(size[1], device=DEVICE) for _ in range(4))
    format = GroupFormat(bits, 128, x.dtype, size[1])
    plan = gpu.group_plan(format, x.numel(), x.device)
    assert plan.fuses_norm_relu
    y = torch.full_like(x, torch.nan)
    data = plan.encode_norm_relu(x, (mean, invstd, weight, bias), y, SEED)
    each = [t.double().view(1, -1, 1, 1) for t in (mean, invstd, weight, bias)]
    expected = (x.double() - each[0]) * each[1] * each[2] + each[3]
    torch.testing.assert_close(y, expected.relu().bfloat16(), rtol=2**-7, atol=1e-6, equal_nan=True)
    # In place, from rows as batch norm's forward writes them.
    rows = torch.stack([mean, invstd, invstd * weight, bias])
    again = x.clone(memory_format=torch.preserve_format)
    assert torch.equal(plan.encode_norm_relu(again, rows, again, SEED), data)
    assert torch.equal(again.view(torch.int16), y.view(torch.int16))
    # The codes are those of what was written, bit for bit.
    assert torch.equal(data, plan.encode(y, SEED))
    plain = reference.group_plan(format, x.numel(), x.device)
    restored = plain.decode(plain.encode(y, SEED), SEED)
    torch.testing.assert_close(plain.decode(data, SEED), restored, rtol=0, atol=0, equal_nan=True)


def test_other_formats_have_no_such_kernel() -> None:
    for dtype, stride, signs in (
        (torch.float16, 8, False), (torch.float32, 8, False), (torch.bfloat16, 1, False), (torch.bfloat16, 8, True),
    ):  # fmt: skip
        plan = gpu.group_plan(GroupFormat(4, 128, dtype, stride, signs), 8 * 256, torch.device(DEVICE))
        assert not plan.fuses_norm_relu
    with pytest.raises(NotImplementedError, match="fuses_norm_relu"):
        reference.group_plan(GroupFormat(2, 128, torch.bfloat16, 8), 8 * 256, torch.device(DEVICE)).encode_norm_relu(
            *[torch.zeros(1)] * 4
        )
