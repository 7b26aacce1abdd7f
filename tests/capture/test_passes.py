"""Forward passes: hooks are on during a training forward pass, and never afterwards."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from tests.capture.common import EXACT, assert_same, batch, grads_of, hooks_are_clear, net, twins
from tests.models import resnet


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_the_model(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = net(), net(), net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            x = checkpoint(self.b, x, use_reentrant=reentrant)
            return self.c(x)

    torch.manual_seed(3)
    plain = Checkpointed()
    for policy in (EXACT, Fixed(ErrorBounded(0.01, "rel"))):
        model = copy.deepcopy(plain)
        encke.attach(model, policy)
        for _ in range(3):
            for m in (plain, model):
                m.zero_grad()
                m(batch()).square().mean().backward()
            if policy is EXACT:
                assert_same(grads_of(plain), grads_of(model))
            else:
                for x, y in zip(grads_of(plain), grads_of(model), strict=True):
                    assert (x - y).norm() < 0.1 * x.norm()
        assert hooks_are_clear()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_model_is_left_alone_or_compressed_when_it_recomputes(reentrant: bool) -> None:
    """The checkpoint's own hooks are on without `reentrant`: nothing is packed. Reentrant, the second run is ours."""
    plain, model, handle = twins()
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            x = batch().requires_grad_()
            checkpoint(m, x, use_reentrant=reentrant).square().mean().backward()
        assert_same(grads_of(plain), grads_of(model))
    assert (handle.report().forwards > 0) == reentrant
    assert hooks_are_clear()


def test_never_above_somebody_elses_hooks() -> None:
    _, model, handle = twins()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        model(batch()).sum().backward()
    assert seen and handle.report().forwards == 0


def test_where_hooks_are_refused_the_model_is_left_alone() -> None:
    plain, model, handle = twins()
    x = batch()
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        model(x).sum().backward()
    plain(x).sum().backward()
    assert_same(grads_of(plain), grads_of(model))
    assert handle.report().forwards == 0 and hooks_are_clear()


def test_a_part_beside_a_transform_of_torch_func_can_be_attached() -> None:
    class Transforms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) + torch.func.grad(lambda t: t.sin().sum())(x).mean()

    model, x = Transforms(), batch()
    model(x).square().mean().backward()
    plain = grads_of(model)
    model.zero_grad()
    with encke.attach(model, EXACT), pytest.raises(RuntimeError, match="saved tensor hooks"):
        model(x)
    assert hooks_are_clear()
    encke.attach(model.net, EXACT)
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        assert_same(plain, grads_of(model))


def test_hooks_that_somebody_keeps_on_pass_everything_through() -> None:
    class Pushes(nn.Module):
        """Pushes its own hooks and does not pop them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
            return y

    model = Pushes()
    encke.attach(model, EXACT)
    model(batch())
    torch._C._autograd._pop_saved_tensors_default_hooks()
    x = batch().requires_grad_()
    y = x.sin().sum()
    y.backward()
    assert torch.equal(x.grad, x.detach().cos())
    torch._C._autograd._pop_saved_tensors_default_hooks()
    assert hooks_are_clear()


def test_exception_in_forward_leaves_no_hooks() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.fail = net(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            if self.fail:
                raise ValueError("no")
            return y

    model = Fails()
    handle = encke.attach(model, EXACT)
    with pytest.raises(ValueError, match="no"):
        model(batch())
    assert hooks_are_clear()
    model.fail = False
    model(batch()).sum().backward()
    assert handle.report().packed_bytes > 0


def test_ctrl_c_in_forward_is_cleared_by_the_next_call_or_detach() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.stop = net(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.stop:
                raise KeyboardInterrupt
            return y

    model = Interrupted()
    plain = copy.deepcopy(model)
    handle = encke.attach(model, EXACT)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    model.stop = plain.stop = False
    for m in (plain, model):
        m(batch()).sum().backward()
    assert_same(grads_of(plain), grads_of(model))
    assert hooks_are_clear()
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.detach()
    assert hooks_are_clear()


def test_calling_a_part_of_the_model_is_compressed_too() -> None:
    _, model, handle = twins()
    model[2](batch()).sum().backward()
    assert [row.layer for row in handle.report().sites] == ["2"]


def test_two_threads_train_at_once() -> None:
    torch.manual_seed(0)
    plain, inputs = resnet()
    model = copy.deepcopy(plain)
    encke.attach(model, EXACT)
    expected = []
    for i in range(2):
        x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i))
        expected.append(torch.autograd.grad(plain(x).square().mean(), list(plain.parameters())))
    failures: list[object] = []

    def work(i: int) -> None:
        try:
            x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i))
            for _ in range(6):
                got = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
                assert all(torch.equal(a, b) for a, b in zip(expected[i], got, strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
