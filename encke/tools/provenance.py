"""Provenance of a figure: date, command, machine and versions, as columns of a CSV."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# Read before anything is measured: how busy the machine was with other work.
LOAD_BEFORE = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else ""


def cpu_name() -> str:
    """Return the processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def core_count() -> int:
    """Return the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version(package: str) -> str:
    """Return the installed version of a package, or an empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def command_line() -> str:
    """Return the command that started this process, without folders of this machine."""
    script = Path(sys.argv[0])
    words = ["python3", f"benchmarks/{script.name}"] if script.parent.name == "benchmarks" else ["encke"]
    return shlex.join([*words, *(re.sub(r"(^|=)/\S*/", r"\1", argument) for argument in sys.argv[1:])])


def provenance() -> dict[str, str | int | float]:
    """Return the columns that are part of every row of a published CSV."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command_line(),
        "cpu": cpu_name(),
        "cores": core_count(),
        "load_before": LOAD_BEFORE,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        **{name: version(name) for name in ("numba", "triton", "torchvision", "transformers", "pysz", "zfpy")},
    }


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the rows, each followed by its own provenance if it has one, else by that of this run."""
    origin = provenance()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        columns = dict.fromkeys(name for row in rows for name in row if name not in origin)
        writer = csv.DictWriter(file, [*columns, *origin])
        writer.writeheader()
        writer.writerows({**origin, **row} for row in rows)


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Return the rows that `write_csv` wrote, with numbers and empty cells restored; an empty list without the file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: cell_value(text) for name, text in row.items()} for row in csv.DictReader(file)]


def cell_value(text: str) -> Any:
    """Return the value of a cell: None if it is empty, a truth value, a number, or the text."""
    if text in ("", "True", "False"):
        return None if text == "" else text == "True"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text
