"""`encke bench same-memory`: which searches and trainings are made, and trainings to an accuracy."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict

import pytest
import torch

from encke.bench import accuracy, maxbatch, same_memory, steps
from encke.bench.accuracy import Goal, ImageData
from encke.bench.maxbatch import Search
from encke.bench.options import Options
from encke.bench.rows import blank_row
from encke.bench.steps import Task, Training
from encke.cli import main
from encke.train.data.in_memory import StoredImages


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_a_method_that_needs_the_compiler_is_compiled(tmp_path):
    options = Options(("cnn",), ("plain", "budget20"), memory=("1MiB", "2MiB"), device="cpu", out=tmp_path)
    tables = options.plan((8,)).tables()
    assert [[(task.method, task.compile, task.cap) for task in each] for each in tables] == [
        [("plain", False, cap), ("budget20", True, cap)] for cap in (2**20, 2**21)
    ]


@pytest.fixture
def answers(monkeypatch):
    """Processes that measure nothing: batches of 40 and 4,000 fit; returns the trainings that were asked for."""
    asked = []

    def found(task: Task):
        batch = 40 if task.method == "plain" else 4000
        figures = {"status": "ok", "batch": batch, "largest_batch": batch, "per_second": 2.0, "pipelined_ms": 5.0}
        return blank_row(task) | figures | {"peak_above_bytes": 9}, [Search(task).row(8, True, 5.0)]

    class Child:
        def __init__(self, task):
            self.task = task

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def ask(self, accuracy):
            asked.append((self.task.model, self.task.method, self.task.batch, self.task.cap, accuracy["seed"]))
            reached = self.task.method == "plain"
            return {"reached": reached, "seconds": 3.0 if reached else None, "epochs": 2, "best_accuracy": 90.0}

    monkeypatch.setattr(maxbatch, "search", found)
    monkeypatch.setattr(same_memory, "Child", Child)
    return asked


def test_every_method_trains_at_its_own_batch_and_none_twice(answers, tmp_path, capsys):
    command = ["bench", "same-memory", "--models", "cnn", "--device", "cpu", "--methods", "plain", "default"]
    command += ["--accuracy", "95", "--accuracy-memory", "8MiB", "--out", str(tmp_path)]
    main([*command, "--seeds", "1"])
    # A batch is at most an eighth of the 4,000 digits.
    assert answers == [("digits", "plain", 40, 2**23, 0), ("digits", "default", 500, 2**23, 0)]
    shown = capsys.readouterr().out
    assert "1 of 1" in shown and "not reached: best 90.00 %" in shown
    main([*command, "--seeds", "2"])
    assert [(method, seed) for _, method, _, _, seed in answers[2:]] == [("plain", 1), ("default", 1)]
    assert [row["status"] for row in rows_of(tmp_path / "same_memory_accuracy.csv")][:2] == [
        "ok", "not reached: best 90.00 %",
    ]  # fmt: skip
    assert [row["cap_bytes"] for row in rows_of(tmp_path / "same_memory.csv")] == [str(256 * 2**20)] * 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--accuracy", "0.5e3"], "--accuracy is in per cent, above 0 and up to 100, got 500"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--data", "nowhere"], "--data nowhere: no such folder"),
    ],
)
def test_bad_options_are_named(arguments, expected, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "same-memory", "--device", "cpu", *arguments])
    assert expected in capsys.readouterr().err


def easy_images(count: int) -> StoredImages:
    """Images whose brightness is their class."""
    labels = torch.arange(count) % 2
    noise = torch.randint(0, 20, (count, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    return StoredImages((noise + 200 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels)


def test_a_training_ends_when_the_accuracy_is_reached_or_the_epochs_are_over():
    data = ImageData(easy_images(64), easy_images(32), torch.tensor(110.0), torch.tensor(100.0))
    task = Task("digits", "plain", "fp32", batch=16, size=8, steps=1, device="cpu")
    found = accuracy.train(Training(task), 16, Goal(90, 20, 0), data)
    assert found["reached"] and found["best_accuracy"] >= 90 and found["seconds"] > 0 and found["epochs"] < 20
    # An accuracy beyond 100 is never reached.
    found = accuracy.train(Training(task), 32, Goal(101, 1, 0), data)
    assert not found["reached"] and found["seconds"] is None and found["epochs"] == 1


def test_a_measuring_process_trains_to_an_accuracy(monkeypatch):
    data = ImageData(easy_images(64), easy_images(32), torch.tensor(110.0), torch.tensor(100.0))
    monkeypatch.setattr(accuracy, "load", lambda path, device: data)
    monkeypatch.setattr(steps, "prepare", lambda task, rehearsed: None)
    task = Task("digits", "plain", "fp32", batch=16, size=8, steps=1, device="cpu")
    answers = io.StringIO()
    steps.Server(task).serve(io.StringIO(json.dumps({"accuracy": asdict(Goal(1, 1, 0))}) + "\n"), answers)
    assert json.loads(answers.getvalue())["reached"]
