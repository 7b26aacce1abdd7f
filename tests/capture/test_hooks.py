"""Pack and unpack: correct gradients or a clear error, whatever the training loop does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed, Policy
from tests.capture.common import EXACT, assert_same, batch, grads_of, twins


def test_retain_graph_reads_twice_and_in_any_order() -> None:
    plain, model, _ = twins()
    for m in (plain, model):
        x = batch().requires_grad_()
        y = m(x)
        a, b = y[:64].sum(), y[64:].square().sum()
        b.backward(retain_graph=True)
        a.backward(retain_graph=True)
        b.backward()
    assert_same(grads_of(plain), grads_of(model))


def test_double_backward() -> None:
    results = []
    for m in twins()[:2]:
        for _ in range(2):
            m.zero_grad()
            x = batch().requires_grad_()
            (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
            g.square().sum().backward()
        results.append(grads_of(m))
    assert_same(*results)


def test_accumulation_and_several_forwards_before_one_backward() -> None:
    plain, model, _ = twins()
    for m in (plain, model):
        losses = [m(batch(i)).square().mean() for i in range(3)]
        (losses[0] + losses[2]).backward()
        losses[1].backward()
        m(batch(7)).sum().backward()
    assert_same(grads_of(plain), grads_of(model))


def test_in_place_change_of_a_tensor_that_was_passed_through_raises() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    model = Scale()
    encke.attach(model)
    x = torch.randn(4, 8)
    y = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_change_of_a_packed_tensor_gives_the_gradient_of_what_was_saved() -> None:
    model = nn.Conv2d(4, 4, 3, padding=1)
    plain = copy.deepcopy(model)
    encke.attach(model, EXACT)
    x = torch.randn(8, 4, 32, 32)
    for _ in range(2):
        model.zero_grad()
        mine = x.clone()
        y = model(mine).relu()
        mine.zero_()
        y.sum().backward()
    plain(x).relu().sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("to_sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_are_kept_as_they_are(to_sparse: Any) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.matrix = nn.Linear(64, 64), to_sparse(torch.eye(128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(self.matrix, self.linear(x))

    torch.manual_seed(0)
    model, x = Mixing(), torch.randn(128, 64)
    model(x).square().sum().backward()
    plain = model.linear.weight.grad.clone()
    encke.attach(model, EXACT)
    for _ in range(3):
        model.zero_grad()
        model(x).square().sum().backward()
        assert torch.equal(model.linear.weight.grad, plain)


def test_complex_and_conjugated_tensors_are_kept_as_they_are() -> None:
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(33, dtype=torch.cfloat))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.fft.rfft(self.linear(x)) * self.weight
            return (h * h.conj()).real.sqrt() + torch.fft.irfft(h.conj() * 2)[:, :33]

    torch.manual_seed(0)
    model, x = Spectrum(), torch.randn(128, 64)
    model(x).square().mean().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    handle = encke.attach(model, EXACT)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
    assert any("unusual" in row.operation for row in handle.report().sites)


@pytest.mark.parametrize("policy", ["default", EXACT])
def test_tangents_of_forward_mode_pass_through(policy: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x, v = torch.randn(128, 64), torch.randn(128, 64)
    expected = torch.func.jvp(model, (x,), (v,))[1]
    encke.attach(model, policy)
    for _ in range(3):
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, v))
            assert torch.equal(forward_ad.unpack_dual(y).tangent, expected)
            y.square().sum().backward()
        assert torch.equal(torch.func.jvp(model, (x,), (v,))[1], expected)


@pytest.mark.parametrize("policy", [Fixed(ErrorBounded(0)), Fixed(GroupQuant(8, seed=1))], ids=["bound 0", "8 bits"])
def test_backward_within_a_compiled_function(policy: Policy) -> None:
    def backward(y: torch.Tensor) -> None:
        y.square().mean().backward()

    def gradients(call: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))
        with encke.attach(model, policy):
            for _ in range(3):
                model.zero_grad()
                call(model(torch.randn(128, 256)))
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = gradients(backward)
    found = gradients(torch.compile(backward, backend="aot_eager"))
    assert len(found) == 6 and all(map(torch.equal, found, expected))
