"""`encke bench codec`: ratio and throughput of every codec beside its peers, on the same data in the same run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from encke.bench.codec_results import Result, measure, totals
from encke.bench.contenders import contenders
from encke.bench.data import Mode, from_file, generated
from encke.bench.plots import COLOURS, MARKERS
from encke.tools.errors import UsageError
from encke.tools.figures import figure
from encke.tools.progress import track
from encke.tools.provenance import write_csv
from encke.tools.terminal import note, table
from encke.tools.units import MB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def codec(
    data: Path | None = None,
    bound: float = 0.01,
    mode: Mode = "rel",
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None,
    size: float | None = None,
    repeat: int = 9,
    per_tensor: bool = False,
    out: Path = Path("runs/bench"),
) -> None:
    """Measure ratio, error and throughput of every codec, beside the other compressors that are installed.

    Prints a table and writes codec.csv and codec.png. Without --data it measures on generated data: ReLU of normal
    noise, normal noise and smooth fields. A copy and the order-0 entropy of the levels show the limits. Codecs with a
    bound are measured under two more: at the variance of GroupQuant with 2 bits and at about a quarter of it.

    Args:
        data: A safetensors file; its floating-point tensors are measured, with the absolute bounds in its metadata
            ("meta": {tensor: {"bound": 0.01}} as JSON) where it has them.
        bound: The largest error allowed, for tensors without a bound of their own.
        mode: What --bound means: an absolute error, or one relative to each tensor's range.
        device: Where to encode and decode.
        dtype: Convert the tensors to this dtype first. Generated data are float32 otherwise.
        size: MiB of each kind of generated data. By default its shape is (16, 64, 56, 56).
        repeat: The least number of timed calls; the median is reported.
        per_tensor: Also list every tensor of the file, not only the totals.
        out: The folder for codec.csv and codec.png.
    """
    if not (bound > 0 and math.isfinite(bound)):
        raise UsageError(f"--bound must be a positive number, got {bound}")
    if size is not None and not (size > 0 and math.isfinite(size)):
        raise UsageError(f"--size must be a positive number of MiB, got {size}")
    if repeat < 1:
        raise UsageError(f"--repeat must be at least 1, got {repeat}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA GPU is available to torch; use --device cpu")
    if data is not None and size is not None:
        raise UsageError(f"--size {size} is for generated data; leave it out with --data")
    if data is not None:
        samples = from_file(data, bound, mode, dtype and DTYPES[dtype], device)
    else:
        samples = generated(size, bound, mode, DTYPES[dtype or "float32"], device)
    flat = [sample.name for sample in samples if sample.absolute == 0]
    if flat:
        raise UsageError(f"{', '.join(flat)}: all values are equal, so a relative bound is zero; use --mode abs")

    entrants, left_out = contenders(samples)
    results: list[Result] = []
    for sample in track([(f"{len(entrants)} codecs on {sample.data} {sample.name}", sample) for sample in samples]):
        results += measure(sample, entrants, repeat)
    overall = totals(results)
    print_tables(results if per_tensor else overall, left_out)
    several = len(results) > len(overall)
    write_csv(out / "codec.csv", [r.row() for r in (*overall, *(results if several else ()))])
    plot(overall, out / "codec.png")
    note(f"wrote {out / 'codec.csv'} and {out / 'codec.png'}")


def rate(value: float | None) -> str:
    """Return bytes per second in MB/s."""
    return "" if value is None else f"{value / MB:,.0f}"


def print_tables(results: Sequence[Result], left_out: Iterable[str]) -> None:
    """Print one table for each tensor or kind of data."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.data, r.tensor), []).append(r)
    heads = ["codec", "threads", "ratio", "encode MB/s", "decode MB/s", "error/bound", "variance"]
    for (data, tensor), group in groups.items():
        first = group[0]
        bound = "bounds of its own" if first.bound is None else f"bound {first.bound:g} {first.mode}"
        rows = [
            [
                r.codec,
                threads(r),
                f"{r.ratio:.2f}",
                rate(r.encode_rate),
                rate(r.decode_rate),
                error(r),
                "" if r.variance is None else f"{r.variance:.3g}",
            ]
            for r in group
        ]
        table(f"{data} ({tensor}, {first.dtype}, {first.device}), {bound}", heads, rows)
    note()
    note("MB/s of input, medians of warm runs. GroupQuant has a fixed rate and promises no bound. SZ3 and zfp keep the")
    note("bound, but not zeros and signs.")
    note("Variance: mean squared error, relative to GroupQuant 2 bits on the same tensor.")
    note("Bound of 2 bits: an error that is uniform within it has the variance of GroupQuant 2 bits.")
    note("Lossless: ratio and MB/s count the mask's own bytes, one for each value.")
    for line in left_out:
        note(line)


def threads(r: Result) -> str:
    """Return the number of threads of a codec that was timed, or GPU."""
    return "" if r.encode_seconds is None else str(r.threads or "GPU")


def error(r: Result) -> str:
    """Return the largest error in units of the bound, with enough digits to show that a bound is broken."""
    if r.error is None:
        return ""
    if r.bounded and r.error > 1:
        return f"{r.error:.7g} (broken)"
    return f"{r.error:.3f}"


def plot(results: Sequence[Result], path: Path) -> None:
    """Plot throughput and variance against the ratio, one row of panels for each kind of data."""
    kinds = list(dict.fromkeys(r.data for r in results))
    with figure(path, len(kinds), 3, (17, 4.2 * len(kinds) + 0.8)) as (made, panels):
        for kind, row in zip(kinds, panels, strict=True):
            shown = [r for r in results if r.data == kind and r.family != "mask"]
            draw(row[0], shown, "GB/s of input", lambda r: r.encode_rate and r.encode_rate / 1e9)
            draw(row[1], shown, "GB/s of input", lambda r: r.decode_rate and r.decode_rate / 1e9)
            draw(row[2], [r for r in shown if r.family != "limit"], "variance, 2 bits = 1", lambda r: r.variance)
            for axes, what in zip(row, ("encode", "decode", "mean squared error"), strict=True):
                axes.set_title(f"{kind}: {what}", loc="left")
        first = results[0]
        where = "GPU" if first.device == "cuda" else f"CPU, threads: Encke {torch.get_num_threads()}, peers 1"
        made.suptitle(f"Ratio, throughput and error, {first.dtype}, {where}. Filled: the bound is kept")
        handles, labels = panels[0][0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside right center", frameon=False)


def draw(axes: Axes, rows: Sequence[Result], label: str, value: Callable[[Result], float | None]) -> None:
    """Draw one panel: a line for each codec through its settings, and the two limits. Filled markers keep the bound."""
    series: dict[str, list[Result]] = {}
    for r in rows:
        if r.family == "limit":
            limit = value(r)
            if limit is None:
                axes.axvline(r.ratio, color=COLOURS["limit"], linestyle=":", linewidth=1.5, label=r.codec)
            else:
                axes.axhline(limit, color=COLOURS["limit"], linestyle="--", linewidth=1, label=r.codec)
        else:
            series.setdefault(r.series, []).append(r)
    for (name, points), marker in zip(series.items(), itertools.cycle(MARKERS)):
        points.sort(key=lambda r: r.ratio)
        first, colour = points[0], COLOURS[points[0].family]
        axes.plot(
            [r.ratio for r in points],
            [value(r) or math.nan for r in points],
            marker=marker,
            color=colour,
            markerfacecolor=colour if first.bounded else "none",
            markersize=7,
            linewidth=0.8,
            label=name if first.bounded else f"{name} (no bound)",
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel("ratio")
    axes.set_ylabel(label)
    axes.grid(alpha=0.3, which="both")
