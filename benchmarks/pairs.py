"""Statistics of paired runs: 95 % intervals of the differences to plain, and the rule for "non-inferior".

Runs with the same seed are a pair. docs/evidence.md explains the rule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["non-inferior", "inferior", "undecided"]

# 97.5 % points of Student's t for 1 to 30 degrees of freedom.
T_POINTS = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def t_point(freedom: int) -> float:
    """Return half the width of a 95 % interval in standard errors."""
    if freedom <= len(T_POINTS):
        return T_POINTS[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Quantity:
    """A column of the runs' table, and how it is compared with plain."""

    column: str
    digits: int
    scale: float = 1.0
    """Factor from the column to the unit that is shown."""
    unit: str = ""
    relative: bool = True
    """Whether the difference is in per cent of plain's value, pair by pair."""
    higher_is_better: bool = False
    margin: float | None = None
    """Largest loss that is tolerated, in the unit of the difference; None: shown without a verdict."""


QUANTITIES = (
    Quantity("accuracy", 2, unit="%", relative=False, higher_is_better=True, margin=0.3),
    Quantity("best_loss", 4, margin=0.5),
    Quantity("train_loss", 4, margin=2.0),
    Quantity("ratio", 2, relative=False),
    Quantity("ratio_fp32", 2, relative=False),
    Quantity("gradient_error", 3, relative=False),
    Quantity("peak_bytes", 2, 1e-9, "GB"),
    Quantity("seconds", 1, unit="s"),
)
"""In the order in which they are shown. Accuracy is in per cent, so its margin is in points."""


def interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean difference (Student's t); None with fewer than two pairs, or NaN in them."""
    if len(differences) < 2 or not all(map(math.isfinite, differences)):
        return None
    middle = statistics.fmean(differences)
    half = t_point(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    return middle - half, middle + half


def judge(differences: Sequence[float], quantity: Quantity) -> Verdict:
    """Apply the rule: non-inferior if the whole 95 % interval of the loss is below the margin.

    Inferior if the whole interval is beyond the margin, otherwise undecided: more pairs would tell.
    """
    assert quantity.margin is not None
    sign = -1 if quantity.higher_is_better else 1
    ends = interval([sign * difference for difference in differences])
    if ends is None:
        return "undecided"
    return "non-inferior" if ends[1] < quantity.margin else "inferior" if ends[0] > quantity.margin else "undecided"


@dataclass(frozen=True)
class Comparison:
    """One quantity of one method beside plain's, over the seeds that both have."""

    quantity: Quantity
    plain: float | None
    mean: float
    differences: tuple[float, ...]

    @property
    def verdict(self) -> Verdict | None:
        """Verdict by the quantity's margin; None for a quantity without one."""
        return None if self.quantity.margin is None or not self.differences else judge(self.differences, self.quantity)

    def cells(self) -> tuple[str, ...]:
        """Return a row of the table: name, plain, method, difference, interval, margin, verdict."""
        q = self.quantity
        name = q.column.removesuffix("_bytes").replace("_", " ") + (f", {q.unit}" if q.unit else "")
        plain, mean = ("" if v is None else f"{v * q.scale:.{q.digits}f}" for v in (self.plain, self.mean))
        unit = " %" if q.relative else ""
        places = 1 if q.relative else q.digits
        difference = f"{statistics.fmean(self.differences):+.{places}f}{unit}" if self.differences else ""
        ends = interval(self.differences)
        span = f"{ends[0]:+.{places}f} to {ends[1]:+.{places}f}" if ends else ""
        margin = (
            ""
            if q.margin is None or not self.differences
            else f"{-q.margin if q.higher_is_better else q.margin:+g}{unit}"
        )
        return name, plain, mean, difference, span, margin, self.verdict or ""


@dataclass(frozen=True)
class Summary:
    """A method over its seeds, compared with plain."""

    method: str
    seeds: int
    pairs: int
    comparisons: tuple[Comparison, ...]

    @property
    def verdict(self) -> Verdict:
        """Verdict over all quantities that have a margin: the worst of them."""
        found = {c.verdict for c in self.comparisons} - {None}
        order: tuple[Verdict, ...] = ("inferior", "undecided", "non-inferior")
        return next((each for each in order if each in found), "undecided")

    def of(self, column: str) -> Comparison:
        """Return the comparison of one column."""
        return next(c for c in self.comparisons if c.quantity.column == column)


def summarise(rows: Iterable[Mapping[str, str]]) -> list[Summary]:
    """Summarise each method, in the order in which they first appear. Quantities without values are left out."""
    methods: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        methods.setdefault(row["method"], {})[row["seed"]] = row
    plain = methods.get("plain", {})
    return [
        Summary(
            method,
            len(runs),
            0 if method == "plain" else len(runs.keys() & plain.keys()),
            tuple(filter(None, (compare(quantity, method, runs, plain) for quantity in QUANTITIES))),
        )
        for method, runs in methods.items()
    ]


def compare(
    quantity: Quantity, method: str, runs: Mapping[str, Mapping[str, str]], plain: Mapping[str, Mapping[str, str]]
) -> Comparison | None:
    """Compare one quantity over the common seeds, or over all where there are none; None where it was not measured."""
    values, base = (
        {seed: float(row[quantity.column]) for seed, row in each.items() if row.get(quantity.column)}
        for each in (runs, plain)
    )
    if not values:
        return None
    common = [
        seed for seed in values if method != "plain" and (base.get(seed) or (seed in base and not quantity.relative))
    ]
    subtract: Callable[[float, float], float] = (
        (lambda value, by: 100 * (value - by) / by) if quantity.relative else (lambda value, by: value - by)
    )
    return Comparison(
        quantity,
        statistics.fmean(base[seed] for seed in common) if common else None,
        statistics.fmean(values[seed] for seed in common or values),
        tuple(subtract(values[seed], base[seed]) for seed in common),
    )


def show(summaries: Sequence[Summary]) -> str:
    """Return a table for each method: its figures, the differences to plain, and the verdict."""
    return "\n\n".join("\n".join(lines(summary)) for summary in summaries)


def lines(summary: Summary) -> list[str]:
    """Return the lines of one method's table."""
    title = f"{summary.method}: {summary.seeds} runs"
    if summary.pairs:
        title += f", {summary.pairs} pairs with plain: {summary.verdict}"
    heads = ("", "plain", summary.method, "difference", "95 % interval", "margin", "verdict")
    table = [heads, *(c.cells() for c in summary.comparisons)]
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in kept]
    rows = zip(*kept, strict=True)
    return [
        title,
        *(
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ),
    ]
