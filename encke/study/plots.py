"""Plots of the study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from encke.study.distributions import distance, ks_normal, kurtosis, sample, standardised, triangle, uniform
from encke.study.predict import codec_error
from encke.study.results import Result
from encke.study.tables import TITLES, run_title
from encke.study.zeros import TRAINING_BOUNDS
from encke.tools.figures import figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"stochastic": "#1f5fbf", "nearest": "#c4541a"}
RUNS = {"plain": "#777777", "zeros": "#1f5fbf", "no_zeros": "#c4541a"}
PARTS = {"low": "#1f5fbf", "high": "#c4541a", "both": "#2a8a4a"}
MARKERS = "osD^vP*X"
BINS = 60


def predicted(results: Sequence[Result], path: Path) -> None:
    """Plot predicted over measured errors of weight gradients, with a band of 10 %; below, their ratio."""
    known = [r for r in results if r.measured and r.predicted]
    multiples = sorted({r.multiple for r in known})
    with figure(path, 2, 2, (12, 8.5), dpi=100) as (made, panels):
        for top, bottom, rounding in zip(*panels, COLOURS, strict=True):
            rows = [r for r in known if r.rounding == rounding]
            for i, multiple in enumerate(multiples):
                chosen = [r for r in rows if r.multiple == multiple]
                x = [r.predicted.exact / gradient_rms(r) for r in chosen if r.predicted]
                y = [r.measured.rms / gradient_rms(r) for r in chosen if r.measured]
                style = {"marker": MARKERS[i], "linestyle": "none", "markersize": 6, "alpha": 0.75}
                top.plot(x, y, color=shade(i, len(multiples)), label=f"bound {multiple:g} rms", **style)
                ratios = [r.ratio("exact") for r in chosen]
                bottom.plot(range(len(chosen)), ratios, color=shade(i, len(multiples)), **style)
            band(top)
            top.set_title(f"{rounding} rounding", loc="left")
            top.set_xlabel("predicted error / gradient's rms")
            top.set_ylabel("measured error / gradient's rms")
            top.legend(frameon=False)
            if rounding == "nearest":
                after = [r.loop.ratio for r in rows if r.loop and r.multiple == multiples[-1]]
                label = f"bound {multiples[-1]:g} rms, after the closed loop"
                bottom.plot(range(len(after)), after, "x", color="black", label=label)
                bottom.legend(frameon=False)
            ratio_axes(bottom, [r.layer.name for r in rows if r.multiple == multiples[0]])
        made.suptitle("Error of the weight's gradient when only this layer's input is lossy; grey: within 10 %")


def gradient_rms(r: Result) -> float:
    return float(r.layer.gradient.square().mean().sqrt()) or 1.0


def shade(i: int, n: int) -> str:
    return ("#9ec5ff", "#1f5fbf", "#0b2447", "#c4541a", "#2a8a4a")[i % 5] if n > 1 else "#1f5fbf"


def band(axes: Axes) -> None:
    """Set log scales and draw the line of equality with a band of 10 % on both sides."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    low = min(axes.get_xlim()[0], axes.get_ylim()[0])
    high = max(axes.get_xlim()[1], axes.get_ylim()[1])
    ends = [low, high]
    axes.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="#777777", alpha=0.25, linewidth=0)
    axes.plot(ends, ends, color="#777777", linewidth=0.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: "")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.grid(alpha=0.3)


def ratio_axes(axes: Axes, names: Sequence[str]) -> None:
    """Label one place for each layer and draw the band of 10 %."""
    axes.axhspan(0.9, 1.1, color="#777777", alpha=0.25, linewidth=0)
    axes.axhline(1, color="#777777", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
    axes.set_ylabel("measured / predicted")
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.75), max(high, 1.25))
    axes.grid(alpha=0.3)


def distributions(results: Sequence[Result], path: Path) -> None:
    """Plot the gradient's error beside the normal curve, the codec's beside its own; first, middle and last layer."""
    known = [r for r in results if r.measured]
    names = list(dict.fromkeys(r.layer.name for r in known))
    chosen = list(dict.fromkeys([names[0], names[len(names) // 2], names[-1]]))
    multiples = sorted({r.multiple for r in known})
    multiple = multiples[len(multiples) // 2]
    with figure(path, len(chosen), 4, (16, 3.2 * len(chosen) + 0.6), dpi=100) as (made, panels):
        for line, name in zip(panels, chosen, strict=True):
            for i, rounding in enumerate(COLOURS):
                (r,) = (r for r in known if (r.layer.name, r.multiple, r.rounding) == (name, multiple, rounding))
                draw_gradient(line[i], r)
                draw_codec(line[2 + i], r)
        made.suptitle(f"Distributions of errors at a bound of {multiple:g} rms of the input; lines: the theory")


def draw_gradient(axes: Axes, r: Result) -> None:
    """Draw the standardised error of the gradient, in total and for each output, and the normal density."""
    assert r.measured is not None
    values, own = standardised(r.measured.sample), r.measured.by_output
    curve(axes, values, r.rounding, 4.5, lambda x: torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi))
    reach = (-4.5, 4.5)
    axes.hist(own.numpy(), bins=BINS, range=reach, density=True, histtype="step", color="black", linestyle=":")
    text = f"excess kurtosis {kurtosis(values):.2f}, KS {ks_normal(values):.3f}"
    text += f"\nby output (dotted) {kurtosis(own):.2f}, KS {ks_normal(own):.3f}"
    label(axes, r, "gradient's error / its std", text)


def draw_codec(axes: Axes, r: Result) -> None:
    """Draw the codec's error over the bound where the input is not zero, and the density that the theory assumes."""
    errors = codec_error(r.layer, r.bound, r.rounding)[r.layer.x != 0]
    values = (sample(errors).double() / r.bound).sort().values
    nearest = r.rounding == "nearest"
    curve(axes, values, r.rounding, 1.15, lambda x: (x.abs() <= 1) * (0.5 if nearest else 1 - x.abs()))
    known = uniform(values) if nearest else triangle(values)
    label(axes, r, "codec's error / bound", f"KS distance {distance(values, known):.3f}")


def curve(axes: Axes, values: torch.Tensor, rounding: str, reach: float, density: Callable[..., torch.Tensor]) -> None:
    axes.hist(values.numpy(), bins=BINS, range=(-reach, reach), density=True, color=COLOURS[rounding], alpha=0.6)
    x = torch.linspace(-reach, reach, 400, dtype=torch.float64)
    axes.plot(x.numpy(), density(x).numpy(), color="black", linewidth=1.2)


def label(axes: Axes, r: Result, what: str, text: str) -> None:
    axes.set_title(f"{r.layer.name}, {r.rounding}", loc="left", fontsize=10)
    axes.set_xlabel(what)
    axes.set_yticks([])
    axes.set_ylim(top=1.3 * axes.get_ylim()[1])
    axes.text(0.98, 0.96, text, transform=axes.transAxes, ha="right", va="top", fontsize=8)


def zeros(rows: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Plot gradient errors by layer with and without exact zeros, and the losses of the trainings."""
    with figure(path, 1, 3 if curves else 2, (16 if curves else 11, 5), dpi=100) as (made, panels):
        for axes, how in zip(panels[0], ("alone", "together"), strict=False):
            for run in ("zeros", "no_zeros"):
                errors = [row[f"{how}_{run}"] for row in rows]
                style = {"marker": "o"} if run == "zeros" else {"marker": "D", "markerfacecolor": "none"}
                axes.plot(range(len(rows)), errors, color=RUNS[run], label=TITLES[run], linestyle="none", **style)
            if how == "alone":
                axes.set_ylim(bottom=0)
            else:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=90, fontsize=8)
            axes.set_ylabel("error / gradient, rms")
            title = (
                "only this layer's input lossy"
                if how == "alone"
                else "every layer's input lossy, ReLU's mask read from it"
            )
            axes.set_title(title, loc="left", fontsize=10)
            axes.legend(frameon=False)
            axes.grid(alpha=0.3, which="both")
        for run, losses in curves.items():
            kind, _, bound = run.rpartition("_")
            coarse = bound == f"{TRAINING_BOUNDS[-1]:g}"
            line = "-" if coarse or not kind else ":"
            panels[0][2].plot(smooth(losses), line, color=RUNS[kind or run], label=run_title(run), linewidth=1.4)
        if curves:
            axes = panels[0][2]
            axes.set_title("a small CNN on digits", loc="left", fontsize=10)
            axes.set_xlabel("step")
            axes.set_ylabel("training loss, mean of 5 steps")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.yaxis.set_minor_formatter(lambda value, _: "")
            axes.legend(frameon=False)
            axes.grid(alpha=0.3, which="both")
        bound = rows[0]["bound_of_range"]
        made.suptitle(f"With and without exact zeros; errors of gradients at a bound of {bound:g} of the range")


def smooth(losses: Sequence[float], width: int = 5) -> list[float]:
    """Return running means over `width` steps."""
    parts = [losses[max(0, i + 1 - width) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def frequency(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot gradient errors with the low frequencies, the high ones and both; nothing without convolutions."""
    path.unlink(missing_ok=True)
    if not rows:
        return
    with figure(path, 1, 2, (13, 5), dpi=100) as (made, panels):
        errors, sizes = panels[0]
        for part, colour in PARTS.items():
            style = {"color": colour, "marker": "o", "linestyle": "none", "label": part}
            errors.plot(range(len(rows)), [row[f"{part}_gradient_error"] for row in rows], **style)
            sizes.plot(range(len(rows)), [32 * row[f"{part}_bytes"] / row["input_bytes"] for row in rows], **style)
        errors.set_ylabel("error / gradient, rms")
        sizes.set_ylabel("bits a value")
        for axes in (errors, sizes):
            axes.set_xticks(range(len(rows)), [row["layer"] for row in rows], rotation=90, fontsize=8)
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)
            axes.grid(alpha=0.3)
        block, bits = rows[0]["block"], rows[0]["bits"]
        made.suptitle(f"Low frequencies ({block} x {block} averages, bf16), high ones (the rest, {bits} bits), both")
