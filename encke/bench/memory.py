"""`encke bench memory`: memory of a training step with every method, side by side."""

from __future__ import annotations

from collections.abc import Sequence

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

COLUMNS = (
    "held: memory after the forward pass less before it (the papers' activation memory). peak: of ordinary steps.",
    "collecting: the peak with collection steps. first: with the very first steps. above: the peak less the memory",
    "before the first step. total: the papers' older measure, memory before backward plus what backward leaves.",
)


def memory(options: StepOptions) -> None:
    """Measure the memory of a training step: plain, Encke's policies and the alternatives, each in its own process.

    Prints a table and writes memory.csv and memory.png (peak against time). Without a GPU it measures the memory of
    the process. docs/bench.md explains the columns.
    """
    csv = options.out / "memory.csv"
    plan = options.plan(options.batch, options.rounds)
    rows = medians(measure_all(plan.tables(), csv, plan.rounds))
    for group in group_rows(rows).values():
        show(group)
    note()
    for line in COLUMNS:
        note(line)
    conclude(rows, [csv, *plots.memory_against_time(rows, options.out / "memory.png")])


def show(rows: Sequence[Row]) -> None:
    """Print one table."""
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
