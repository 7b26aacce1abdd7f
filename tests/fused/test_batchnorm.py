"""Batch norm from packed inputs: the gradients of plain hooks, nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import encke
from encke import kernels
from encke.capture import expressions
from encke.codecs import ErrorBounded, GroupQuant
from encke.fused import batchnorm, registry
from encke.fused.base import in_place_of
from encke.policies import Division, Fixed
from tests.fused.common import DEVICE, NEAR, attach, data, gradients, near, needs_gpu, net, second_order

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_gradients_are_those_of_plain_hooks(last, bits, calls):
    model, x = net(), data(last)
    if last:
        model = model.to(memory_format=torch.channels_last)
    other, policy = copy.deepcopy(model), Fixed(GroupQuant(bits=bits))
    attach(other, policy, device="none")
    expected = gradients(other, x)
    assert not calls
    attach(model, policy)
    got = gradients(model, x)
    # 2 x 18 x 18 pixels fill groups of 128 badly: such channels_last inputs are kept in groups across channels.
    assert calls == (["forward", "packed"] if not last else ["forward", "values"])
    assert near(got, expected, NEAR)


def test_channels_last_reads_packed_values(calls):
    model = net().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 24, device=DEVICE).contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, x), gradients(other, x), NEAR)
    assert calls == ["forward", "packed"]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, momentum=None),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, eps=0.1, momentum=0.3),
    ],
    ids=str,
)
def test_settings(norm, calls):
    model = net(norm)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    got, expected = gradients(model, data(), 3), gradients(other, data(), 3)
    assert calls == ["forward", "packed"] * 2
    assert near(got, expected, NEAR)
    buffers = zip(model.buffers(), other.buffers(), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in buffers)


def test_eval_without_running_statistics_is_training_too(calls):
    model = net(nn.BatchNorm2d(8, track_running_stats=False))
    other = copy.deepcopy(model)
    for m in (model, other):
        m[1].eval()
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, data()), gradients(other, data()), NEAR)
    assert calls == ["forward", "packed"]


@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias")])
def test_frozen_parameters_get_no_gradient(frozen, calls):
    model = net()
    for name in frozen:
        getattr(model[1], name).requires_grad_(False)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, data()), gradients(other, data()), NEAR)
    assert calls == ["forward", "packed"] and model[1].weight.grad is None


def test_input_without_a_gradient(calls):
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).to(DEVICE)
    other, x = copy.deepcopy(model), torch.randn(2, 8, 18, 18, device=DEVICE)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, x), gradients(other, x), NEAR)
    assert calls == ["forward", "packed"]


def test_eval_no_grad_and_exact_policies_go_the_plain_way(calls):
    model = net()
    handle = attach(model)
    gradients(model, data())
    calls.clear()
    model.eval()
    gradients(model, data())
    model.train()
    with torch.no_grad():
        model(data())
    model[1].eval()
    gradients(model, data())
    handle.detach()
    model.train()
    attach(model, Fixed(ErrorBounded(0)))
    gradients(model, data())
    assert not calls


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "policy", [Fixed(ErrorBounded(1e-2)), Division(), Fixed(GroupQuant(bits=4, signs=True))], ids=str
)
def test_values_that_other_codecs_decode_to(policy, last, calls):
    """The gradients are those of plain hooks, and of a second backward too: what was decoded is written over."""
    model, x = net(), data(last)
    if last:
        model = model.to(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    attach(other, policy, device="none")
    expected = gradients(other, x)
    assert not calls
    attach(model, policy)
    assert near(gradients(model, x), expected, NEAR)
    assert calls == ["forward", "values"]
    first, second = (torch.autograd.grad(y, list(model.parameters()), retain_graph=True) for y in [model(x).sum()] * 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_values_that_somebody_else_reads_are_not_written_over(calls):
    """Two batch norms of one tensor share what is decoded."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.first(y).tanh() + self.second(y)

    torch.manual_seed(0)
    model, policy = Both().to(DEVICE), Fixed(ErrorBounded(1e-2))
    other = copy.deepcopy(model)
    attach(other, policy, device="none")
    attach(model, policy)
    assert near(gradients(model, data()), gradients(other, data()), NEAR)
    assert calls == ["forward", "forward", "values", "values"]


FUNCTION = in_place_of("NativeBatchNorm", batchnorm.BatchNormFunction)


class Direct(nn.Module):
    """Calls the function itself, whatever the policy."""

    def __init__(self) -> None:
        super().__init__()
        # A bias there would have a gradient of rounding errors.
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return batchnorm.training_forward(self.norm, self.first(x), FUNCTION)


class Plain(Direct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


@pytest.mark.parametrize("policy", [None, Fixed(ErrorBounded(0))], ids=str)
def test_bit_equal_where_the_input_is_exact(policy, deterministic):
    torch.manual_seed(0)
    model, other, x = Direct().to(DEVICE), Plain().to(DEVICE), torch.randn(4, 3, 30, 30, device=DEVICE)
    other.load_state_dict(model.state_dict())
    if policy is not None:
        encke.attach(model, policy)
    for a, b in zip(gradients(model, x, 3), gradients(other, x, 3), strict=True):
        assert torch.equal(a, b)


def test_double_backward(calls):
    model, other = net(nn.BatchNorm2d(8)), net(nn.BatchNorm2d(8))
    attach(model)
    attach(other, device="none")
    got, expected = second_order(model, data()), second_order(other, data())
    assert "forward" in calls and len(got) == len(expected) > 3
    assert near(got, expected, 1e-4)


def test_double_backward_is_right(calls):
    direct, plain = Direct().double().to(DEVICE), Plain().double().to(DEVICE)
    plain.load_state_dict(direct.state_dict())
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=DEVICE)
    assert near(second_order(direct, x), second_order(plain, x), 1e-9)


def test_backward_twice(calls):
    model = net()
    attach(model)
    gradients(model, data())
    loss = model(data()).square().mean()
    first = torch.autograd.grad(loss, model[1].weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, model[1].weight)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_weight_changed_in_place_is_an_error(calls):
    model = net()
    attach(model)
    gradients(model, data())
    loss = model(data()).square().mean()
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_expanded_and_transposed_gradients(calls):
    model = net()[:2]
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    for loss in (
        lambda y: y.sum(),
        lambda y: (y.permute(0, 2, 3, 1).contiguous() * torch.arange(8, device=DEVICE)).sum(),
    ):
        for m in (model, other):
            m.zero_grad()
            for _ in range(2):
                loss(m(data())).backward()
        assert torch.allclose(model[1].bias.grad, other[1].bias.grad)
        assert torch.allclose(model[1].weight.grad, other[1].weight.grad, atol=1e-2)
    assert calls.count("packed") == 3


def test_inside_a_checkpoint_nothing_is_fused(calls):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    attach(model)
    gradients(model, data().requires_grad_())
    assert not calls


def test_a_second_call_of_a_layer_is_fused_too(calls):
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm, nn.Conv2d(8, 8, 1, bias=False), norm).to(DEVICE)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, data()), gradients(other, data()), 1e-4)
    assert calls.count("packed") == 2


@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_no_leaves_get_their_gradients(bias, calls):
    """As in DataParallel's replicas, whose weights are copies that the graph leads back from."""
    model, x, found = net(), data(), []
    if not bias:
        model[1].bias = None
    for m, device in ((model, DEVICE), (copy.deepcopy(model), "none")):
        attach(m, device=device)
        gradients(m, x)
        factor = torch.ones(8, device=DEVICE, requires_grad=True)
        replica = m[1]._replicate_for_data_parallel()
        replica.weight = m[1].weight * factor
        if bias:
            replica.bias = m[1].bias * 1
        else:
            replica._parameters["bias"] = None
        m._modules["1"] = replica
        m(x).square().mean().backward()
        found.append([factor.grad])
    assert near(*found, 1e-3) and calls == ["forward", "packed"] * 2


def blocks(count: int, channels: int) -> nn.Sequential:
    parts = [
        m
        for _ in range(count)
        for m in (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
    ]
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *parts, nn.Conv2d(channels, 4, 1)).cuda()


@needs_gpu
@pytest.mark.parametrize("size", [7, 14, 28, 56])
@pytest.mark.parametrize("last", [False, True])
def test_on_a_gpu_fused_and_unfused_agree(last, size, calls, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(256, 3, size, size, device="cuda")
    model = blocks(2, 64)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    results = []
    for m, enabled in ((model, True), (other, False)):
        monkeypatch.setattr(registry, "ENABLED", enabled)
        attach(m, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=last):
            results.append(gradients(m, x))
    assert calls == ["forward", "forward", "packed", "packed"]
    assert near(*results, 0.05 if last else 5e-3)


@needs_gpu
def test_on_a_gpu_the_peak_is_no_higher(monkeypatch):
    peaks = {}
    for enabled in (False, True):
        monkeypatch.setattr(registry, "ENABLED", enabled)
        torch.manual_seed(0)
        model, x = blocks(6, 64), torch.randn(64, 3, 56, 56, device="cuda")
        handle = attach(model, device="cuda")
        gradients(model, x)
        torch.cuda.reset_peak_memory_stats()
        gradients(model, x)
        peaks[enabled] = torch.cuda.max_memory_allocated()
        handle.detach()
    assert peaks[True] <= peaks[False] * 1.01, peaks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_activation_behind_it_is_decoded_and_normalised_in_one_kernel(dtype, calls, monkeypatch):
    """Gradients equal those from a decoded input that torch normalises."""
    layers = [nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU(inplace=True), nn.Conv2d(16, 4, 1)]
    model = nn.Sequential(*layers).to(DEVICE, dtype, memory_format=torch.channels_last)
    model[1].float()
    x = torch.randn(4, 8, 16, 16, device=DEVICE).to(dtype, memory_format=torch.channels_last)
    other, used = copy.deepcopy(model), []
    original = expressions.batch_norm_kernel

    def counting(*arguments):
        found = original(*arguments)
        used.append(found is not None)
        return found

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    monkeypatch.setattr(expressions, "runs_kernels", lambda device: True)
    monkeypatch.setattr(expressions, "batch_norm_kernel", counting)
    policy = Fixed(GroupQuant(bits=8))
    handle = attach(model, policy)
    kernel = gradients(model, x, 4)
    codecs = {f"{row.layer}:{row.operation}": row.codec for row in handle.report().sites}
    assert codecs["2:Silu"] == "recomputed" and used and all(used)
    monkeypatch.setattr(expressions, "batch_norm_kernel", lambda *arguments: None)
    attach(other, policy)
    assert near([g.float() for g in kernel], [g.float() for g in gradients(other, x, 4)], 0.02)
