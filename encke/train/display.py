"""What a training shows while it runs: a live line in a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from encke.tools.terminal import note

EVERY = 10.0
"""Seconds between plain lines."""


def clock(seconds: float) -> str:
    """A time to read: 7 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def memory(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"


def figures(line: dict[str, Any], unit: str) -> str:
    """Loss, accuracy, speed and memory of a line of metrics."""
    parts = [f"loss {line['loss']:.4f}"]
    if line["accuracy"] is not None:
        parts.append(f"accuracy {100 * line['accuracy']:.1f} %")
    parts.append(f"{line['per_second']:,.0f} {unit}/s")
    for name, key in (("memory", "memory_bytes"), ("peak", "peak_bytes")):
        if line[key] is not None:
            parts.append(f"{name} {memory(line[key])}")
    if line["ratio"] is not None:
        parts.append(f"ratio {line['ratio']:.1f}x")
    return ", ".join(parts)


class Display:
    """Rank 0's; the others have one that is `quiet`."""

    def __init__(self, steps: int, epochs: float, unit: str, quiet: bool) -> None:
        self.steps, self.epochs, self.unit, self.quiet = steps, epochs, unit, quiet
        self.said = 0.0
        self.progress: Any = None
        if not quiet and sys.stdout.isatty():
            self.progress = self._live()

    def _live(self) -> Any:
        try:
            from rich.progress import BarColumn, Progress, TextColumn
        except ModuleNotFoundError:
            return None
        columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(20), TextColumn("{task.description}"))
        live = Progress(*columns, transient=True)
        self.task = live.add_task("starting", total=self.steps, epoch="")
        live.start()
        return live

    def step(self, line: dict[str, Any], left: float) -> None:
        """A line of metrics, with the seconds that are left."""
        if self.quiet:
            return
        epoch = f"{line['epoch']:.2f} of {self.epochs:g}"
        text = f"{figures(line, self.unit)}, {clock(left)} left"
        if self.progress is not None:
            self.progress.update(self.task, completed=line["step"], description=text, epoch=epoch)
        elif time.monotonic() - self.said >= EVERY:
            self.said = time.monotonic()
            note(f"step {line['step']} of {self.steps}, epoch {epoch}: {text}")

    def epoch(self, line: dict[str, Any]) -> None:
        """An epoch's end, with what validation gave."""
        if self.quiet:
            return
        parts = [f"train loss {line['train_loss']:.4f}"]
        if line["train_accuracy"] is not None:
            parts.append(f"accuracy {100 * line['train_accuracy']:.1f} %")
        if line["validation_loss"] is not None:
            parts.append(f"validation loss {line['validation_loss']:.4f}")
        if line["validation_accuracy"] is not None:
            parts.append(f"accuracy {100 * line['validation_accuracy']:.2f} %")
        self.say(f"epoch {line['epoch']:g} of {self.epochs:g}: {', '.join(parts)} ({clock(line['seconds'])})")

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        if self.progress is not None:
            self.progress.console.print(text, highlight=False, markup=False)
        else:
            note(text)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
