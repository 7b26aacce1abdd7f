"""The lines that a training shows while it runs."""

from __future__ import annotations

from typing import Any

from encke.tools.progress import StatusLine
from encke.tools.terminal import columns, parts
from encke.tools.units import duration, size

BAR = 12
"""Width of the bar in the live line."""
REPEATED = 20
"""Number of lines of ratios before the names are shown again."""


def figures(line: dict[str, Any], unit: str) -> str:
    """Format loss, accuracy, speed and memory of a line of metrics."""
    parts = [f"loss {loss_text(line['loss'])}"]
    if line["accuracy"] is not None:
        parts.append(f"accuracy {100 * line['accuracy']:.1f} %")
    parts.append(f"{line['per_second']:,.0f} {unit}/s")
    for name, key in (("memory", "memory_bytes"), ("peak", "peak_bytes")):
        if line[key] is not None:
            parts.append(f"{name} {size(line[key])}")
    if line["ratio"] is not None:
        parts.append(f"ratio {line['ratio']:.1f}x")
    return ", ".join(parts)


def loss_text(value: float) -> str:
    """Return a loss with four decimals, or with four digits where training has diverged."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def live_line(line: dict[str, Any], steps: int, epochs: float, left: float, unit: str, width: int) -> str:
    """Return a line of metrics that fits the width: bar, epoch and time left, then as many figures as fit."""
    done = round(BAR * line["step"] / steps)
    end = f"{duration(left)} left"
    text = f"[{'#' * done}{'-' * (BAR - done)}] epoch {line['epoch']:.2f} of {epochs:.4g}"
    figures = [f"loss {loss_text(line['loss'])}"]
    if line["accuracy"] is not None:
        figures.append(f"{100 * line['accuracy']:.1f} %")
    if line["ratio"] is not None:
        figures.append(f"ratio {line['ratio']:.1f}x")
    if line["peak_bytes"] is not None:
        figures.append(f"peak {size(line['peak_bytes'])}")
    figures.append(f"{line['per_second']:,.0f} {unit}/s")
    for figure in figures:
        if len(f"{text}, {figure}, {end}") > width:
            break
        text += f", {figure}"
    return f"{text}, {end}"


def ratio_lines(step: int, ratios: dict[str, float], width: int) -> list[list[str]]:
    """Return heads and figures of a step's ratios as pairs of lines, each of which fits the width."""
    rows = ["step", *ratios], [f"{step:,}", *(f"{ratio:.1f}" for ratio in ratios.values())]
    widths = [max(7, *map(len, column)) for column in zip(*rows, strict=True)]
    return [
        ["  ".join(cell.rjust(widths[i]) for i, cell in [(0, row[0]), *list(enumerate(row))[part]]) for row in rows]
        for part in parts(widths, width)
    ]


class Display:
    """Terminal output of a training. Only rank 0 shows it; the other ranks are `quiet`."""

    def __init__(self, steps: int, epochs: float, unit: str, quiet: bool) -> None:
        self.steps, self.epochs, self.unit, self.quiet = steps, epochs, unit, quiet
        self.line = StatusLine()
        self.heads: str = ""
        """Names above the last lines of ratios; shown again after `REPEATED` lines."""
        self.below = 0

    def step(self, metrics: dict[str, Any], left: float) -> None:
        """Show a line of metrics, with the remaining seconds."""
        if not self.quiet:
            place = f"step {metrics['step']} of {self.steps}, epoch {metrics['epoch']:.2f} of {self.epochs:.4g}"
            text = f"{place}: {figures(metrics, self.unit)}, {duration(left)} left"
            if self.line.live:
                text = live_line(metrics, self.steps, self.epochs, left, self.unit, self.line.width)
            self.line.show(text)

    def epoch(self, metrics: dict[str, Any]) -> None:
        """Show the end of an epoch, with the result of validation."""
        words = [f"train loss {loss_text(metrics['train_loss'])}"]
        if metrics["train_accuracy"] is not None:
            words.append(f"accuracy {100 * metrics['train_accuracy']:.1f} %")
        if metrics["validation_loss"] is not None:
            words.append(f"validation loss {loss_text(metrics['validation_loss'])}")
        if metrics["validation_accuracy"] is not None:
            words.append(f"accuracy {100 * metrics['validation_accuracy']:.2f} %")
        self.say(
            f"epoch {metrics['epoch']:.4g} of {self.epochs:.4g}: {', '.join(words)} ({duration(metrics['seconds'])})"
        )

    def ratios(self, step: int, found: dict[str, float]) -> None:
        """Show the ratio of every convolution in a step; the names are repeated at intervals."""
        for heads, figures in ratio_lines(step, found, columns()):
            self.below += 1
            if heads != self.heads or self.below > REPEATED:
                self.heads, self.below = heads, 1
                self.say(heads)
            self.say(figures)

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if not self.quiet:
            self.line.say(text)

    def close(self) -> None:
        """Remove the live line."""
        self.line.clear()
