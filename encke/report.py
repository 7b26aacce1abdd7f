"""Reports: bytes saved and packed at every site of the last forward pass, with the codec and its settings."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from encke.capture.ledger import CAST_AGAIN, Record
from encke.codecs import Codec
from encke.tools.files import write_json
from encke.tools.terminal import columns
from encke.tools.units import size

LEAST_NAME = 10
"""Characters that a layer's or an operation's name keeps in a narrow terminal."""


@dataclass(frozen=True)
class Row:
    """One site of the last forward pass."""

    layer: str
    operation: str
    slot: str
    codec: str
    bound: str
    saved_bytes: int
    packed_bytes: int
    shared: tuple[str, ...] = ()
    """Other sites that saved this tensor, such as "features.8 Convolution.input"."""

    @property
    def ratio(self) -> float:
        return self.saved_bytes / self.packed_bytes if self.packed_bytes else float("inf")


@dataclass(frozen=True)
class Report:
    """Table of the last forward pass, site by site. `print(report)` shows it.

    Example:
        >>> import torch
        >>> import encke
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 10))
        >>> handle = encke.attach(model)
        >>> for _ in range(2):
        ...     model(torch.randn(256, 64)).sum().backward()
        >>> report = handle.report()
        >>> report.saved_bytes > report.packed_bytes
        True
        >>> [row.operation for row in report.sites if row.codec == "GroupQuant"]
        ['Tanh']
    """

    policy: str
    saved_bytes: int
    """Bytes that plain autograd would hold, each storage once."""
    packed_bytes: int
    """Bytes held instead."""
    peak_bytes: int
    """Measured peak of the process: on a GPU allocated memory since the last `torch.cuda.reset_peak_memory_stats`, on
    the CPU resident memory."""
    forwards: int
    """Training forward passes so far."""
    sites: tuple[Row, ...]
    coarsened: int = 0
    """Tensors so far, at these sites, for which the memory predicted on a GPU was too small: they were packed with 4 or
    64 times the bound that the policy had chosen."""

    @property
    def ratio(self) -> float:
        """Saved bytes over packed bytes."""
        return self.saved_bytes / self.packed_bytes if self.packed_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain Python data."""
        data = asdict(self)
        data["ratio"] = self.ratio
        # JSON has no infinity: a layer that costs nothing has no ratio.
        data["sites"] = [{**asdict(row), "ratio": row.ratio if row.packed_bytes else None} for row in self.sites]
        return data

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_dict()` as JSON, whole or not at all."""
        target = Path(path)
        if not target.parent.is_dir():
            raise FileNotFoundError(f"cannot write the report to {target}: the folder {target.parent} does not exist")
        write_json(target, self.to_dict())

    def __str__(self) -> str:
        if not self.forwards:
            return f"encke: no training forward pass yet ({self.policy})"
        head = ("layer", "operation", "codec", "bound", "saved", "packed", "ratio")
        table = [head]
        for row in self.sites:
            ratio = f"{row.ratio:.1f}" if row.packed_bytes else "-"
            name = f"{row.operation}.{row.slot}" if row.slot else row.operation
            sizes = (size(row.saved_bytes), size(row.packed_bytes))
            table.append((row.layer or "-", name, row.codec, row.bound, *sizes, ratio))
        table.append(("all", "", "", "", size(self.saved_bytes), size(self.packed_bytes), f"{self.ratio:.1f}"))
        lines = aligned(table, columns())
        lines.insert(1, "-" * len(lines[0]))
        lines.insert(len(lines) - 1, "-" * len(lines[0]))
        note = f"{self.policy}; last of {self.forwards} forward passes; peak of the process {size(self.peak_bytes)}"
        note += f"; {self.coarsened} packed with a coarser bound" if self.coarsened else ""
        return "\n".join([*(line.rstrip() for line in lines), note])


def aligned(rows: Sequence[tuple[str, ...]], most: int) -> list[str]:
    """Return rows in columns that are at most `most` characters wide together.

    Where that is too narrow for the names in the first two columns, their beginnings are left out.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    space = "  " if sum(widths) + 2 * (len(widths) - 1) <= most else " "
    spare = most - sum(widths[2:]) - len(space) * (len(widths) - 1)
    while sum(widths[:2]) > max(spare, 2 * LEAST_NAME):
        widths[widths[1] > widths[0]] -= 1
    lines = []
    for row in rows:
        cells = [
            cell if len(cell) <= width else f"…{cell[1 - width :]}" for cell, width in zip(row, widths, strict=True)
        ]
        cells = [cell.ljust(widths[i]) if i < 4 else cell.rjust(widths[i]) for i, cell in enumerate(cells)]
        lines.append(space.join(cells))
    return lines


class StepLog:
    """Log of codec and ratio at every site, forward pass by forward pass: JSON lines in a file, or lines of text."""

    def __init__(self, target: str | os.PathLike[str] | TextIO, every: int) -> None:
        self.every = every
        self.written = 0
        self.stream: TextIO | None = None
        if isinstance(target, str | os.PathLike):
            self.path = Path(target)
            if not self.path.parent.is_dir():
                raise FileNotFoundError(f"cannot log to {target}: the folder {self.path.parent} does not exist")
            self.path.open("a").close()
        elif callable(getattr(target, "write", None)):
            self.stream = target
        else:
            raise TypeError(f"log takes a path or an open text stream, got {type(target).__name__}")

    def write(self, step: int, records: list[Record]) -> None:
        """Write the records of one forward pass, unless they were already written or the pass is not logged."""
        if step == self.written or step % self.every:
            return
        self.written = step
        rows = rows_of(records)
        saved, packed = sum(row.saved_bytes for row in rows), sum(row.packed_bytes for row in rows)
        total = saved / packed if packed else None
        if self.stream is None:
            sites = [{**asdict(row), "ratio": row.ratio if row.packed_bytes else None} for row in rows]
            line = {"step": step, "ratio": total, "saved_bytes": saved, "packed_bytes": packed, "sites": sites}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            return
        for row in rows:
            ratio = f"{row.ratio:.2f}" if row.packed_bytes else "-"
            setting = " ".join(filter(None, (row.codec, row.bound)))
            self.stream.write(f"step {step} {row.layer or '-'} {row.operation}.{row.slot} {setting} ratio {ratio}\n")
        self.stream.write(f"step {step} all ratio {f'{total:.2f}' if total else '-'}\n")


def describe(codec: Codec | str) -> tuple[str, str]:
    """Return a codec's name and its settings, such as the bound or the bits; `codec` may be a word such as "kept"."""
    return (codec, "") if isinstance(codec, str) else (type(codec).__name__, codec.describe())


def rows_of(records: list[Record]) -> tuple[Row, ...]:
    """Return rows in the order of the forward pass; tensors that were kept are summed up by reason."""
    rows: dict[tuple[Any, ...], Row] = {}
    for number, record in enumerate(records):
        site = record.site
        codec, bound = describe(record.codec)
        key = (site.layer, site.operation) if codec in ("kept", CAST_AGAIN) else (number,)
        old = rows.get(key)
        saved = record.saved_bytes + (old.saved_bytes if old else 0)
        packed = record.packed_bytes + (old.packed_bytes if old else 0)
        others = (sharer.site for sharer in record.facts.sharers)
        shared = tuple(sorted(f"{other.layer} {other.operation}.{other.slot}" for other in others))
        rows[key] = Row(site.layer, site.operation, site.slot, codec, bound, saved, packed, shared)
    return tuple(row for row in rows.values() if row.saved_bytes or row.packed_bytes)


def peak_bytes(device: torch.device | None) -> int:
    """Return the measured peak: allocated GPU memory, or the process's largest resident size."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
