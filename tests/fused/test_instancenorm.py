"""Instance norm from packed inputs: the gradients of plain hooks, nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from encke.capture import encoding
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.exact import Sign
from encke.fused.planner import layer_of
from encke.policies import Comet, Fixed
from tests.fused.common import DEVICE, EXACT, attach, gradients, near, second_order

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SIDES = {1: (300,), 2: (18, 18), 3: (4, 8, 9)}


def net(norm: nn.Module, inplace: bool = True) -> nn.Sequential:
    """Convolution, norm, leaky ReLU, convolution, in as many dimensions as the norm has."""
    torch.manual_seed(1)
    norm = copy.deepcopy(norm)
    with torch.no_grad():
        for p in norm.parameters():
            p.uniform_(0.5, 1.5)
    convolution = CONVOLUTIONS[norm._get_no_batch_dim() - 2]
    first = convolution(3, norm.num_features, 3, padding=1, bias=False)  # a bias would have no gradient
    return nn.Sequential(first, norm, nn.LeakyReLU(0.01, inplace), convolution(norm.num_features, 4, 1)).to(DEVICE)


def data(model: nn.Module, samples: int = 2) -> torch.Tensor:
    sides = SIDES[model[1]._get_no_batch_dim() - 1]
    return torch.randn(samples, 3, *sides, generator=torch.Generator().manual_seed(3)).to(DEVICE)


def compared(model: nn.Module, x: torch.Tensor, policy: Fixed) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results of a model with fused layers and of one with plain hooks."""
    other = copy.deepcopy(model)
    attach(other, policy, device="none")
    expected = gradients(other, x)
    attach(model, policy)
    return gradients(model, x), expected


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize(
    "norm",
    [
        nn.InstanceNorm3d(8, affine=True),
        nn.InstanceNorm2d(8),
        nn.InstanceNorm2d(8, eps=0.1, affine=True),
        nn.InstanceNorm1d(8, affine=True),
    ],
    ids=str,
)
def test_gradients_are_those_of_plain_hooks(norm, inplace, calls):
    model = net(norm, inplace)
    got, expected = compared(model, data(model), Fixed(GroupQuant(bits=4)))
    assert calls == ["forward", "packed"] and near(got, expected, 1e-5)


@pytest.mark.parametrize("fused", [True, False])
def test_an_activation_in_place_behind_it_is_seen(fused, monkeypatch):
    """Autograd does not hide it in a node of copies, and it saves as in the pass before: its own bits, or shared."""
    monkeypatch.setattr(encoding, "EXAMINED", ())
    model = nn.Sequential(net(nn.InstanceNorm2d(8, affine=True)), nn.InstanceNorm2d(4), nn.LeakyReLU(0.01, True))
    x = data(model, 6)
    handle = attach(model, Fixed(GroupQuant(bits=4)))
    if not fused:
        for forward in handle._hooks:
            forward.min_bytes = 1 << 40
    gradients(model, x, 3)
    layers = [layer_of(module, handle._capture) for module in model.modules()]
    facts = [known for layer in layers if layer is not None for known in layer.calls[0]]
    found = {known.site.layer: known for known in facts if known.site.operation == "LeakyRelu"}
    codecs = {name: known.steady.codec for name, known in found.items()}
    assert codecs == {"0.2": GroupQuant(bits=8, signs=True), "2": Sign()}
    assert {known.reader for known in found.values()} == {"LeakyRelu"}
    names, stack = set(), [model(x).grad_fn]
    while stack:
        node = stack.pop()
        names.add(type(node).__name__)
        stack += [each for each, _ in node.next_functions if each is not None]
    assert "CopySlices" not in names and "AliasBackward" in names


def test_values_that_other_codecs_decode_to(calls):
    model = net(nn.InstanceNorm3d(8, affine=True))
    got, expected = compared(model, data(model), Fixed(ErrorBounded(1e-2)))
    assert calls == ["forward", "values"] and near(got, expected, 1e-5)


def test_many_groups_of_few_samples(calls):
    """Sums of one plane's groups are gathered by one program."""
    model = net(nn.InstanceNorm2d(4, affine=True))
    x = torch.randn(1, 3, 72, 160, device=DEVICE)
    got, expected = compared(model, x, Fixed(GroupQuant(bits=2)))
    assert calls == ["forward", "packed"] and near(got, expected, 1e-5)


@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias")])
def test_frozen_parameters_get_no_gradient(frozen, calls):
    model = net(nn.InstanceNorm2d(8, affine=True))
    for name in frozen:
        getattr(model[1], name).requires_grad_(False)
    got, expected = compared(model, data(model), Fixed(GroupQuant(bits=4)))
    assert calls == ["forward", "packed"] and near(got, expected, 1e-5) and model[1].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_of_16_bits_with_weights_of_32(dtype, calls):
    model = net(nn.InstanceNorm2d(8, affine=True)).to(dtype)
    model[1].float()
    got, expected = compared(model, data(model, 6).to(dtype), Fixed(GroupQuant(bits=8)))
    assert calls == ["forward", "packed"]
    assert near([g.float() for g in got], [g.float() for g in expected], 0.03)


def test_channels_last_inputs_are_copied_as_torch_does(calls):
    model = net(nn.InstanceNorm2d(8, affine=True)).to(memory_format=torch.channels_last)
    x = data(model).contiguous(memory_format=torch.channels_last)
    got, expected = compared(model, x, Fixed(GroupQuant(bits=4)))
    assert near(got, expected, 1e-5)


def test_calls_that_go_the_plain_way(calls):
    """Running statistics, a single sample without a batch dimension, and a policy that is exact."""
    for norm, shape in ((nn.InstanceNorm2d(8, track_running_stats=True), (2, 3, 18, 18)),
                        (nn.InstanceNorm2d(8, affine=True), (3, 18, 18))):  # fmt: skip
        model = net(norm)
        got, expected = compared(model, torch.randn(shape, device=DEVICE), Fixed(GroupQuant(bits=4)))
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    model = net(nn.InstanceNorm2d(8, affine=True))
    got, expected = compared(model, data(model), EXACT)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)) and not calls


def test_errors_and_warnings_are_torchs_own():
    model = net(nn.InstanceNorm2d(8, affine=True))
    attach(model)
    gradients(model, data(model))
    with pytest.raises(ValueError, match="to match num_features"):
        model[1](torch.randn(2, 7, 18, 18, device=DEVICE, requires_grad=True))
    with pytest.raises(ValueError, match="expected 3D or 4D"):
        model[1](torch.randn(18, 18, device=DEVICE, requires_grad=True))
    with pytest.raises(ValueError, match="expected 3D or 4D"):
        model[1](torch.randn(9000, device=DEVICE, requires_grad=True))
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        model[1](torch.randn(2, 8, 1, 1, device=DEVICE, requires_grad=True))


def test_a_weight_changed_in_place_is_no_error(calls):
    """Backward reads a copy of it for each sample, as plain autograd does."""
    model = net(nn.InstanceNorm2d(8, affine=True))
    other = copy.deepcopy(model)
    attach(model)
    gradients(model, data(model))
    loss = model(data(model)).square().mean()
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    loss.backward()
    loss = other(data(other)).square().mean()
    with torch.no_grad():
        other[1].weight.mul_(2.0)
    loss.backward()


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(8), nn.BatchNorm2d(8, affine=False)], ids=str)
def test_collection_steps_of_norms_without_weights(norm, calls):
    model = net(norm) if isinstance(norm, nn.InstanceNorm2d) else nn.Sequential(nn.Conv2d(3, 8, 1), norm).to(DEVICE)
    handle = attach(model, Comet())
    for _ in range(3):
        handle.collect_now()
        model(torch.randn(2, 3, 20, 24, device=DEVICE)).square().mean().backward()
    assert "forward" in calls and handle.history


def test_double_backward(calls):
    model, other = net(nn.InstanceNorm2d(8)), net(nn.InstanceNorm2d(8))
    attach(model)
    attach(other, device="none")
    got, expected = second_order(model, data(model)), second_order(other, data(other))
    assert "forward" in calls and len(got) == len(expected) == 3 and near(got, expected, 1e-4)
