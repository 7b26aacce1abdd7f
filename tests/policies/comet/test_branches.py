"""Branches: shares of the gradient where paths join, and the memory they save."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.capture.nodes import operation_name
from encke.policies import Comet
from encke.policies.comet.assess import Assessment
from encke.policies.comet.branches import Branch, Graph, Joint, ScoresShare, share_of
from tests.policies.comet.trainings import sgd


def nodes_of(t: Tensor) -> list[Any]:
    """Return the nodes of a graph, the last one first."""
    stack, seen = [t.grad_fn], []
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.append(node)
            stack += [source for source, _ in node.next_functions]
    return sorted(seen, key=lambda node: -node._sequence_nr())


def node_of(t: Tensor, name: str) -> Any:
    """Return the last node whose operation has this prefix."""
    return next(node for node in nodes_of(t) if operation_name(node).startswith(name))


def graph_of(t: Tensor, weights: dict[Any, list[Any]] | None = None) -> Graph:
    return Graph(nodes_of(t), weights or {})


def shares(branch: Branch) -> list[float]:
    return [share_of(None if joint.tensor is None else joint.tensor.double()) for _, joint in branch.sections]


def square(t: Tensor) -> float:
    return float(t.detach().double().square().sum())


@pytest.fixture
def draw() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64)


def test_the_share_of_a_residual_branch_is_that_of_its_gradient(draw) -> None:
    x, w, g = draw(8, 16).requires_grad_(), draw(16, 16).requires_grad_(), draw(8, 16)
    h = x * 1.0
    y = h + 0.3 * torch.tanh(h @ w)
    branch = graph_of(y).branch(node_of(y, "Tanh"))
    y.backward(g)
    through = (0.3 * g * (1 - torch.tanh(h @ w) ** 2)) @ w.T
    assert shares(branch) == [pytest.approx(square(through) / square(g + through))]


def test_a_gated_block_joins_at_its_input_and_at_the_residual_sum(draw) -> None:
    """The gate's gradient joins that of the other projection, then both join the residual path."""
    x, g = draw(8, 16).requires_grad_(), draw(8, 16)
    gate, up, down = (draw(16, 16).requires_grad_() for _ in range(3))
    stem = x * 1.0
    inner = torch.tanh(stem)
    a, b = inner @ gate, inner @ up
    y = stem + (F.silu(a) * b) @ down
    weights = {node: [SimpleNamespace(weight=node)] for node in nodes_of(y) if operation_name(node) == "Mm"}
    branch = graph_of(y, weights).branch(node_of(y, "Silu"))
    y.backward(g)
    d, s = g @ down.T, torch.sigmoid(a)
    to_gate, to_up = (d * b * s * (1 + a * (1 - s))) @ gate.T, (d * F.silu(a)) @ up.T
    inside = (to_gate + to_up) * (1 - inner**2)
    assert shares(branch) == [
        pytest.approx(square(to_gate) / square(to_gate + to_up)),
        pytest.approx(square(inside) / square(g + inside)),
    ]
    assert [[each.weight for each in samples] for samples, _ in branch.sections] == [[a.grad_fn], []]


def test_query_key_and_value_are_one_branch(draw) -> None:
    """Their errors are independent where they join, so the squares of their gradients add up."""
    x, g = draw(2, 4, 8, 16).requires_grad_(), draw(2, 4, 8, 16)
    weights = [(0.1 * draw(16, 16)).requires_grad_() for _ in range(3)]
    stem = x * 1.0
    projected = [stem @ weight for weight in weights]
    y = stem + F.scaled_dot_product_attention(*projected)
    attention = node_of(y, "ScaledDotProduct")
    branch, scores = graph_of(y).branch(attention), ScoresShare(attention)
    to_projected = torch.autograd.grad(y, projected, g, retain_graph=True)
    branch.sections[0][1].parts.clear()
    (total,) = torch.autograd.grad(y, x, g)
    parts = [square(each @ weight.T) for each, weight in zip(to_projected, weights, strict=True)]
    assert shares(branch) == [pytest.approx(sum(parts) / square(total))]
    query, key, value = map(square, to_projected)
    assert share_of(scores.tensor) == pytest.approx((query + key) / (query + key + value))  # type: ignore[arg-type]


def test_an_error_in_a_branch_is_as_small_as_its_share_where_paths_join(draw) -> None:
    """An error is added to the gradient that a branch propagates, and measured in the gradient of the sum."""
    x, w = draw(64, 32).requires_grad_(), draw(32, 32)
    gradients = []
    for wrong in (0.0, 0.1):

        def distort(computed: tuple[Tensor, ...], _: Any, wrong: float = wrong) -> tuple[Tensor, ...]:
            return (computed[0] + wrong * computed[0].square().mean().sqrt() * draw(64, 32),)

        stem = x * 1.0
        y = stem + 0.2 * torch.tanh(stem @ w)
        node = node_of(y, "Tanh")
        node.register_hook(distort)
        branch = graph_of(y).branch(node)
        gradients.append(torch.autograd.grad(y.square().sum(), x)[0])
    right, distorted = gradients
    reached = branch.reach({}, 1.0, dict(zip([joint for _, joint in branch.sections], shares(branch), strict=True)))
    assert square(distorted - right) / square(right) == pytest.approx(0.1**2 * reached, rel=0.1)


def test_weights_count_by_the_share_that_reaches_them() -> None:
    a, b, c = (SimpleNamespace(weight=object()) for _ in range(3))
    first, second = Joint(), Joint()
    branch: Any = Branch([([a, a], first), ([b], second)])
    squares = {id(each.weight): size for each, size in ((a, 1.0), (b, 2.0), (c, 50.0))}
    # All of the error reaches a, half of it reaches b, and half of a quarter reaches the weights before both joints.
    assert branch.reach(squares, 10.0, {first: 0.5, second: 0.25}) == pytest.approx(1 + 0.5 * 2 + 0.125 * 7)
    assert branch.reach(squares, 10.0, {}) == 10.0  # nothing was measured
    assert branch.reach(squares, 0.4, {first: 0.5, second: 0.25}) == 0.4


@pytest.mark.parametrize("numbers", [[0.0, 0.0], [math.nan, 1.0], [1.0, math.inf], [2.0, 1.0], [math.inf, math.inf]])
def test_a_share_that_tells_nothing_is_all(numbers: list[float]) -> None:
    assert share_of(torch.tensor(numbers)) == 1.0
    assert share_of(math.nan) == 1.0


def test_paths_that_join_while_others_are_open_end_the_branch(draw) -> None:
    """A third path joins one of the two results of a split: no share is taken."""
    x = draw(8, 16).requires_grad_()
    stem = x * 1.0
    y = stem * 2.0
    left, right = torch.tanh(stem), torch.tanh(y)
    z = F.silu(left * right) + y
    branch = graph_of(z).branch(node_of(z, "Silu"))
    z.sum().backward()
    assert branch.sections == []


def reversed_columns(x: Tensor) -> Tensor:
    """Return the columns in reverse order, by an operation whose gradient is sparse."""
    return x + torch.tanh(torch.gather(x, 1, torch.arange(31, -1, -1).expand_as(x), sparse_grad=True))


def filtered(x: Tensor) -> Tensor:
    """Return the sum of two paths that split and join as complex numbers, as in Fourier layers."""
    waves = torch.fft.rfft(x)
    return torch.fft.irfft(waves + torch.fft.rfft(torch.tanh(torch.fft.irfft(waves, n=32))), n=32)


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(32, 32), nn.Linear(32, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("function", [reversed_columns, filtered])
def test_sparse_and_complex_gradients_in_a_branch_are_not_measured(function: Callable[[Tensor], Tensor]) -> None:
    model = Block(function)
    encke.attach(model, Comet(), min_bytes=1)
    model(torch.randn(64, 32)).sum().backward()
    assert model.first.weight.grad is not None


class Residual(nn.Module):
    """Residual blocks whose branches contribute little of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(6))
        self.up = nn.ModuleList(nn.Linear(32, 128) for _ in range(6))
        self.down = nn.ModuleList(nn.Linear(128, 32) for _ in range(6))
        self.stem, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + 0.2 * down(F.gelu(up(norm(x))))
        return self.head(x)


def held_and_off(branches: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[int, float, float]:
    """Return bytes held after two collection steps, the error of the gradient, and the tolerated error."""
    if not branches:
        monkeypatch.setattr(Assessment, "_reach", lambda self, site, squares, before: before)
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(1024, 32, generator=generator), torch.randint(10, (1024,), generator=generator)
    model = Residual()
    optimizer = sgd(model, 0.0)

    def gradient() -> Tensor:
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    exact = gradient()
    handle = encke.attach(model, Comet(), optimizer, min_bytes=1)
    for _ in range(12):
        gradient()
        optimizer.step()
    found = torch.stack([(gradient() - exact).norm() / exact.norm() for _ in range(4)])
    return handle.report().packed_bytes, float(found.mean()), 0.1 * math.sqrt(0.5 * 3.35)


def test_branches_take_fewer_bits_and_the_error_stays_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer, off, tolerated = held_and_off(True, monkeypatch)
    more, _, _ = held_and_off(False, monkeypatch)
    assert fewer < 0.9 * more
    assert off < tolerated
