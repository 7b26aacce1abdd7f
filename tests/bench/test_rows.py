"""`encke bench memory` and `speed`: what measuring processes find, and what happens when they fail."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace

import pytest

from encke.bench import children
from encke.bench.rows import FIGURES, IDENTITY, measure_all, measure_row, medians
from encke.bench.steps import Server, Task
from encke.cli import main

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the memory of the process is read from /proc")
TASK = Task("cnn", "plain", "fp32", batch=8, size=32, steps=1, device="cpu")


@pytest.fixture(autouse=True)
def gentle_threads(monkeypatch):
    """Threads that wait without spinning: tests share their cores with other tests."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def rows_of(path):
    with path.open() as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_cuda_graphs_without_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "speed", "--graphs", "--device", "cpu", "--out", str(tmp_path)])
    assert "--graphs records CUDA graphs and needs a GPU" in capsys.readouterr().err


@pytest.mark.slow
@LINUX
def test_plain_default_and_checkpoint_side_by_side(tmp_path, capsys):
    methods = ["plain", "default", "checkpoint", "save-on-cpu"]
    main(
        [
            "bench",
            "memory",
            "--models",
            "cnn",
            "--image",
            "64",
            "--steps",
            "1",
            "--methods",
            *methods,
            "--out",
            str(tmp_path),
        ]
    )
    rows = rows_of(tmp_path / "memory.csv")
    assert list(rows) == methods
    assert rows.pop("save-on-cpu")["status"] == "only on a GPU"
    for row in rows.values():
        assert row["status"] == "ok" and row["torch"] and row["command"] and row["cpu"]
        assert float(row["per_second"]) == pytest.approx(16e3 / float(row["step_ms"]))
        peaks = [float(row[f"{name}_bytes"]) for name in ("peak", "peak_with_collection", "peak_run")]
        assert peaks == sorted(peaks) and float(row["peak_above_bytes"]) < peaks[0]
        assert float(row["papers_total_bytes"]) > float(row["held_bytes"]) > 0
    plain, default, checkpoint = rows.values()
    assert float(default["held_bytes"]) < float(plain["held_bytes"]) / 5
    assert float(checkpoint["held_bytes"]) < float(plain["held_bytes"]) / 1.3
    assert float(default["packed_bytes"]) < float(default["saved_bytes"]) / 10
    assert float(default["saved_bytes"]) == pytest.approx(float(plain["held_bytes"]), rel=0.2)
    assert float(default["collection_ms"]) > 0 and plain["collection_ms"] == ""
    assert float(checkpoint["loss"]) == pytest.approx(float(plain["loss"]), rel=1e-3)
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "default" in shown and "only on a GPU" in shown and "about" in shown


@pytest.mark.soak
def test_a_transformer_gives_tokens_in_a_second(tmp_path, capsys):
    options = ["--models", "gpt", "--tokens", "32", "--batch", "2", "3", "--steps", "1", "--methods", "plain"]
    main(["bench", "speed", *options, "--out", str(tmp_path)])
    row = rows_of(tmp_path / "speed.csv")["plain"]
    assert (row["unit"], row["batch"], row["model_from"]) == ("tokens", "3", "encke")
    assert float(row["per_second"]) == pytest.approx(3 * 32e3 / float(row["pipelined_ms"]))
    assert (tmp_path / "throughput.png").exists()
    assert "tokens/s" in capsys.readouterr().out


def test_what_a_method_cannot_do_is_its_row(monkeypatch):
    # As the measuring process answers, without the process.
    monkeypatch.setattr("encke.bench.rows.measure", lambda task: Server(task).answer({"measure": True}))
    row = measure_row(Task("cnn", "plain", "fp32", batch=1, size=1, steps=1, device="cpu"))
    assert row["status"].startswith("ValueError: Expected more than 1 value per channel")
    assert row["step_ms"] is None


@pytest.mark.slow
@LINUX
def test_a_cap_that_is_too_small_is_out_of_memory():
    answer = children.measure(Task("cnn", "plain", "fp32", 8, 32, 1, "cpu", cap=2**18))
    assert answer["failed"] == "out of memory"


@pytest.mark.soak
def test_rounds_are_measured_in_turn_and_their_median_is_shown(tmp_path, capsys):
    options = ["--models", "cnn", "--image", "16", "--batch", "4", "--steps", "1", "--methods", "plain", "group2"]
    main(["bench", "speed", *options, "--rounds", "2", "--out", str(tmp_path)])
    with (tmp_path / "speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["round"], row["method"]) for row in rows] == [
        ("1", "plain"),
        ("1", "group2"),
        ("2", "plain"),
        ("2", "group2"),
    ]
    # The training goes on from round to round: its first steps were those of the first round.
    assert rows[0]["first_ms"] == rows[2]["first_ms"] and rows[0]["loss"] != rows[2]["loss"]
    assert "median of 2 rounds" in capsys.readouterr().out


def test_medians_leave_out_rounds_that_failed():
    def row(status: str, step: float | None) -> dict:
        same = dict.fromkeys(IDENTITY)
        return {**same, **dict.fromkeys(FIGURES), "round": 1, "status": status, "step_ms": step}

    (merged,) = medians([row("ok", 3.0), row("out of memory", None), row("ok", 5.0)])
    assert (merged["status"], merged["step_ms"], merged["round"]) == ("ok", 4.0, 2)
    (merged,) = medians([row("out of memory", None)])
    assert (merged["status"], merged["round"]) == ("out of memory", 0)


@pytest.mark.slow
def test_processes_that_warm_up_together_do_not_time_their_first_steps(tmp_path):
    tasks = [replace(TASK, method=method, warm=2) for method in ("plain", "checkpoint")]
    rows = measure_all([tasks], tmp_path / "rows.csv", done=[{"method": "earlier"}], together=2)
    assert [row["method"] for row in rows] == ["earlier", "plain", "checkpoint"]
    assert [row["status"] for row in rows[1:]] == ["ok", "ok"]
    assert all(row["step_ms"] > 0 and row["first_ms"] is None for row in rows[1:])
    assert list(rows_of(tmp_path / "rows.csv")) == ["earlier", "plain", "checkpoint"]
