"""Comet: settings that follow the training. Predicted against measured, and what stands between the two."""

from __future__ import annotations

import copy
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.layout import flatten
from encke.policies import Comet
from encke.policies.comet import assess
from encke.policies.comet import policy as comet_policy
from encke.policies.comet.measure import ErrorProbe
from encke.policies.comet.policy import initial_codec
from encke.policies.comet.schedule import CollectionSchedule
from encke.policies.comet.theory import error_std

ROUNDINGS = ["stochastic", "nearest"]


def batches(count: int = 4, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Smooth images of ten kinds with noise, half of the labels wrong: random, but always the same.

    Labels that can be learnt in no time would leave gradients in few samples only, and few terms are no statistics.
    """
    generator = torch.Generator().manual_seed(7)
    kinds = F.interpolate(torch.randn(10, 3, 4, 4, generator=generator), size=(16, 16), mode="bilinear")
    found = []
    for _ in range(count):
        labels = torch.randint(0, 10, (size,), generator=generator)
        images = kinds[labels] + 0.5 * torch.randn(size, 3, 16, 16, generator=generator)
        wrong = torch.rand(size, generator=generator) < 0.5
        found.append((images, torch.where(wrong, torch.randint(0, 10, (size,), generator=generator), labels)))
    return found


BATCHES = batches()


def net(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 8, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


WEIGHTS = ["0", "3", "5", "8"]


def sgd(model: nn.Module, lr: float = 0.005, momentum: float = 0.9) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def train(model: nn.Module, optimizer: Optimizer | None, steps: int, first: int = 1, lr: float = 0.02) -> None:
    """Steps with the same batches in the same order; without an optimizer a plain update by hand."""
    for step in range(first, first + steps):
        x, y = BATCHES[step % len(BATCHES)]
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if optimizer is not None:
            optimizer.step()
        else:
            with torch.no_grad():
                for p in model.parameters():
                    p -= lr * p.grad


def run(policy: Comet, steps: int = 15, norm: bool = True, lr: float = 0.005) -> encke.api.Handle:
    model = net(norm)
    optimizer = sgd(model, lr)
    handle = encke.attach(model, policy, optimizer)
    train(model, optimizer, steps)
    # The model would otherwise be gone, and the handle with it.
    handle.model = model  # type: ignore[attr-defined]
    return handle


def weight_rows(handle: encke.api.Handle, step: int | None = None) -> list[dict[str, Any]]:
    """The history of what weights' gradients hang on."""
    return [row for row in handle.history if "predicted" in row and step in (None, row["step"])]


def last(handle: encke.api.Handle) -> dict[str, dict[str, Any]]:
    """The last collection step's rows of weights, by layer."""
    return {row["layer"]: row for row in weight_rows(handle)}


def steps_of(handle: encke.api.Handle) -> list[int]:
    return sorted({row["step"] for row in weight_rows(handle)})


def off(handle: encke.api.Handle) -> float:
    """How far predicted and measured errors of the settings in force are apart, at worst."""
    rows = [row for row in weight_rows(handle) if row["in_force_measured"] is not None]
    assert {row["layer"] for row in rows} == set(WEIGHTS)
    return max(abs(math.log(row["in_force_predicted"] / row["in_force_measured"])) for row in rows)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from threads, and lose much where others want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_attach_takes_comet_with_stochastic_rounding_if_nothing_is_said() -> None:
    handle = encke.attach(nn.Linear(2, 2))
    assert isinstance(handle.policy, Comet) and handle.policy == Comet()
    assert Comet().rounding == "stochastic" and Comet().tolerance == 0.2 and Comet().formula == "exact"
    assert repr(handle.policy) == "Comet()" == handle.report().policy
    assert Comet(rounding="nearest").tolerance == 0.01 and Comet(0.3, rounding="nearest").tolerance == 0.3


def test_prints_as_it_is_written() -> None:
    policy = Comet(0.05, every=100, rounding="nearest", formula="paper", seed=3)
    assert repr(policy) == "Comet(sigma=0.05, every=100, rounding='nearest', formula='paper', seed=3)"
    assert eval(repr(policy)) == policy


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"sigma": 0}, ValueError, "sigma must be positive.*got 0"),
        ({"sigma": -0.1}, ValueError, "sigma must be positive.*got -0.1"),
        ({"sigma": math.nan}, ValueError, "sigma must be positive.*got nan"),
        ({"sigma": math.inf}, ValueError, "sigma must be positive.*got inf"),
        ({"sigma": "0.1"}, TypeError, "sigma must be a number, got '0.1'"),
        ({"sigma": True}, TypeError, "sigma must be a number, got True"),
        ({"every": 0}, ValueError, "every must be at least 1.*got 0"),
        ({"every": 1.5}, TypeError, "every must be a whole number.*got 1.5"),
        ({"rounding": "up"}, ValueError, "rounding must be .*got 'up'"),
        ({"formula": "guess"}, ValueError, "formula must be .*got 'guess'"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        Comet(**arguments)


# -- schedule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (1000, [1, 10, 20, 40, 80, 160, 320, 640, 1000, 2000, 3000]),
        (100, [1, 10, 20, 40, 80, *range(100, 3001, 100)]),
        (80, [1, 10, 20, 40, *range(80, 3001, 80)]),
        (7, [1, *range(7, 3001, 7)]),
        (10, [1, *range(10, 3001, 10)]),
        (1, [*range(1, 3001)]),
    ],
)
def test_collection_steps_double_until_every_takes_over(every: int, expected: list[int]) -> None:
    schedule = CollectionSchedule(Comet(), every, None, None)
    assert [step for step in range(1, 3001) if schedule.due(step)] == expected


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_a_training_collects_at_those_steps(given: bool) -> None:
    model = net()
    optimizer = sgd(model) if given else None
    handle = encke.attach(model, Comet(every=12), optimizer)
    train(model, optimizer, 25)
    assert steps_of(handle) == [10, 12, 24]


def test_a_training_without_weights_to_follow_collects_on_schedule_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3))
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=6), optimizer)
    for _ in range(16):
        model(BATCHES[0][0]).square().mean().backward()
        optimizer.step()
    assert sorted({row["step"] for row in handle.history}) == [1, 6, 12]


# -- the theory at work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_predicted_errors_are_the_measured_ones(rounding: str) -> None:
    handle = run(Comet(every=5, rounding=rounding), steps=40)
    assert off(handle) < 0.15
    assert all(row["in_force_measured"] is None for row in weight_rows(handle, 5))


@pytest.mark.parametrize("sigma", [0.05, 0.2, 1.0])
def test_fewest_bits_that_are_tolerated(sigma: float) -> None:
    handle = run(Comet(sigma, every=5))
    for row in weight_rows(handle):
        assert row["bits"] in (2, 4, 8) and row["bound"] is None
        assert row["predicted"] <= row["tolerated"] or row["bits"] == 8
        assert row["tolerated"] == pytest.approx(sigma * row["momentum"])
    assert {row["layer"] for row in weight_rows(handle, 15)} == set(WEIGHTS)


def test_bits_in_between_would_not_have_done() -> None:
    """Halving sigma's square root of bits: a setting one finer is never chosen without need."""
    coarse, fine = (last(run(Comet(sigma, every=5), lr=0.0)) for sigma in (1e3, 1e-3))
    wanted = last(run(Comet(0.2, every=5), lr=0.0))
    for layer in WEIGHTS:
        assert coarse[layer]["bits"] == 2 and fine[layer]["bits"] == 8
        # What two bits would do is what the coarse run predicts, in the same step with the same gradients.
        assert (wanted[layer]["bits"] == 2) == (coarse[layer]["predicted"] <= wanted[layer]["tolerated"])
        assert (wanted[layer]["bits"] == 8) <= (8 * fine[layer]["predicted"] < coarse[layer]["predicted"])


def test_tiny_sigma_takes_8_bits_and_a_huge_one_2() -> None:
    for sigma, bits in ((1e-5, 8), (1e5, 2)):
        handle = run(Comet(sigma, every=5))
        assert {row["bits"] for row in handle.history} == {bits}
        packed = [row for row in handle.report().sites if row.codec == "GroupQuant"]
        assert {row.bound for row in packed} == {f"{bits} bits"}


def test_nearest_bounds_grow_with_sigma_until_they_are_clamped() -> None:
    low, mid, high = (last(run(Comet(s, every=5, rounding="nearest"), lr=0.0)) for s in (0.005, 0.01, 0.02))
    for layer in WEIGHTS:
        assert mid[layer]["bound"] == pytest.approx(2 * low[layer]["bound"], rel=0.1)
        assert high[layer]["bound"] == pytest.approx(2 * mid[layer]["bound"], rel=0.1)
        assert mid[layer]["predicted"] == pytest.approx(mid[layer]["tolerated"], rel=1e-3)
    for sigma, share in ((1e-7, 1 / 1024), (1e5, 1.0)):
        for row in last(run(Comet(sigma, every=5, rounding="nearest"), lr=0.0)).values():
            assert row["bound"] == pytest.approx(share * row["std"])


def test_the_bound_set_is_the_bound_in_force() -> None:
    handle = run(Comet(every=5, rounding="nearest"))
    train(handle.model, None, 1, lr=0.0)  # type: ignore[attr-defined]
    rows = {row.layer: row.bound for row in handle.report().sites if row.codec == "ErrorBounded"}
    for layer, row in last(handle).items():
        # What the ReLU before a layer makes is saved there first.
        saved = rows.get(layer) or rows.get(str(int(layer) - 1)) or rows[str(int(layer) - 2)]
        assert saved.startswith(f"{row['bound']:.3g} abs")


WRONG: dict[str, Callable[..., float]] = {
    "no root of the terms": lambda power, rms, terms, coherent=0.0: math.sqrt(power) * rms * terms,
    "terms ignored": lambda power, rms, terms, coherent=0.0: math.sqrt(power) * rms,
    "bound for standard deviation": lambda power, rms, terms, coherent=0.0: error_std(3 * power, rms, terms, coherent),
    "mean absolute value for norm": lambda power, rms, terms, coherent=0.0: error_std(power, 0.8 * rms, terms),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_wrong_theory_shows(wrong: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assess, "error_std", WRONG[wrong])
    assert off(run(Comet(every=5, rounding=rounding))) > 0.15


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_sparsity_ignored_shows(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = assess.predict

    def predict(formula: str, sample: Any, gradient: Any, power: float, mean: float) -> float:
        return right(formula, sample, gradient, power / float(sample.stats.share), mean)

    monkeypatch.setattr(assess, "predict", predict)
    assert off(run(Comet(every=5, rounding=rounding))) > 0.15


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)], ids=type)
def test_mean_errors_count_where_output_gradients_do_not_cancel(
    layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = assess.predict

    def apart() -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), copy.deepcopy(layer))
        optimizer = sgd(model, 0.0)
        handle = encke.attach(model, Comet(0.05, every=5, rounding="nearest"), optimizer)
        for step in range(10):
            out = model(BATCHES[step % 4][0])
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(step))
            model.zero_grad()
            (out * (1 + noise)).mean().backward()
            optimizer.step()
        row = last(handle)["2"]
        return abs(math.log(row["in_force_predicted"] / row["in_force_measured"]))

    assert apart() < 0.15
    monkeypatch.setattr(assess, "predict", lambda formula, r, g, power, mean: right(formula, r, g, power, 0.0))
    assert apart() > 0.3


@pytest.mark.parametrize(("rounding", "sigma"), [("stochastic", 0.2), ("nearest", 0.01)])
def test_measurement_corrects_a_wrong_prediction(rounding: str, sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Comet(sigma, every=5, rounding=rounding)
    expected = last(run(policy, steps=20, lr=0.0))
    right = assess.predict
    monkeypatch.setattr(assess, "predict", lambda *figures: 3 * right(*figures))
    wrong = run(policy, steps=20, lr=0.0)
    first = {row["layer"]: row for row in weight_rows(wrong, 5)}
    for layer, row in last(wrong).items():
        assert row["gain"] == pytest.approx(1 / 3, rel=0.15) and first[layer]["gain"] == 1.0
        if rounding == "stochastic":
            assert row["bits"] == expected[layer]["bits"]
        else:
            assert row["bound"] == pytest.approx(expected[layer]["bound"], rel=0.1)
            assert first[layer]["bound"] == pytest.approx(row["bound"] / 3, rel=0.4)


def test_the_papers_formula_is_near_and_another_one() -> None:
    exact, paper = (last(run(Comet(every=5, rounding="nearest", formula=f), lr=0.0)) for f in ("exact", "paper"))
    ratios = [paper[layer]["in_force_predicted"] / exact[layer]["in_force_predicted"] for layer in WEIGHTS]
    assert all(ratio != 1.0 for ratio in ratios) and all(0.2 < ratio < 3 for ratio in ratios), ratios


# -- readers -----------------------------------------------------------------------------------------------------------


class Fork(nn.Module):
    """Two convolutions read one tensor; the gradient of one is the same every step, that of the other is noise."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        return self.a(h), self.b(h)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("noisy", [0, 1])
def test_a_tensor_is_packed_for_its_strictest_reader(rounding: str, noisy: int) -> None:
    torch.manual_seed(0)
    model = Fork()
    optimizer = sgd(model, 0.0)
    handle = encke.attach(
        model, Comet(0.07 if rounding == "stochastic" else 0.02, every=10, rounding=rounding), optimizer
    )
    x = BATCHES[0][0]
    for step in range(22):
        model.zero_grad()
        out = model(x)
        noise = torch.randn(out[0].shape, generator=torch.Generator().manual_seed(step))
        (out[noisy] * noise).mean().backward(retain_graph=True)
        (out[1 - noisy] * (1 + noise)).mean().backward()
        optimizer.step()
    rows = last(handle)
    strict, loose = rows["ab"[noisy]], rows["ba"[noisy]]
    settings = handle.policy.state_dict()["settings"]
    assert len([place for place in settings if place.startswith(("a/", "b/"))]) == 2
    (packed,) = [row for row in handle.report().sites if row.operation == "Tanh"]
    if rounding == "stochastic":
        assert strict["bits"] > loose["bits"] and packed.bound == f"{strict['bits']} bits"
    else:
        assert strict["bound"] < 0.7 * loose["bound"] and packed.bound == f"{strict['bound']:.3g} abs"


# -- optimizers, scaling, clipping, accumulation -----------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), 0.0, momentum=0.9),
    "Nesterov": lambda m: torch.optim.SGD(m.parameters(), 0.0, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), 0.0),
    "AdamW, fused": lambda m: torch.optim.AdamW(m.parameters(), 0.0, fused=True),
    "SGD without momentum": lambda m: torch.optim.SGD(m.parameters(), 0.0),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), 0.0),
}


def test_the_same_gradients_are_tolerated_the_same_whatever_the_optimizer() -> None:
    found = {}
    for name, make in OPTIMIZERS.items():
        model = net()
        optimizer = make(model)
        handle = encke.attach(model, Comet(every=5), optimizer)
        train(model, optimizer, 10)
        found[name] = last(handle)
    for rows in found.values():
        assert set(rows) == set(WEIGHTS)
        for layer in WEIGHTS:
            for figure in ("momentum", "tolerated", "predicted"):
                assert rows[layer][figure] == pytest.approx(found["SGD"][layer][figure], rel=1e-2)
            assert rows[layer]["bits"] == found["SGD"][layer]["bits"]


def test_an_optimizer_attached_late_counts_as_warm() -> None:
    model = net()
    optimizer = sgd(model, 0.0)
    train(model, optimizer, 60)
    handle = encke.attach(model, Comet(every=4), optimizer)
    train(model, optimizer, 4, first=61)
    reference = net()
    other = sgd(reference, 0.0)
    expected = encke.attach(reference, Comet(every=64), other)
    train(reference, other, 64)
    for layer, row in last(expected).items():
        assert last(handle)[layer]["momentum"] == pytest.approx(row["momentum"], rel=0.05)


def plain_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


class Scaled:
    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=7)

    def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        self.scaler.scale(F.cross_entropy(model(x), y)).backward()
        self.scaler.step(optimizer)
        self.scaler.update()


class ScaledAndClipped(Scaled):
    def __call__(self, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        self.scaler.scale(F.cross_entropy(model(x), y)).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        self.scaler.step(optimizer)
        self.scaler.update()


def scale_inside(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """As a gradient scaler does with a fused optimizer on a GPU."""
    (F.cross_entropy(model(x), y) * 512).backward()
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(512.0), torch.tensor(0.0)
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.cross_entropy(model(part), labels) / 4).backward()
    optimizer.step()


def accumulated_without_releasing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    accumulated(model, optimizer, x, y)
    optimizer.zero_grad(set_to_none=False)


def sgd_still(model: nn.Module) -> Optimizer:
    return sgd(model, 0.0)


WAYS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], Optimizer]]] = {
    "scaled": (Scaled, sgd_still),
    "scaled, no momentum": (Scaled, lambda m: sgd(m, 0.0, 0.0)),
    "scaled, fused Adam": (Scaled, lambda m: torch.optim.Adam(m.parameters(), 0.0, fused=True)),
    "scaled inside the step": (lambda: scale_inside, lambda m: torch.optim.Adam(m.parameters(), 0.0, fused=True)),
    "scaled inside, no momentum": (lambda: scale_inside, lambda m: torch.optim.SGD(m.parameters(), 0.0, fused=True)),
    "scaled and clipped": (ScaledAndClipped, sgd_still),
    "clipped": (lambda: clipped, sgd_still),
    "clipped, Adam": (lambda: clipped, OPTIMIZERS["Adam"]),
    "accumulated": (lambda: accumulated, sgd_still),
    "accumulated, no momentum": (lambda: accumulated, lambda m: sgd(m, 0.0, 0.0)),
    "accumulated, gradients kept": (lambda: accumulated_without_releasing, sgd_still),
}


def big_batches(step: Any, make: Callable[[nn.Module], Optimizer], rounding: str) -> dict[str, dict[str, Any]]:
    model = net(norm=False)
    optimizer = make(model)
    sigma = 0.3 if rounding == "stochastic" else 0.01
    handle = encke.attach(model, Comet(sigma, every=5, rounding=rounding), optimizer)
    # One batch: clipping gives every step the same norm, and the norms of different batches are not.
    x, y = (torch.cat([batch[j] for batch in BATCHES]) for j in range(2))
    for _ in range(10):
        model.zero_grad()
        step(model, optimizer, x, y)
    assert steps_of(handle) == [5, 10]
    return last(handle)


@pytest.fixture(scope="module")
def plainly() -> dict[str, dict[str, dict[str, Any]]]:
    return {rounding: big_batches(plain_step, sgd_still, rounding) for rounding in ROUNDINGS}


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_of_gradients_between_backward_and_step_changes_no_setting(
    way: str, rounding: str, plainly: dict[str, dict[str, dict[str, Any]]]
) -> None:
    step, make = WAYS[way]
    found, expected = big_batches(step(), make, rounding), plainly[rounding]
    for layer in WEIGHTS:
        mine, plain = found[layer], expected[layer]
        if rounding == "stochastic":
            # A fourth of the rows may be in other groups; a setting on the edge is not one to compare.
            shares = [row["predicted"] / row["tolerated"] for row in (mine, plain)]
            assert mine["bits"] == plain["bits"], (layer, shares)
            assert shares[0] == pytest.approx(shares[1], rel=0.3)
        else:
            assert mine["bound"] == pytest.approx(plain["bound"], rel=0.3), layer


# -- frozen layers, no optimizer, compress -----------------------------------------------------------------------------


def test_frozen_layers_cost_nothing_and_are_not_followed() -> None:
    model = net()
    model[3].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.02, momentum=0.9)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 12)
    assert set(last(handle)) == {"0", "5", "8"} and all(row["layer"] != "3" for row in handle.history)
    assert all(row.packed_bytes == 0 for row in handle.report().sites if row.layer == "3")


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_without_an_optimizer_averages_are_kept(rounding: str) -> None:
    model, other = net(), net()
    handle = encke.attach(model, Comet(every=5, rounding=rounding))
    train(model, None, 16, lr=0.0)
    optimizer = sgd(other, 0.0)
    expected = encke.attach(other, Comet(every=5, rounding=rounding), optimizer)
    train(other, optimizer, 16)
    assert steps_of(handle) == steps_of(expected) == [5, 10, 15]
    for layer, row in last(expected).items():
        mine = last(handle)[layer]
        assert mine["tolerated"] == pytest.approx(row["tolerated"], rel=0.02)
        assert mine["bits"] == row["bits"]
        assert mine["bound"] is None or mine["bound"] == pytest.approx(row["bound"], rel=0.05)


def test_a_handful_of_steps_are_averaged_and_then_forgotten() -> None:
    model = net()
    handle = encke.attach(model, Comet(every=100))
    schedule = handle.policy.schedule  # type: ignore[attr-defined]
    train(model, None, 45, lr=0.0)
    assert not schedule.averages.state_dict(dict(model.named_parameters()))
    train(model, None, 20, lr=0.0)
    kept = schedule.averages.state_dict(dict(model.named_parameters()))
    assert set(kept) == {f"{layer}.weight" for layer in WEIGHTS}


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_compress_follows_a_training_too(given: bool, rounding: str) -> None:
    model = net()
    optimizer = sgd(model)
    context = encke.compress(Comet(every=5, rounding=rounding), optimizer if given else None)
    for step in range(16):
        x, y = BATCHES[step % 4]
        model.zero_grad()
        with context as handle:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    rows = weight_rows(handle, 15)
    assert len(rows) == len(WEIGHTS)
    measured = [row for row in rows if row["in_force_measured"] is not None]
    assert measured
    for row in measured:
        assert row["in_force_predicted"] == pytest.approx(row["in_force_measured"], rel=0.2)
    handle.detach()
    assert hooks_left(model, optimizer) == 0


# -- gradients and activations that are no numbers ---------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["everywhere", "in one layer"])
def test_bad_gradients_leave_settings_and_the_next_step_collects_again(rounding: str, bad: float, where: str) -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5, rounding=rounding), optimizer)
    settings = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 24):
            x, y = BATCHES[step % 4]
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            hook = None
            if step in (10, 15, 16) and where == "in one layer":
                hook = model[0].weight.register_hook(lambda g: g * bad)
            (loss * bad if step in (10, 15, 16) and hook is None else loss).backward()
            if step in (10, 15, 16):
                # As a careful training does: the step is made without these gradients.
                for p in model.parameters():
                    p.grad.zero_()
            if hook is not None:
                hook.remove()
            optimizer.step()
            kept = handle.policy.state_dict()["settings"]
            settings.append({place: kept[place] for place in sorted(kept) if kept[place]["values"]})
    assert settings[9] == settings[8] and settings[14] == settings[15] == settings[13] != settings[16]
    assert steps_of(handle) == [5, 11, 17, 20]
    words = [str(w.message) for w in caught if "not finite" in str(w.message)]
    assert len(words) == 1 and "step 10" in words[0]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_an_overflow_that_the_scaler_skips_delays_the_collection() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for forward in range(1, 9):
        x, y = BATCHES[forward % 4]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (math.inf if forward == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    # The fifth forward pass had no step, so the sixth is the fifth step's.
    assert steps_of(handle) == [5] and handle.policy.schedule.updates == 7  # type: ignore[attr-defined]
    assert {row["layer"] for row in weight_rows(handle)} == set(WEIGHTS)


@pytest.mark.parametrize("given", [True, False], ids=["optimizer without momentum", "no optimizer"])
def test_averages_recover_from_one_bad_gradient(given: bool) -> None:
    model = net()
    optimizer = sgd(model, 0.0, 0.0)
    handle = encke.attach(model, Comet(every=5), optimizer if given else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 22):
            x, y = BATCHES[step % 4]
            model.zero_grad()
            (F.cross_entropy(model(x), y) * (math.inf if step == 8 else 1.0)).backward()
            optimizer.step()
            if step == 8:
                with torch.no_grad():
                    for p, good in zip(model.parameters(), net().parameters(), strict=True):
                        p.copy_(good)
    steps = steps_of(handle)
    assert steps[0] == 5 and steps[-2:] == [15, 20] and len(steps) <= 5, steps


def test_bad_activations_leave_the_norms_setting() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 3))
    optimizer = sgd(model, 0.0)
    handle = encke.attach(model, Comet(every=5, rounding="nearest"), optimizer)
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(1, 12):
            model.zero_grad()
            x = BATCHES[step % 4][0].clone()
            if step == 10:
                x[0, 0, 0, 0] = math.nan
            model(x).square().mean().backward()
            if step == 10:
                for p in model.parameters():
                    p.grad.zero_()
            optimizer.step()
            found.append(handle.policy.state_dict()["settings"])
    assert found[9] == found[8] and len(found[9]) == 3
    assert steps_of(handle) == [5, 11]


# -- normalisation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "share"), [(None, 0.25), (0.0025, 0.125), (0.02, 0.25 * math.sqrt(2)), (1.0, 0.5)])
def test_norm_inputs_are_bounded_by_their_spread(sigma: float | None, share: float) -> None:
    handle = run(Comet(sigma, every=5, rounding="nearest"))
    rows = [row for row in handle.history if row["layer"] == "1"]
    assert [row["step"] for row in rows] == [1, 5, 10, 15]
    for row in rows:
        assert row["operation"] == "NativeBatchNorm" and row["bound"] == pytest.approx(share * row["std"])
    x = BATCHES[15 % 4][0]
    # The last row's spread is that of the tensor itself, a step before the weights moved on.
    assert rows[-1]["std"] == pytest.approx(float(handle.model[0](x).detach().std()), rel=0.05)  # type: ignore[attr-defined]


def test_norm_inputs_take_the_bits_that_their_spread_allows() -> None:
    for sigma, bits in ((0.4, 2), (0.01, 4), (1e-5, 8)):
        handle = run(Comet(sigma, every=5))
        assert {row["bits"] for row in handle.history if row["layer"] == "1"} == {bits}, sigma


# -- state -------------------------------------------------------------------------------------------------------------


def resumed(state: dict[str, Any], policy: Comet, given: bool) -> tuple[nn.Module, Optimizer | None, encke.api.Handle]:
    model = net()
    model.load_state_dict(state["model"])
    optimizer = sgd(model) if given else None
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    handle = encke.attach(model, policy, optimizer)
    handle.load_state_dict(state["encke"])
    return model, optimizer, handle


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("given", [True, False], ids=["SGD", "no optimizer"])
@pytest.mark.parametrize("split", [3, 10, 11, 13])
def test_a_resumed_run_decides_and_ends_like_an_uninterrupted_one(split: int, given: bool, rounding: str) -> None:
    policy = Comet(0.1 if rounding == "stochastic" else None, every=5, rounding=rounding)
    model = net()
    optimizer = sgd(model) if given else None
    handle = encke.attach(model, policy, optimizer)
    train(model, optimizer, split)
    state = {"model": model.state_dict(), "encke": handle.state_dict()}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    state = through_a_file(state)
    train(model, optimizer, 22 - split, first=split + 1)
    again, other, second = resumed(state, policy, given)
    train(again, other, 22 - split, first=split + 1)
    assert second.history == handle.history and steps_of(second) == [5, 10, 15, 20]
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert second.policy.state_dict()["settings"] == handle.policy.state_dict()["settings"]
    assert repr(second.report().sites) == repr(handle.report().sites)


def test_where_memory_is_short_places_are_measured_in_turn_also_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comet_policy, "PROBED", 1)
    policy = Comet(every=5)
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, policy, optimizer)
    train(model, optimizer, 17)
    saved = {"model": model.state_dict(), "encke": handle.state_dict(), "optimizer": optimizer.state_dict()}
    state = through_a_file(saved)
    train(model, optimizer, 9, first=18)
    again, other, second = resumed(state, policy, True)
    train(again, other, 9, first=18)
    rows = [row for row in weight_rows(handle) if row["in_force_measured"] is not None]
    assert [row["step"] for row in rows] == [10, 15, 20, 25]
    assert {row["layer"] for row in rows} == set(WEIGHTS)
    assert second.history == handle.history


def test_a_state_stays_as_it_was_when_training_goes_on() -> None:
    model = net()
    handle = encke.attach(model, Comet(every=5))
    train(model, None, 7)
    state = handle.state_dict()
    before = through_a_file(state)
    train(model, None, 7, first=8)
    assert repr(state) == repr(before)


def test_wrong_states_are_told() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer)
    train(model, optimizer, 6)
    state = handle.state_dict()
    other = encke.attach(net(), Comet(rounding="nearest"))
    with pytest.raises(ValueError, match=r"saved with Comet\(every=5\).*Comet\(rounding='nearest'\).*stochastic"):
        other.load_state_dict(state)
    for key in ("settings", "follower", "history"):
        broken = {name: value for name, value in state["policy"].items() if name != key}
        with pytest.raises(ValueError, match=f"not a state of Comet.*{key}"):
            handle.load_state_dict({**state, "policy": broken})
    handle.load_state_dict(state)


def test_one_policy_serves_two_models() -> None:
    policy = Comet(every=5)
    handles = []
    for steps in (6, 11):
        model = net()
        optimizer = sgd(model)
        handles.append((encke.attach(model, policy, optimizer), model, optimizer, steps))
    for _, model, optimizer, steps in handles:
        train(model, optimizer, steps)
    assert steps_of(handles[0][0]) == [5] and steps_of(handles[1][0]) == [5, 10]
    assert policy.history == [] and policy.settings == {}


def test_what_is_chosen_before_the_first_collection() -> None:
    assert initial_codec(True, 3) == GroupQuant(2, seed=3) and initial_codec(False, 0) == ErrorBounded(1e-2, "rel")


# -- history, log, detach ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_history_has_a_row_for_each_place_of_each_collection_step(rounding: str) -> None:
    handle = run(Comet(every=5, rounding=rounding), steps=11)
    assert {(row["step"], row["layer"]) for row in handle.history} == {
        (1, "1"),  # in the first step there is no momentum to speak of
        *((step, layer) for step in (5, 10) for layer in (*WEIGHTS, "1")),
    }
    assert len(handle.history) == 11
    for row in handle.history:
        assert (row["bits"] is None) == (rounding == "nearest") == (row["bound"] is not None)
        assert 0 < row["share"] <= 1 and row["std"] > 0
        if row["layer"] in WEIGHTS:
            assert row["predicted"] > 0 and row["tolerated"] > 0 and row["momentum"] > 0
    json.dumps(handle.history, allow_nan=False)
    handle.history.clear()
    assert handle.history


def test_log_writes_every_layer_at_every_forward_pass(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=3, rounding="nearest"), optimizer)
    path = tmp_path / "log.jsonl"
    handle.log(path)
    train(model, optimizer, 5)
    assert len(path.read_text().splitlines()) == 4
    report = handle.report()
    handle.detach()
    handle.detach()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[-1]["ratio"] == pytest.approx(report.ratio)
    assert lines[-1]["sites"] == json.loads(json.dumps(report.to_dict()["sites"]))
    for line in lines:
        assert line["saved_bytes"] / line["packed_bytes"] == pytest.approx(line["ratio"])
        lossy = [row for row in line["sites"] if row["codec"] == "ErrorBounded"]
        assert len(lossy) >= 5 and all(row["bound"] and row["ratio"] > 1 and row["layer"] for row in lossy)
        # One line a step, the bound of that step: relative before the first collection, absolute after.
        for row in lossy:
            first = 1 if row["operation"] == "NativeBatchNorm" else 3
            assert ("rel" in row["bound"]) == (line["step"] <= first)


def test_log_to_a_stream_is_to_be_read() -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=3), optimizer)
    stream = io.StringIO()
    handle.log(stream)
    train(model, optimizer, 2)
    handle.detach()
    lines = stream.getvalue().splitlines()
    assert any(line.startswith("step 1 0 Convolution.input GroupQuant 2 bits ratio ") for line in lines)
    assert [line.split(" ratio ")[0] for line in lines if " all " in line] == ["step 1 all", "step 2 all"]
    assert float(lines[-1].split()[-1]) == pytest.approx(handle.report().ratio, abs=0.01)


def test_log_every_third_pass_and_its_end(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(), optimizer)
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n")
    handle.log(str(path), every=3)
    train(model, optimizer, 8)
    assert [json.loads(line).get("step") for line in path.read_text().splitlines()] == [None, 3, 6]
    handle.log(None)
    train(model, optimizer, 8)
    handle.detach()
    assert len(path.read_text().splitlines()) == 3


def test_bad_log_targets_are_told(tmp_path: Path) -> None:
    handle = encke.attach(net())
    with pytest.raises(FileNotFoundError, match="folder .*missing does not exist"):
        handle.log(tmp_path / "missing" / "log.jsonl")
    with pytest.raises(TypeError, match="path or an open text stream, got int"):
        handle.log(3)  # type: ignore[arg-type]
    for every in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="every must be"):
            handle.log(tmp_path / "log.jsonl", every=every)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def hooks(model: nn.Module, optimizer: Any) -> Iterator[int]:
    yield len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    for p in model.parameters():
        yield len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ())


def hooks_left(model: nn.Module, optimizer: Any) -> int:
    return sum(hooks(model, optimizer))


@pytest.mark.parametrize("given", [True, False], ids=["optimizer", "no optimizer"])
def test_detach_takes_every_hook_off(given: bool) -> None:
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=5), optimizer if given else None)
    train(model, optimizer, 6)
    # In the middle of a collection step, too.
    train(model, None, 4, first=7, lr=0.0)
    x, y = BATCHES[0]
    loss = F.cross_entropy(model(x), y)
    assert hooks_left(model, optimizer) > 0
    history = handle.history
    handle.detach()
    assert hooks_left(model, optimizer) == 0
    loss.backward()
    train(model, optimizer, 6)
    assert handle.history == history and history


# -- odd products ------------------------------------------------------------------------------------------------------


class LeftHanded(nn.Module):
    """The weight is the first factor, so that rows of the input are not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(96, 64) / 8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ torch.sin(x * self.scale)


class Tokens(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(64, 64, bias=False), nn.Parameter(torch.ones(()))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(torch.sin(x * self.scale))
        return x


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_part_of_a_large_input_tells_the_whole(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encke.policies.comet.measure, "PROBE", 4096)
    for model, shape in ((Tokens(), (512, 64)), (LeftHanded(), (64, 512))):
        optimizer = sgd(model, 0.0)
        handle = encke.attach(model, Comet(every=2, rounding=rounding), optimizer)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        noise = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(1))
        for _ in range(6):
            model.zero_grad()
            (model(x) * (noise + 0.1)).mean().backward()
            optimizer.step()
        rows = [row for row in weight_rows(handle) if row["in_force_measured"] is not None]
        assert rows
        for row in rows:
            assert row["in_force_measured"] == pytest.approx(row["in_force_predicted"], rel=0.2), type(model)


@pytest.mark.parametrize("codec", [GroupQuant(bits=2), ErrorBounded(0.05, "rel")], ids=["rate", "bound"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_what_is_kept_of_an_error_is_small_and_tells_it(codec, memory) -> None:
    """And cuDNN does not try algorithms for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 32, 16, 16, generator=generator).relu().contiguous(memory_format=memory)
    flat, layout = flatten(x)
    packed = codec.encode_flat(flat, layout, 3)
    probe = ErrorProbe(flat, layout, packed, 3, whole=True)
    assert probe.error.nbytes < 0.6 * x.numel()
    g = torch.randn(8, 24, 16, 16, generator=generator)
    settings = []

    def weight_gradient(g: Tensor, e: Tensor) -> Tensor:
        settings.append(torch.backends.cudnn.benchmark)
        return torch.einsum("nohw,nihw->oi", g, e)

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        measured = probe.measure(g, weight_gradient)
        assert settings == [False] and torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before
    exact = weight_gradient(g, layout.restore(packed.decode_flat()) - x).square().mean()
    assert measured.item() == pytest.approx(exact.item(), rel=0.1)


def test_a_weight_used_twice_may_err_less_each_time() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    for times in (1, 2):
        model = Tokens(times)
        optimizer = sgd(model, 0.0)
        handle = encke.attach(model, Comet(0.2, every=5), optimizer)
        for _ in range(5):
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        rows = weight_rows(handle)
        assert len(rows) == times
        for row in rows:
            assert row["tolerated"] == pytest.approx(0.2 * row["momentum"] / math.sqrt(times))


# -- the smallest inputs -----------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Large inputs of convolutions, and a small one of the last layer, nearly the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu().mean([2, 3]) + 1)


@pytest.mark.parametrize(("spare", "bits"), [(0.01, 8), (0.0, 2)])
def test_the_smallest_inputs_have_the_most_bits_from_the_second_step_on(spare, bits, monkeypatch) -> None:
    monkeypatch.setattr(assess, "CHEAP_SHARE", spare)
    torch.manual_seed(0)
    model = Pooled()
    optimizer = sgd(model, 0.0)
    handle = encke.attach(model, Comet(sigma=1e3), optimizer)  # nothing else asks for more than two
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    for step in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rows = {row.layer: row.bound for row in handle.report().sites if row.codec == "GroupQuant"}
        assert rows["first"] == "2 bits" and rows["last"] == f"{bits if step else 2} bits"
    rows = [row for row in handle.history if row["step"] == 10]
    assert {row["layer"]: row["bits"] for row in rows} == {"first": 2, "second": 2, "last": bits}
