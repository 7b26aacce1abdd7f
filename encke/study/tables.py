"""The study's tables in the terminal, and what they come to in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import rich.box
from rich.table import Table

from encke.bench.show import console, note
from encke.study.zeros import last

if TYPE_CHECKING:
    from encke.study.gradients import Confirmation, Result

TITLES = {"plain": "plain", "zeros": "exact zeros", "no_zeros": "no exact zeros"}


def title_of(run: str) -> str:
    """A training's name in words: `no_zeros_0.1` -> `no exact zeros, bound 0.1`."""
    kind, _, bound = run.rpartition("_")
    return f"{TITLES[kind]}, bound {bound}" if kind in TITLES else TITLES[run]


def table(title: str, first: Sequence[str], columns: Iterable[str]) -> Table:
    view = Table(title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
    view.padding = (0, 0, 0, 0)
    for name in first:
        view.add_column(name, no_wrap=True)
    for name in columns:
        view.add_column(name, justify="right", no_wrap=True)
    return view


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def predictions(results: Sequence[Result], bounds: Sequence[float]) -> None:
    """Measured over predicted for each layer."""
    heads = [f"{what}\n{bound:g}" for what in ("stoch.", "near.", "loop") for bound in bounds]
    view = table("Measured over predicted error of the weight's gradient", ["layer"], ["share", *heads])
    for layer in dict.fromkeys(r.layer for r in results):
        rows = [r for r in results if r.layer is layer]
        if rows[0].measured is None:
            view.add_row(layer.name, number(layer.share), rows[0].status)
            continue
        nearest = [r for r in rows if r.rounding == "nearest"]
        ratios = [r.ratio("exact") for r in rows] + [r.loop.ratio for r in nearest if r.loop]
        view.add_row(layer.name, number(layer.share), *map(number, ratios))
    console.print(view)
    note("share: of non-zeros in the input. stoch., near.: rounding, at a bound in units of the input's rms.")
    note("loop: nearest again, its bound corrected by what was measured, as Comet does; aim: the plain theory.")


def zeros(rows: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]]) -> None:
    """Gradient errors with and without exact zeros, and what became of the training."""
    bound = rows[0]["bound_of_range"]
    columns = ["alone", "alone, no zeros", "together", "together, no zeros"]
    title = f"Error over gradient with and without exact zeros, bound {bound:g} of the range"
    view = table(title, ["layer"], ["zeros", *columns])
    for row in rows:
        errors = [row[f"{how}_{run}"] for how in ("alone", "together") for run in ("zeros", "no_zeros")]
        view.add_row(row["layer"], f"{100 * row['zero_share']:.0f} %", *(f"{error:.3f}" for error in errors))
    console.print(view)
    note("alone: only this layer's input is lossy. together: all are, norms apart, and ReLU's mask is read from them.")
    if curves:
        ends = "; ".join(f"{title_of(run)}: {last(list(losses)):.3f}" for run, losses in curves.items())
        note(f"A small CNN on digits, {len(next(iter(curves.values())))} steps, loss at the end, {ends}.")


def frequency(rows: Sequence[Mapping[str, Any]]) -> None:
    """Gradient errors with the low or the high frequency alone."""
    if not rows:
        note("No convolutions here, so nothing to say about low and high frequencies.")
        return
    block, bits = rows[0]["block"], rows[0]["bits"]
    title = f"Error over gradient, {block} x {block} averages (low), the rest at {bits} bits (high)"
    view = table(title, ["layer", "input"], ["low", "high", "both", "low bits", "high bits"])
    for row in rows:
        errors = [f"{row[f'{part}_gradient_error']:.3f}" for part in ("low", "high", "both")]
        bits_each = [f"{row[f'{part}_bytes'] / row['input_bytes'] * 32:.2f}" for part in ("low", "high")]
        view.add_row(row["layer"], row["input"], *errors, *bits_each)
    console.print(view)


def worst(results: Iterable[tuple[Result, float | None]]) -> tuple[float, Result] | None:
    """The ratio that is furthest from one, by factor."""
    known = [(ratio, result) for result, ratio in results if ratio and math.isfinite(ratio)]
    return max(known, key=lambda pair: abs(math.log(pair[0])), default=None)


def deviation(found: tuple[float, Result] | None) -> str:
    """`6 % (conv1, bound 1)`."""
    if found is None:
        return "not measured"
    ratio, result = found
    far = f"{ratio:.1f} times" if ratio > 2 else f"{100 * (ratio - 1):+.0f} %"
    return f"{far} ({result.layer.name}, bound {result.multiple:g})"


def conclude(results: Sequence[Result], confirmations: Sequence[Confirmation]) -> None:
    """How far theory and measurement are apart at worst, and what the real runs say of the shortcut."""
    stochastic = [r for r in results if r.rounding == "stochastic"]
    nearest = [r for r in results if r.rounding == "nearest"]
    if confirmations:
        far = max(c.disagreement for c in confirmations)
        equal, others = sum(c.equal for c in confirmations), sum(c.others for c in confirmations)
        note(
            f"{len(confirmations)} real runs with one lossy input each agree with the product to {far:.1e} of the "
            f"error; {equal} of {others} gradients of other parameters were bit-equal to the plain ones."
        )
    if kept := sorted({r.layer.name for r in results if r.status == "kept (small)"}):
        note(f"kept (small), so not studied: {', '.join(kept)}; a larger --batch brings them in.")
    chance = deviation(worst((r, r.ratio("certain")) for r in stochastic))
    note(f"With the part of stochastic rounding that is certain sent through the product itself: {chance}.")
    by_chance = worst((r, r.ratio("exact")) for r in stochastic)
    before = worst((r, r.ratio("exact")) for r in nearest)
    after = worst((r, r.loop.ratio if r.loop else None) for r in nearest)
    note(
        f"Measured against predicted, at worst: stochastic {deviation(by_chance)}; nearest {deviation(before)}, "
        f"after the closed loop {deviation(after)}."
    )
