"""The accuracy benchmarks: schedule, table and statistics, and a smoke run of each script on the CPU."""

from __future__ import annotations

import io
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import encke

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import runs  # type: ignore[import-not-found]

    return runs


@pytest.fixture
def pairs(runs):
    import pairs  # type: ignore[import-not-found]

    return pairs


@pytest.fixture
def cifar(runs):
    import accuracy_cifar

    return accuracy_cifar


@pytest.fixture
def gpt(runs):
    import accuracy_gpt

    return accuracy_gpt


def call(monkeypatch, script: str, *arguments: object) -> int:
    """Runs a script's command in this process; its workers are processes of their own."""
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / script), *map(str, arguments)])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    with pytest.raises(SystemExit) as done:
        runpy.run_path(sys.argv[0], run_name="__main__")
    return int(done.value.code)


def test_runs_come_pair_by_pair_and_each_once(runs):
    assert runs.parse_runs(["plain:0-2", "careful:1,3", "plain:2-3"]) == [
        ("plain", 0),
        ("plain", 1),
        ("careful", 1),
        ("plain", 2),
        ("careful", 3),
        ("plain", 3),
    ]


@pytest.mark.parametrize("text", ["plain", "plain:", "plain:x", "plane:0", "2 bits:0", "comet 0.1:0"])
def test_a_run_that_makes_no_sense_is_refused(runs, text):
    with pytest.raises(ValueError, match="METHOD:SEEDS|choose one of plain, default"):
        runs.parse_runs([text])


def test_methods_attach_their_policies(runs):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert runs.attach_method("plain", model, optimizer) is None
    handle = runs.attach_method("group4", model, optimizer)
    assert handle.policy.codec.bits == 4
    handle.detach()
    runs.attach_method("default", model, optimizer).detach()


ROWS = [
    {"method": method, "seed": str(seed), "accuracy": str(value), "ratio": str(ratio)}
    for method, ratio, values in (
        ("plain", 1.0, (90, 92, 94)),
        ("group2", 14.0, (89, 92, 92)),
        ("division", 9.0, (91,)),
    )
    for seed, value in enumerate(values)
]


def test_the_summary_pairs_seeds_with_plain(pairs):
    plain, bits, division = pairs.summarise(ROWS)
    assert (plain.seeds, plain.pairs, plain.of("accuracy").mean, plain.of("accuracy").differences) == (3, 0, 92, ())
    # Differences -1, 0, -2: mean -1, deviation 1, and t for two degrees of freedom is 4.3027.
    accuracy = bits.of("accuracy")
    assert (accuracy.plain, accuracy.mean, accuracy.differences) == (92, 91, (-1, 0, -2))
    assert pairs.interval(accuracy.differences) == pytest.approx((-1 - 4.3027 / 3**0.5, -1 + 4.3027 / 3**0.5))
    # One pair has a difference to plain's run with the same seed alone, and no interval.
    assert division.of("accuracy").differences == (1,) and pairs.interval((1.0,)) is None
    assert division.verdict == "undecided"
    shown = pairs.show([bits]).splitlines()
    assert shown[0] == "group2: 3 runs, 3 pairs with plain: undecided"
    assert shown[2].split() == "accuracy, % 92.00 91.00 -1.00 -3.48 to +1.48 -0.3 undecided".split()


def test_the_verdict_follows_the_interval_and_the_margin(pairs):
    accuracy, loss, train, *rest = pairs.QUANTITIES
    assert [(q.column, q.margin) for q in (accuracy, loss, train)] == [
        ("accuracy", 0.3), ("best_loss", 0.5), ("train_loss", 2.0),
    ]  # fmt: skip
    assert all(quantity.margin is None for quantity in rest)
    # By hand: mean -0.1, deviation 0.1, n = 4, t = 3.1824, half width 3.1824 * 0.1 / 2 = 0.15912.
    differences = [-0.1 - 0.1 * 0.75**0.5, -0.1 + 0.1 * 0.75**0.5] * 2
    low, high = pairs.interval(differences)
    assert (low, high) == pytest.approx((-0.25912, 0.05912), abs=1e-5)
    assert pairs.judge(differences, accuracy) == "non-inferior"
    assert pairs.judge([d - 0.05 for d in differences], accuracy) == "undecided"  # down to -0.309
    assert pairs.judge([d - 0.4 for d in differences], accuracy) == "inferior"  # up to -0.341
    # A loss is better when it is lower, and a better one is never inferior.
    assert pairs.judge([0.4, 0.4, 0.41], loss) == "non-inferior"
    assert pairs.judge([0.6, 0.6, 0.61], loss) == "inferior"
    assert pairs.judge([-9.0, -9.1, -9.2], train) == "non-inferior"
    assert pairs.judge([9.0, 9.1, 9.2], accuracy) == "non-inferior"
    assert pairs.judge([float("nan"), 0.0], accuracy) == "undecided"


def test_losses_are_compared_in_per_cent_and_the_worst_verdict_counts(pairs):
    rows = [
        {"method": method, "seed": str(seed), "best_loss": str(value), "train_loss": str(train), "ratio": "1"}
        for method, values in (("plain", (2.0, 4.0)), ("group2", (2.002, 4.004)))
        for seed, (value, train) in enumerate(zip(values, (1.0, 1.0 if method == "plain" else 1.2), strict=True))
    ]
    _, bits = pairs.summarise(rows)
    assert bits.of("best_loss").differences == pytest.approx((0.1, 0.1))
    assert bits.of("best_loss").verdict == "non-inferior"
    assert bits.of("train_loss").differences == pytest.approx((0, 20))
    assert bits.verdict == bits.of("train_loss").verdict == "undecided"
    assert bits.of("ratio").verdict is None


def test_points_of_students_t(pairs):
    # From tables: 31, 60 and 1000 degrees of freedom lie beyond our own.
    for freedom, point in ((1, 12.706), (10, 2.228), (31, 2.0395), (60, 2.0003), (1000, 1.9623)):
        assert pairs.t_point(freedom) == pytest.approx(point, abs=5e-4)


def test_the_gradient_error_is_measured_before_and_after_detaching(runs):
    exact = torch.tensor([3.0, 4.0])

    class Handle:
        attached = True

        def detach(self) -> None:
            self.attached = False

    handle = Handle()
    found = runs.gradient_error(handle, lambda: exact + torch.tensor([0.0, 1.0]) * handle.attached)
    assert found == {"gradient_error": 0.2} and not handle.attached
    assert runs.gradient_error(None, lambda: exact) == {"gradient_error": 0.0}


def test_a_table_survives_a_row_that_was_cut_off(runs, tmp_path):
    table = runs.Table(tmp_path / "folder" / "table.csv")
    table.append({"method": "a, b", "seed": 1})
    with table.path.open("a") as file:
        file.write('"a, b"')
    assert table.rows() == [{"method": "a, b", "seed": "1"}]
    table.append({"method": "c", "seed": 2})
    assert [row["seed"] for row in table.rows()] == ["1", "2"]
    with pytest.raises(ValueError):
        table.append({"method": "c", "other": 2})


WORKER = """
import json, pathlib, sys, time
job = json.loads(sys.argv[2])
pathlib.Path(job["data"], f"{time.monotonic_ns()}").write_text(f"{job['method']} {job['seed']}")
if job["method"] == "division":
    sys.exit("no such policy")
time.sleep(job["sleep"])
row = {"method": job["method"], "seed": job["seed"], "accuracy": 1, "train_loss": 0, "ratio": 2, "seconds": 0}
pathlib.Path(job["result"]).write_text(json.dumps(row))
"""


@pytest.fixture
def schedule(runs, tmp_path):
    """Runs jobs with a worker that does nothing; returns what was started, what failed and what was left."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    started = tmp_path / "started"
    started.mkdir()

    def run(names, sleep=0.0, **settings):
        table = runs.Table(tmp_path / "table.csv")
        scheduler = runs.Scheduler(
            script, table, logs=tmp_path / "logs", metric="accuracy", **{"workers": 1, "minutes": None, **settings}
        )
        jobs = [{"method": m, "seed": s, "data": str(started), "sleep": sleep} for m, s in runs.parse_runs(names)]
        left = scheduler.run(jobs)
        order = [path.read_text() for path in sorted(started.iterdir(), key=lambda path: int(path.name))]
        return order, scheduler.failed, left, table.rows()

    return run


def test_runs_start_in_order_and_a_failed_one_stops_no_other(schedule, capsys):
    order, failed, left, rows = schedule(["plain:0-1", "division:0", "default:0"])
    assert order == ["plain 0", "division 0", "default 0", "plain 1"] and not left
    assert [job["method"] for job in failed] == ["division"]
    assert [(row["method"], row["seed"]) for row in rows] == [("plain", "0"), ("default", "0"), ("plain", "1")]
    assert "no such policy" in capsys.readouterr().out


def test_nothing_starts_that_would_end_behind_the_limit(schedule):
    order, _, left, rows = schedule(["plain:0-4"], sleep=0.5, minutes=0.9 / 60)
    assert order == ["plain 0"] and len(left) == 4 and len(rows) == 1
    # What the table says about earlier runs counts from the start.
    order, _, left, _ = schedule(["default:0"], minutes=0.4 / 60)
    assert order == ["plain 0"] and len(left) == 1


def test_workers_run_side_by_side(schedule):
    order, _, _, rows = schedule(["plain:0-3"], workers=4, sleep=0.3)
    assert sorted(order) == [f"plain {seed}" for seed in range(4)]
    assert {row["workers"] for row in rows} == {"4"}


@pytest.fixture
def pack(tmp_path):
    """Thirteen training and five test images of 32 x 32 in mosaics of three by two tiles."""
    from PIL import Image

    arrays = {"meta": np.array([32, 3, 6])}
    images = np.random.default_rng(0).integers(0, 256, (18, 32, 32, 3), np.uint8)
    for split, part in (("train", images[:13]), ("test", images[13:])):
        arrays[f"y_{split}"] = np.arange(len(part), dtype=np.uint8) % 10
        for number in range(math.ceil(len(part) / 6)):
            tiles = np.zeros((6, 32, 32, 3), np.uint8)
            tiles[: len(part[6 * number :][:6])] = part[6 * number :][:6]
            mosaic = tiles.reshape(2, 3, 32, 32, 3).swapaxes(1, 2).reshape(64, 96, 3)
            file = io.BytesIO()
            Image.fromarray(mosaic).save(file, "PNG")
            name = split if split == "test" else f"{split}{number}"
            arrays[name] = np.frombuffer(file.getvalue(), np.uint8)
    np.savez(tmp_path / "pack.npz", **arrays)
    return tmp_path / "pack.npz", images


def test_packs_are_read_in_order(cifar, pack):
    path, images = pack
    for split, expected in (("train", images[:13]), ("test", images[13:])):
        found, labels = cifar.read_pack(str(path), split)
        assert np.array_equal(found, expected) and labels.tolist() == [i % 10 for i in range(len(expected))]


def test_crops_are_those_of_each_padded_image(cifar):
    images = torch.arange(3 * 8 * 8 * 3, dtype=torch.float).reshape(3, 8, 8, 3)
    padded = cifar.reflect(images)
    expected = torch.nn.functional.pad(images.permute(0, 3, 1, 2), (4, 4, 4, 4), "reflect").permute(0, 2, 3, 1)
    assert torch.equal(padded, expected)
    cut = cifar.crop(padded, torch.tensor([2, 0]), torch.tensor([[4, 4], [1, 7]]), torch.tensor([0, 1]))
    assert torch.equal(cut[0], images[2])
    assert torch.equal(cut[1], padded[0, 1:9, 7:15].flip(1))
    assert cifar.normalise(cut, channels_last=True).shape == (2, 3, 8, 8)


def test_an_epoch_has_every_image_once_cut_and_mirrored_as_drawn(cifar, monkeypatch):
    monkeypatch.setattr(cifar.Epoch, "PIECE", 3)
    images = torch.randint(256, (7, 8, 8, 3), dtype=torch.uint8)
    epoch = cifar.Epoch(images, torch.arange(7))
    epoch.draw(torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    order = torch.randperm(7, generator=generator)
    offsets = torch.randint(9, (7, 2), generator=generator)
    flips = torch.randint(2, (7,), generator=generator)
    assert torch.equal(epoch.labels, order)
    assert torch.equal(epoch.images, cifar.crop(cifar.reflect(images), order, offsets, flips))


def test_bytes_that_autograd_saves_are_counted_as_in_a_report(cifar):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3)
    )
    x = torch.randn(8, 3, 32, 32)
    with encke.attach(model) as handle:
        model(x).sum().backward()
        expected = handle.report().saved_bytes
    assert cifar.saved_bytes(model, lambda: model(x).sum()) == expected


@pytest.mark.slow
def test_ratios_over_fp32_and_over_the_precision_of_the_run(cifar, pack, tmp_path):
    job = {"data": cifar.prepare(str(pack[0]), tmp_path), "device": "cpu", "history": None, "seed": 0, "limit": 8}
    job |= {"model": "cnn", "precision": "bf16", "epochs": 1, "batch": 8, "lr": 0.1, "channels_last": True}
    plain, packed = (cifar.train({**job, "method": method}) for method in ("plain", "group2"))
    assert plain["ratio"] == 1 and 1.5 < plain["ratio_fp32"] <= 2
    assert packed["ratio_fp32"] == pytest.approx(packed["ratio"] * plain["ratio_fp32"], rel=0.05)


@pytest.mark.soak
def test_cifar_writes_a_table_and_continues_it(monkeypatch, tmp_path, pack, capsys):
    table, plot = tmp_path / "table.csv", tmp_path / "plot.png"
    common = ["--data", pack[0], "--csv", table, "--logs", tmp_path / "logs", "--device", "cpu", "--workers", 2]
    tiny = ["--epochs", 1, "--batch", 4, "--limit", 8]
    assert call(monkeypatch, "accuracy_cifar.py", *common, *tiny, "--run", "plain:0", "--run", "group2:0") == 0
    assert "2 runs to do, 0 in table.csv already" in capsys.readouterr().out
    before = table.read_text()
    assert str(tmp_path) not in before
    assert call(monkeypatch, "accuracy_cifar.py", *common, *tiny, "--run", "plain:0", "--plot", plot) == 0
    assert "0 runs to do, 1 in table.csv already" in capsys.readouterr().out
    assert table.read_text() == before and plot.stat().st_size > 1000
    assert call(monkeypatch, "accuracy_cifar.py", "--summary", table) == 0
    shown = capsys.readouterr().out
    assert "group2: 1 runs, 1 pairs with plain: undecided" in shown
    lines = [line.split() for line in shown.partition("group2:")[2].splitlines()]
    (ratio,) = [words[1:] for words in lines if words and words[0] == "ratio" and words[1] != "fp32"]
    (over_fp32,) = [words[2:] for words in lines if words[:2] == ["ratio", "fp32"]]
    assert float(ratio[0]) == float(over_fp32[0]) == 1
    assert float(ratio[1]) == pytest.approx(float(over_fp32[1]), rel=0.02) and float(ratio[1]) > 10
    # Figures of other settings do not go into the same table.
    assert call(monkeypatch, "accuracy_cifar.py", *common, "--run", "plain:1") == 2
    assert "this call has 15" in capsys.readouterr().err


@pytest.mark.slow
def test_gpt_pairs_runs_by_seed(gpt, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 60)
    settings = {"every": 1, "batch": 8, "context": 16, "layers": 1, "heads": 2, "width": 64, "lr": 1e-2, "dropout": 0.1}
    job = {"data": str(text), "device": "cpu", "history": None, "iterations": 2, **settings}

    def loss(method: str, seed: int, iterations: int) -> float:
        return gpt.train({**job, "method": method, "seed": seed, "iterations": iterations})["train_loss"]

    # The first forward pass is plain's to the bit: the same weights, batch and dropout. The second one is another.
    assert loss("plain", 0, 1) == loss("group2", 0, 1) != loss("plain", 1, 1)
    plain, bits = loss("plain", 0, 2), gpt.train({**job, "method": "group2", "seed": 0})
    assert bits["train_loss"] != plain and bits["train_loss"] == pytest.approx(plain, rel=0.02)
    assert bits["ratio"] > 2 and bits["packed_bytes"] < bits["saved_bytes"]


@pytest.mark.slow
def test_gpt_runs_from_the_command_line(monkeypatch, tmp_path, capsys):
    text, table = tmp_path / "text.txt", tmp_path / "table.csv"
    text.write_text("all the world's a stage; " * 40)
    tiny = ["--iterations", 2, "--every", 1, "--batch", 2, "--context", 8, "--layers", 1, "--heads", 1, "--width", 8]
    common = ["--data", text, "--csv", table, "--logs", tmp_path / "logs", "--device", "cpu"]
    assert call(monkeypatch, "accuracy_gpt.py", *common, *tiny, "--run", "plain:3") == 0
    assert "plain, seed 3: best loss" in capsys.readouterr().out
    assert len(table.read_text().splitlines()) == 2


def test_histories_are_written_where_a_handle_keeps_one(runs, tmp_path):
    class Handle:
        history = [{"step": 0, "bound": 0.5}, {"step": 1000, "bound": torch.float32}]

    job = {"method": "aggressive", "seed": 2, "history": str(tmp_path / "history")}
    runs.write_history(None, job)
    assert not (tmp_path / "history").exists()
    runs.write_history(Handle(), job)
    lines = (tmp_path / "history" / "aggressive-2.jsonl").read_text().splitlines()
    assert lines == ['{"step": 0, "bound": 0.5}', '{"step": 1000, "bound": "torch.float32"}']
