"""Ranks of a data-parallel training hold the same settings after every collection step, as the benchmark finds them.

Settings of two ranks are compared in tests/integration/test_distributed.py, too.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_hold_the_same_settings(ranks, tmp_path):
    table = tmp_path / "scaling.csv"
    small = ["--ranks", ranks, "--model", "cnn", "--size", 32, "--batch", 4, "--collections", 2, "--csv", table]
    subprocess.run([sys.executable, SCRIPT, *map(str, small)], check=True, timeout=200)
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert (row["ranks"], row["same_settings"]) == (str(ranks), "True")
    assert int(row["settings"]) > 3 and int(row["share_bytes"]) > 0 and float(row["share_ms"]) > 0
