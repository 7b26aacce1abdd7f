"""`encke bench first-hour`: the figures of the first steps, the table and the files."""

from __future__ import annotations

import csv
import itertools

import pytest
import torch

from encke.bench import first_hour
from encke.bench.compilations import Compilations, Compiled
from encke.bench.steps import Task
from encke.bench.steps import first_steps as measured_steps
from encke.cli import main


def answer_of(times, collections=(), later=0, kernels=()):
    steps = [
        {
            "step": number,
            "ms": ms,
            "collection": number in collections,
            "kernels": dict(kernels).get(number, 0),
            "kernel_seconds": 0.5 * dict(kernels).get(number, 0),
            "graphs": int(number == 60),
            "recordings": 2 * int(number == 61),
            "peak_bytes": 100.0 + number,
        }
        for number, ms in enumerate(times, 1)
    ]
    return {"steps": steps, "later_collections": later, "loss": 1.0}


def test_figures_separate_first_ordinary_and_collection_steps():
    times = [5000.0, 400.0] + [10.0] * 18
    times[9] = 70.0
    found = first_hour.summarise(answer_of(times, {1, 10}, later=3, kernels={1: 8, 2: 2, 10: 1}))
    assert (found["first_ms"], found["second_ms"], found["step_ms"], found["slowest_ms"]) == (5000, 400, 10, 70)
    assert (found["kernels"], found["late_kernels"], found["kernel_seconds"]) == (11, 1, 5.5)
    # 20 measured steps, 980 ordinary ones, and 3 collections of 60 ms more than those.
    assert found["thousand_seconds"] == pytest.approx((sum(times) + 980 * 10 + 3 * 60) / 1e3)
    assert found["peak_bytes"] == 120


def test_a_method_without_collection_steps_has_no_time_for_them():
    found = first_hour.summarise(answer_of([20.0] * 15))
    assert found["slowest_ms"] is None and found["thousand_seconds"] == pytest.approx(20.0)


@pytest.mark.slow
def test_each_of_the_first_steps_is_told():
    task = Task("cnn", "default", "fp32", batch=4, size=32, steps=1, device="cpu")
    answer = measured_steps(task, 11)
    assert [step["step"] for step in answer["steps"]] == list(range(1, 12))
    collections = [step["step"] for step in answer["steps"] if step["collection"]]
    assert 1 in collections and 10 in collections
    assert answer["later_collections"] > 0 and all(step["ms"] > 0 for step in answer["steps"])


def test_table_and_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_hour, "first_steps", lambda task, count, caches: answer_of([30.0] * count, {10}))
    main(["bench", "first-hour", "cnn", "digits", "--steps", "12", "--device", "cpu", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    for method, caches in itertools.product(("plain", "default"), ("empty", "warm")):
        assert shown.count(f"{method}, {caches} ") == 4  # twice while they are measured, twice in tables
    assert shown.index("cnn, bf16") < shown.index("digits, bf16") and shown.count("1,000 s: time") == 1
    assert max(len(line) for line in shown.splitlines() if not line.startswith("wrote")) <= 80
    with (tmp_path / "first_hour.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * 12 and rows[0]["caches"] == "empty"
    assert [rows[0]["model"], rows[-1]["model"]] == ["cnn", "digits"]
    assert (tmp_path / "first_hour.png").stat().st_size > 0


def test_kernels_are_listed_by_the_time_they_took():
    rows = first_hour.kernel_rows({"model": "cnn"}, [("decode", 0.5), ("encode", 1.5), ("decode", 0.25)])
    assert [(row["kernel"], row["compiled"], row["seconds"]) for row in rows] == [
        ("encode", 1, 1.5),
        ("decode", 2, 0.75),
    ]


def test_a_failure_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_hour, "first_steps", lambda *_: {"failed": "out of memory"})
    with pytest.raises(SystemExit):
        main(["bench", "first-hour", "cnn", "--device", "cpu", "--out", str(tmp_path)])
    assert "nothing could be measured: plain: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["cn"], "did you mean"), (["cnn", "--steps", "5"], "--steps must be more than 10")],
    ids=["model", "steps"],
)
def test_bad_arguments_are_named(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "first-hour", *arguments, "--device", "cpu", "--out", str(tmp_path)])
    assert message in capsys.readouterr().err


def test_kernels_found_on_disk_are_not_counted():
    class Times:
        total = 2_000_000

    with Compilations() as compilations:
        compilations.listener = None
        compilations.listen(times=Times, cache_hit=False, src=None)
        compilations.listen(times=Times, cache_hit=True, src=None)
    assert compilations.kernels == [("?()", 2.0)]
    total = compilations.total
    assert (total.kernels, total.kernel_seconds) == (1, 2.0)
    figures = (Compiled(3, 2.0, 1, 4) - Compiled(1, 0.5, 1, 1)).figures()
    assert figures == {"kernels": 2, "kernel_seconds": 1.5, "graphs": 0, "recordings": 3}


def test_recordings_of_cuda_graphs_are_counted(monkeypatch):
    begun = []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda graph, pool: begun.append((graph, pool)))
    with Compilations() as compilations:
        torch.cuda.CUDAGraph.capture_begin("graph", pool="pool")
    torch.cuda.CUDAGraph.capture_begin("other", pool="pool")
    assert begun == [("graph", "pool"), ("other", "pool")] and compilations.total.recordings == 1


def test_graphs_compiled_after_the_first_steps_are_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(first_hour, "first_steps", lambda task, count, caches: answer_of([30.0] * count, {10}))
    main(["bench", "first-hour", "cnn", "--compile", "--steps", "70", "--device", "cpu", "--out", str(tmp_path)])
    assert "default, warm: 3 graphs compiled or recorded after step 50" in capsys.readouterr().out
