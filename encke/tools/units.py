"""Bytes and durations as text: decimal units (1 MB = 1,000,000 bytes) in every command and report."""

from __future__ import annotations

GB, MB, KB = 1e9, 1e6, 1e3


def size(value: float) -> str:
    """Bytes with their unit: 512 B, 3.2 kB, 45.0 MB, 1.25 GB."""
    for unit, factor, digits in (("GB", GB, 2), ("MB", MB, 1), ("kB", KB, 1)):
        if abs(value) >= factor:
            return f"{value / factor:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def size_in(value: float | None, unit: float) -> str:
    """Format bytes in a given unit, without its name: a table cell below a heading that names the unit."""
    return "" if value is None else f"{value / unit:,.{2 if unit >= GB else 1}f}"


def duration(seconds: float) -> str:
    """A duration: 7 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
