"""The patch of AOTAutograd: there while a compiled model is attached, gone afterwards, and out of everybody's way."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import encke
from encke import api
from encke.compiled import aot
from encke.torch_internals import AOT_INLINE, aot_graph_compile
from tests.compiled.common import TWO, compile, gradients, graphs, images, net, same

pytestmark = pytest.mark.slow


def current() -> Any:
    """Return what AOTAutograd would call."""
    return getattr(aot_graph_compile(), AOT_INLINE)


@pytest.fixture(autouse=True)
def original() -> Iterator[Any]:
    """Torch's own function; it is back in its place when a test has ended."""
    # Models of other tests may still be attached: dynamo's caches hold some of them.
    for handle in list(api._handles.values()):
        handle.detach()
    gc.collect()
    assert not isinstance(current(), aot.InlinePatch)
    before = current()
    yield before
    gc.collect()
    assert current() is before


def attached() -> tuple[torch.nn.Module, encke.Handle]:
    model = compile(net())
    return model, encke.attach(model, TWO)


def test_detach_puts_the_very_same_function_back(original: Any) -> None:
    model, handle = attached()
    assert isinstance(current(), aot.InlinePatch) and current().original is original
    gradients(model, images())
    handle.detach()
    assert current() is original
    handle.detach()
    assert current() is original


def test_attached_again_a_model_packs_again(original: Any) -> None:
    model, handle = attached()
    first = gradients(model, images())
    handle.detach()
    plain = gradients(model, images())
    again = encke.attach(model, TWO)
    assert isinstance(current(), aot.InlinePatch)
    assert same(gradients(model, images()), first) and not same(plain, first)
    again.detach()
    assert current() is original and same(gradients(model, images()), plain)


def test_the_last_of_two_models_takes_the_patch_out(original: Any) -> None:
    (model, first), (other, second) = attached(), attached()
    patch = current()
    assert patch.original is original
    first.detach()
    assert current() is patch
    gradients(other, images())
    assert second.report().ratio > 4 and first.report().forwards == 0
    second.detach()
    assert current() is original
    plain = gradients(model, images())
    assert same(plain, gradients(net(), images()))


def test_a_model_that_is_dropped_without_detach_takes_the_patch_out(original: Any) -> None:
    model, handle = attached()
    gradients(model, images())
    assert current() is not original
    del model, handle
    torch._dynamo.reset()
    gc.collect()
    assert current() is original


def test_a_patch_on_top_of_ours_stays_and_ours_passes_everything_on(monkeypatch: Any, original: Any) -> None:
    model, handle = attached()
    ours, calls = current(), []

    def foreign(*arguments: Any) -> None:
        calls.append(len(arguments))
        ours(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(aot_graph_compile(), AOT_INLINE, foreign)
        gradients(model, images())
        assert len(calls) == 1 and handle.report().ratio > 4
        handle.detach()
        assert current() is foreign
        assert same(gradients(model, images()), gradients(net(), images()))
        # On top of theirs there may be one of ours again.
        other, second = attached()
        assert current().original is foreign
        gradients(other, images())
        assert second.report().ratio > 4
        second.detach()
        assert current() is foreign
    # They took theirs out and put back what they had found: ours, which the next one reuses and takes out.
    assert current() is ours
    attached()[1].detach()
    assert current() is original


def test_hooks_of_others_still_go_through_the_original(original: Any) -> None:
    """Graph modules as hooks are torch's own feature: without a model of ours it works as ever."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    hooks = [torch.fx.symbolic_trace(f) for f in (double, halve)]
    _, handle = attached()
    x = torch.randn(64, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        y = torch.compile(lambda x: x.exp().sin(), backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert torch.allclose(x.grad, torch.cos(x.exp()) * x.exp())
    handle.detach()


def test_a_shallow_copy_runs_the_plain_graph_after_detach() -> None:
    model, handle = attached()
    plain, shallow = gradients(net(), images()), copy.copy(model)
    gradients(model, images())
    handle.detach()
    torch._dynamo.reset()
    assert same(gradients(shallow, images()), plain) and handle.report().forwards == 1


def test_hooks_of_detached_models_are_kept_so_that_no_later_pair_gets_their_address() -> None:
    model, handle = attached()
    gradients(model, images())
    address = id(handle._hooks[0].compiled.hooks.pack)
    handle.detach()
    del model, handle
    gc.collect()
    assert id(aot._pairs[address].pack) == address and aot._pairs[address].owner() is None
    assert graphs() == 1


def test_another_torch_is_named_and_nothing_is_left_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(aot_graph_compile(), AOT_INLINE, lambda fw_module: None)
        with pytest.raises(NotImplementedError, match=re.escape(torch.__version__)):
            encke.attach(compile(net()))
    model, handle = attached()
    gradients(model, images())
    handle.detach()


class Recurrent(nn.Module):
    """Dynamo leaves an LSTM to eager mode, and with it what the LSTM saves to the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.lstm = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), nn.LSTM(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        torch._dynamo.graph_break()
        return self.lstm(x)[0]


def test_hooks_between_graphs_are_not_compiled_themselves() -> None:
    compiled, x = compile(Recurrent(), fullgraph=False), torch.randn(8, 16, 64)
    counters.clear()
    with encke.attach(compiled, TWO, min_bytes=1):
        compiled(x).sum().backward()
    # The head, what follows the break, and no hook for each kind of tensor.
    assert counters["frames"]["total"] < 5


def test_a_process_may_attach_any_number_of_models_of_a_class() -> None:
    limit = torch._dynamo.config.recompile_limit
    for _ in range(limit + 2):
        model, handle = attached()
        with handle:
            gradients(model, images())
            assert handle.report().ratio > 1.2
        assert torch._dynamo.config.recompile_limit == limit
