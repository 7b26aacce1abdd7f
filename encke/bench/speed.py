"""`encke bench speed`: time of a training step with every method, side by side, and the throughput."""

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
    "step: median of whole steps, each waited for. pipelined: several steps, waited for once; the throughput comes",
    "from it. host: until everything is launched. collecting: a collection step. first: the very first step.",
)


def speed(options: StepOptions) -> None:
    """Measure the time of a training step: plain, Encke's policies and the alternatives, each in its own process.

    Prints a table and writes speed.csv (with the columns of memory.csv) and speed.png (peak against time); with
    several --batch, throughput over batch size as well. docs/bench.md explains the columns.
    """
    csv = options.out / "speed.csv"
    plan = options.plan(options.batch, options.rounds)
    rows = medians(measure_all(plan.tables(), csv, plan.rounds))
    for group in group_rows(rows).values():
        show(group)
    note()
    for line in COLUMNS:
        note(line)
    written = [csv, *plots.memory_against_time(rows, options.out / "speed.png")]
    if len(plan.batch) > 1:
        written += plots.throughput(rows, options.out / "throughput.png")
    conclude(rows, written)


def show(rows: Sequence[Row]) -> None:
    """Print one table."""
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
