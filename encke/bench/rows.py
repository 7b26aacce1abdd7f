"""Rows of the bench tables: one training step of every method, measured side by side."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from encke.bench.children import Child, measure
from encke.bench.methods import METHODS, compiled_as
from encke.bench.models import MODELS, source
from encke.bench.steps import Result, Task
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.terminal import note
from encke.tools.units import GB, MB

Row = dict[str, Any]
FIGURES = tuple(field.name for field in fields(Result))
CHUNKED = "chunked loss"
IDENTITY = ("model", "method", "precision", "compile", "graphs", "chunked", "batch", "size", "cap_bytes")
"""Columns that identify a task."""


@cache
def code_digest() -> str:
    """Return a short digest of the package's Python files: rows with equal digests measure the same code."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def blank_row(task: Task) -> Row:
    """Return the columns that identify a measurement, and empty ones for the figures."""
    return {
        "model": task.model,
        "model_from": source(task.model),
        "method": task.method,
        "precision": task.precision,
        "compile": task.compile,
        "graphs": task.graphs,
        "chunked": task.chunked,
        "device": task.device,
        "batch": task.batch,
        "size": task.size,
        "unit": MODELS[task.model].data,
        "cap_bytes": task.cap,
        "code": code_digest(),
        "round": 1,
        "status": "",
        **dict.fromkeys(FIGURES),
    }


def describe(task: Task) -> str:
    """Return a description of a task."""
    compiled = f", {compiled_as(task.graphs)}" if task.compile else ""
    chunked = f", {CHUNKED}" if task.chunked else ""
    return f"{task.model}, {task.precision}{compiled}{chunked}, batch {task.batch}: {task.method}"


def measure_row(task: Task, child: Child | None = None) -> Row:
    """Measure one task, in a new process or in `child`, which keeps its training for the next round.

    `status` is "ok", or the reason why there are no figures.
    """
    row = blank_row(task)
    if reason := METHODS[task.method].missing(task.device):
        return row | {"status": reason}
    answer = measure(task) if child is None else child.ask(measure=True, keep=True)
    row["status"] = answer.pop("failed", "ok")
    return row | {name: value for name, value in answer.items() if name in row}


def measure_all(
    tables: Sequence[Sequence[Task]], csv: Path, rounds: int = 1, done: Sequence[Row] = (), together: int = 1
) -> list[Row]:
    """Measure every task of every table; with several rounds, the tasks of a table take turns.

    With several rounds each task has one process that keeps its training from round to round. The CSV is written after
    every row, so that an interrupted run keeps its rows.

    Args:
        tables: Tasks of each table.
        csv: File for the rows.
        rounds: Number of measurements of each task.
        done: Rows that precede those of this call in the file.
        together: Number of processes of a table that warm up at the same time. Their first steps are then not timed.
    """
    rows = list(done)
    labels = [
        (describe(task) + (f", round {number}" if rounds > 1 else ""), None)
        for tasks in tables
        for number in range(1, rounds + 1)
        for task in tasks
    ]
    status = track(labels)
    with ExitStack() as stack:

        def start(tasks: Sequence[Task]) -> dict[Task, Child]:
            able = [task for task in tasks if not METHODS[task.method].missing(task.device)]
            alive = rounds > 1 or together > 1
            return {task: stack.enter_context(Child(task)) for task in able} if alive else {}

        upcoming = start(tables[0]) if tables else {}
        for tasks, following in zip(tables, [*tables[1:], ()], strict=True):
            # The next processes import their libraries while these measure.
            kept, upcoming = upcoming, start(following)
            if together > 1:
                with ThreadPoolExecutor(together) as pool:
                    list(pool.map(lambda child: child.ask(warm=True), kept.values()))
            for number in range(1, rounds + 1):
                for task in tasks:
                    next(status)
                    rows.append(measure_row(task, kept.get(task)) | {"round": number})
                    write_csv(csv, rows)
            for child in kept.values():
                child.close()
    next(status, None)
    return rows


def medians(rows: Sequence[Row]) -> list[Row]:
    """Merge the rounds of each task: medians of times and memory, and the number of rounds that were measured."""
    merged = []
    for group in group_rows(rows, IDENTITY).values():
        measured = [row for row in group if row["status"] == "ok"]
        row = dict((measured or group)[0])
        for name in FIGURES if measured else ():
            values = [each[name] for each in measured if each[name] is not None]
            row[name] = statistics.median(values) if values else None
        merged.append(row | {"round": len(measured)})
    return merged


def group_rows(
    rows: Sequence[Row], keys: Sequence[str] = ("model", "precision", "batch", "cap_bytes")
) -> dict[Any, list[Row]]:
    """Group rows by some of their columns; by default the rows of one table."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def title(row: Mapping[str, Any]) -> str:
    """Return the title of a table: the common properties of its rows."""
    repeated = {"images": 2, "volumes": 3}.get(row["unit"], 1)
    size = " x ".join([str(row["size"])] * repeated) if repeated > 1 else f"{row['size']} tokens"
    package = f" ({row['model_from']})" if row["unit"] == "tokens" else ""
    tf32 = " (TF32)" if row["precision"] == "fp32" and row["device"] == "cuda" else ""
    words = [f"{row['model']}{package}", row["precision"] + tf32]
    words += [compiled_as(row["graphs"])] if row["compile"] else []
    words += [CHUNKED] if row.get("chunked") else []
    words += [f"batch {row['batch']}"] if row["batch"] else []
    words += [size, row["device"]]
    words += [f"at most {cap_words(row['cap_bytes'])}"] if row["cap_bytes"] else []
    words += [f"median of {row['round']} rounds"] if row["round"] > 1 else []
    return ", ".join(words)


def cap_words(cap: int | None) -> str:
    """Format a cap in the units in which caps are given."""
    return f"{cap / 2**30:.4g} GiB" if cap and cap >= 2**30 else f"{(cap or 0) / 2**20:.4g} MiB"


def plain_row(rows: Sequence[Row]) -> Row:
    """Return the row that others are compared with; without figures if plain was not measured."""
    return next((row for row in rows if row["method"] == "plain"), {})


def compared_peak(row: Row) -> float | None:
    """Return the peak that methods are compared by; without a GPU that above interpreter, libraries, model and data."""
    return row.get("peak_bytes" if row.get("device") == "cuda" else "peak_above_bytes")


def table_lines(rows: Sequence[Row], cells: Callable[[Row], list[str]]) -> list[list[str]]:
    """Return the lines of a table: figures, or the reason why there are none."""
    return [[row["method"], *(cells(row) if row["status"] == "ok" else [row["status"]])] for row in rows]


def table_unit(rows: Sequence[Row]) -> tuple[str, float]:
    """Return the unit for a table's bytes: GB, or MB where all are small."""
    largest = max((row["peak_bytes"] or 0 for row in rows), default=0)
    return ("GB", GB) if largest >= 2 * GB else ("MB", MB)


def conclude(rows: Sequence[Row], written: Sequence[Path]) -> None:
    """Name the files that were written; raise an error if there is no figure at all."""
    note()
    note("wrote " + " and ".join(str(path) for path in written))
    if all(row["status"] != "ok" for row in rows):
        raise UsageError(f"nothing could be measured: {rows[0]['method']}: {rows[0]['status']}")
