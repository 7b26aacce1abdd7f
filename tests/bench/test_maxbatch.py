"""`encke bench max-batch`: the search, and real trials under a cap."""

from __future__ import annotations

import csv
import sys

import pytest

from encke.bench import maxbatch
from encke.bench.maxbatch import Failed, Search, compare_with_plain, confirm, largest, search
from encke.bench.rows import blank_row
from encke.bench.steps import Task
from encke.cli import main

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="a cap on the memory of a process needs Linux")
TASK = Task("cnn", "plain", "fp32", batch=8, size=32, steps=1, device="cpu", cap=2**30)


@pytest.fixture(autouse=True)
def gentle_threads(monkeypatch):
    """Threads that wait without spinning: tests share their cores with other tests."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 9, 31, 33, 100, 160, 1056, 5000])
def test_the_search_finds_the_limit_to_one_part_in_32(limit):
    asked: list[int] = []

    def attempt(batch: int) -> tuple[bool, None]:
        asked.append(batch)
        return batch <= limit, None

    found = largest(attempt)
    assert limit - max(0, limit // 32) <= found <= limit
    assert found in asked and len(set(asked)) == len(asked) <= 20


@pytest.mark.parametrize("limit", [8, 15, 16, 17, 40, 100, 1056, 5000])
@pytest.mark.parametrize("bend", [0.0, -0.1, 0.1, 0.5])
def test_peaks_of_small_batches_shorten_the_search(limit, bend):
    """`bend`: by how much a sample of the largest batch takes more than one of the smallest."""
    asked: dict[bool, list[int]] = {True: [], False: []}

    def peak(batch: int) -> float:
        return 1000 + 10 * batch * (1 + bend * batch / limit)

    for known in asked:

        def attempt(batch: int, known: bool = known) -> tuple[bool, float | None]:
            asked[known].append(batch)
            return batch <= limit, peak(batch) if known and batch <= limit else None

        found = largest(attempt, cap=int(peak(limit)))
        assert limit - max(0, limit // 32) <= found <= limit
        assert found in asked[known] and len(set(asked[known])) == len(asked[known])
    assert limit < 100 or len(asked[True]) < len(asked[False])


def test_the_search_knows_when_nothing_fits_and_when_everything_does():
    assert largest(lambda batch: (False, None)) == 0
    assert largest(lambda batch: (True, None), most=100) == 100
    assert largest(lambda batch: (True, batch), most=100, cap=10**9) == 100


class FakeChild:
    """Answers as a measuring process would; dies at 32."""

    started = 0

    def __init__(self, task: Task) -> None:
        FakeChild.started += 1

    def ask(self, trial: int) -> dict:
        if trial == 32:
            return {"failed": "killed by SIGKILL (out of memory?)", "died": True}
        if trial > 20:
            return {"failed": "out of memory", "out_of_memory": True}
        return {"fits": True, "step_ms": 2.0}

    def close(self) -> None:
        pass


def test_a_process_that_dies_counts_as_one_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(maxbatch, "Child", FakeChild)
    FakeChild.started = 0
    trials = Search(TASK)
    assert largest(trials.attempt) == 20
    # On a CPU 24 and 22, which do not fit, end their process as well: it would keep memory.
    assert FakeChild.started == 4
    assert [(row["batch"], row["fits"]) for row in trials.trials][:3] == [(8, True), (16, True), (32, False)]
    assert trials.trials[0]["per_second"] == 8e3 / 2.0


def test_a_method_that_fails_whatever_the_batch_ends_the_search(monkeypatch):
    class Broken(FakeChild):
        def ask(self, trial: int) -> dict:
            return {"failed": "not supported: NotImplementedError: no"}

    monkeypatch.setattr(maxbatch, "Child", Broken)
    with pytest.raises(Failed, match="not supported"):
        Search(TASK).attempt(8)
    row, trials = search(TASK)
    assert row["status"].startswith("not supported") and row["largest_batch"] == 0


def test_a_batch_that_does_not_fit_by_itself_is_made_smaller(monkeypatch):
    def measured(task: Task) -> dict:
        return {"batch": task.batch, "status": "ok" if task.batch <= 94 else "out of memory"}

    monkeypatch.setattr(maxbatch, "measure_row", measured)
    assert confirm(Task("cnn", "plain", "fp32", 100, 32, 1, "cpu"))["largest_batch"] == 94


def test_throughput_is_compared_with_plain_at_its_own_batch():
    common = {"model": "m", "precision": "fp32", "device": "cpu", "size": 8, "cap_bytes": 1}
    rows = [
        common | {"method": "plain", "largest_batch": 100, "per_second": 50.0},
        common | {"method": "default", "largest_batch": 400, "per_second": 40.0},
        common | {"method": "offload", "largest_batch": 0, "per_second": None},
    ]
    compare_with_plain(rows)
    assert [row["batch_over_plain"] for row in rows] == [1, 4, None]
    assert [row["throughput_over_plain"] for row in rows] == [1, 0.8, None]


@pytest.fixture
def searches(monkeypatch):
    """Searches that measure nothing; returns the tasks that were searched."""
    made: list[tuple[str, int | None]] = []

    def found(task: Task):
        made.append((task.method, task.cap))
        figures = {"status": "ok", "largest_batch": 8, "per_second": 2.0, "pipelined_ms": 5.0, "peak_above_bytes": 9}
        return blank_row(task) | figures, [Search(task).row(8, True, 5.0)]

    monkeypatch.setattr(maxbatch, "search", found)
    return made


def test_an_interrupted_call_goes_on_under_every_cap(searches, monkeypatch, tmp_path, capsys):
    command = ["bench", "max-batch", "--models", "cnn", "--device", "cpu", "--out", str(tmp_path), "--methods", "plain"]
    main([*command, "--memory", "1MiB"])
    assert searches == [("plain", 2**20)] and "1 searches, about 1 min 00 s (a rough guess)" in capsys.readouterr().out
    main([*command, "default", "--memory", "1MiB", "2MiB"])
    assert searches[1:] == [("default", 2**20), ("plain", 2**21), ("default", 2**21)]
    assert "1 of 4 searches are in" in (shown := capsys.readouterr().out) and "judged by the rows there" in shown
    with (tmp_path / "max_batch.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["throughput_over_plain"]) for row in rows] == [("plain", "1.0"), ("default", "1.0")] * 2
    assert "--memory 1MiB --" not in rows[1]["command"]
    # Rows of another machine do not belong into this table.
    monkeypatch.setattr("encke.tools.provenance.cpu_name", lambda: "another")
    main([*command, "--memory", "1MiB"])
    assert searches[4:] == [("plain", 2**20)]


# A process for each trial that does not fit. tests/bench/test_rows.py has one that does not.
@pytest.mark.soak
@LINUX
def test_the_largest_batch_under_a_cap_on_the_process(tmp_path, capsys):
    cap = ["--memory", "40MiB", "--methods", "plain", "--steps", "1"]
    main(["bench", "max-batch", "--models", "cnn", "--image", "64", *cap, "--out", str(tmp_path)])
    with (tmp_path / "max_batch.csv").open() as file:
        (plain,) = csv.DictReader(file)
    assert plain["status"] == "ok"
    assert 1 <= int(plain["largest_batch"]) < 100
    assert float(plain["throughput_over_plain"]) == 1
    assert float(plain["peak_above_bytes"]) < 40 * 2**20
    with (tmp_path / "max_batch_trials.csv").open() as file:
        trials = list(csv.DictReader(file))
    fitting = [int(trial["batch"]) for trial in trials if trial["fits"] == "True"]
    failing = [int(trial["batch"]) for trial in trials if trial["fits"] == "False"]
    assert max(fitting) - 1 <= int(plain["largest_batch"]) <= max(fitting) < min(failing)
    assert (tmp_path / "max_batch.png").exists()
    assert "largest batch" in capsys.readouterr().out


@pytest.mark.soak
@LINUX
def test_a_cap_too_small_for_one_sample_ends_in_a_clear_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            ["bench", "max-batch", "--models", "cnn", "--memory", "1MiB", "--methods", "plain", "--out", str(tmp_path)]
        )
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--memory 1 MiB" in line and "not even one sample fits" in line and "cnn" in line
