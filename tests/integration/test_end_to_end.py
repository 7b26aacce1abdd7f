"""At bound 0 every gradient equals plain autograd's bit for bit; every large float that is no weight is packed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import encke
from encke.capture.hooks import SMALL
from encke.capture.nodes import saved_by
from encke.capture.saved import Saved
from tests.models import MODELS, Changing

EXACT = encke.policies.Fixed(encke.codecs.ErrorBounded(0))


def grads(model: nn.Module, inputs, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model.zero_grad()
    (model(*inputs).square().mean()).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def saved_in(output: torch.Tensor) -> list[tuple[str, str, Saved]]:
    found, stack, seen = [], [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found += [(node.name(), slot, saved) for slot, saved in saved_by(node)]
        stack += [n for n, _ in node.next_functions]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_bit_equal_at_bound_zero(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    plain = copy.deepcopy(model)
    with_handle = encke.attach(model, EXACT)
    for seed in range(3):
        expected, got = grads(plain, inputs, seed), grads(model, inputs, seed)
        assert len(expected) == len(got) > 0
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)
    assert with_handle.report().packed_bytes > 0


@pytest.mark.parametrize("codec", [encke.codecs.ErrorBounded(0), encke.codecs.GroupQuant(8)], ids=repr)
def test_layers_that_change_from_step_to_step_train_without_an_error(codec: encke.Codec) -> None:
    torch.manual_seed(0)
    model, x = Changing(), torch.randn(256, 64)
    plain = copy.deepcopy(model)
    handle = encke.attach(model, encke.policies.Fixed(codec))
    for step in range(20):
        plain.step = model.step = step
        for a, b in zip(grads(plain, (x,), step), grads(model, (x,), step), strict=True):
            assert torch.equal(a, b) if codec.exact else (a - b).norm() <= 0.1 * a.norm() + 1e-3, step
    assert codec.exact or handle.report().ratio > 1.5


@pytest.mark.parametrize("name", MODELS)
def test_every_large_float_that_is_no_weight_is_packed(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    handle = encke.attach(model, EXACT)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for step in range(2):
        found = saved_in(model(*inputs))
        packed = 0
        for operation, slot, saved in found:
            assert not saved.pending, (operation, slot)
            tensor = saved.tensor
            packed += saved.cell is not None
            if tensor is None or not tensor.is_floating_point() or tensor.nbytes < SMALL:
                continue
            is_weight = tensor.untyped_storage().data_ptr() in parameters or tensor.shape in WEIGHT_SHAPES.get(name, ())
            assert is_weight, (step, operation, slot, tensor.shape)
        assert packed > 0
    handle.detach()


# Weights that are computed or cast: none of the activations of these models has such a shape.
WEIGHT_SHAPES = {
    "normed": {torch.Size([96, 16, 5]), torch.Size([96, 96])},
    "frozen": {torch.Size([256, 256]), torch.Size([256, 8]), torch.Size([8, 256]), torch.Size([32, 3, 3, 3])},
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_stay_exact_under_a_coarse_bound(name: str) -> None:
    """With a bound of half the range on everything lossy, what a weight slot restores is still the weight itself."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    encke.attach(model, encke.policies.Fixed(encke.codecs.ErrorBounded(0.5, "rel")))
    for _ in range(2):
        lossy = {
            (saved.site.operation, saved.site.slot): saved.layout.size
            for _, _, saved in saved_in(model(*inputs))
            if saved.cell is not None and saved.site.need in ("lossy", "attention")
        }
        assert not {key for key, size in lossy.items() if torch.Size(size) in WEIGHT_SHAPES.get(name, ())}
        assert not {slot for _, slot in lossy if slot.startswith("weight")}
