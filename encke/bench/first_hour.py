"""`encke bench first-hour`: the first steps of a training, one by one, with empty and with warm kernel caches."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encke.bench import plots
from encke.bench.children import Child
from encke.bench.methods import METHODS
from encke.bench.options import Device, Options, Precision, option
from encke.bench.rows import blank_row, group_rows, title
from encke.bench.steps import HOUR, Task
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.terminal import note, number, table
from encke.tools.units import size

Row = dict[str, Any]
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR")
"""Environment variables of the folders of compiled kernels."""
SETTLED = 50
"""Step after which nothing may be compiled or recorded any more."""
LAST = 10
"""Number of last steps, whose ordinary ones give the time of a step."""


@dataclass(frozen=True)
class FirstHourOptions:
    """The models and sizes to measure."""

    models: tuple[str, ...] = field(
        metadata={"help": "Models of `encke bench speed --models`. By default resnet50, without a GPU resnet18."}
    )
    methods: tuple[str, ...] = option(("plain", "default"), "Methods of `encke bench speed`.")
    precision: Precision = option(
        "bf16", "fp32 (with TF32 on a GPU), or bf16: autocast, with channels_last for images."
    )
    compile: bool = option(False, "Compile the model with torch.compile, then attach.")
    graphs: bool = option(False, 'Compile with mode="reduce-overhead", so that the GPU replays CUDA graphs.')
    batch: int | None = option(None, "Images or sequences in a step. By default the model's usual batch.")
    image: int | None = option(None, "Pixels along a side. By default 224, without a GPU 64; volumes 128 and 32.")
    tokens: int | None = option(None, "Tokens in a sequence. By default 1024, without a GPU 128.")
    steps: int = option(50, "Number of steps to time, from the very first on.")
    device: Device | None = option(None, "By default a GPU if there is one.")
    out: Path = option(Path("runs/bench"), "The folder for the CSV file and the plot.")


def first_hour(options: FirstHourOptions) -> None:
    """Time each of the first steps of a training, with empty and with warm kernel caches, beside plain.

    Prints a table (first steps, ordinary step, slowest collection step, compiled kernels, time of 1,000 steps) and
    writes first_hour.csv (a row for each step) and first_hour.png. docs/bench.md explains the columns.
    """
    if options.steps <= LAST:
        raise UsageError(f"--steps must be more than {LAST}, got {options.steps}")
    plan = Options(
        models=options.models,
        methods=options.methods,
        precision=(options.precision,),
        compile=options.compile,
        graphs=options.graphs,
        image=options.image,
        tokens=options.tokens,
        device=options.device,
        out=options.out,
    ).plan(() if options.batch is None else (options.batch,))
    tasks = [task for each in plan.tables() for task in each]
    rows, runs, kernels = [], [], []
    for task, caches, folder in track(stages(tasks)):
        answer = first_steps(task, options.steps, Path(folder.name))
        run = blank_row(task) | {"caches": caches, "status": answer.get("failed", "ok")}
        runs.append(run | summarise(answer) if "steps" in answer else run)
        rows += [{**identity(task), "caches": caches, **step} for step in answer.get("steps", ())]
        kernels += kernel_rows(identity(task) | {"caches": caches}, answer.get("kernels", ()))
        if rows:
            write_csv(options.out / "first_hour.csv", rows)
        if kernels:
            write_csv(options.out / "first_hour_kernels.csv", kernels)
        if caches == "warm":
            folder.cleanup()
    for group in group_rows(runs, ("model",)).values():
        show(group)
    explain()
    if options.steps > SETTLED and (options.compile or options.graphs):
        for run in runs:
            late = run.get("late_graphs", "unknown")
            note(f"{run['method']}, {run['caches']}: {late} graphs compiled or recorded after step {SETTLED}")
    if not rows:
        raise UsageError(f"nothing could be measured: {runs[0]['method']}: {runs[0]['status']}")
    names = ["first_hour.csv", *(["first_hour_kernels.csv"] if kernels else [])]
    written = [*(options.out / name for name in names), *plots.first_steps(rows, options.out / "first_hour.png")]
    note("wrote " + ", ".join(str(path) for path in written))


def stages(tasks: Sequence[Task]) -> list[tuple[str, Any]]:
    """Return each task twice, with its cache folder: first empty, then as the first process left it."""
    found = []
    for task in tasks:
        if not METHODS[task.method].missing(task.device):
            folder = tempfile.TemporaryDirectory(prefix="encke-caches-")
            for caches in ("empty", "warm"):
                found.append((f"{task.model}: {task.method}, {caches} caches", (task, caches, folder)))
    return found


def first_steps(task: Task, count: int, caches: Path) -> dict[str, Any]:
    """Run the first steps in a new process that keeps its compiled kernels in `caches`."""
    with Child(task, {name: str(caches / name.lower()) for name in CACHES}) as child:
        return child.ask(first=count)


def identity(task: Task) -> Row:
    """Return the columns that identify a measurement."""
    names = "model model_from method precision compile device batch size unit".split()
    return {name: value for name, value in blank_row(task).items() if name in names}


def kernel_rows(about: Row, kernels: Sequence[tuple[str, float]]) -> list[Row]:
    """Return a row for each kernel: the number of compiled specialisations, and the seconds of all of them."""
    taken: dict[str, list[float]] = {}
    for name, seconds in kernels:
        taken.setdefault(name, []).append(seconds)
    rows = [about | {"kernel": n, "compiled": len(s), "seconds": round(sum(s), 3)} for n, s in taken.items()]
    return sorted(rows, key=lambda row: -row["seconds"])


def summarise(answer: dict[str, Any]) -> Row:
    """Return the figures of one process: the cost of the first steps beyond ordinary ones, and of collection."""
    steps = answer["steps"]
    ordinary = statistics.median(step["ms"] for step in steps[-LAST:] if not step["collection"])
    collections = [step["ms"] for step in steps[2:] if step["collection"]]
    last = collections[-1] if collections else ordinary
    later = HOUR - len(steps)
    rest = later * ordinary + answer["later_collections"] * (last - ordinary)
    return {
        "first_ms": steps[0]["ms"],
        "second_ms": steps[1]["ms"],
        "step_ms": ordinary,
        "slowest_ms": max(collections, default=None),
        "kernels": sum(step["kernels"] for step in steps),
        "late_kernels": sum(step["kernels"] for step in steps[2:]),
        "kernel_seconds": sum(step["kernel_seconds"] for step in steps),
        "graphs": sum(step["graphs"] for step in steps),
        "late_graphs": sum(step["graphs"] + step["recordings"] for step in steps[SETTLED:]),
        "thousand_seconds": (sum(step["ms"] for step in steps) + rest) / 1e3,
        "peak_bytes": max(step["peak_bytes"] for step in steps[2:]),
        "loss": answer["loss"],
    }


def show(runs: Sequence[Row]) -> None:
    """Print the table of one model."""

    def cells(run: Row) -> list[str]:
        if run["status"] != "ok":
            return [f"{run['method']}, {run['caches']}", run["status"]]
        slowest = run["slowest_ms"]
        return [
            f"{run['method']}, {run['caches']}",
            number(run["first_ms"] / 1e3, 2),
            number(run["second_ms"] / 1e3, 2),
            number(run["step_ms"]),
            number(slowest),
            str(run["kernels"]),
            number(run["kernel_seconds"]),
            number(run["thousand_seconds"]),
            size(run["peak_bytes"]) if run["peak_bytes"] else "",
        ]

    heads = ["method, caches", "1st s", "2nd s", "step ms", "collect", "kernels", "s", "1,000 s", "peak"]
    table(title(runs[0]), heads, [cells(run) for run in runs])


def explain() -> None:
    """Print an explanation of the columns."""
    note()
    note("1st, 2nd: the first steps. step: ordinary ones. collect: the slowest collection")
    note("step from the third on, ms. kernels, s: compiled by Triton, and its seconds.")
    note("1,000 s: time of 1,000 steps, from those measured. peak: from step 3 on.")
