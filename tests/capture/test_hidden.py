"""In-place operations on a view: the graph hides them, and the layer identifies the tensors they save."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import encke
from encke.codecs import GroupQuant
from encke.policies import Fixed
from tests.capture.common import EXACT, assert_same, grads_of

SHAPE = (16, 8, 64)
"""Three dimensions: a linear layer returns a view."""
ACTIVATIONS = {
    "relu": lambda: nn.ReLU(inplace=True),
    "leaky_relu": lambda: nn.LeakyReLU(0.1, inplace=True),
    "silu": lambda: nn.SiLU(inplace=True),
    "mish": lambda: nn.Mish(inplace=True),
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "hardsigmoid": lambda: nn.Hardsigmoid(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(-0.5, 0.75, inplace=True),
    "relu6": lambda: nn.ReLU6(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "dropout": lambda: nn.Dropout(0.5, inplace=True),
}
RESULTS = ("relu", "leaky_relu")
"""Activations that save their result: the first pass knows it."""
KEPT = ("elu", "dropout")
"""Activations whose layer is not asked, or whose saved tensor must be exact."""


def network(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), activation, nn.Linear(64, 64))


def train(model: nn.Module, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(SHAPE)).square().sum().backward()
    return grads_of(model)


def rows_of(handle: encke.Handle, layer: str) -> list[Any]:
    return [row for row in handle.report().sites if row.layer == layer and row.saved_bytes]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_plain_training_at_bound_0(name: str) -> None:
    plain, model = network(ACTIVATIONS[name]()), network(ACTIVATIONS[name]())
    encke.attach(model, EXACT)
    for step in range(4):
        assert_same(train(plain, step), train(model, step))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS.keys() - set(KEPT)))
def test_the_layer_tells_what_is_saved(name: str) -> None:
    model = network(ACTIVATIONS[name]())
    handle = encke.attach(model, Fixed(GroupQuant(bits=4)))
    train(model, 0)
    assert (rows_of(handle, "1")[0].codec == "kept") == (name not in RESULTS)
    train(model, 1)
    (row,) = rows_of(handle, "1")
    assert row.packed_bytes < row.saved_bytes / 3
    assert row.operation != "CopySlices"


@pytest.mark.parametrize("name", KEPT)
def test_what_no_layer_tells_is_kept_as_it_is(name: str) -> None:
    model = network(ACTIVATIONS[name]())
    handle = encke.attach(model, Fixed(GroupQuant(bits=4)))
    for step in range(3):
        train(model, step)
    (row,) = rows_of(handle, "1")
    assert (row.operation, row.codec) == ("CopySlices", "kept")
    assert row.packed_bytes == row.saved_bytes


class Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[..., :8] = 0
        return x


@pytest.mark.parametrize("name", RESULTS)
def test_a_tensor_whose_part_was_written_is_no_view(name: str) -> None:
    """Its node is behind that of copies, too, but the graph shows the activation."""
    plain = network(ACTIVATIONS[name]()).insert(1, nn.Sequential(nn.GELU(), Masked()))
    model = copy.deepcopy(plain)
    handle = encke.attach(model, Fixed(GroupQuant(bits=8)))
    for step in range(3):
        for found, right in zip(train(model, step), train(plain, step), strict=True):
            assert torch.allclose(found, right, rtol=0.02, atol=0.02 * float(right.abs().max()))
    assert rows_of(handle, "2")[0].codec != "kept"


@pytest.mark.parametrize("when", ["before", "after", "later"])
def test_a_hook_that_saves_inside_the_call_is_not_taken_for_the_activation(when: str) -> None:
    def scale(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (inputs[0].mul(2).view(-1, 64).sigmoid_().view(inputs[0].shape) - 0.5,)

    plain, model = (network(nn.LeakyReLU(inplace=True)) for _ in range(2))
    if when == "before":
        model[1].register_forward_pre_hook(scale)
    encke.attach(model, EXACT)
    if when == "after":
        model[1].register_forward_pre_hook(scale)
    if when != "later":
        plain[1].register_forward_pre_hook(scale)
    for step in range(5):
        if when == "later" and step == 2:
            plain[1].register_forward_pre_hook(scale)
            model[1].register_forward_pre_hook(scale)
        assert_same(train(plain, step), train(model, step))


def test_a_derived_class_and_a_replaced_forward_are_not_asked() -> None:
    class Twice(nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.mul_(2)).sigmoid()

    replaced = nn.LeakyReLU(inplace=True)
    replaced.forward = lambda x: torch.nn.functional.elu_(x)  # type: ignore[method-assign]
    for activation in (Twice(inplace=True), replaced):
        plain = network(copy.deepcopy(activation))
        model = network(activation)
        encke.attach(model, EXACT)
        for step in range(4):
            assert_same(train(plain, step), train(model, step))


def test_an_activation_behind_an_instance_norm_shares_its_memory_with_the_next_convolution() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv3d(8, 8, 3, padding=1, bias=False), nn.InstanceNorm3d(8, affine=True), nn.LeakyReLU(0.01, inplace=True),
        nn.Conv3d(8, 8, 3, padding=1),
    )  # fmt: skip
    plain = copy.deepcopy(model)
    handle = encke.attach(model, Fixed(GroupQuant(bits=8)))
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(step)
            each(torch.randn(2, 8, 8, 8, 8)).square().sum().backward()
        for exact, found in zip(grads_of(plain), grads_of(model), strict=True):
            assert (exact - found).norm() <= 0.02 * exact.norm()
    rows = rows_of(handle, "2") + rows_of(handle, "3")
    assert [row.layer for row in rows] == ["2"]
    assert rows[0].packed_bytes < rows[0].saved_bytes / 3
