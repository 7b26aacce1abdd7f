"""Operators that compiled graphs call."""

from __future__ import annotations

import pytest
import torch

import encke.compiled.ops  # noqa: F401  registers the operators
from encke.compiled.writer import order_of, stride_of
from encke.kernels import GroupFormat


@pytest.mark.parametrize("shape", [(4, 16, 9, 7), (300, 65), (5000,)])
def test_operators_give_back_size_and_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    variants = [x, x.t() if x.dim() == 2 else x[::2]]
    if x.dim() == 4:
        variants += [x.to(memory_format=torch.channels_last), x[:, :, 1:, ::2], x.permute(2, 0, 3, 1)]
    seed = torch.tensor([5, -3])
    for t in variants:
        order = order_of(t)
        format = GroupFormat(8, 128, t.dtype, stride_of(t, 128, order)).numbers()
        data = torch.ops.encke.site_encode(t, seed, 1, format, order)
        back = torch.ops.encke.site_decode(data, seed, 1, format, t.shape, t.stride(), order)
        assert back.shape == t.shape and back.stride() == t.stride()
        assert (back - t).abs().max() < 0.05
        bits = torch.ops.encke.mask_encode(t > 0, order)
        assert bits.numel() == -(-t.numel() // 8)
        assert torch.equal(torch.ops.encke.mask_decode(bits, t.shape, t.stride(), order), t > 0)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.encke.site_encode.default, (t, seed, 1, format, order), test_utils=checks)
        torch.library.opcheck(
            torch.ops.encke.site_decode.default,
            (data, seed, 1, format, list(t.shape), list(t.stride()), order),
            test_utils=checks,
        )
