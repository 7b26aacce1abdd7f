"""`encke.estimate`: lines in the batch, peaks and the largest batch under a cap."""

from __future__ import annotations

from collections import UserDict
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import encke
from encke.bench.estimate import measure_task, show_measured
from encke.bench.steps import Task
from encke.cli import main
from encke.codecs import GroupQuant
from encke.estimation import BATCHES, STEPS, Forecast, Line, copied, resized
from encke.policies import Comet, Fixed, Policy
from encke.tools.allocations import Allocations
from encke.tools.provenance import read_csv

pytestmark = pytest.mark.slow


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


@pytest.fixture(scope="module")
def found() -> encke.Estimate:
    return encke.estimate(network(), torch.randn(3, 64), batch=1000, memory=10**8, optimizer="sgd")


def test_what_autograd_saves_is_counted_exactly(found):
    # The input, the output of Tanh and that of ReLU: each is saved once, by the layer before and the one behind.
    assert found.plain.held == Line(0.0, 4 * (64 + 512 + 512))
    assert found.plain.held_bytes(1000) == 4_352_000


def test_what_encke_holds_is_the_report_of_the_same_steps(found):
    assert found.encke.held.at(BATCHES[1]) == packed(BATCHES[1], "default", min_bytes=1)
    assert found.encke.held.fixed == 0.0  # the smaller batch is packed with the same bits


def packed(batch: int, policy: Policy | str, min_bytes: int | None = None) -> int:
    model, optimizer = copied(network(), "sgd")
    handle = encke.attach(model, policy, optimizer, min_bytes=min_bytes)
    for _ in range(STEPS):
        model(resized(torch.randn(3, 64), batch)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return handle.report().packed_bytes


def test_tensors_that_are_small_at_a_batch_count_unpacked_whatever_batch_is_shown():
    policy = Fixed(GroupQuant(bits=4))
    forecasts = [encke.estimate(network(), torch.randn(3, 64), n, None, "sgd", policy=policy).encke for n in (1, 1000)]
    assert forecasts[0] == forecasts[1]
    for batch in (8, 63, 64, 1000):  # of 64 x 4 bytes and 512 x 4 bytes a sample
        assert forecasts[0].held_bytes(batch) == packed(batch, policy)
    assert forecasts[0].held_bytes(7) == 7 * 4 * (64 + 512 + 512)


def test_negligible_tensors_count_unpacked():
    big, little = (Line(0, 2**30), Line(0, 2**27)), (Line(0, 2**15), Line(0, 2**12))
    forecast = Forecast(Line(0, 2**27 + 2**12), (Line(0, 2**30),), (big, little))
    assert forecast.held_bytes(1) == 2**27 + 2**15
    # Of many such tensors, no more than 0.3 % of all stays unpacked.
    many = replace(forecast, sites=(big, *[little] * 1000))
    assert 0.0025 < (many.peak_bytes(1) - 2**30) / (2**30 + 1000 * 2**15) < 0.003


def test_weights_gradients_and_momentum_are_counted(found):
    weights = 4 * sum(parameter.numel() for parameter in network().parameters())
    assert found.weight_bytes == found.gradient_bytes == found.optimizer_bytes == weights
    # At the end of backward all three are alive.
    assert min(each.peak_bytes(1) for each in (found.plain, found.encke)) >= 3 * weights


def test_the_peak_is_that_of_a_whole_step_at_another_batch(found):
    model, optimizer = copied(network(), "sgd")
    model(torch.randn(2, 64)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with Allocations() as allocations:
        data = torch.randn(1000, 64)
        model(data).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    measured = found.weight_bytes + found.optimizer_bytes + max(allocations.alive)
    assert found.plain.peak_bytes(1000) == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("way", ["plain", "encke"])
def test_the_largest_batch_just_fits(found, way):
    forecast = getattr(found, way)
    batch = forecast.largest_batch(10**8)
    assert forecast.peak_bytes(batch) <= 10**8 < forecast.peak_bytes(batch + 1)
    assert forecast.largest_batch(forecast.peak_bytes(1)) == 1
    assert forecast.largest_batch(forecast.peak_bytes(1) - 1) == 0


def test_the_peak_is_in_the_part_that_grows_most_at_a_large_batch():
    forecast = Forecast(Line(0, 1), (Line(100, 1), Line(10, 2)))
    assert [forecast.peak_bytes(batch) for batch in (1, 90, 100)] == [101, 190, 210]


def test_model_optimizer_and_random_numbers_stay_as_they_were():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    handle = encke.attach(model, optimizer=optimizer)
    with torch.no_grad():
        found = encke.estimate(model, (torch.randn(2, 3, 16, 16),), optimizer=optimizer)
    torch.random.set_rng_state(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not optimizer.state and all(parameter.grad is None for parameter in model.parameters())
    assert handle.report().forwards == 0
    assert found.optimizer_bytes == 2 * found.gradient_bytes + 4 * 4  # and a count of steps for each parameter


def test_keyword_arguments_and_a_loss_of_one_s_own():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.layer(x), labels), "unused": x}

    example = {"x": torch.randn(2, 16), "labels": torch.tensor([0, 1])}
    by_model = encke.estimate(Model(), example)
    by_loss = encke.estimate(Model(), example, loss=lambda model, batch: model(**batch)["loss"])
    # Input, log-probabilities and labels, and cross-entropy's sum of weights.
    assert by_model.plain.held == by_loss.plain.held == Line(4.0, 4 * 16 + 4 * 4 + 8)


def test_the_table_fits_a_terminal_and_says_what_does_not_fit(found):
    shown = str(found)
    assert max(map(len, shown.splitlines())) <= 80
    assert "4.4 MB" in shown and f"{found.encke.largest_batch(10**8):,}" in shown
    small = encke.Estimate(**{**found.__dict__, "memory": 1000})
    assert "none fits" in str(small) and "allow more memory" in str(small)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.randn(2, 63),), RuntimeError, "does not train on 4 samples of the example"),
        ((torch.randn(0, 64),), ValueError, "no samples"),
        (([],), ValueError, "no samples"),
        ((torch.randn(2, 64), 0), ValueError, "batch must be at least 1"),
        ((torch.randn(2, 64), 2.5), TypeError, "batch must be a whole number"),
        ((torch.randn(2, 64), 2, 0), ValueError, "memory must be at least 1"),
        ((torch.randn(2, 64), 2, 1, "lion"), ValueError, "optimizer must be"),
    ],
    ids=["shape", "empty", "nothing", "batch", "fraction", "memory", "optimizer"],
)
def test_what_cannot_be_estimated_is_an_error(arguments, error, words):
    with pytest.raises(error, match=words):
        encke.estimate(network(), *arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"optimizer": None}, ValueError, "optimizer must be .* got None"),
        ({"policy": "commet"}, ValueError, "unknown preset"),
        ({"policy": None}, TypeError, "policy must be a name"),
        ({"loss": "mse"}, TypeError, "loss must be a function of model and batch, got str"),
        (
            {"loss": lambda model, batch: (model(batch), 1)},
            TypeError,
            "must return a tensor, the loss alone, got tuple",
        ),
        (
            {"loss": lambda model, batch: model(batch)},
            ValueError,
            r"one number .* got a tensor with the shape \(4, 10\)",
        ),
        ({"loss": lambda model, batch: model(batch).mean().detach()}, ValueError, "got a tensor with no gradient"),
        ({"example": torch.randn(2, 64, device="meta")}, ValueError, "the example has no values"),
    ],
    ids=["optimizer", "preset", "policy", "loss", "tuple", "vector", "detached", "meta"],
)
def test_what_is_wrong_is_named(options, error, words):
    with pytest.raises(error, match=words):
        encke.estimate(network(), **{"example": torch.randn(2, 64)} | options)


def test_an_optimizer_that_takes_more_than_gradients_is_an_error():
    model = network()
    with pytest.raises(RuntimeError, match='LBFGS does not step .*closure.*; pass optimizer="adamw"'):
        encke.estimate(model, torch.randn(2, 64), optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_policy_and_its_state_are_not_used_up():
    policy, data = Comet(), torch.randn(8, 64)
    found = [encke.estimate(network(), data, 1000, policy=each).encke.held for each in (policy, policy, "default")]
    assert found[0] == found[1] == found[2] and not policy.history


def test_mappings_inference_mode_and_frozen_norms():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

        def forward(self, x):
            assert self.training and not self.norm.training
            return self.norm(self.layer(x))

    model = Model()
    model.norm.eval()
    with torch.inference_mode():
        found = encke.estimate(model, UserDict(x=torch.randn(2, 64)))
    assert found.plain.held.per_sample == 4 * (64 + 64)
    assert model.training and not model.norm.training


def test_models_that_cannot_be_copied_are_refused():
    with pytest.raises(TypeError, match="estimate takes a torch.nn.Module"):
        encke.estimate(torch.tanh, torch.randn(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="before torch.compile"):
        encke.estimate(torch.compile(network()), torch.randn(2, 64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no values"):
        encke.estimate(nn.Linear(2, 2, device="meta"), torch.randn(2, 2))
    with pytest.raises(ValueError, match="no parameters to train"):
        encke.estimate(nn.Tanh(), torch.randn(2, 2))
    with pytest.raises(ValueError, match="run one forward pass first"):
        encke.estimate(nn.LazyLinear(2), torch.randn(2, 2))
    model = nn.Linear(2, 2)
    model.last = model(torch.randn(2, 2))
    with pytest.raises(RuntimeError, match="Linear cannot be copied .* earlier steps"):
        encke.estimate(model, torch.randn(2, 2))


def test_a_terminal_alone_shows_progress(monkeypatch, capsys):
    shown: list[int] = []
    monkeypatch.setattr("encke.estimation.progress", lambda *given, **named: nullcontext(shown.append))
    encke.estimate(network(), torch.randn(2, 64))
    assert shown == [] and capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    encke.estimate(network(), torch.randn(2, 64))
    assert shown == [4, 8, 24, 12]


def test_a_profiler_at_work_is_an_error():
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="leave it first"):
        encke.estimate(network(), torch.randn(2, 64))


def test_allocations_are_followed_in_order():
    with Allocations() as allocations:
        first = torch.zeros(1000)
        allocations.mark("one")
        second = torch.zeros(2000)
        del first
        allocations.mark("two")
        del second
        allocations.mark("three")
    assert allocations.alive == [4000, 12000, 8000, 0]
    assert [(part.name, max(part.peaks)) for part in allocations.parts] == [
        ("one", 4000),
        ("two", 12000),
        ("three", 8000),
    ]
    assert allocations.parts[1].operations[1] == "aten::zeros"
    assert allocations.times == sorted(allocations.times)


def test_the_command_prints_the_estimate(capsys):
    main(["estimate", "cnn", "--batch", "64", "--image", "32", "--memory", "64MiB"])
    shown = capsys.readouterr().out
    assert shown.startswith("cnn, fp32, batch 64, 32 x 32, cpu, sgd\n")
    assert "expected peak at batch 64" in shown and "largest batch in 67.1 MB" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["resnet51"], "MODEL: there is no 'resnet51'"),
        (["cnn", "--batch", "0"], "--batch must be at least 1"),
        (["cnn", "--memory", "much"], "--memory: 'much'"),
        (["vit_b_16", "--image", "65"], "multiple of 16"),
    ],
    ids=["model", "batch", "memory", "image"],
)
def test_a_senseless_option_is_named(options, words, capsys):
    with pytest.raises(SystemExit):
        main(["estimate", *options])
    assert words in capsys.readouterr().err


def test_a_rehearsal_of_the_same_steps_comes_before_the_measurement(monkeypatch):
    asked: list[dict[str, object]] = []

    class Answers:
        def __init__(self, task: Task) -> None:
            self.batch = task.batch

        def __enter__(self) -> Answers:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def ask(self, **request: object) -> dict[str, object]:
            asked.append(request)
            return {"failed": "out of memory"} if self.batch > 4 and "first" in request else {"peak_bytes": 1}

    monkeypatch.setattr("encke.bench.estimate.Child", Answers)
    task = Task("cnn", "default", "fp32", 4, 32, 1, "cpu")
    assert measure_task(task) == {"peak_bytes": 1} and asked == [{"first": task.warm}, {"measure": True}]
    assert measure_task(replace(task, batch=8)) == {"failed": "out of memory"}


def test_measured_peaks_are_added_to_a_file(monkeypatch, tmp_path, capsys):
    answers = {"plain": (900.0, 1000.0, 700.0), "default": (500.0, 500.0, 400.0)}

    def measured(task):
        names = ("peak_bytes", "peak_with_collection_bytes", "peak_added_bytes")
        return dict(zip(names, answers[task.method], strict=True))

    monkeypatch.setattr("encke.bench.estimate.measure_task", measured)
    monkeypatch.chdir(tmp_path)
    task = Task("cnn", "plain", "fp32", 4, 32, 1, "cpu")
    for _ in range(2):
        show_measured([660, 300], {"plain": task, "default": replace(task, method="default")})
    rows = read_csv(tmp_path / "runs/bench/estimate.csv")
    assert [(row["method"], row["peak_bytes"], row["off_percent"]) for row in rows[:2]] == [
        ("plain", 600, 10),
        ("default", 400, -25),
    ]
    assert len(rows) == 4 and "+10.0 %" in capsys.readouterr().out
