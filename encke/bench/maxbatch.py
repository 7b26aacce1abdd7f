"""`encke bench max-batch`: the largest batch that each method fits into a given memory, and its throughput there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from encke.bench import plots
from encke.bench.children import Child
from encke.bench.methods import METHODS
from encke.bench.options import Options, Plan
from encke.bench.rows import Row, blank_row, cap_words, measure_row, plain_row, table_lines, title
from encke.bench.steps import Task
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import provenance, read_csv, write_csv
from encke.tools.terminal import note, number, table, times
from encke.tools.units import GB, duration, size_in

START = 8
"""The first batch that is tried."""
GRAIN = 32
"""The search ends within one part in this many."""
MOST = 1 << 16
AGAIN = 4
"""Number of slightly smaller batches to try if the largest one does not fit into a new process."""
FEW = ("plain", "default", "checkpoint")
"""Methods measured without a GPU, where a search takes a minute."""


CPU_CAP = "256MiB"
"""Cap without a GPU, above interpreter and libraries."""
MINUTES = {"cuda": 3.0, "cpu": 1.0}
"""Rough time of a search before the first one was made."""
COMPILED = 5
"""Factor on the time of a search that compiles the model at every batch."""
MACHINE = ("cpu", "gpu", "torch")
"""Columns in which the rows of one table must agree."""
COLUMNS = "model method precision compile graphs device batch size unit cap_bytes".split()
"""Columns of a trial besides its result."""


class Failed(Exception):
    """A method does not work here, whatever the batch size."""


class Guess:
    """The next batch size of a search: extrapolated from known peaks to the cap, else doubled and bisected.

    Args:
        start: The first batch size.
        most: The largest batch size.
        cap: Bytes that may be used.
    """

    def __init__(self, start: int, most: int, cap: int | None) -> None:
        self.low, self.high = 0, most + 1
        """The largest batch that fits, and the smallest that does not."""
        self.batch, self.most, self.cap = start, most, cap
        self.peaks: list[tuple[int, float]] = []
        self.failures = 0
        """Batches in sequence that did not fit."""

    @property
    def done(self) -> bool:
        """Whether the limit is known to one part in GRAIN."""
        return self.high - self.low <= max(1, self.low // GRAIN)

    def learn(self, fits: bool, peak: float | None) -> None:
        """Record the result of the last batch, and choose the next one."""
        if fits:
            self.low, self.failures = self.batch, 0
            if peak is not None:
                self.peaks.append((self.batch, peak))
        else:
            self.high, self.failures = self.batch, self.failures + 1
        self.batch = max(self.near_limit() or 0, self.low + 1) if self.low else self.high // 2
        self.batch = min(self.batch, self.high - 1, self.most)

    def near_limit(self) -> int:
        """Return the expected limit, or a batch one part in GRAIN away from the last one, towards the limit."""
        middle = min(2 * self.low, self.most) if self.high > self.most else (self.low + self.high) // 2
        if len(self.peaks) < 2 or self.cap is None:
            return middle
        grain = max(1, (self.high if self.failures else self.low) // GRAIN)
        if self.failures:
            return max(middle, self.high - grain * 2 ** (self.failures - 1))
        (first, small), (second, large) = self.peaks[-2:]
        more = int((self.cap - large) * (second - first) / (large - small)) if large > small else 0
        # Peaks of very small batches do not predict a much larger one.
        return self.low + max(grain, min(more, 3 * self.low))


def largest(
    attempt: Callable[[int], tuple[bool, float | None]], start: int = START, most: int = MOST, cap: int | None = None
) -> int:
    """Return the largest batch up to `most` that fits, within one part in GRAIN; 0 if not even one sample does.

    Args:
        attempt: Returns whether a batch fits, and its peak in bytes if that is known.
        start: The first batch.
        most: The largest one.
        cap: The limit that peaks are compared with.
    """
    guess = Guess(start, most, cap)
    while not guess.done:
        guess.learn(*attempt(guess.batch))
    return guess.low


class Search:
    """Trials of one method, in one process for as long as it survives them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.child: Child | None = None
        self.trials: list[Row] = []
        self.reason = ""
        """Why the last trial did not fit."""

    def attempt(self, batch: int) -> tuple[bool, float | None]:
        """Return whether several whole steps pass at this batch, and their peak if it is known."""
        if self.child is None:
            self.child = Child(self.task)
        answer = self.child.ask(trial=batch)
        fitting = bool(answer.get("fits"))
        if not fitting and not answer.get("died") and not answer.get("out_of_memory"):
            raise Failed(answer["failed"])
        if answer.get("died") or (not fitting and self.task.device == "cpu"):
            # A process in which an allocation has failed keeps memory: smaller batches would not fit into it either.
            self.close()
        self.reason = answer.get("failed", self.reason)
        self.trials.append(self.row(batch, fitting, answer.get("step_ms")))
        return fitting, answer.get("peak_bytes")

    def row(self, batch: int, fitting: bool, step_ms: float | None) -> Row:
        """Return one trial as a row of max_batch_trials.csv."""
        task = replace(self.task, batch=batch)
        row = {name: value for name, value in blank_row(task).items() if name in COLUMNS}
        speed = 1e3 * task.units / step_ms if step_ms else None
        return row | {"fits": fitting, "step_ms": step_ms, "per_second": speed}

    def close(self) -> None:
        """End the process."""
        if self.child is not None:
            self.child.close()
            self.child = None


def search(task: Task) -> tuple[Row, list[Row]]:
    """Return the largest batch of one method with its figures, and the trials that led to it."""
    row = blank_row(replace(task, batch=0)) | {"largest_batch": 0}
    if reason := METHODS[task.method].missing(task.device):
        return row | {"status": reason}, []
    trials = Search(task)
    try:
        batch = largest(trials.attempt, cap=task.cap)
    except Failed as error:
        return row | {"status": str(error)}, trials.trials
    finally:
        trials.close()
    if batch == 0:
        return row | {"status": f"not even one sample fits ({trials.reason})"}, trials.trials
    return confirm(replace(task, batch=batch)), trials.trials


def confirm(task: Task) -> Row:
    """Measure the largest batch in a new process; a slightly smaller one if it does not fit there."""
    for _ in range(AGAIN):
        row = measure_row(task)
        if row["status"] != "out of memory" or task.batch == 1:
            break
        task = replace(task, batch=task.batch - max(1, task.batch // GRAIN))
    return row | {"largest_batch": row["batch"] if row["status"] == "ok" else 0}


def max_batch(options: Options) -> None:
    """Find the largest batch of every method under a cap on memory, and its throughput there beside plain's at its own.

    A batch fits if several whole steps pass, with the optimizer's state and a collection step of the policy. Prints a
    table and writes max_batch.csv, max_batch_trials.csv and max_batch.png (throughput against batch). A search whose
    row is in max_batch.csv already is not made again.
    """
    gpu = options.device_or_default() == "cuda"
    methods = options.methods or (() if gpu else FEW)
    memory = options.memory or ("16GiB" if gpu else CPU_CAP,)
    search_all(replace(options, methods=methods, memory=memory).plan((START,)), options.out / "max_batch")


def search_all(plan: Plan, path: Path) -> list[Row]:
    """Search for every task of the plan without a row; write PATH.csv, PATH_trials.csv and PATH.png."""
    files = path.with_suffix(".csv"), path.with_name(f"{path.name}_trials.csv")
    rows, trials = known_rows(files[0]), known_rows(files[1])
    done = {key(row): row for row in rows}
    tables = plan.tables()
    tasks = [task for each in tables for task in each if task_key(task) not in done]
    announce(tasks, sum(map(len, tables)), rows, files[0])
    for task in track([(f"{t.model}, {t.precision}, {cap_words(t.cap)}: {t.method}", t) for t in tasks]):
        started = time.monotonic()
        row, tried = search(task)
        rows.append(row | {"search_seconds": round(time.monotonic() - started, 1)})
        trials += tried
        compare_with_plain(rows)
        write_csv(files[0], rows)
        if trials:
            write_csv(files[1], trials)
    done = {key(row): row for row in rows}
    shown = [[done[task_key(task)] for task in each] for each in tables]
    for group in shown:
        show(group)
    note()
    chosen = [row for group in shown for row in group]
    pictures = plots.throughput_under_cap(chosen, trials, path.with_suffix(".png"))
    note("wrote " + ", ".join(str(each) for each in [*files[: 1 + bool(trials)], *pictures]))
    if not any(row["largest_batch"] for row in chosen):
        row = chosen[0]
        raise UsageError(f"--memory {cap_words(row['cap_bytes'])}: {row['model']}, {row['method']}: {row['status']}")
    return chosen


def known_rows(path: Path) -> list[Row]:
    """Return the rows of an earlier, interrupted call on this machine with this version of torch."""
    here = provenance()
    return [row for row in read_csv(path) if all(str(row.get(name) or "") == str(here[name]) for name in MACHINE)]


def key(row: Row) -> tuple[Any, ...]:
    """Return the columns that identify a search."""
    return tuple(row[name] for name in COLUMNS if name != "batch")


def task_key(task: Task) -> tuple[Any, ...]:
    """Return the key of a task's future row."""
    return key(blank_row(task))


def announce(tasks: Sequence[Task], total: int, rows: Sequence[Row], file: Path) -> None:
    """Print the number of searches and their estimated time, based on the finished ones."""
    if total > len(tasks):
        note(f"{total - len(tasks)} of {total} searches are in {file} already; without that file they are made again")
    taken = [row["search_seconds"] for row in rows]

    def seconds(task: Task) -> float:
        rough = 60 * MINUTES[task.device] * (COMPILED if task.compile else 1)
        same = [row["search_seconds"] for row in rows if row["method"] == task.method]
        return statistics.fmean(same or (taken if not task.compile else []) or [rough])

    if tasks:
        judged = "judged by the rows there" if taken else "a rough guess"
        note(f"{len(tasks)} searches, about {duration(sum(map(seconds, tasks)))} ({judged})")


def compare_with_plain(rows: Sequence[Row]) -> None:
    """Add each method's batch and throughput over plain's, each at its own largest batch."""
    for row in rows:
        same = ("model", "precision", "device", "size", "cap_bytes")
        plain = plain_row([other for other in rows if all(other[name] == row[name] for name in same)])
        for column, figure in (("batch_over_plain", "largest_batch"), ("throughput_over_plain", "per_second")):
            both = row.get(figure) and plain.get(figure)
            row[column] = row[figure] / plain[figure] if both else None


def show(rows: Sequence[Row]) -> None:
    """Print one table."""
    plain = plain_row(rows)

    def cells(row: Row) -> list[str]:
        batch, speed = (times(row[column], plain.get(column)) for column in ("largest_batch", "per_second"))
        peak = size_in(row["reserved_bytes"] or row["peak_above_bytes"], GB)
        return [str(row["largest_batch"]), batch, number(row["per_second"]), speed, number(row["pipelined_ms"]), peak]

    heads = ["method", "largest batch", "of plain", f"{rows[0]['unit']}/s", "of plain", "step ms", "taken GB"]
    table(title(rows[0] | {"batch": 0}), heads, table_lines(rows, cells))
