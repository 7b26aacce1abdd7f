"""Tables and progress in plain text: the same on every machine, whatever is installed there."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def note(line: str = "") -> None:
    """One plain line."""
    print(line, flush=True)


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: the first column to the left, figures to the right. A row may end early, with a line in words."""
    widths = [max(len(row[i]) for row in (heads, *rows) if len(row) == len(heads)) for i in range(len(heads))]
    widths[0] = max(len(row[0]) for row in (heads, *rows))
    note()
    note(title)
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        note("  ".join(cells if len(row) == len(heads) else [cells[0], *row[1:]]).rstrip())


def progress(items: Sequence[tuple[str, T]]) -> Iterator[T]:
    """Passes the items on, saying what is being measured and about how long the rest will take."""
    started = time.monotonic()
    terminal = sys.stderr.isatty()
    for done, (what, item) in enumerate(items):
        left = (time.monotonic() - started) / done * (len(items) - done) if done else None
        line = f"{done + 1} of {len(items)}: {what}" + (f", about {duration(left)} left" if left is not None else "")
        if terminal:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        else:
            note(line)
        try:
            yield item
        finally:
            if terminal:
                print("\r\033[K", end="", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def size(value: float | None, unit: float) -> str:
    """Bytes in a unit, with as many digits as it deserves."""
    return "" if value is None else f"{value / unit:,.{2 if unit >= 1e9 else 1}f}"


def times(value: float | None, other: float | None) -> str:
    """How many times `other` goes into `value`."""
    return f"{value / other:.2f}x" if value and other and other > 0 else ""
