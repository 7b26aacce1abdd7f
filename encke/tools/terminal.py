"""Tables and lines in plain text, which look the same on every machine."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence


def note(line: str = "") -> None:
    """Print one plain line."""
    print(line, flush=True)


def columns() -> int:
    """Return the width of the terminal; unlimited if the output is not a terminal."""
    return shutil.get_terminal_size((0, 0)).columns or sys.maxsize


def paragraph(text: str, lead: str = "", below: str = "") -> None:
    """Print a paragraph in lines that fit the terminal: `lead` begins the first, `below` the others."""
    note(textwrap.fill(text, min(columns(), 120), initial_indent=lead, subsequent_indent=below))


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a left-aligned first column and right-aligned figures. A short row ends with a line of text.

    Columns that do not fit the terminal follow below, with the first column repeated.
    """
    widths = [max(len(row[i]) for row in (heads, *rows) if len(row) == len(heads)) for i in range(len(heads))]
    widths[0] = max(len(row[0]) for row in (heads, *rows))
    note()
    note(title)
    for part in parts(widths, columns()):
        if part.start > 1:
            note()
        for row in (heads, ["-" * width for width in widths], *rows):
            cells = [row[0].ljust(widths[0])]
            if len(row) == len(heads):
                cells += [cell.rjust(width) for cell, width in zip(row[part], widths[part], strict=True)]
            elif part.start == 1:
                cells += row[1:]
            else:
                continue
            note("  ".join(cells).rstrip())


def parts(widths: Sequence[int], most: int) -> Iterator[slice]:
    """Yield the columns after the first in groups that fit beside the first."""
    start, taken = 1, widths[0]
    for column in range(1, len(widths)):
        taken += 2 + widths[column]
        if taken > most and column > start:
            yield slice(start, column)
            start, taken = column, widths[0] + 2 + widths[column]
    yield slice(start, len(widths))


def number(value: float | None, digits: int = 1) -> str:
    """Format a number with a fixed count of digits; empty if it is unknown."""
    return "" if value is None else f"{value:,.{digits}f}"


def times(value: float | None, other: float | None) -> str:
    """Format the quotient of two figures, such as 1.50x; empty if one is unknown or `other` is not positive."""
    return f"{value / other:.2f}x" if value and other and other > 0 else ""
