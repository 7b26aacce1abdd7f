"""GroupQuant on the GPU: memory is read as it lies."""

from __future__ import annotations

import pytest
import torch

from encke import kernels
from encke.codecs import GroupQuant
from encke.codecs.base import EncoderState
from encke.codecs.layout import flatten

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(1, 3, 0, 2),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x[1:],
    ],
)
def test_memory_read_as_it_lies_gives_the_codes_of_its_flat_run(view, dtype, monkeypatch):
    from encke.kernels import gpu

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    x = view(torch.randn(4, 8, 16, 8, device=DEVICE).to(dtype)).requires_grad_()
    codec, state, (flat, layout) = GroupQuant(bits=4), EncoderState(), flatten(x.detach())
    expected = codec.encode_flat(flat, layout, key=5)
    for _ in range(2):
        packed = codec.encode_run(x, layout, flat.numel(), 5, state)
        assert torch.equal(packed.buffers[0], expected.buffers[0]) and packed.nbytes == expected.nbytes
        decoded = packed.decode()
        assert torch.equal(decoded, expected.decode()) and decoded.stride() == x.stride()
    assert (codec.planned(x, layout, flat.numel(), state) is packed.plan) == layout.dense
