"""`encke estimate MODEL`: memory of a training and the largest batch, from a few small steps on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encke
from encke.bench.children import Child
from encke.bench.models import MODELS, build, loss_of, synthetic_batch
from encke.bench.options import Options, parse_bytes
from encke.bench.rows import blank_row, title
from encke.bench.steps import Task
from encke.tools.errors import UsageError
from encke.tools.provenance import read_csv, write_csv
from encke.tools.suggest import pick
from encke.tools.terminal import note, table
from encke.tools.units import size

MEASURED = Path("runs/bench/estimate.csv")
COLUMNS = ("model", "method", "precision", "device", "batch", "size")
SIZES = {"images": 224, "volumes": 64, "tokens": 1024}


def estimate(
    model: str,
    batch: int | None = None,
    memory: str = "16GiB",
    image: int | None = None,
    tokens: int | None = None,
    measure: bool = False,
) -> None:
    """Estimate the memory of a training and its largest batch, plain and with Encke, without training.

    Runs four steps at a batch of 4 and four at 8 on the CPU, in fp32, and extrapolates to the batch.
    `encke.estimate(model, example)` does the same for a model of your own.

    Args:
        model: A model that `encke bench` knows, such as resnet50, vit_b_16 or gpt.
        batch: Images, volumes or sequences in a step; by default the batch of `encke bench` on a GPU.
        memory: The memory into which the largest batch has to fit, such as 16GiB.
        image: Pixels along a side; by default 224, for volumes 64.
        tokens: Tokens in a sequence; by default 1024.
        measure: Also train some steps at this batch on the CPU, show by how much the estimate is off, and add that to
            runs/bench/estimate.csv.
    """
    name = pick(model, MODELS, "MODEL")
    info, cap = MODELS[name], parse_bytes(memory)
    words = info.data == "tokens"
    given = tokens if words else image
    length = SIZES[info.data] if given is None else given
    sizes = Options(
        (name,), image=None if words else length, tokens=length if words else None, device="cpu", out=Path()
    )
    sizes.plan(() if batch is None else (batch,))
    tasks = {each: Task(name, each, "fp32", batch or info.batch, length, 1, "cpu") for each in ("plain", "default")}
    task = tasks["plain"]
    data = synthetic_batch(info, max(encke.estimation.BATCHES), length, "cpu")
    try:
        found = encke.estimate(build(name, length), data, task.batch, cap, info.optimizer, loss_of)
    except RuntimeError as error:
        raise UsageError(f"{name}: {error}") from error
    note(f"{title(blank_row(task))}, {info.optimizer}")
    note(str(found))
    if measure:
        show_measured([found.plain.peak_bytes(task.batch), found.encke.peak_bytes(task.batch)], tasks)


def measure_task(task: Task) -> dict[str, Any]:
    """Measure one training in a new process, after a rehearsal of its first steps.

    The rehearsal loads, among others, kernels for the bits that the policy sets. They take tens of megabytes, which are
    not the training's own.
    """
    with Child(task) as child:
        rehearsal = child.ask(first=task.warm)
        return rehearsal if "failed" in rehearsal else child.ask(measure=True)


def show_measured(expected: list[int], tasks: dict[str, Task]) -> None:
    """Measure the same trainings in processes of their own, and print the measured peaks beside the expected ones."""
    rows: list[tuple[str, ...]] = []
    measured = read_csv(MEASURED)
    for value, (method, task) in zip(expected, tasks.items(), strict=True):
        answer = measure_task(task)
        if answer.get("peak_added_bytes") is None:
            rows.append((method, answer.get("failed", "this system does not tell a process's memory")))
        else:
            peak = answer["peak_bytes"] - (answer["peak_with_collection_bytes"] - answer["peak_added_bytes"])
            off = 100 * (value / peak - 1)
            rows.append((method, size(value), size(peak), f"{off:+.1f} %"))
            columns = {name: each for name, each in blank_row(task).items() if name in COLUMNS}
            measured.append(columns | {"expected_bytes": value, "peak_bytes": peak, "off_percent": round(off, 2)})
    table(
        "Peak of the process above interpreter and libraries",
        ("", "expected", "measured", "off by"),
        rows,
    )
    if measured:
        write_csv(MEASURED, measured)
        note(f"wrote {MEASURED}")
