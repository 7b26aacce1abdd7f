"""GroupQuant on all implementations: unbiased, zeros, signs, special values; memory is read as it lies."""

from __future__ import annotations

import math

import pytest
import torch

from encke import kernels
from encke.codecs import GroupQuant
from encke.codecs.base import EncoderState
from encke.codecs.layout import flatten
from encke.kernels import GroupFormat, reference
from tests.codecs.common import CONTENT, DEVICES, IMPLEMENTATIONS, bits
from tests.kernels.common import with_dtypes


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
    pytest.importorskip("triton")
    from encke.kernels import gpu

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    x = view(torch.randn(4, 8, 16, 8, device=DEVICES["gpu"]).to(dtype)).requires_grad_()
    codec, state, (flat, layout) = GroupQuant(bits=4), EncoderState(), flatten(x.detach())
    expected = codec.encode_flat(flat, layout, key=5)
    for _ in range(2):
        packed = codec.encode_run(x, layout, flat.numel(), 5, state)
        assert torch.equal(packed.buffers[0], expected.buffers[0]) and packed.nbytes == expected.nbytes
        decoded = packed.decode()
        assert torch.equal(decoded, expected.decode()) and decoded.stride() == x.stride()
    assert (codec.planned(x, layout, flat.numel(), state) is packed.plan) == layout.dense


# On a GPU and on a CPU values are those of the reference (tests/kernels): one of the three, the others at length only.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "cpu" else pytest.param(name, marks=pytest.mark.soak) for name in IMPLEMENTATIONS]
)
@pytest.mark.parametrize(
    ("width", "signs", "dtype"), with_dtypes([(2, False), (3, False), (4, True), (8, True), (4, False)])
)
def test_group_quant_is_unbiased_and_keeps_zeros_and_signs(
    name: str, dtype: torch.dtype, width: int, signs: bool
) -> None:
    device, format = torch.device(DEVICES[name]), GroupFormat(width, 128, dtype, 1, signs)
    plan = IMPLEMENTATIONS[name].group_plan(format, 700, device)
    oracle = reference.group_plan(format, 700, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    slow = 3 if name == "gpu" and device.type == "cpu" else 100  # the reference draws what the CPU kernels draw
    draws = 200 if name == "cpu" else slow
    for content in ("normal", "relu", "integers", "zeros", "equal"):
        x = CONTENT[content](700, generator).to(dtype)
        total = torch.zeros(700, dtype=torch.float64)
        widest = 0.0
        for draw in range(draws):
            seed = draw * 0x9E3779B97F4A7C15 % 2**63
            data = plan.encode(x.to(device), seed)
            y = plan.decode(data, seed).cpu()
            if draw < 2:
                assert torch.equal(bits(oracle.decode(oracle.encode(x, seed), seed)), bits(y))
            if signs:
                assert torch.equal(y == 0, x == 0) and torch.equal(torch.sign(y), torch.sign(x))
            if signs or (x >= 0).all():
                assert (y[x == 0] == 0).all()
                assert torch.equal(plan.mask(data).cpu(), x != 0)
            else:
                step = (x.double().max() - x.double().min()) / (2**width - 1)
                assert (y.double() - x.double()).abs().max() <= 0.51 * step + torch.finfo(dtype).eps * 4
            total += y.double()
            widest = max(widest, float((y.double() - x.double()).abs().max()))
        # The mean of n unbiased draws with errors up to one step is within 5 standard deviations of the value; what
        # comes on top is the rounding of a level to the tensor's own dtype.
        cast = torch.finfo(dtype).eps * float(x.double().abs().max())
        error = total / draws - x.double()
        assert (error.abs() <= 5 * widest / math.sqrt(draws) + cast).all()
        if draws >= 100:
            assert abs(float(error.mean())) <= 5 * widest / math.sqrt(draws * 700) + cast / 8


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_group_quant_shows_nan_and_infinities(width: int) -> None:
    x = torch.randn(1024)
    x[300], x[700] = math.nan, math.inf
    y = GroupQuant(bits=width, group=128).encode(x).decode()
    assert y[256:384].isnan().all() and y[640:768].isnan().all()
    assert not any(part.isnan().any() for part in (y[:256], y[384:640], y[768:]))
