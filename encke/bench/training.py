"""What `encke bench memory` and `encke bench speed` share: one training step of every method, side by side."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from encke.bench import children
from encke.bench.methods import METHODS, compiled_as, usual
from encke.bench.models import MODELS, check_installed
from encke.bench.steps import Result, Task
from encke.tools.errors import UsageError
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.suggest import pick
from encke.tools.terminal import note

Precision = Literal["fp32", "bf16"]
Device = Literal["cpu", "cuda"]
Row = dict[str, Any]
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
SMALL = {"images": 16, "tokens": 4}
"""Images or sequences in a step without a GPU."""


def parse_bytes(text: str, option: str = "--memory") -> int:
    """The bytes that `16GiB`, `900MiB` or `1.5 GB` means."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise UsageError(f"{option}: {text!r} is no amount of memory; write it like 16GiB or 900MiB")
    return round(float(match[1]) * unit)


@dataclass(frozen=True)
class Options:
    """What was asked for, checked, with the machine's defaults filled in."""

    models: Sequence[str]
    batch: Sequence[int]
    methods: Sequence[str]
    precision: Sequence[Precision]
    compile: bool
    graphs: bool
    image: int
    tokens: int
    steps: int
    cap: int | None
    device: Device

    def size(self, model: str) -> int:
        """Pixels along an image's side, or tokens in a sequence."""
        return self.tokens if MODELS[model].data == "tokens" else self.image

    def batches(self, model: str) -> Sequence[int]:
        if self.batch:
            return self.batch
        return [MODELS[model].batch if self.device == "cuda" else SMALL[MODELS[model].data]]

    def task(self, model: str, method: str, precision: Precision, batch: int) -> Task:
        size = self.size(model)
        return Task(model, method, precision, batch, size, self.steps, self.device, self.compile, self.cap, self.graphs)


def checked(
    models: Sequence[str],
    batch: Sequence[int],
    methods: Sequence[str],
    precision: Sequence[Precision],
    compile: bool,
    graphs: bool,
    image: int | None,
    tokens: int | None,
    steps: int,
    memory: str | None,
    device: Device | None,
    out: Path,
) -> Options:
    """The options of a command, or an error that names the one that makes no sense. Makes the folder `out`."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA GPU is available to torch; use --device cpu")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    gpu = device == "cuda"
    if graphs and not gpu:
        raise UsageError("--graphs records CUDA graphs and needs a GPU; without one there is --compile")
    compile = compile or graphs
    image = (224 if gpu else 64) if image is None else image
    tokens = (1024 if gpu else 128) if tokens is None else tokens
    counts = [("--batch", n) for n in batch] + [("--steps", steps), ("--image", image), ("--tokens", tokens)]
    for option, value in counts:
        if value < 1:
            raise UsageError(f"{option} must be at least 1, got {value}")
    if not precision:
        raise UsageError("--precision needs at least one of fp32 and bf16")
    names = [pick(name, MODELS, "--models") for name in models or ["resnet50" if gpu else "resnet18"]]
    for name in names:
        check_installed(name)
        if name == "vit_b_16" and image % 16:
            raise UsageError(f"--image {image}: vit_b_16 cuts images into squares of 16 pixels; use a multiple of 16")
    wanted = [pick(name, METHODS, "--methods") for name in methods] or usual(compile)
    cap = parse_bytes(memory) if memory is not None else None
    if cap is not None and gpu and cap > (total := torch.cuda.get_device_properties(0).total_memory):
        raise UsageError(f"--memory {memory} is more than this GPU has ({total / 2**30:.0f} GiB)")
    out.mkdir(parents=True, exist_ok=True)
    return Options(names, batch, wanted, precision, compile, graphs, image, tokens, steps, cap, device)


def blank_row(task: Task) -> Row:
    """The columns that say what was measured, and empty ones for the figures."""
    kind, method = MODELS[task.model], METHODS[task.method]
    return {
        "model": task.model,
        "model_from": kind.source,
        "method": task.method,
        "label": method.label,
        "precision": task.precision,
        "compile": task.compile,
        "graphs": task.graphs,
        "device": task.device,
        "batch": task.batch,
        "size": task.size,
        "unit": kind.data,
        "cap_bytes": task.cap,
        "status": "",
        **{field.name: None for field in fields(Result)},
    }


def tasks_of(options: Options) -> list[Task]:
    """Every method of a model next to the others."""
    return [
        options.task(model, method, precision, batch)
        for model in options.models
        for precision in options.precision
        for batch in options.batches(model)
        for method in options.methods
    ]


def describe(task: Task) -> str:
    compiled = f", {compiled_as(task.graphs)}" if task.compile else ""
    return f"{task.model}, {task.precision}{compiled}, batch {task.batch}: {METHODS[task.method].label}"


def measure_row(task: Task) -> Row:
    """One task as a row; `status` is "ok" or says in words why there are no figures."""
    row = blank_row(task)
    why = METHODS[task.method].missing(task.device, task.compile)
    answer = {"failed": why} if why else children.measure(task)
    row["status"] = answer.pop("failed", "ok")
    row |= {name: value for name, value in answer.items() if name in row}
    return row


def measure_all(options: Options, csv: Path) -> list[Row]:
    """Measures everything; the CSV grows with every row, so that an end before time leaves what is there."""
    rows: list[Row] = []
    for task in track([(describe(task), task) for task in tasks_of(options)]):
        rows.append(measure_row(task))
        write_csv(csv, rows)
    return rows


def groups(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """The rows that stand side by side: same model, precision, batch."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["model"], row["precision"], row["batch"]), []).append(row)
    return found


def title_of(row: Mapping[str, Any]) -> str:
    """What a table's rows have in common."""
    size = f"{row['size']} tokens" if row["unit"] == "tokens" else f"{row['size']} x {row['size']}"
    source = f" ({row['model_from']})" if row["unit"] == "tokens" else ""
    parts = [f"{row['model']}{source}", row["precision"] + (" (tf32)" if plain_gpu(row) else "")]
    parts += [compiled_as(row["graphs"])] if row["compile"] else []
    parts += [f"batch {row['batch']}"] if row["batch"] else []
    parts += [size, row["device"]]
    parts += [f"at most {row['cap_bytes'] / 2**30:.4g} GiB"] if row["cap_bytes"] else []
    return ", ".join(parts)


def plain_gpu(row: Mapping[str, Any]) -> bool:
    return row["precision"] == "fp32" and row["device"] == "cuda"


def plain_of(rows: Sequence[Row]) -> Row:
    """The row that others are compared with; without figures if plain was not measured."""
    return next((row for row in rows if row["method"] == "plain"), {})


def peak_of(row: Row) -> float | None:
    """The peak that methods are compared by; without a GPU above what there was before, interpreter and libraries."""
    return row.get("peak_bytes" if row.get("device") == "cuda" else "peak_above_bytes")


def lines_of(rows: Sequence[Row], cells: Callable[[Row], list[str]]) -> list[list[str]]:
    """The table's lines: figures, or in words why there are none."""
    return [[row["label"], *(cells(row) if row["status"] == "ok" else [row["status"]])] for row in rows]


def unit_of(rows: Sequence[Row]) -> tuple[str, float]:
    """Bytes are shown in GB or MB, whichever suits a table."""
    largest = max((row["peak_bytes"] or 0 for row in rows), default=0)
    return ("GB", 1e9) if largest >= 2e9 else ("MB", 1e6)


def conclude(rows: Sequence[Row], written: Sequence[Path]) -> None:
    """What was written; an error if there is no figure at all."""
    note()
    note("wrote " + " and ".join(str(path) for path in written))
    if all(row["status"] != "ok" for row in rows):
        raise UsageError(f"nothing could be measured: {rows[0]['label']}: {rows[0]['status']}")
