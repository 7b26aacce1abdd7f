"""Copies of weights that autocast makes are released after forward and cast again in backward."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.capture.casts import cast_weight
from encke.capture.facts import SiteFacts
from encke.capture.sites import Site
from encke.codecs import ErrorBounded
from encke.policies import Fixed

EXACT = Fixed(ErrorBounded(0))


class Net(nn.Module):
    """Convolutions in both memory formats, a linear layer called twice, and products of views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1).to(memory_format=torch.channels_last)
        self.deep = nn.Conv2d(32, 64, 3, groups=2)
        self.twice = nn.Linear(64, 64, bias=False)
        self.table = nn.Parameter(torch.randn(64, 160))

    def forward(self, x: Tensor) -> Tensor:
        h = self.deep(self.conv(x).relu()).mean([2, 3])
        h = self.twice(self.twice(h).tanh())
        # A part of the weight is cast separately and kept; a view of the whole copy is not kept.
        return torch.cat([h @ self.table[:, :80], F.linear(h, self.table.to(h.dtype).mT)], 1)


def run(model: nn.Module, x: Tensor, backward: bool = True) -> Tensor:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    if backward:
        loss.backward()
    return loss


@pytest.fixture
def batch() -> Tensor:
    return torch.randn(16, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def copies_alive(model: nn.Module) -> set[tuple[int, ...]]:
    """Return the shapes of those weights that have a living 16-bit copy."""
    shapes = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    tensors = [o for o in gc.get_objects() if issubclass(type(o), Tensor)]
    return {tuple(t.shape) for t in tensors if t.dtype == torch.bfloat16} & shapes


def test_gradients_are_equal_and_the_copies_are_released(batch):
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    run(plain, batch)
    handle = encke.attach(model, EXACT, min_bytes=1)
    for step in range(3):
        loss = run(model, batch, backward=False)
        if step:
            assert not copies_alive(model)
        loss.backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
    rows = {row.operation: row for row in handle.report().sites if row.codec == "cast again"}
    assert rows.keys() == {"(copies of weights)"} and rows["(copies of weights)"].packed_bytes == 0
    whole = [model.conv.weight, model.deep.weight, model.twice.weight, model.table]
    assert rows["(copies of weights)"].saved_bytes == 2 * sum(p.numel() for p in whole)


def test_without_a_copy_nothing_is_cast(batch):
    model = Net()
    handle = encke.attach(model, EXACT, min_bytes=1)
    for _ in range(2):
        model(batch).sum().backward()
    assert "cast again" not in {row.codec for row in handle.report().sites}


def test_a_weight_modified_before_backward_is_refused_once_and_copies_are_kept_from_then_on(batch):
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    encke.attach(model, EXACT, min_bytes=1)
    run(model, batch)

    def modify_before_backward(network: nn.Module) -> None:
        loss = run(network, batch, backward=False)
        with torch.no_grad():
            for p in network.parameters():
                p.mul_(0.5)
        loss.backward()

    with pytest.raises(RuntimeError, match=r"a weight of shape \[.*\] was modified between forward and backward"):
        modify_before_backward(model)
    model.load_state_dict(plain.state_dict())
    modify_before_backward(model)
    modify_before_backward(plain)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_layers_that_are_left_out_keep_their_copies(batch):
    model = Net()
    handle = encke.attach(model, EXACT, overrides={"twice": None, "conv": None, "deep": None, "": None})
    for _ in range(2):
        run(model, batch)
    assert {row.codec for row in handle.report().sites} == {"kept"}


def test_a_released_graph_releases_the_weight(batch):
    """Stand-ins refer to the weight, which must not outlive the model."""
    model = Net()
    encke.attach(model, EXACT, min_bytes=1)
    for _ in range(2):
        run(model, batch, backward=False)
    weight = weakref.ref(model.deep.weight)
    del model
    gc.collect()
    assert weight() is None


def test_copies_of_frozen_weights_are_released() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.base, self.next = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 128)
            for layer in (self.base, self.next):
                layer.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.next(self.base(self.inp(x)))

    torch.manual_seed(0)
    plain = Adapted()
    model = copy.deepcopy(plain)
    handle = encke.attach(model, EXACT)
    x = torch.randn(256, 64)
    for _ in range(3):
        run(plain, x), run(model, x)
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(plain.inp.parameters(), model.inp.parameters(), strict=True)
        )
    rows = {row.operation: row.saved_bytes for row in handle.report().sites}
    assert rows["(copies of weights)"] == 2 * 128 * 128 * 2 and "(tensors computed from weights)" not in rows
    loss = run(model, x, backward=False)
    with torch.no_grad():
        model.base.weight.mul_(2)
    with pytest.raises(RuntimeError, match="was modified between forward and backward"):
        loss.backward()


def test_a_replaced_forward_may_multiply_by_another_constant() -> None:
    torch.manual_seed(0)
    operand: list[Tensor | None] = [None]
    plain = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128))
    plain[1].requires_grad_(False)
    model = copy.deepcopy(plain)
    for base in (plain[1], model[1]):
        own = base.weight
        base.forward = lambda x, own=own: nn.functional.linear(x, own if operand[0] is None else operand[0])
    encke.attach(model, EXACT)
    x = torch.randn(256, 64)
    for step in range(6):
        operand[0] = torch.randn(128, 128) if step > 3 else None
        run(plain, x), run(model, x)
        assert torch.equal(plain[0].weight.grad, model[0].weight.grad)


def test_a_stand_in_has_the_size_of_the_copy_or_of_its_view() -> None:
    weight = nn.Parameter(torch.randn(6, 4))
    copy_of = weight.to(torch.bfloat16)
    facts = SiteFacts(Site("layer", "Mm", "mat2"))
    for t in (copy_of, copy_of.t(), copy_of):
        found = cast_weight(t, facts, lambda: None)
        assert found is not None and found.size == tuple(t.shape)
        restored = found.restore()
        assert torch.equal(restored, t) and restored.stride() == t.stride() and not restored.requires_grad
