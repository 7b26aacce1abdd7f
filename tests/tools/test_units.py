"""Bytes and durations as text."""

from __future__ import annotations

import pytest

from encke.tools.units import GB, MB, duration, size, size_in


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (45_040_000, "45.0 MB"),
        (1_254_000_000, "1.25 GB"),
        (2.5e12, "2,500.00 GB"),
        (-3e6, "-3.0 MB"),
    ],
)
def test_bytes_have_a_decimal_unit(value, text):
    assert size(value) == text


def test_a_cell_holds_bytes_in_the_unit_of_its_column():
    assert [size_in(1_234_567_890, GB), size_in(1_234_567_890, MB), size_in(None, MB)] == ["1.23", "1,234.6", ""]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (7.2, "7 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations_grow_from_seconds_to_hours(seconds, text):
    assert duration(seconds) == text
