"""Operators that compiled graphs call."""

from __future__ import annotations

import pytest
import torch

from encke.compiled.writer import order_of, stride_of


@pytest.mark.parametrize("shape", [(4, 16, 9, 7), (300, 65), (5000,)])
def test_operators_give_back_size_and_strides(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    variants = [x, x.t() if x.dim() == 2 else x[::2]]
    if x.dim() == 4:
        variants += [x.to(memory_format=torch.channels_last), x[:, :, 1:, ::2], x.permute(2, 0, 3, 1)]
    seed = torch.tensor([5, -3])
    for t in variants:
        order = order_of(t)
        stride = stride_of(t, 128, order)
        settings = (order, 1, 8, 128, stride, False)
        data = torch.ops.encke.site_encode(t, seed, *settings)
        back = torch.ops.encke.site_decode(data, seed, t.shape, t.stride(), t.dtype, *settings)
        assert back.shape == t.shape and back.stride() == t.stride()
        assert (back - t).abs().max() < 0.05
        bits = torch.ops.encke.mask_encode(t, order)
        assert bits.numel() == -(-t.numel() // 8)
        assert torch.equal(torch.ops.encke.mask_decode(bits, t.shape, t.stride(), torch.bool, order), t > 0)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(torch.ops.encke.site_encode.default, (t, seed, *settings), test_utils=checks)
        torch.library.opcheck(
            torch.ops.encke.site_decode.default,
            (data, seed, list(t.shape), list(t.stride()), t.dtype, *settings),
            test_utils=checks,
        )
