"""Ranks of a data-parallel training hold the same settings after every collection step."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.soak)], ids=str
)
def test_ranks_hold_the_same_settings(ranks, tmp_path):
    table = tmp_path / "scaling.csv"
    small = ["--ranks", ranks, "--model", "cnn", "--size", 32, "--batch", 4, "--collections", 2, "--csv", table]
    subprocess.run([sys.executable, SCRIPT, *map(str, small)], check=True, timeout=200)
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert (row["ranks"], row["same_settings"]) == (str(ranks), "True")
    assert int(row["settings"]) > 3 and int(row["share_bytes"]) > 0 and float(row["share_ms"]) > 0
