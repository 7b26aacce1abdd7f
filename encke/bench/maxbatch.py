"""`encke bench max-batch`: the largest batch that each method fits into a given memory, and its throughput there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from encke.bench import plots
from encke.bench.children import Child
from encke.bench.methods import METHODS
from encke.bench.options import Options, Plan
from encke.bench.rows import Row, blank_row, measure_row, plain_row, table_lines, title
from encke.bench.steps import Task
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.terminal import note, number, table, times
from encke.tools.units import GB, size_in

START = 8
"""The first batch that is tried."""
GRAIN = 32
"""The search ends within one part in this many."""
MOST = 1 << 16
AGAIN = 4
"""Number of slightly smaller batches to try if the largest one does not fit into a new process."""
FEW = ("plain", "default", "checkpoint")
"""Methods measured without a GPU, where a search takes a minute."""


COLUMNS = "model method precision compile graphs device batch size unit cap_bytes".split()
"""Columns of a trial, beside its result."""


class Failed(Exception):
    """A method that does not work here, whatever the batch."""


def largest(fits: Callable[[int], bool], start: int = START, most: int = MOST) -> int:
    """Return the largest batch up to `most` that fits, within one part in GRAIN; 0 if not even one sample does."""
    low, high, batch = 0, most + 1, start
    while high - low > max(1, low // GRAIN):
        if fits(batch):
            low = batch
        else:
            high = batch
        doubling = high > most
        batch = min(2 * low, most) if doubling else high // 2 if low == 0 else (low + high) // 2
    return low


class Search:
    """Trials of one method, in one process as long as it survives them."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.child: Child | None = None
        self.trials: list[Row] = []
        self.reason = ""
        """Why the last trial did not fit."""

    def fits(self, batch: int) -> bool:
        """Return whether several whole steps pass at this batch."""
        if self.child is None:
            self.child = Child(self.task)
        answer = self.child.ask(trial=batch)
        fitting = bool(answer.get("fits"))
        if answer.get("died"):
            self.close()
        elif not fitting and not answer.get("out_of_memory"):
            raise Failed(answer["failed"])
        self.reason = answer.get("failed", self.reason)
        self.trials.append(self.row(batch, fitting, answer.get("step_ms")))
        return fitting

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
    if reason := METHODS[task.method].missing(task.device, task.compile):
        return row | {"status": reason}, []
    trials = Search(task)
    try:
        batch = largest(trials.fits)
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
    table and writes max_batch.csv, max_batch_trials.csv and max_batch.png (throughput against batch).
    """
    plan, out = with_defaults(options.plan(), bool(options.methods)), options.out
    files = out / "max_batch.csv", out / "max_batch_trials.csv"
    tables = plan.tables()
    rows, trials = [], []
    tasks = [(f"{t.model}, {t.precision}: {t.method}", t) for tasks in tables for t in tasks]
    for task in track(tasks):
        row, tried = search(task)
        rows.append(row)
        trials += tried
        compare_with_plain(rows)
        write_csv(files[0], rows)
        if trials:
            write_csv(files[1], trials)
    for tasks_of_table in tables:
        shown = {(task.model, task.precision) for task in tasks_of_table}
        show([row for row in rows if (row["model"], row["precision"]) in shown])
    note()
    written = [*files[: 1 + bool(trials)], *plots.throughput_under_cap(rows, trials, out / "max_batch.png")]
    note("wrote " + ", ".join(str(path) for path in written))
    if not any(row["largest_batch"] for row in rows):
        raise UsageError(
            f"--memory {options.memory or ''}: {rows[0]['model']}, {rows[0]['method']}: {rows[0]['status']}"
        )


def with_defaults(plan: Plan, chosen: bool) -> Plan:
    """Fill in the cap, the first batch to try, and without a GPU only a few methods unless they were chosen."""
    gpu = plan.device == "cuda"
    cap = plan.cap or (16 * 2**30 if gpu else 256 * 2**20)
    return replace(plan, cap=cap, batch=(START,), methods=plan.methods if gpu or chosen else FEW)


def compare_with_plain(rows: Sequence[Row]) -> None:
    """Add each method's batch and throughput over plain's, each at its own largest batch."""
    for row in rows:
        plain = plain_row([r for r in rows if (r["model"], r["precision"]) == (row["model"], row["precision"])])
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
