"""Provenance of figures."""

from __future__ import annotations

import sys

import pytest

from encke.tools.provenance import provenance, read_csv, write_csv


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        ("benchmarks/cpu_step.py", "python3 benchmarks/cpu_step.py --csv f.csv"),
        ("/anywhere/bin/encke", "encke --csv f.csv"),
        ("/anywhere/encke/__main__.py", "encke --csv f.csv"),
    ],
)
def test_the_command_is_the_one_that_was_given(called, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [called, "--csv", "f.csv"])
    assert provenance()["command"] == expected
    monkeypatch.setattr(sys, "argv", [called, "--csv", "/a/folder/of/mine/f.csv"])
    assert provenance()["command"] == expected


def test_rows_are_read_as_they_were_written_and_keep_their_provenance(tmp_path):
    path = tmp_path / "folder" / "rows.csv"
    assert read_csv(path) == []
    row = {"a": 1, "b": 0.5, "c": None, "d": True, "e": "2 words"}
    write_csv(path, [row])
    (found,) = read_csv(path)
    assert {name: found[name] for name in row} == row and found["torch"] == provenance()["torch"]
    write_csv(path, [found | {"torch": "1.0.0"}, {**row, "f": 3}])
    first, second = read_csv(path)
    assert first["torch"] == "1.0.0" and first["f"] is None and second["f"] == 3 and second["torch"] == found["torch"]
