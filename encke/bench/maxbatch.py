"""`encke bench max-batch`: the largest batch that each method fits into a given memory, and its throughput there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from encke.bench import plots
from encke.bench.children import Child
from encke.bench.methods import METHODS
from encke.bench.steps import Task
from encke.bench.training import (
    Device,
    Options,
    Precision,
    Row,
    blank_row,
    checked,
    lines_of,
    measure_row,
    plain_of,
    title_of,
)
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.terminal import note, number, table, times
from encke.tools.units import GB, size_in

START = 8
"""The first batch that is tried."""
GRAIN = 32
"""The largest batch is found to within one part in so many."""
MOST = 1 << 16
AGAIN = 4
"""How often a slightly smaller batch is tried if the largest one does not fit into a process of its own."""
FEW = ("plain", "default", "checkpoint")
"""What is measured without a GPU, where a search takes a minute."""


class Failed(Exception):
    """A method that does not work here, whatever the batch."""


def largest(fits: Callable[[int], bool], start: int = START, most: int = MOST) -> int:
    """The largest batch up to `most` that fits, to within one part in GRAIN; 0 if not even one sample does."""
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
        self.why = ""

    def fits(self, batch: int) -> bool:
        """Whether several whole steps go through."""
        if self.child is None:
            self.child = Child(self.task)
        answer = self.child.ask(trial=batch)
        fitting = bool(answer.get("fits"))
        if answer.get("died"):
            self.close()
        elif not fitting and not answer.get("out_of_memory"):
            raise Failed(answer["failed"])
        self.why = answer.get("failed", self.why)
        self.trials.append(self.row(batch, fitting, answer.get("step_ms")))
        return fitting

    def row(self, batch: int, fitting: bool, step_ms: float | None) -> Row:
        task = replace(self.task, batch=batch)
        what = ("model", "method", "label", "precision", "compile", "graphs", "device", "batch", "size", "unit")
        row = {name: value for name, value in blank_row(task).items() if name in (*what, "cap_bytes")}
        speed = 1e3 * task.units / step_ms if step_ms else None
        return row | {"fits": fitting, "step_ms": step_ms, "per_second": speed}

    def close(self) -> None:
        if self.child is not None:
            self.child.__exit__(None, None, None)
            self.child = None


def search(task: Task) -> tuple[Row, list[Row]]:
    """The largest batch of one method with its figures, and the trials that led to it."""
    row = blank_row(replace(task, batch=0)) | {"largest_batch": 0}
    why = METHODS[task.method].missing(task.device, task.compile)
    if why:
        return row | {"status": why}, []
    trials = Search(task)
    try:
        batch = largest(trials.fits)
    except Failed as error:
        return row | {"status": str(error)}, trials.trials
    finally:
        trials.close()
    if batch == 0:
        return row | {"status": f"not even one sample fits ({trials.why})"}, trials.trials
    return confirmed(replace(task, batch=batch)), trials.trials


def confirmed(task: Task) -> Row:
    """The figures at the largest batch in a process of its own; at a slightly smaller one if it does not fit there."""
    for _ in range(AGAIN):
        row = measure_row(task)
        if row["status"] != "out of memory" or task.batch == 1:
            break
        task = replace(task, batch=task.batch - max(1, task.batch // GRAIN))
    return row | {"largest_batch": row["batch"] if row["status"] == "ok" else 0}


def max_batch(
    models: tuple[str, ...] = (),
    methods: tuple[str, ...] = (),
    precision: tuple[Precision, ...] = ("fp32",),
    compile: bool = False,
    graphs: bool = False,
    image: int | None = None,
    tokens: int | None = None,
    steps: int = 5,
    memory: str | None = None,
    device: Device | None = None,
    out: Path = Path("runs/bench"),
) -> None:
    """The largest batch of every method under a cap on memory, and its throughput there beside plain's at its own.

    A batch fits if several whole steps pass, with the optimizer's state and a collection step of the policy. Prints a
    table and writes max_batch.csv, max_batch_trials.csv and max_batch.png (throughput against batch).

    Args:
        models: resnet18, resnet50, wide_resnet50_2, vgg16, densenet161, efficientnet_b0, vit_b_16, gpt2, gpt_mini.
            By default resnet50, without a GPU resnet18.
        methods: plain, default, comet-nearest, division, group2, group4, bounded, checkpoint, selective, save-on-cpu,
            offload, and with --compile budget50, budget20. By default all, without a GPU plain, default, checkpoint.
        precision: fp32 (with tf32 on a GPU), or bf16: autocast, and channels_last for images.
        compile: Compile the model with torch.compile, then attach.
        graphs: The same with mode="reduce-overhead": the GPU replays CUDA graphs.
        image: Pixels along an image's side; by default 224, without a GPU 64.
        tokens: Tokens in a sequence; by default 1024, without a GPU 128.
        steps: Steps that are timed at the largest batch; the median counts.
        memory: The cap, such as 16GiB (the default) or 900MiB; without a GPU 256MiB, beyond what interpreter and
            libraries take.
        device: cpu or cuda; by default a GPU if there is one.
        out: The folder for the CSVs and the plot.
    """
    options = checked(models, (), methods, precision, compile, graphs, image, tokens, steps, memory, device, out)
    options = with_defaults(options, methods)
    files = out / "max_batch.csv", out / "max_batch_trials.csv"
    rows, trials = [], []
    for task in track([(f"{t.model}, {t.precision}: {METHODS[t.method].label}", t) for t in tasks_of(options)]):
        row, tried = search(task)
        rows.append(row)
        trials += tried
        against_plain(rows)
        write_csv(files[0], rows)
        if trials:
            write_csv(files[1], trials)
    for model in options.models:
        for kind in options.precision:
            show([row for row in rows if row["model"] == model and row["precision"] == kind])
    note()
    written = [*files[: 1 + bool(trials)], *plots.throughput_under_cap(rows, trials, out / "max_batch.png")]
    note("wrote " + ", ".join(str(path) for path in written))
    if not any(row["largest_batch"] for row in rows):
        raise UsageError(f"--memory {memory or ''}: {rows[0]['model']}, {rows[0]['label']}: {rows[0]['status']}")


def with_defaults(options: Options, methods: Sequence[str]) -> Options:
    gpu = options.device == "cuda"
    cap = options.cap or (16 * 2**30 if gpu else 256 * 2**20)
    return replace(options, cap=cap, methods=options.methods if gpu or methods else FEW)


def tasks_of(options: Options) -> list[Task]:
    return [
        options.task(model, method, precision, START)
        for model in options.models
        for precision in options.precision
        for method in options.methods
    ]


def against_plain(rows: Sequence[Row]) -> None:
    """Adds each method's batch and throughput over plain's, each at its own largest batch."""
    for row in rows:
        plain = plain_of([r for r in rows if (r["model"], r["precision"]) == (row["model"], row["precision"])])
        for column, of in (("batch_over_plain", "largest_batch"), ("throughput_over_plain", "per_second")):
            both = row.get(of) and plain.get(of)
            row[column] = row[of] / plain[of] if both else None


def show(rows: Sequence[Row]) -> None:
    """One table."""
    plain = plain_of(rows)

    def cells(row: Row) -> list[str]:
        compared = [times(row[column], plain.get(column)) for column in ("largest_batch", "per_second")]
        peak = row["reserved_bytes"] or row["peak_above_bytes"]
        return [
            str(row["largest_batch"]),
            compared[0],
            number(row["per_second"]),
            compared[1],
            number(row["pipelined_ms"]),
            size_in(peak, GB),
        ]

    heads = ["method", "largest batch", "of plain", f"{rows[0]['unit']}/s", "of plain", "step ms", "taken GB"]
    table(title_of(rows[0] | {"batch": 0}), heads, lines_of(rows, cells))
