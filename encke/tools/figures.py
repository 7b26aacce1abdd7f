"""Figures that matplotlib draws to a file, without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure(path: Path, rows: int, columns: int, size: tuple[float, float], dpi: int = 120) -> Iterator[tuple[Any, Any]]:
    """Make a figure with its panels and write it when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    made, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    yield made, panels
    made.savefig(path, dpi=dpi)
    plt.close(made)
