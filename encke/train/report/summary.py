"""Text and tables of a report, for every format."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from encke.tools import units
from encke.train.report.runs import Pair, Run, margin_of_error, number, pairs, shown

UNKNOWN = "–"
ONLY_PLAIN = "All runs are plain (policy.name none): there is nothing compressed to compare."


@dataclass(frozen=True)
class Table:
    """A table of text. The first cell of each row names the row."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    """Highlighted rows."""


@dataclass(frozen=True)
class StepChart:
    """Memory during one training step, as curves of several trainings."""

    caption: str
    curves: tuple[tuple[str, Mapping[str, Any]], ...]
    """Name and figures (the fields of `StepMemory`) of each training, plain first."""


@dataclass(frozen=True)
class Section:
    """A section of the report: a chart, paragraphs, then tables."""

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    chart: StepChart | None = None


@dataclass(frozen=True)
class Tile:
    """One figure at the head of a comparison."""

    name: str
    value: str
    note: str


def size(value: float | None) -> str:
    """Return bytes with a unit, if they are known."""
    return UNKNOWN if value is None else units.size(value)


def times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"


def percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.2f} %"


def loss(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.4g}"


def count(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def step_time(value: float | None) -> str:
    """Format the seconds of a step."""
    return UNKNOWN if value is None else f"{value:.3f} s" if value >= 0.1 else f"{1000 * value:.3g} ms"


def duration(value: float | None) -> str:
    """Return a duration, if it is known."""
    return UNKNOWN if value is None else units.duration(value)


def smaller(plain: float | None, compressed: float | None) -> str:
    """Return how many times less, or more."""
    if plain is None or compressed is None or plain <= 0 or compressed <= 0:
        return ""
    less = plain / compressed
    if round(less, 2) == 1:
        return "the same"
    if less < 1:
        return f"{1 / less:.2f}x more"
    return f"{less:.1f}x less" if less >= 2 else f"{less:.2f}x less"


def is_figure(cells: Iterable[str]) -> bool:
    """Return whether a column holds figures, which are aligned to the right."""
    return all(re.match(r"[+-]?[\d.]|–$|$", cell) for cell in cells)


def plural(n: int, one: str, several: str = "") -> str:
    return f"{n:,} {one if n == 1 else several or one + 's'}"


@dataclass(frozen=True)
class Comparison:
    """Memory, time and accuracy of a compressed run against a plain one."""

    pair: Pair

    @property
    def title(self) -> str:
        run = self.pair.compressed
        return f"{run.name} against {self.pair.plain.name}: {run.model} on {run.data}, policy {run.policy}"

    @property
    def same_machine(self) -> bool:
        return not any(text.startswith(("device ", "world ", "threads ")) for text in self.pair.differences)

    @property
    def peak(self) -> str:
        """Figure of the peak. On the CPU it is the peak above interpreter and libraries, or that of all tensors."""
        if self.pair.plain.on_cpu and None not in self.both("peak_above_bytes"):
            return "peak_above_bytes"
        return "step_peak_bytes" if None in self.both("peak_bytes") else "peak_bytes"

    def chart(self) -> StepChart | None:
        """Return the memory through one step, if both runs on one machine have recorded it."""
        run, memories = self.pair.compressed, (self.pair.plain.memory, self.pair.compressed.memory)
        if not all(memories) or not self.same_machine:
            return None
        steps = " and ".join(dict.fromkeys(f"{memory['step']:g}" for memory in memories))
        setting = f"batch {run.settings.get('batch')}, {run.settings.get('precision')}, policy {run.policy}"
        caption = f"Bytes of all tensors through step {steps}: {run.model} on {run.data}, {setting}"
        return StepChart(caption, tuple(zip((self.pair.plain.name, run.name), memories, strict=True)))

    def both(self, key: str) -> tuple[float | None, float | None]:
        return self.pair.plain.figures[key], self.pair.compressed.figures[key]

    @property
    def epoch(self) -> float | None:
        """The epoch of the comparison if one of the runs has not ended; None compares their ends."""
        if self.pair.plain.ended and self.pair.compressed.ended:
            return None
        a, b = ([number(line.get("epoch")) for line in run.epochs] for run in (self.pair.plain, self.pair.compressed))
        return max((epoch for epoch in a if epoch is not None and epoch in b), default=0.0)

    def validated(self, key: str) -> tuple[float | None, float | None]:
        """Return a figure of the validation of both runs, at the same epoch."""
        at = self.epoch
        if at is None:
            return self.both(key)
        lines = [
            next((line for line in run.epochs if line.get("epoch") == at), {})
            for run in (self.pair.plain, self.pair.compressed)
        ]
        return number(lines[0].get(key)), number(lines[1].get(key))

    @property
    def when(self) -> str:
        return "" if self.epoch is None else f" after epoch {self.epoch:g}"

    @property
    def samples(self) -> float:
        """Validation samples of both runs; 0 if unknown."""
        both = (number(run.environment.get("validation_samples")) for run in (self.pair.plain, self.pair.compressed))
        return min((samples for samples in both if samples is not None), default=0)

    @property
    def margin(self) -> float | None:
        """Difference of the accuracies that randomness alone explains."""
        a, b = self.validated("validation_accuracy")
        return None if a is None or b is None or not self.samples else margin_of_error(a, b, self.samples)

    def verdict(self) -> str:
        """Return the difference of the accuracies, compared with the margin."""
        a, b = self.validated("validation_accuracy")
        if a is None or b is None:
            return ""
        gain = f"{100 * (b - a):+.2f} points"
        if self.margin is None:
            return gain
        judged = "within chance" if abs(b - a) <= self.margin else "more than chance"
        return f"{gain}, {judged}"

    def sentences(self) -> Iterator[str]:
        saved, packed = self.pair.compressed.figures["saved_bytes"], self.pair.compressed.figures["packed_bytes"]
        if saved and packed:
            yield (
                f"What autograd saves for the backward pass takes {size(packed)} instead of {size(saved)}"
                f" ({smaller(saved, packed)}, counted by Encke)."
            )
        if self.same_machine:
            held = self.both("held_bytes")
            if smaller(*held):
                yield f"Held after forward, measured: {size(held[1])} instead of {size(held[0])} ({smaller(*held)})."
            peak = self.both(self.peak)
            if smaller(*peak):
                which = {"peak_above_bytes": " above the memory before the first step"}
                which["step_peak_bytes"] = " of all tensors in one step"
                above = which.get(self.peak, "")
                yield f"The measured peak{above} is {size(peak[1])} instead of {size(peak[0])} ({smaller(*peak)})."
                if self.peak != "step_peak_bytes" and self.pair.plain.on_cpu:
                    yield "On the CPU that is the memory of the process, compiled kernels included."
            a, b = self.both("step_seconds")
            if a and b:
                yield f"A step takes {step_time(b)} instead of {step_time(a)} ({b / a:.2f}x the time)."
        else:
            yield "They ran on different machines: neither time nor measured memory can be compared."
        yield from self.accuracy()
        if self.pair.differences:
            yield f"Beside the policy they differ in {'; '.join(self.pair.differences)}."

    def accuracy(self) -> Iterator[str]:
        a, b = self.validated("validation_accuracy")
        if a is not None and b is not None:
            yield f"Validation accuracy{self.when} is {percent(b)} against {percent(a)}: {100 * (b - a):+.2f} points."
            if self.margin is None:
                return
            judged = "this is more than" if abs(b - a) > self.margin else "this is within"
            yield f"With {count(self.samples)} validation samples, {judged} chance ({100 * self.margin:.2f} points)."
            return
        a, b = self.validated("validation_loss")
        if a and b is not None:
            yield (
                f"Validation loss{self.when} is {loss(b)} against {loss(a)} ({100 * (b / a - 1):+.2f} %);"
                " how much of that is chance only more seeds can tell."
            )
        elif self.epoch == 0:
            yield "They have no validation in common yet."

    def tiles(self) -> Iterator[Tile]:
        saved, packed = self.pair.compressed.figures["saved_bytes"], self.pair.compressed.figures["packed_bytes"]
        if saved and packed:
            yield Tile("saved tensors, counted", smaller(saved, packed), f"{size(saved)} → {size(packed)}")
        peak = self.both(self.peak)
        if self.same_machine and smaller(*peak):
            yield Tile("peak memory, measured", smaller(*peak), f"{size(peak[0])} → {size(peak[1])}")
        a, b = self.both("step_seconds")
        if self.same_machine and a and b:
            yield Tile("time of a step", f"{b / a:.2f}x", f"{step_time(a)} → {step_time(b)}")
        a, b = self.validated("validation_accuracy")
        if a is not None and b is not None:
            _, _, judged = self.verdict().partition(", ")
            note = f"{percent(a)} → {percent(b)}" + (f", {judged} ({100 * self.margin:.2f})" if self.margin else "")
            yield Tile(f"validation accuracy{self.when}", f"{100 * (b - a):+.2f} points", note)
            return
        a, b = self.validated("validation_loss")
        if a and b is not None:
            yield Tile(f"validation loss{self.when}", f"{100 * (b / a - 1):+.2f} %", f"{loss(a)} → {loss(b)}")

    def table(self) -> Table:
        plain, compressed = self.pair.plain, self.pair.compressed
        counted = compressed.figures["saved_bytes"], compressed.figures["packed_bytes"]
        rows = [("saved tensors, counted by Encke", size(counted[0]), size(counted[1]), smaller(*counted))]
        memory = "process memory" if plain.on_cpu else "memory"
        for key, name in {
            "held_bytes": f"{memory} held after forward",
            "peak_bytes": f"peak {memory}",
            "peak_above_bytes": "peak above memory before step 1",
            "step_peak_bytes": "peak of all tensors in a step",
        }.items():
            a, b = self.both(key)
            rows.append((name, size(a), size(b), smaller(a, b) if self.same_machine else ""))

        def slower(key: str) -> str:
            a, b = self.both(key)
            alike = key != "seconds" or len({*self.both("steps")}) == 1
            return f"{b / a:.2f}x" if self.same_machine and alike and a and b else ""

        for key, name, write in (
            ("step_seconds", "time of a step", step_time),
            ("per_second", f"{compressed.unit} in a second", rate),
            ("seconds", "time of the training", duration),
        ):
            a, b = self.both(key)
            rows.append((name, write(a), write(b), slower(key)))
        a, b = self.validated("validation_accuracy")
        if (a, b) != (None, None):
            rows.append((f"validation accuracy{self.when}", percent(a), percent(b), self.verdict()))
        a, b = self.validated("validation_loss")
        change = f"{100 * (b / a - 1):+.2f} %" if a and b is not None else ""
        rows.append((f"validation loss{self.when}", loss(a), loss(b), change))
        kept = tuple(row for row in rows if row[1:3] != (UNKNOWN, UNKNOWN))
        return Table(f"{compressed.name} against {plain.name}", ("", "plain", "compressed", "difference"), kept)


def alone(run: Run) -> str:
    """Describe a compressed run without a plain one."""
    figures = run.figures
    saved, packed = figures["saved_bytes"], figures["packed_bytes"]
    words = f"{run.name} ({run.model} on {run.data}, policy {run.policy}): "
    if saved and packed:
        words += (
            f"what autograd saves for the backward pass takes {size(packed)} instead of {size(saved)}"
            f" ({smaller(saved, packed)}, counted by Encke). "
        )
    if run.on_cpu and figures["step_peak_bytes"] is not None:
        words += f"The measured peak of all tensors in one step is {size(figures['step_peak_bytes'])}. "
    elif figures["peak_bytes"] is not None:
        words += f"The measured peak is {size(figures['peak_bytes'])}{' of the process' if run.on_cpu else ''}. "
    return words + "Without a plain run (policy.name none) of the same model and data there is nothing to compare with."


def summary(runs: Sequence[Run]) -> Section:
    """Describe every compressed run."""
    found = pairs(runs)
    paired = {id(pair.compressed) for pair in found}
    words = []
    for pair in found:
        comparison = Comparison(pair)
        words.append(f"{comparison.title}. " + " ".join(comparison.sentences()))
    words += [alone(run) for run in runs if not run.plain and id(run) not in paired]
    words += [ONLY_PLAIN] if all(run.plain for run in runs) else []
    return Section("Summary", tuple(words), tuple(Comparison(pair).table() for pair in found))


def warnings(runs: Sequence[Run]) -> Section:
    """Return the warnings of all runs, each once with the runs it concerns."""
    about: dict[str, list[str]] = {}
    for run in runs:
        for text in run.warnings:
            about.setdefault(text, []).append(run.name)
    return Section("Warnings", tuple(f"{', '.join(names)}: {text}" for text, names in about.items()))


def run_table(runs: Sequence[Run]) -> Table:
    """Return a table with one row for each run."""
    columns: dict[str, Callable[[Run], str]] = {
        "run": lambda run: run.name,
        "model": lambda run: run.model,
        "data": lambda run: run.data,
        "policy": lambda run: run.policy,
        "epochs": lambda run: shown_epochs(run),
        "validation accuracy": lambda run: percent(run.figures["validation_accuracy"]),
        "best": lambda run: percent(run.figures["best_validation_accuracy"]),
        "validation loss": lambda run: loss(run.figures["validation_loss"]),
        "best loss": lambda run: loss(run.figures["best_validation_loss"]),
        "peak memory": lambda run: size(run.figures["peak_bytes"]),
        "peak of a step": lambda run: size(run.figures["step_peak_bytes"]),
        "saved": lambda run: size(run.figures["saved_bytes"]),
        "packed": lambda run: size(run.figures["packed_bytes"]),
        "ratio": lambda run: times(run.figures["ratio"]),
        f"{'/'.join(dict.fromkeys(run.unit for run in runs))} per second": lambda run: rate(run.figures["per_second"]),
        "step": lambda run: step_time(run.figures["step_seconds"]),
        "time": lambda run: duration(run.figures["seconds"]),
    }
    cells = {name: [write(run) for run in runs] for name, write in columns.items()}
    kept = [name for name in columns if any(cell != UNKNOWN for cell in cells[name])]
    rows = tuple(zip(*(cells[name] for name in kept), strict=True))
    return Table("Counted bytes and measured peak", tuple(kept), rows)


def shown_epochs(run: Run) -> str:
    done, total = run.figures["epochs"], number(run.settings.get("epochs"))
    if done is None:
        return UNKNOWN
    return f"{done:.3g}" if run.ended or total is None else f"{done:.3g} of {total:g}"


def epoch_tables(runs: Sequence[Run], most: int | None = None) -> list[Table]:
    """Return losses and accuracies at the end of each epoch, a table for each with a column for each run.

    Return at most `most` rows, at equal intervals.
    """
    epochs = sorted({epoch for run in runs for line in run.epochs if (epoch := number(line.get("epoch"))) is not None})
    if most is not None and len(epochs) > most:
        epochs = [epochs[round(i * (len(epochs) - 1) / (most - 1))] for i in range(most)]
    lines = [{line.get("epoch"): line for line in run.epochs} for run in runs]
    wanted: dict[str, tuple[str, Callable[[float | None], str]]] = {
        "train_loss": ("Train loss", loss),
        "validation_loss": ("Validation loss", loss),
        "train_accuracy": ("Train accuracy", percent),
        "validation_accuracy": ("Validation accuracy", percent),
    }
    tables = []
    for key, (name, write) in wanted.items():
        rows = [(f"{epoch:g}", *(write(number(at.get(epoch, {}).get(key))) for at in lines)) for epoch in epochs]
        if any(cell != UNKNOWN for row in rows for cell in row[1:]):
            head = ("epoch", *(run.name for run in runs))
            tables.append(Table(f"{name} at the end of each epoch", head, tuple(rows)))
    return tables


def site_table(run: Run) -> Table:
    """Return the sites of the last forward pass, as `handle.report()` shows them."""
    rows = tuple(
        (
            str(row.get("layer") or "–"),
            ".".join(str(row[key]) for key in ("operation", "slot") if row.get(key)),
            str(row.get("codec", "")),
            str(row.get("bound", "")),
            size(number(row.get("saved_bytes"))),
            size(number(row.get("packed_bytes"))),
            times(number(row.get("ratio"))),
        )
        for row in run.sites
    )
    head = ("layer", "operation", "codec", "bound", "saved", "packed", "ratio")
    return Table(f"{run.name}: what was saved in the last forward pass, in its order", head, rows)


def setting_tables(runs: Sequence[Run]) -> list[Table]:
    """Return settings and environment: first the differences between the runs, marked, then the common ones."""

    def split(of: Sequence[Mapping[str, Any]], differing: bool) -> list[tuple[str, ...]]:
        names = dict.fromkeys(name for each in of for name in each)
        cells = {name: [shown(each[name]) if name in each else UNKNOWN for each in of] for name in names}
        return [
            (name, *(found if differing or len(runs) == 1 else found[:1]))
            for name, found in cells.items()
            if (len(set(found)) > 1) == differing
        ]

    parts = [[run.settings for run in runs], [run.environment for run in runs]]
    different = [row for part in parts for row in split(part, True)]
    tables = []
    if different:
        head = ("", *(run.name for run in runs))
        tables.append(Table("What differs between the runs", head, tuple(different), frozenset(range(len(different)))))
    for name, part in zip(("Settings", "Environment"), parts, strict=True):
        same = tuple(split(part, False))
        if same:
            head = ("", runs[0].name if len(runs) == 1 else "all runs")
            tables.append(Table(name if len(runs) == 1 else f"{name} that all runs share", head, same))
    return tables
