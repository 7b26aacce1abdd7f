"""Forwards of our own: installed, removed, copied, and asked which way a call goes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from encke.codecs import ErrorBounded
from encke.fused.base import LayerForward
from encke.policies import Comet, Fixed
from encke.torch_internals import top_saved_tensors_hooks
from tests.fused.common import DEVICE, attach, copies, data, gradients, net

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_detach_leaves_the_layer_as_it_was(calls):
    model = net()
    before = dict(model[1].__dict__)
    handle = attach(model)
    assert isinstance(model[1].__dict__["forward"], LayerForward)
    gradients(model, data())
    loss = model(data()).square().mean()
    handle.detach()
    assert model[1].__dict__.keys() == before.keys() and model[1].forward.__func__ is nn.BatchNorm2d.forward
    loss.backward()
    assert calls.count("packed") == 2


def test_copies_are_unattached_and_can_be_attached(calls):
    model = net()
    attach(model)
    gradients(model, data())
    calls.clear()
    first = copies(model)
    for again in copies(first[0]) + copies(first[1]):
        gradients(again, data())
    for other in first:
        other[1].running_mean.fill_(7.0)
        gradients(other, data())
        assert not calls and model[1].running_mean.abs().max() < 7.0
        handle = attach(other)
        gradients(other, data())
        assert calls == ["forward", "packed"]
        calls.clear()
        handle.detach()
        assert "forward" not in other[1].__dict__


def test_a_replica_brings_its_own_weights(calls):
    """As DataParallel makes them: another object with the same attributes but its own weights."""
    model = net()
    handle = attach(model)
    gradients(model, data())
    replica = model[1]._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.full((8,), 3.0).to(DEVICE), torch.full((8,), 5.0).to(DEVICE)
    x = torch.randn(2, 8, 4, 4, device=DEVICE)
    expected = nn.functional.batch_norm(x, None, None, replica.weight, replica.bias, True)
    assert torch.equal(replica(x), expected)
    before = handle.report().forwards
    handle.detach()
    assert torch.equal(replica(x), expected) and handle.report().forwards == before


@pytest.mark.slow
def test_a_collection_step_learns_the_same_through_the_kernels():
    """Comet's figures do not depend on which function computes the gradients."""
    torch.manual_seed(4)
    layers = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers).to(DEVICE)
    other, x = copy.deepcopy(model), torch.randn(2, 3, 20, 20, device=DEVICE)
    histories = []
    for m, device in ((model, DEVICE), (other, "none")):
        handle = attach(m, Comet(every=3), device=device)
        optimizer = torch.optim.SGD(m.parameters(), 0.01, momentum=0.9)
        for _ in range(4):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        histories.append(handle.history)
    assert len(histories[0]) == len(histories[1]) > 4
    for a, b in zip(*histories, strict=True):
        assert (a["place"], a["bits"], a["operation"], a["slot"]) == (b["place"], b["bits"], b["operation"], b["slot"])
        for name in ("std", "momentum", "in_force_predicted"):
            assert (name in a) == (name in b)
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-2)


def test_a_layer_whose_class_changes_after_attach_goes_the_plain_way(deterministic):
    """A parametrization computes the weight at every look at it: spectral norm would take further steps."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(DEVICE), data().requires_grad_()
    plain = copy.deepcopy(model)
    attach(model, Fixed(ErrorBounded(0)))
    gradients(model, x)
    gradients(plain, x)
    for m in (model, plain):
        torch.manual_seed(7)
        nn.utils.parametrizations.spectral_norm(m[1])
    for a, b in zip(gradients(model, x, steps=3), gradients(plain, x, steps=3), strict=True):
        assert torch.equal(a, b)


def test_fused_layers_tell_of_their_calls_without_hooks():
    model = net()
    handle = attach(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model) and len(model._forward_pre_hooks) == 1
    gradients(model, data())
    assert {row.layer for row in handle.report().sites if row.codec != "kept"} == {"1", "2"}


def test_a_fused_layer_on_its_own_is_compressed_and_leaves_nothing_behind_after_an_error():
    model, x = nn.BatchNorm2d(8).to(DEVICE), torch.randn(4, 8, 18, 18, device=DEVICE)
    plain = copy.deepcopy(model)
    handle = attach(model)
    with pytest.raises(ValueError, match="expected 4D input"):
        model(x[0, 0])
    assert top_saved_tensors_hooks() is None
    assert torch.allclose(gradients(model, x)[0], gradients(plain, x)[0], atol=1e-6)
    assert handle.report().forwards == 3 and handle.report().packed_bytes > 0


def test_compiling_a_fused_layer_after_attach_is_an_error():
    model = net()
    attach(model)
    with pytest.raises(Exception, match="Compile it first"):
        torch.compile(model[1], backend="eager", fullgraph=True)(torch.randn(2, 8, 18, 18, device=DEVICE))


def test_a_shallow_copy_of_a_changed_class_brings_its_own_weights():
    """As parametrizations change it: the copy shares our forward, which must not run the layer it was made of."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1)).to(DEVICE), data()
    attach(model)
    gradients(model, x)
    twin = copy.copy(model[0])
    twin.__class__ = type("Changed", (nn.Conv2d,), {})
    twin._parameters = {name: nn.Parameter(torch.zeros_like(p)) for name, p in twin._parameters.items()}
    assert not twin(x).any()
