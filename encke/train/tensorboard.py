"""Figures of a training for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from encke.tools.errors import UsageError
from encke.tools.extras import install_hint, installed

TAGS = {
    "loss": "loss/train",
    "validation_loss": "loss/validation",
    "accuracy": "accuracy/train",
    "validation_accuracy": "accuracy/validation",
    "lr": "learning_rate",
    "ratio": "ratio",
    "memory_bytes": "memory/now_bytes",
    "peak_bytes": "memory/peak_bytes",
    "step_peak_bytes": "memory/step_peak_bytes",
    "per_second": "per_second",
}
"""Tag of each figure of a line of metrics."""


def check() -> None:
    """Raise an error if the package is missing."""
    if not installed("tensorboard"):
        raise UsageError(f"log tensorboard needs the package tensorboard: {install_hint('tensorboard')}")


class TensorBoard:
    """Writer of event files into a folder. Steps after `done`, which a killed run has written, are withdrawn."""

    def __init__(self, folder: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def write(self, line: dict[str, Any]) -> None:
        """Write the known figures of a line of metrics."""
        for name, tag in TAGS.items():
            if line.get(name) is not None:
                self.writer.add_scalar(tag, line[name], line["step"])

    def close(self) -> None:
        """Write what is pending."""
        self.writer.close()
