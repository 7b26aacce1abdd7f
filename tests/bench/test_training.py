"""`encke bench memory` and `speed`: what measuring processes find, and what happens when they fail."""

from __future__ import annotations

import csv
import os
import signal
import sys

import pytest

from encke.bench import children
from encke.bench.children import Child
from encke.bench.plots import spread
from encke.bench.steps import Task
from encke.bench.training import measure_row, parse_bytes
from encke.cli import main
from encke.tools.errors import UsageError
from encke.tools.provenance import provenance

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the memory of the process is read from /proc")
TASK = Task("resnet18", "plain", "fp32", batch=8, size=32, steps=1, device="cpu")


@pytest.fixture(autouse=True)
def gentle_threads(monkeypatch):
    """Threads that wait without spinning: tests share their cores with other tests."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


def rows_of(path):
    with path.open() as file:
        return {row["method"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    ("text", "value"), [("16GiB", 16 * 2**30), ("900MiB", 900 * 2**20), ("1.5 GB", 1_500_000_000), ("4096", 4096)]
)
def test_amounts_of_memory_are_read(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "16 gallons", "-1GiB", "0", "GiB", "1e9"])
def test_what_is_no_amount_of_memory_is_named(text):
    with pytest.raises(UsageError, match="--memory"):
        parse_bytes(text)


def test_cuda_graphs_without_a_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "speed", "--graphs", "--device", "cpu", "--out", str(tmp_path)])
    assert "--graphs records CUDA graphs and needs a GPU" in capsys.readouterr().err


@pytest.mark.slow
@LINUX
def test_plain_default_and_checkpoint_side_by_side(tmp_path, capsys):
    methods = ["plain", "default", "checkpoint", "save-on-cpu"]
    main(["bench", "memory", "--image", "64", "--steps", "1", "--methods", *methods, "--out", str(tmp_path)])
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
    assert "default: Comet()" in shown and "only on a GPU" in shown and "about" in shown


@pytest.mark.slow
def test_a_transformer_gives_tokens_in_a_second(tmp_path, capsys):
    options = ["--models", "gpt-mini", "--tokens", "32", "--batch", "2", "3", "--steps", "1", "--methods", "plain"]
    main(["bench", "speed", *options, "--out", str(tmp_path)])
    row = rows_of(tmp_path / "speed.csv")["plain"]
    assert (row["unit"], row["batch"], row["model_from"]) == ("tokens", "3", "encke.train.models.gpt.Gpt")
    assert float(row["per_second"]) == pytest.approx(3 * 32e3 / float(row["pipelined_ms"]))
    assert (tmp_path / "throughput.png").exists()
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_method_cannot_do_is_its_row():
    row = measure_row(Task("resnet18", "plain", "fp32", batch=1, size=32, steps=1, device="cpu"))
    assert row["status"].startswith("ValueError: Expected more than 1 value per channel")
    assert row["step_ms"] is None


@pytest.mark.slow
@LINUX
def test_a_cap_that_is_too_small_is_out_of_memory():
    answer = children.measure(Task("resnet18", "plain", "fp32", 8, 32, 1, "cpu", cap=20 * 2**20))
    assert answer["failed"] == "out of memory"


def test_a_killed_process_is_reported():
    with Child(TASK) as child:
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        assert child.ask(measure=True) == {"failed": "killed by SIGKILL (out of memory?)", "died": True}


def test_a_process_that_ends_by_itself_is_reported_with_its_last_line(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "nonsense")
    with Child(TASK) as child:
        answer = child.ask(measure=True)
    assert answer["died"] and answer["failed"].startswith("exit code 1: Python")


def test_an_interrupt_leaves_no_process_behind():
    with pytest.raises(KeyboardInterrupt), Child(TASK) as child:
        raise KeyboardInterrupt
    assert child.process.poll() is not None


def test_processes_without_a_gpu_share_one_allocator_setting():
    found = children.environment(TASK)
    assert found["MALLOC_MMAP_THRESHOLD_"] == "65536"
    capped = children.environment(Task("resnet18", "plain", "fp32", 8, 32, 1, "cuda", cap=1))
    assert "expandable_segments:True" in capped["PYTORCH_CUDA_ALLOC_CONF"]


def test_names_beside_a_plot_keep_their_order_and_a_gap():
    found = spread([0.5, 0.5, 0.99, 0.98, 0.0], 0.1)
    ordered = sorted(found)
    assert all(b - a >= 0.1 - 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))
    assert found[4] == 0 and found[2] > found[3] and max(found) <= 1


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("benchmarks/cpu_step.py", "python3 benchmarks/cpu_step.py --csv f.csv"),
        ("/anywhere/bin/encke", "encke --csv f.csv"),
        ("/anywhere/encke/__main__.py", "encke --csv f.csv"),
    ],
)
def test_the_command_is_the_one_that_was_given(called, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called, "--csv", "f.csv"])
    assert provenance()["command"] == expected
