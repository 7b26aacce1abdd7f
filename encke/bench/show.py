"""How results are shown: progress, a table in the terminal, a plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import rich.box
import rich.progress
import torch
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from encke.bench.codec import Result

T = TypeVar("T")
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 100
COLOURS = {"encke": "#1f5fbf", "peer": "#c4541a", "limit": "#777777"}
MARKERS = "osD^vP*X<>hd"


def note(line: str) -> None:
    """One plain line."""
    console.print(line, markup=False, soft_wrap=True)


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Passes the items on, showing how far it is and how much time is left; one plain line when not in a terminal."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        print(f"measuring {what}", flush=True)
        yield from items
        return
    yield from rich.progress.track(items, f"measuring {what}", console=errors, transient=True)


def rate(value: float | None) -> str:
    """Bytes a second in MB/s."""
    return "" if value is None else f"{value / 1e6:,.0f}"


def table(results: Sequence[Result], left_out: Iterable[str]) -> None:
    """The results as tables, one for each tensor or kind of data."""
    parts: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        parts.setdefault((r.data, r.tensor), []).append(r)
    for (data, tensor), rows in parts.items():
        first = rows[0]
        bound = "bounds of its own" if first.bound is None else f"bound {first.bound:g} {first.mode}"
        title = f"{data} ({tensor}, {first.dtype}, {first.device}), {bound}"
        view = Table(title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
        view.add_column("codec", no_wrap=True)
        for name in ("threads", "ratio", "encode MB/s", "decode MB/s", "error/bound"):
            view.add_column(name, justify="right", no_wrap=True)
        for r in rows:
            timed = r.encode_seconds is not None
            threads = str(r.threads or "GPU") if timed else ""
            view.add_row(r.codec, threads, f"{r.ratio:.2f}", rate(r.encode_rate), rate(r.decode_rate), error(r))
        console.print(view)
    note("MB/s of input, medians of warm runs. GroupQuant has a fixed rate and promises no bound.")
    note("Lossless: ratio and MB/s count the mask's own bytes, one for each value.")
    for line in left_out:
        note(line)


def error(r: Result) -> str:
    """The largest error in units of the bound, with as many digits as a broken bound needs to be seen."""
    if r.error is None:
        return ""
    if r.bounded and r.error > 1:
        return f"{r.error:.7g} (broken)"
    return f"{r.error:.3f}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Ratio against throughput, encode and decode side by side, one line of panels for each kind of data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(r.data for r in results))
    figure, panels = plt.subplots(
        len(kinds), 2, figsize=(12, 4.2 * len(kinds) + 0.8), squeeze=False, layout="constrained"
    )
    for kind, pair in zip(kinds, panels, strict=True):
        rows = [r for r in results if r.data == kind and r.family != "mask"]
        for axes, direction in zip(pair, ("encode", "decode"), strict=True):
            draw(axes, rows, direction)
            axes.set_title(f"{kind}: {direction}", loc="left")
    first = results[0]
    where = "GPU" if first.device == "cuda" else f"CPU, Encke on {torch.get_num_threads()} threads, peers on one"
    figure.suptitle(f"Ratio and throughput, {first.dtype}, {where}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw(axes: Axes, rows: Sequence[Result], direction: str) -> None:
    """One panel. Filled markers keep the bound; the lines are the two limits."""
    for i, r in enumerate(r for r in rows if r.family in ("encke", "peer")):
        value = r.encode_rate if direction == "encode" else r.decode_rate
        colour = COLOURS[r.family]
        axes.plot(
            r.ratio,
            (value or 0) / 1e9,
            MARKERS[i % len(MARKERS)],
            color=colour,
            markerfacecolor=colour if r.bounded else "none",
            markersize=8,
            linestyle="none",
            label=r.codec if r.bounded else f"{r.codec} (no bound)",
        )
    for r in rows:
        if r.codec == "copy":
            value = r.encode_rate if direction == "encode" else r.decode_rate
            axes.axhline((value or 0) / 1e9, color=COLOURS["limit"], linestyle="--", linewidth=1, label="copy")
        elif r.family == "limit":
            axes.axvline(r.ratio, color=COLOURS["limit"], linestyle=":", linewidth=1.5, label=r.codec)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio")
    axes.set_ylabel("GB/s of input")
    axes.grid(alpha=0.3, which="both")
