"""Plots of memory, time and throughput: one panel for each model and precision, every method named at its marker."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from encke.bench.methods import METHODS, compiled_as
from encke.bench.rows import cap_words
from encke.tools.figures import figure
from encke.tools.terminal import note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
COLOURS = {"plain": "#222222", "encke": "#1f5fbf", "other": "#c4541a", "peer": "#c4541a", "limit": "#777777"}
MARKERS = "osD^vP*X<>hd"
GAP = 0.06
"""Gap between the names beside a panel, as a share of its height."""


def memory_against_time(rows: Sequence[Row], path: Path) -> list[Path]:
    """Plot the peak of each method against the time of its step."""
    on_gpu = rows[0]["device"] == "cuda"
    peak = "peak_bytes" if on_gpu else "peak_above_bytes"

    def panel(axes: Axes, part: Sequence[Row]) -> None:
        for row in part:
            mark(axes, row, row["pipelined_ms"], row[peak] / 1e9)
        times = [row["pipelined_ms"] for row in part]
        if max(times) > 8 * min(times):
            axes.set_xscale("log")
            axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
        else:
            axes.set_xlim(0, 1.1 * max(times))
        axes.set_ylim(0, 1.08 * max(row[peak] / 1e9 for row in part))
        axes.set_xlabel("ms for a step")
        axes.set_ylabel("peak, GB" if on_gpu else "peak of the process above its start, GB")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        label(axes, [(row["pipelined_ms"], row[peak] / 1e9, row) for row in part])

    return draw(measured(rows), path, panel, ("model", "precision", "cap_bytes", "batch"))


def throughput(rows: Sequence[Row], path: Path) -> list[Path]:
    """Plot images or tokens per second over the batch."""

    def panel(axes: Axes, part: Sequence[Row]) -> None:
        ends = []
        for mine in by_method(part):
            last = curve(axes, mine)
            ends.append((last["batch"], last["per_second"], last))
        finish_throughput(axes, part, ends)

    return draw(measured(rows), path, panel, ("model", "precision", "cap_bytes"))


def throughput_under_cap(rows: Sequence[Row], trials: Sequence[Row], path: Path) -> list[Path]:
    """Plot the throughput of the trials over the batch as lines, with a marker at each method's largest batch."""

    def panel(axes: Axes, part: Sequence[Row]) -> None:
        ends = []
        for row in part:
            same = ("model", "precision", "cap_bytes", "method")
            tried = [t for t in trials if t["fits"] and all(t[key] == row[key] for key in same)]
            if tried:
                curve(axes, tried, marked=False)
            mark(axes, row, row["batch"], row["per_second"])
            ends.append((row["batch"], row["per_second"], row))
        finish_throughput(axes, part, ends)

    return draw(measured(rows), path, panel, ("model", "precision", "cap_bytes"))


def first_steps(rows: Sequence[Row], path: Path) -> list[Path]:
    """Plot the time of each of the first steps, with empty and with warm kernel caches."""

    def panel(axes: Axes, part: Sequence[Row]) -> None:
        for mine in by_method(part):
            for caches, style in (("empty", "-"), ("warm", ":")):
                line = [row for row in mine if row["caches"] == caches]
                points = [row["step"] for row in line], [row["ms"] for row in line]
                name = f"{mine[0]['method']}, {caches} caches"
                axes.plot(*points, style, color=colour(mine[0]), linewidth=1.4, label=name)
                collected = [row for row in line if row["collection"]]
                points = [row["step"] for row in collected], [row["ms"] for row in collected]
                axes.plot(*points, marker(mine[0]), color=colour(mine[0]), markersize=5, linestyle="none")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.set_xlabel("step (markers: collection steps)")
        axes.set_ylabel("ms")
        axes.legend(fontsize=8)

    return draw([{**row, "graphs": False, "cap_bytes": None} for row in rows], path, panel, ("model", "precision"))


def measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def by_method(rows: Sequence[Row]) -> list[list[Row]]:
    return [[row for row in rows if row["method"] == name] for name in dict.fromkeys(row["method"] for row in rows)]


def finish_throughput(axes: Axes, rows: Sequence[Row], ends: Sequence[tuple[float, float, Row]]) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(0, 1.08 * max(axes.dataLim.y1, 0))
    axes.set_xlabel("batch")
    axes.set_ylabel(f"{rows[0]['unit']} per second")
    label(axes, ends)


def colour(row: Row) -> str:
    return COLOURS[METHODS[row["method"]].kind]


def marker(row: Row) -> str:
    return MARKERS[list(METHODS).index(row["method"]) % len(MARKERS)]


def mark(axes: Axes, row: Row, x: float, y: float) -> None:
    axes.plot(x, y, marker(row), color=colour(row), markersize=8, linestyle="none")


def curve(axes: Axes, rows: Sequence[Row], marked: bool = True) -> Row:
    """Draw a line over the batch; return the row it ends with."""
    ordered = sorted(rows, key=lambda row: row["batch"])
    points = [row["batch"] for row in ordered], [row["per_second"] for row in ordered]
    axes.plot(*points, marker=marker(rows[0]) if marked else "", color=colour(rows[0]), linewidth=1, alpha=0.7)
    return ordered[-1]


def label(axes: Axes, points: Sequence[tuple[float, float, Row]]) -> None:
    """Write the names in a column beside the panel, in the order of their markers, each with a line to its marker."""
    low, high = axes.get_ylim()
    heights = spread([(y - low) / (high - low) for _, y, _ in points], GAP)
    for (x, y, row), height in zip(points, heights, strict=True):
        axes.annotate(
            row["method"],
            (x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=colour(row),
            arrowprops={"arrowstyle": "-", "color": colour(row), "linewidth": 0.6, "alpha": 0.5, "shrinkB": 4},
            annotation_clip=False,
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Return heights between 0 and 1 in the same order, as close to the wanted ones as a gap between them allows."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    heights = [0.0] * len(wanted)
    lowest = 0.0
    for i in order:
        heights[i] = lowest = max(wanted[i], lowest)
        lowest += gap
    highest = 1.0
    for i in reversed(order):
        heights[i] = highest = min(heights[i], highest)
        highest -= gap
    return heights


def draw(
    rows: Sequence[Row], path: Path, panel: Callable[[Axes, Sequence[Row]], None], split: Sequence[str]
) -> list[Path]:
    """Write a figure with a panel for each group of rows; nothing without rows or without matplotlib."""
    if not rows:
        return []
    if importlib.util.find_spec("matplotlib") is None:
        note(f"no {path.name}: matplotlib is not installed")
        return []
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(row[name] for name in split), []).append(row)
    columns = min(len(parts), 2)
    lines = -(-len(parts) // columns)
    with figure(path, lines, columns, (7.5 * columns, 4.4 * lines)) as (_, grid):
        for axes in grid.flat[len(parts) :]:
            axes.remove()
        for axes, (key, part) in zip(grid.flat, parts.items(), strict=False):
            words = [str(key[0]), str(key[1]), *(f"batch {batch}" for batch in key[3:])]
            words += [compiled_as(part[0]["graphs"])] if part[0]["compile"] else []
            words += [f"at most {cap_words(part[0]['cap_bytes'])}"] if part[0]["cap_bytes"] else []
            axes.set_title(", ".join(words), loc="left")
            axes.grid(alpha=0.3, which="both")
            panel(axes, part)
    return [path]
