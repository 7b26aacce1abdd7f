"""The lines that a training shows while it runs."""

from __future__ import annotations

from typing import Any

from encke.tools.progress import StatusLine
from encke.tools.units import duration, size


def figures(line: dict[str, Any], unit: str) -> str:
    """Loss, accuracy, speed and memory of a line of metrics."""
    parts = [f"loss {line['loss']:.4f}"]
    if line["accuracy"] is not None:
        parts.append(f"accuracy {100 * line['accuracy']:.1f} %")
    parts.append(f"{line['per_second']:,.0f} {unit}/s")
    for name, key in (("memory", "memory_bytes"), ("peak", "peak_bytes")):
        if line[key] is not None:
            parts.append(f"{name} {size(line[key])}")
    if line["ratio"] is not None:
        parts.append(f"ratio {line['ratio']:.1f}x")
    return ", ".join(parts)


class Display:
    """Lines of a training in the terminal. Only rank 0 shows them; the others are `quiet`."""

    def __init__(self, steps: int, epochs: float, unit: str, quiet: bool) -> None:
        self.steps, self.epochs, self.unit, self.quiet = steps, epochs, unit, quiet
        self.line = StatusLine()

    def step(self, metrics: dict[str, Any], left: float) -> None:
        """Show a line of metrics, with the seconds that are left."""
        if not self.quiet:
            place = f"step {metrics['step']} of {self.steps}, epoch {metrics['epoch']:.2f} of {self.epochs:g}"
            self.line.show(f"{place}: {figures(metrics, self.unit)}, {duration(left)} left")

    def epoch(self, metrics: dict[str, Any]) -> None:
        """Show an epoch's end, with the result of validation."""
        words = [f"train loss {metrics['train_loss']:.4f}"]
        if metrics["train_accuracy"] is not None:
            words.append(f"accuracy {100 * metrics['train_accuracy']:.1f} %")
        if metrics["validation_loss"] is not None:
            words.append(f"validation loss {metrics['validation_loss']:.4f}")
        if metrics["validation_accuracy"] is not None:
            words.append(f"accuracy {100 * metrics['validation_accuracy']:.2f} %")
        self.say(f"epoch {metrics['epoch']:g} of {self.epochs:g}: {', '.join(words)} ({duration(metrics['seconds'])})")

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if not self.quiet:
            self.line.say(text)

    def close(self) -> None:
        """Remove the live line."""
        self.line.clear()
