"""Leaky ReLU in place from packed signs: the gradients of plain hooks, nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from encke import kernels
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.exact import Sign
from encke.fused import leaky
from encke.policies import Fixed
from tests.fused.common import DEVICE, EXACT, attach, gradients, second_order

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def read(monkeypatch) -> list[bool]:
    """Whether each backward has read signs."""
    seen: list[bool] = []
    original = leaky.gradient_from_signs

    def watched(*arguments):
        found = original(*arguments)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(leaky, "gradient_from_signs", watched)
    return seen


def net(slope: float = 0.1, inplace: bool = True, behind: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3), nn.LeakyReLU(slope, inplace), behind or nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers).to(DEVICE)


def data(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 3, 18, 18, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)


def compared(model: nn.Module, x: torch.Tensor, policy: Fixed) -> bool:
    """Whether gradients with fused layers are those of plain hooks, bit for bit."""
    other = copy.deepcopy(model)
    attach(other, policy, device="none")
    expected = gradients(other, x)
    attach(model, policy)
    return all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("behind", [None, nn.MaxPool2d(2)], ids=["codes", "a bit each"])
def test_gradients_are_those_of_plain_hooks(behind, dtype, last, read, deterministic):
    memory = torch.channels_last if last else torch.contiguous_format
    model = net(behind=behind).to(dtype, memory_format=memory)
    assert compared(model, data(dtype).contiguous(memory_format=memory), Fixed(GroupQuant(bits=4)))
    assert read == [True]


@pytest.mark.parametrize("launched", [False, True])
def test_codes_that_no_kernel_reads(launched, read, deterministic, monkeypatch):
    """Those of `ErrorBounded`: the kernel that reads their bitmap computes ReLU's gradient."""
    if launched:
        monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    assert compared(net(), data(), Fixed(ErrorBounded(1e-2))) and read == [False]
    assert compared(net(), data(), EXACT)


def test_codes_without_signs_give_no_gradient_and_signs_no_mask():
    x = data()
    assert GroupQuant(4).encode(x).gate(x, 0.1) is None and Sign().encode(x).gate(x) is None
    found = [codec.encode(x).gate(x, 0.1) for codec in (GroupQuant(4, signs=True), Sign())]
    assert all(torch.equal(each, nn.functional.leaky_relu(x, 0.1)) for each in found)


def test_calls_that_go_the_plain_way(read, deterministic):
    """Not in place, and in place on a view, where autograd hides the operation."""
    assert compared(net(inplace=False), data(), Fixed(GroupQuant(bits=4)))
    model = nn.Sequential(nn.Linear(18, 64), nn.LeakyReLU(0.1, True), nn.Linear(64, 8)).to(DEVICE)
    assert compared(model, data(), Fixed(GroupQuant(bits=4))) and not read


def test_a_layer_that_is_no_longer_in_place_leaves_its_input_alone():
    model, inputs = net(), []
    attach(model)
    gradients(model, data())
    model[1].inplace = False
    model[0].register_forward_hook(lambda module, given, out: inputs.append(out.detach()))
    gradients(model, data(), 1)
    assert torch.equal(inputs[0], nn.functional.conv2d(data(), model[0].weight, model[0].bias))


def test_a_negative_slope_is_torchs_own_error():
    model = net(-0.1)
    attach(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="negative slope"):
            gradients(model, data(), 1)


def test_second_derivatives():
    plain, model = net(), net()
    attach(model, EXACT)
    expected = second_order(plain, data())
    assert all(torch.allclose(a, b) for a, b in zip(second_order(model, data()), expected, strict=True))
