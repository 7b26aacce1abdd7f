"""Assessment: predicted errors against measured ones, and the settings that follow."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Comet
from encke.policies.comet import assess
from encke.policies.comet.theory import error_std
from tests.policies.comet.trainings import (
    BATCHES,
    ROUNDINGS,
    WEIGHTS,
    last,
    net,
    off,
    run,
    sgd,
    train,
    weight_rows,
)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_predicted_errors_are_the_measured_ones(rounding: str) -> None:
    handle = run(Comet(every=5, rounding=rounding), steps=40)
    assert off(handle) < 0.15
    assert all(row["in_force_measured"] is None for row in weight_rows(handle, 1))


@pytest.mark.parametrize("sigma", [0.05, 0.2, 1.0])
def test_fewest_bits_that_are_tolerated(sigma: float) -> None:
    handle = run(Comet(sigma, every=5))
    for row in weight_rows(handle):
        assert row["bits"] in (2, 3, 4, 8) and row["bound"] is None
        assert row["predicted"] <= row["tolerated"] or row["bits"] == 8
        assert row["tolerated"] == pytest.approx(sigma * row["momentum"])
    assert {row["layer"] for row in weight_rows(handle, 15)} == set(WEIGHTS)


def test_bits_in_between_would_not_have_done() -> None:
    """A setting one finer is never chosen without need."""
    coarse, fine = (last(run(Comet(sigma, every=5), lr=0.0)) for sigma in (1e3, 1e-3))
    wanted, loose = (last(run(Comet(sigma, every=5), lr=0.0)) for sigma in (0.1, 0.2))
    for layer in WEIGHTS:
        assert coarse[layer]["bits"] == 2 and fine[layer]["bits"] == 8
        # The coarse run predicts the error of two bits, in the same step with the same gradients.
        assert (wanted[layer]["bits"] == 2) == (coarse[layer]["predicted"] <= wanted[layer]["tolerated"])
        # At the larger sigma, the limit of all errors together requires more bits in one layer.
        assert (loose[layer]["bits"] == 2) <= (coarse[layer]["predicted"] <= loose[layer]["tolerated"])
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
        # The result of a ReLU before a layer is saved by the ReLU first.
        saved = rows.get(layer) or rows.get(str(int(layer) - 1)) or rows[str(int(layer) - 2)]
        assert saved.startswith(f"{row['bound']:.3g} abs")
    codecs = [setting.codec for setting in handle.policy.settings.values()]  # type: ignore[attr-defined]
    assert codecs and all(isinstance(codec, ErrorBounded) and codec.coarsens for codec in codecs)


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
        return right(formula, sample, gradient, power / float(sample.stats.tensors[0]), mean)

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
    first = {row["layer"]: row for row in weight_rows(wrong, 1)}
    for layer, row in last(wrong).items():
        assert row["gain"] == pytest.approx(1 / 3, rel=0.15) and first[layer]["gain"] == 1.0
        if rounding == "stochastic":
            assert row["bits"] == expected[layer]["bits"]
        else:
            assert row["bound"] == pytest.approx(expected[layer]["bound"], rel=0.1)
            bound, wanted = (each["bound"] / each["tolerated"] for each in (first[layer], row))
            assert bound == pytest.approx(wanted / 3, rel=0.4)


def test_the_papers_formula_is_near_and_another_one() -> None:
    exact, paper = (last(run(Comet(every=5, rounding="nearest", formula=f), lr=0.0)) for f in ("exact", "paper"))
    ratios = [paper[layer]["in_force_predicted"] / exact[layer]["in_force_predicted"] for layer in WEIGHTS]
    assert all(ratio != 1.0 for ratio in ratios) and all(0.2 < ratio < 3 for ratio in ratios), ratios


@pytest.mark.parametrize(("sigma", "share"), [(None, 0.25), (0.0025, 0.125), (0.02, 0.25 * math.sqrt(2)), (1.0, 0.5)])
def test_norm_inputs_are_bounded_by_their_spread(sigma: float | None, share: float) -> None:
    handle = run(Comet(sigma, every=5, rounding="nearest"))
    rows = [row for row in handle.history if row["layer"] == "1"]
    assert [row["step"] for row in rows] == [1, 5, 10, 15]
    for row in rows:
        assert row["operation"] == "BatchNorm" and row["bound"] == pytest.approx(share * row["std"])
    x = BATCHES[15 % 4][0]
    # The last row's spread is that of the tensor itself, one step before the weights changed.
    assert rows[-1]["std"] == pytest.approx(float(handle.model[0](x).detach().std()), rel=0.05)  # type: ignore[attr-defined]


def test_norm_inputs_take_the_bits_that_their_propagated_error_allows() -> None:
    def bits(sigma: float) -> list[int]:
        handle = run(Comet(sigma, every=2), steps=4, lr=0.0)
        return [row["bits"] for row in handle.history if row["layer"] == "1"]

    low, high = 1e-5, 0.4
    assert set(bits(low)) == {8} and set(bits(high)) == {2}
    # All other inputs have 8 bits before the norm has 4: the range of sigma in between is small.
    for _ in range(12):
        middle = math.sqrt(low * high)
        *_, found = bits(middle)
        if found == 4:
            break
        low, high = (middle, high) if found == 8 else (low, middle)
    assert found == 4


def test_lasting_codecs_are_those_of_half_the_sigma() -> None:
    whole, half = (run(Comet(sigma, every=2), steps=2, lr=0.0).policy for sigma in (0.2, 0.1))
    assert isinstance(whole, Comet) and isinstance(half, Comet) and whole.settings.keys() == half.settings.keys()
    for place, setting in whole.settings.items():
        expected, lasting = half.settings[place].codec, setting.lasting
        assert isinstance(expected, GroupQuant) and isinstance(setting.codec, GroupQuant)
        assert isinstance(lasting, GroupQuant) and lasting.bits == max(expected.bits, setting.codec.bits)
    assert any(setting.lasting != setting.codec for setting in whole.settings.values())


class Pooled(nn.Module):
    """Large inputs of convolutions, and a small one of the last layer, nearly the same for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.last = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).relu().mean([2, 3]) + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("spare", "bits"), [(0.01, 8), (0.0, 2)])
def test_the_smallest_inputs_have_the_most_bits_from_the_second_step_on(spare, bits, monkeypatch) -> None:
    monkeypatch.setattr(assess, "CHEAP_SHARE", spare)
    torch.manual_seed(0)
    model = Pooled()
    optimizer = sgd(model, 0.0)
    handle = encke.attach(model, Comet(sigma=1e3), optimizer)  # no other limit requires more than two
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    for step in range(10):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        rows = {row.layer: row.bound for row in handle.report().sites if row.codec == "GroupQuant"}
        assert rows["first"] == ("2 bits" if step else "4 bits")
        assert rows["last"] == (f"{bits} bits" if step else "4 bits")
    rows = [row for row in handle.history if row["step"] == 10]
    assert {row["layer"]: row["bits"] for row in rows} == {"first": 2, "second": 2, "last": bits}


def test_inputs_of_computed_weights_keep_four_bits() -> None:
    """The error of such a weight's gradient is not measured, so no limit could justify fewer bits."""
    model = net(norm=False)
    for layer in (3, 8):
        nn.utils.parametrizations.weight_norm(model[layer])
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(1e3, every=5), optimizer)
    train(model, optimizer, 6)
    bits = {row["layer"]: row["bits"] for row in handle.history if row["slot"] in ("input", "mat1")}
    assert bits == {"0": 2, "3": 4, "5": 2, "8": 4}
