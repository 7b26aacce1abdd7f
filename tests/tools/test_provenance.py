"""Provenance of figures."""

from __future__ import annotations

import sys

import pytest

from encke.tools.provenance import provenance


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
