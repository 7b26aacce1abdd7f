"""`encke bench memory` and `encke bench speed`: memory and time of a training step with every method, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from encke.bench import plots
from encke.bench.options import StepOptions
from encke.bench.rows import (
    Row,
    compared_peak,
    conclude,
    group_rows,
    measure_all,
    medians,
    plain_row,
    table_lines,
    table_unit,
    title,
)
from encke.tools.terminal import note, number, table, times
from encke.tools.units import size_in

MEMORY_COLUMNS = (
    "held: memory after the forward pass less before it (the papers' activation memory). peak: of ordinary steps.",
    "collecting: the peak with collection steps. first: with the very first steps. above: the peak less the memory",
    "before the first step. total: the papers' older measure, memory before backward plus what backward leaves.",
)
SPEED_COLUMNS = (
    "step: median of whole steps, each waited for. pipelined: several steps, waited for once; the throughput comes",
    "from it. host: until everything is launched. collecting: a collection step. first: the very first step.",
)


def memory(options: StepOptions) -> None:
    """Measure the memory of a training step: plain, Encke's policies and the alternatives, each in its own process.

    Prints a table and writes memory.csv and memory.png (peak against time). Without a GPU it measures the memory of
    the process. docs/bench.md explains the columns.
    """
    conclude(*compare(options, "memory", show_memory, MEMORY_COLUMNS))


def speed(options: StepOptions) -> None:
    """Measure the time of a training step: plain, Encke's policies and the alternatives, each in its own process.

    Prints a table and writes speed.csv (with the columns of memory.csv) and speed.png (peak against time); with
    several --batch, throughput over batch size as well. docs/bench.md explains the columns.
    """
    rows, written = compare(options, "speed", show_speed, SPEED_COLUMNS)
    if len(options.batch) > 1:
        written += plots.throughput(rows, options.out / "throughput.png")
    conclude(rows, written)


def compare(
    options: StepOptions, name: str, show: Callable[[Sequence[Row]], None], columns: Sequence[str]
) -> tuple[list[Row], list[Path]]:
    """Measure and show everything; return the rows, and the files that were written."""
    csv = options.out / f"{name}.csv"
    plan = replace(options.plan(options.batch, options.rounds), chunked=options.chunked)
    rows = medians(measure_all(plan.tables(), csv, plan.rounds))
    for group in group_rows(rows).values():
        show(group)
    note()
    for line in columns:
        note(line)
    return rows, [csv, *plots.memory_against_time(rows, options.out / f"{name}.png")]


def show_memory(rows: Sequence[Row]) -> None:
    """Print one table of `encke bench memory`."""
    plain = plain_row(rows)
    name, unit = table_unit(rows)

    def cells(row: Row) -> list[str]:
        columns = ("held", "peak", "peak_with_collection", "peak_run", "peak_above", "reserved", "papers_total")
        values = [row[f"{column}_bytes"] for column in columns]
        sizes = [size_in(value, unit) for value in values]
        held, peak = times(plain.get("held_bytes"), row["held_bytes"]), times(compared_peak(plain), compared_peak(row))
        return [sizes[0], held, *sizes[1:5], peak, *sizes[5:], number(row["pipelined_ms"])]

    heads = ["method", f"held {name}", "less", f"peak {name}", "collecting", "first", "above", "less"]
    table(title(rows[0]), [*heads, "reserved", "total", "step ms"], table_lines(rows, cells))


def show_speed(rows: Sequence[Row]) -> None:
    """Print one table of `encke bench speed`."""
    plain = plain_row(rows)
    name, unit = table_unit(rows)

    def cells(row: Row) -> list[str]:
        step, pipelined, host, *others = (
            number(row[f"{column}_ms"]) for column in ("step", "pipelined", "host", "collection", "first")
        )
        peak = compared_peak(row)
        ratio, less = times(row["pipelined_ms"], plain.get("pipelined_ms")), times(compared_peak(plain), peak)
        return [step, pipelined, ratio, host, *others, number(row["per_second"]), size_in(peak, unit), less]

    heads = ["method", "step ms", "pipelined", "of plain", "host", "collecting", "first", f"{rows[0]['unit']}/s"]
    table(title(rows[0]), [*heads, f"peak {name}", "less"], table_lines(rows, cells))
