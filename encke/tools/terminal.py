"""Tables and lines in plain text: the same on every machine, whatever is installed there."""

from __future__ import annotations

from collections.abc import Sequence


def note(line: str = "") -> None:
    """Print one plain line."""
    print(line, flush=True)


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: first column to the left, figures to the right. A short row ends with a line in words."""
    widths = [max(len(row[i]) for row in (heads, *rows) if len(row) == len(heads)) for i in range(len(heads))]
    widths[0] = max(len(row[0]) for row in (heads, *rows))
    note()
    note(title)
    for row in (heads, ["-" * width for width in widths], *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        note("  ".join(cells if len(row) == len(heads) else [cells[0], *row[1:]]).rstrip())


def number(value: float | None, digits: int = 1) -> str:
    """A number with a fixed count of digits; empty if it is not known."""
    return "" if value is None else f"{value:,.{digits}f}"


def times(value: float | None, other: float | None) -> str:
    """The quotient of two figures, such as 1.50x; empty if one is not known or `other` is not positive."""
    return f"{value / other:.2f}x" if value and other and other > 0 else ""
