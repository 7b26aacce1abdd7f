"""ReLU's gradient from codes: that of plain hooks, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from encke.codecs import ErrorBounded
from encke.fused import relu
from encke.kernels import backend_for
from encke.policies import Fixed
from tests.fused.common import DEVICE, attach, data, gradients

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_reads_its_mask_from_what_is_packed_for_the_next_layer(inplace, last, deterministic, monkeypatch):
    gates: list[int] = []
    gated = relu.gradient_from_codes

    def watched(packed, layout, grad):
        found = gated(packed, layout, grad)
        gates.extend([] if found is None else [packed.plan.format.stride])
        return found

    monkeypatch.setattr(relu, "gradient_from_codes", watched)
    torch.manual_seed(2)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(8, 8, 1), nn.ReLU(inplace), nn.Conv2d(8, 4, 1)
    model = nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    attach(other, device="none")
    expected = gradients(other, x, steps=3)
    assert not gates
    attach(model)
    got = gradients(model, x, steps=3)
    assert gates == [8 if last else 1] * 4
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("rounding", ["nearest", "dithered"])
def test_relu_reads_its_mask_from_levels(rounding, deterministic, monkeypatch):
    """The gradient of ReLU goes through the bitmap of a variable-rate code, without a mask in memory."""
    gates: list[bool] = []
    gated = relu.gradient_from_codes
    monkeypatch.setattr(relu, "gradient_from_codes", lambda *args: gates.append(gated(*args)) or gates[-1])
    monkeypatch.setattr(backend_for(DEVICE), "bounded_gate", gpu.bounded_gate, raising=False)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(DEVICE)
    x, policy = torch.randn(2, 3, 32, 32, device=DEVICE), Fixed(ErrorBounded(0.01, rounding=rounding))
    other = copy.deepcopy(model)
    attach(other, policy, device="none")
    expected = gradients(other, x)
    attach(model, policy)
    got = gradients(model, x)
    assert [gate is not None for gate in gates] == [True]
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_relu_of_an_exact_or_small_tensor_goes_the_plain_way(deterministic):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(DEVICE), data()
    plain = copy.deepcopy(model)
    attach(model, Fixed(ErrorBounded(0)))
    for a, b in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(a, b)
