"""Tables of training steps: cases are measured in turn and shown as Markdown. readme_table.py and transformer_table.py
say which cases."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.bench.maxbatch import known_rows  # noqa: E402
from encke.bench.options import Options, Precision  # noqa: E402
from encke.bench.rows import (  # noqa: E402
    CHUNKED,
    IDENTITY,
    Row,
    blank_row,
    code_digest,
    compared_peak,
    group_rows,
    measure_all,
    medians,
    plain_row,
)
from encke.bench.steps import WARM, Task  # noqa: E402
from encke.tools.units import GB  # noqa: E402

CASE = tuple(column for column in IDENTITY if column != "method")
HEADS = (
    *("case", "method", "step", "of plain", "peak", "of plain", "held", "of plain"),
    *("first two steps", "collection step"),
)


@dataclass(frozen=True)
class Case:
    """Methods that are measured in turn on one model."""

    model: str
    methods: tuple[str, ...] = ("plain", "default")
    precision: Precision = "bf16"
    batch: int | None = None
    """Images or sequences in a step; None: the model's usual batch."""
    compile: bool = False
    chunked: bool = False
    tokens: int | None = None

    def tasks(self, args: argparse.Namespace) -> list[Task]:
        """Return the tasks, with sizes from the command line in place of the case's own."""
        options = Options(
            (self.model,),
            self.methods,
            (self.precision,),
            self.compile,
            image=args.image,
            tokens=args.tokens or self.tokens,
            steps=args.steps,
            out=args.csv.parent,
        )
        batch = args.batch or self.batch
        (tasks,) = options.plan((batch,) if batch else ()).tables()
        return [replace(task, chunked=self.chunked, warm=args.warm) for task in tasks]


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every table has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round")
    parser.add_argument("--warm", type=int, default=WARM, help="warm-up steps")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help='measure only cases with this in their names, "fp32"')
    parser.add_argument("--csv", type=Path, help="rows of the same code and machine that it has are not measured again")
    parser.add_argument("--batch", type=int, help="use this batch for all cases, for a quick run")
    parser.add_argument("--image", type=int, help="pixels along an image's side; by default 224, without a GPU 64")
    parser.add_argument("--tokens", type=int, help="tokens in a sequence, for a quick run")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="let N processes warm up at the same time, without timing their first steps, then measure all cases in "
        "turn: much shorter for compiled models. Not for CNNs: cuDNN times its algorithms in the warm-up",
    )
    return parser


def run(cases: Sequence[Case], args: argparse.Namespace) -> None:
    """Measure the cases that the CSV lacks, and print a table of all its rows. Rows of other cases stay in it."""
    tables = [case.tasks(args) for case in cases]
    if args.only:
        tables = [tasks for tasks in tables if any(text in case_name(blank_row(tasks[0])) for text in args.only)]
    asked = {identity(blank_row(task)) for tasks in tables for task in tasks}
    known = [row for row in known_rows(args.csv) if row.get("code") == code_digest() or identity(row) not in asked]
    left = [tasks for tasks in tables if not all(is_measured(task, known, args.rounds) for task in tasks)]
    if len(left) < len(tables):
        print(f"{len(tables) - len(left)} of {len(tables)} tables are in {args.csv} already", flush=True)
    repeated = {identity(blank_row(task)) for tasks in left for task in tasks}
    known = [row for row in known if identity(row) not in repeated]
    if args.together > 1:
        left = [[task for tasks in left for task in tasks]] if left else []
    print(markdown(measure_all(left, args.csv, args.rounds, known, args.together)))
    print(f"\nwrote {args.csv}")


def identity(row: Row) -> tuple[object, ...]:
    """Return the columns that tell one task from another."""
    return tuple(row[name] for name in IDENTITY)


def is_measured(task: Task, rows: Sequence[Row], rounds: int) -> bool:
    """Return whether the rows have all rounds of a task, with figures."""
    mine = [row for row in rows if identity(row) == identity(blank_row(task))]
    return sum(row["status"] == "ok" for row in mine) >= rounds


def markdown(rows: Sequence[Row]) -> str:
    """Return medians over the rounds as a Markdown table, each beside plain's of the same case."""
    lines: list[tuple[str, ...]] = [HEADS, ("---",) * len(HEADS)]
    for group in group_rows(medians(rows), CASE).values():
        plain = plain_row(group)
        for row in group:
            name = case_name(row)
            if row["status"] != "ok":
                lines.append((name, row["method"], row["status"], *[""] * (len(HEADS) - 3)))
                continue
            times = [each["pipelined_ms"] for each in rows if identity(each) == identity(row) and each["pipelined_ms"]]
            first, second, collection = (row[f"{which}_ms"] for which in ("first", "second", "collection"))
            lines.append(
                (
                    name,
                    row["method"],
                    f"{row['pipelined_ms']:.1f} ms (n = {len(times)}, {min(times):.1f} to {max(times):.1f})",
                    ratio(row["pipelined_ms"], plain.get("pipelined_ms")),
                    in_gb(compared_peak(row)),
                    ratio(compared_peak(row), compared_peak(plain)),
                    in_gb(row["held_bytes"]),
                    ratio(row["held_bytes"], plain.get("held_bytes")),
                    f"{first / 1e3:.1f} s, {second / 1e3:.2f} s" if first and second else "",
                    f"{collection:.0f} ms, {in_gb(row['peak_with_collection_bytes'])}" if collection else "",
                )
            )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def case_name(row: Row) -> str:
    """Return what a row has in common with those it is compared with."""
    sequences = f" x {row['size']} tokens" if row["unit"] == "tokens" else ""
    words = [row["model"], f"batch {row['batch']}{sequences}", row["precision"]]
    words += ["compiled"] if row["compile"] else []
    return ", ".join(words + ([CHUNKED] if row["chunked"] else []))


def in_gb(value: float | None) -> str:
    """Return bytes in GB; empty where they were not measured."""
    return "" if value is None else f"{value / GB:.2f} GB"


def ratio(value: float | None, plain: float | None) -> str:
    """Return a figure over plain's."""
    return f"{value / plain:.2f}x" if value and plain else ""
