"""Momentum in one unit: with any optimizer, a constant gradient g gives g / (1 - decay) at every step."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from encke.policies.comet.momentum import Averages, Momenta, Momentum, gradient_norm, mean_abs

SHAPE = (8, 16)

KEPT: dict[str, tuple[Callable[[list[Tensor]], Optimizer], float]] = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 0.9),
    "SGD, Nesterov": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True), 0.9),
    "SGD, foreach": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True), 0.9),
    "SGD, fused": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True), 0.9),
    "SGD, maximize": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, maximize=True), 0.9),
    "SGD, dampening 0.9": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.9), 0.9),
    "SGD, dampening 0.5": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), 0.9),
    "SGD, momentum 0.5": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.5), 0.5),
    "Adam": (lambda p: torch.optim.Adam(p), 0.9),
    "Adam, amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 0.9),
    "Adam, foreach": (lambda p: torch.optim.Adam(p, foreach=True), 0.9),
    "Adam, fused": (lambda p: torch.optim.Adam(p, fused=True), 0.9),
    "Adam, beta1 0.5": (lambda p: torch.optim.Adam(p, betas=(0.5, 0.999)), 0.5),
    "Adam, beta1 0.95": (lambda p: torch.optim.Adam(p, betas=(0.95, 0.999)), 0.95),
    "AdamW": (lambda p: torch.optim.AdamW(p), 0.9),
    "AdamW, foreach": (lambda p: torch.optim.AdamW(p, foreach=True), 0.9),
    "AdamW, fused": (lambda p: torch.optim.AdamW(p, fused=True), 0.9),
    "NAdam": (lambda p: torch.optim.NAdam(p), 0.9),
    "RAdam": (lambda p: torch.optim.RAdam(p), 0.9),
    "Adamax": (lambda p: torch.optim.Adamax(p), 0.9),
}
OURS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD without momentum": lambda p: torch.optim.SGD(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "RMSprop with momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def mean_of(momentum: Momentum | None) -> Tensor | None:
    return None if momentum is None else mean_abs([momentum])[0]


def gradient() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("steps", [1, 2, 5, 50])
def test_a_constant_gradient_has_the_same_momentum_in_every_optimizer(name: str, steps: int) -> None:
    make, decay = KEPT[name]
    weight, g = nn.Parameter(torch.randn(SHAPE)), gradient()
    optimizer = make([weight])
    assert Momenta(optimizer).kept(weight)
    for _ in range(steps):
        weight.grad = g.clone()
        optimizer.step()
    assert Momenta(optimizer).kept(weight)
    found = mean_of(Momenta(optimizer).momentum(weight, steps))
    assert found is not None
    assert float(found) == pytest.approx(float(g.abs().mean()) / (1 - decay), rel=1e-4)


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_our_own_averages_have_that_unit_too(steps: int) -> None:
    weight, g, averages = nn.Parameter(torch.randn(SHAPE)), gradient(), Averages()
    assert mean_of(averages.momentum(weight)) is None
    for _ in range(steps):
        averages.add(weight, g)
    found = mean_of(averages.momentum(weight))
    assert found is not None and float(found) == pytest.approx(float(g.abs().mean()) / (1 - 0.9), rel=1e-4)
    averages.clear()
    assert mean_of(averages.momentum(weight)) is None


@pytest.mark.parametrize("name", OURS)
def test_optimizers_that_keep_no_average_of_gradients_are_told_apart(name: str) -> None:
    weight = nn.Parameter(torch.randn(SHAPE))
    optimizer = OURS[name]([weight])
    assert not Momenta(optimizer).kept(weight)
    weight.grad = gradient()
    optimizer.step()
    assert not Momenta(optimizer).kept(weight) and mean_of(Momenta(optimizer).momentum(weight, 1)) is None


def test_changing_gradients_give_one_momentum_too() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(SHAPE, generator=generator) + 0.2 for _ in range(30)]
    found = []
    for name in ("SGD", "Adam", "AdamW, fused", "NAdam", "RAdam", "Adamax"):
        weight = nn.Parameter(torch.randn(SHAPE))
        optimizer = KEPT[name][0]([weight])
        for g in gradients:
            weight.grad = g.clone()
            optimizer.step()
        found.append(mean_of(Momenta(optimizer).momentum(weight, len(gradients))))
    averages, weight = Averages(), nn.Parameter(torch.randn(SHAPE))
    for g in gradients:
        averages.add(weight, g)
    found.append(mean_of(averages.momentum(weight)))
    # Weight decay of NAdam and AdamW does not change exp_avg: all give the same sum.
    assert [float(f) for f in found if f is not None] == pytest.approx([float(found[0] or 0)] * 7, rel=1e-4)


def test_a_buffer_of_unknown_age_counts_as_full_and_a_foreign_weight_has_none() -> None:
    weight, other = nn.Parameter(torch.randn(SHAPE)), nn.Parameter(torch.randn(SHAPE))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9, dampening=0.5)
    assert mean_of(Momenta(optimizer).momentum(weight, 0)) is None
    for _ in range(200):
        weight.grad = gradient()
        optimizer.step()
    found = mean_of(Momenta(optimizer).momentum(weight, None))
    assert found is not None and float(found) == pytest.approx(float(gradient().abs().mean()) * 10, rel=1e-3)
    assert mean_of(Momenta(optimizer).momentum(other, 200)) is None and not Momenta(optimizer).kept(other)


def test_each_group_has_its_own_decay() -> None:
    a, b = nn.Parameter(torch.randn(SHAPE)), nn.Parameter(torch.randn(SHAPE))
    optimizer = torch.optim.SGD([{"params": [a], "momentum": 0.5}, {"params": [b], "momentum": 0.0}], 0.1, momentum=0.9)
    for p in (a, b):
        p.grad = gradient()
    optimizer.step()
    momenta = Momenta(optimizer)
    assert momenta.kept(a) and not momenta.kept(b) and mean_of(momenta.momentum(b, 1)) is None
    assert float(mean_of(momenta.momentum(a, 1)) or 0) == pytest.approx(2 * float(gradient().abs().mean()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_averages_go_on_from_their_state(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(8)]
    whole, first, second = Averages(), Averages(), Averages()
    weight, other = (nn.Parameter(torch.zeros(SHAPE, dtype=dtype)) for _ in range(2))
    for g in gradients:
        whole.add(weight, g)
    for g in gradients[:5]:
        first.add(weight, g)
    state = first.state_dict({"w": weight, "unseen": other})
    assert set(state) == {"w"}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    second.add(other, gradients[0])
    fresh = nn.Parameter(torch.zeros(SHAPE, dtype=dtype))
    second.load_state_dict(torch.load(file), {"w": fresh})
    assert mean_of(second.momentum(other)) is None
    for g in gradients[5:]:
        second.add(fresh, g)
    assert torch.equal(mean_of(whole.momentum(weight)), mean_of(second.momentum(fresh)))  # type: ignore[arg-type]


def test_a_state_of_averages_stays_as_it_was_when_training_goes_on() -> None:
    averages, weight = Averages(), nn.Parameter(torch.zeros(SHAPE))
    averages.add(weight, gradient())
    state = averages.state_dict({"w": weight})
    before = state["w"][0].clone()
    averages.add(weight, -3 * gradient())
    assert torch.equal(state["w"][0], before)


def test_averages_leave_gradients_and_sparse_ones_alone() -> None:
    weight, averages, g = nn.Parameter(torch.zeros(SHAPE)), Averages(), gradient()
    averages.add(weight, g.to_sparse())
    assert mean_of(averages.momentum(weight)) is None
    averages.add(weight, g)
    averages.add(weight, g)
    assert torch.equal(g, gradient())


def test_gradient_norm_is_that_of_all_weights_together() -> None:
    weights = [nn.Parameter(torch.zeros(5, 5)), nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2))]
    assert gradient_norm(weights) is None
    weights[0].grad, weights[1].grad = torch.randn(5, 5), torch.randn(7)
    expected = torch.cat([w.grad.flatten() for w in weights[:2]]).norm()
    assert float(gradient_norm(weights) or 0) == pytest.approx(float(expected))
    big = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    big.grad = torch.full((4,), 6e4, dtype=torch.float16)
    assert float(gradient_norm([big]) or 0) == pytest.approx(1.2e5, rel=1e-3)
    assert float(mean_abs([(torch.full((70000,), 2.0, dtype=torch.float16), 1.0)])[0]) == pytest.approx(2.0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_norms_of_complex_weights_are_those_of_their_absolute_values(dtype: torch.dtype) -> None:
    weights = [nn.Parameter(torch.zeros(5, dtype=dtype)), nn.Parameter(torch.zeros(7))]
    weights[0].grad, weights[1].grad = torch.full((5,), 3 + 4j, dtype=dtype), torch.ones(7)
    assert float(gradient_norm(weights) or 0) == pytest.approx((5 * 25 + 7) ** 0.5)
    assert [*map(float, mean_abs([(w.grad, 0.5) for w in weights]))] == pytest.approx([10, 2])
