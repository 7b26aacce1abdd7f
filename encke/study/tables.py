"""Tables of the study in the terminal, and their summary in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from encke.study.results import Confirmation, Result
from encke.study.zeros import final_loss
from encke.tools.terminal import note, number, table

TITLES = {"plain": "plain", "zeros": "exact zeros", "no_zeros": "no exact zeros"}


def run_title(run: str) -> str:
    """Return a training's readable name: `no_zeros_0.1` becomes `no exact zeros, bound 0.1`."""
    kind, _, bound = run.rpartition("_")
    return f"{TITLES[kind]}, bound {bound}" if kind in TITLES else TITLES[run]


def predictions(results: Sequence[Result], bounds: Sequence[float]) -> None:
    """Print measured over predicted errors for each layer."""
    heads = [f"{kind} {bound:g}" for kind in ("stoch.", "near.", "loop") for bound in bounds]
    lines = []
    for layer in dict.fromkeys(r.layer for r in results):
        rows = [r for r in results if r.layer is layer]
        if rows[0].measured is None:
            lines.append([layer.name, rows[0].status])
            continue
        nearest = [r for r in rows if r.rounding == "nearest"]
        ratios = [r.ratio("exact") for r in rows] + [r.loop.ratio for r in nearest if r.loop]
        lines.append([layer.name, *(number(value, 2) for value in [layer.share, *ratios])])
    table("Measured over predicted error of the weight's gradient", ["layer", "share", *heads], lines)
    note("share: non-zeros in the input. stoch., near.: rounding, at a bound in units of the input's rms.")
    note("loop: nearest again, its bound corrected by the measured error, as Comet does; target: the plain theory.")


def zeros(rows: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]]) -> None:
    """Print gradient errors with and without exact zeros, and the final losses of the trainings."""
    bound = rows[0]["bound_of_range"]
    columns = ["alone", "alone, no zeros", "together", "together, no zeros"]
    title = f"Error over gradient with and without exact zeros, bound {bound:g} of the range"
    lines = []
    for row in rows:
        errors = [row[f"{how}_{run}"] for how in ("alone", "together") for run in ("zeros", "no_zeros")]
        lines.append([row["layer"], f"{100 * row['zero_share']:.0f} %", *(f"{error:.3f}" for error in errors)])
    table(title, ["layer", "zeros", *columns], lines)
    note("alone: only this layer's input is lossy. together: all are, norms apart, and ReLU's mask is read from them.")
    if curves:
        ends = "; ".join(f"{run_title(run)}: {final_loss(list(losses)):.3f}" for run, losses in curves.items())
        note(f"A small CNN on digits, {len(next(iter(curves.values())))} steps, loss at the end, {ends}.")


def frequency(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print gradient errors with the low or the high frequencies alone."""
    if not rows:
        note("No convolutions here, so nothing to say about low and high frequencies.")
        return
    block, bits = rows[0]["block"], rows[0]["bits"]
    title = f"Error over gradient, {block} x {block} averages (low), the rest at {bits} bits (high)"
    lines = []
    for row in rows:
        errors = [f"{row[f'{part}_gradient_error']:.3f}" for part in ("low", "high", "both")]
        bits_each = [f"{row[f'{part}_bytes'] / row['input_bytes'] * 32:.2f}" for part in ("low", "high")]
        lines.append([row["layer"], row["input"], *errors, *bits_each])
    table(title, ["layer", "input", "low", "high", "both", "low bits", "high bits"], lines)


def worst(results: Iterable[tuple[Result, float | None]]) -> tuple[float, Result] | None:
    """Return the ratio that is furthest from one, by factor, with its result."""
    known = [(ratio, result) for result, ratio in results if ratio and math.isfinite(ratio)]
    return max(known, key=lambda pair: abs(math.log(pair[0])), default=None)


def deviation(case: tuple[float, Result] | None) -> str:
    """Format a deviation, such as `+6 % (conv1, bound 1)`."""
    if case is None:
        return "not measured"
    ratio, result = case
    far = f"{ratio:.1f} times" if ratio > 2 else f"{100 * (ratio - 1):+.0f} %"
    return f"{far} ({result.layer.name}, bound {result.multiple:g})"


def conclude(results: Sequence[Result], confirmations: Sequence[Confirmation]) -> None:
    """Print the largest deviations of theory from measurement, and the agreement of real runs with the product."""
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
    certain = deviation(worst((r, r.ratio("certain")) for r in stochastic))
    note(f"With the deterministic part of stochastic rounding sent through the product itself: {certain}.")
    random = worst((r, r.ratio("exact")) for r in stochastic)
    before = worst((r, r.ratio("exact")) for r in nearest)
    after = worst((r, r.loop.ratio if r.loop else None) for r in nearest)
    note(
        f"Measured against predicted, at worst: stochastic {deviation(random)}; nearest {deviation(before)}, "
        f"after the closed loop {deviation(after)}."
    )
