"""Files written whole, and JSON without NaN."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encke.tools.files import finite_json, write_json, write_whole


def test_values_without_a_word_in_json_become_null():
    data = {"loss": float("nan"), 1: [float("inf"), 2.0, (True, None)], "path": Path("a")}
    assert finite_json(data) == {"loss": None, "1": [None, 2.0, [True, None]], "path": "a"}


def test_a_json_file_holds_the_data(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("-inf"), "y": [1]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [1]}
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


def test_a_file_stays_as_it_was_when_writing_fails(tmp_path, monkeypatch):
    write_whole(tmp_path / "a.txt", "before")

    def fail(self, text, **options):
        self.write_bytes(text[:2].encode())
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "a.txt", "after")
    assert (tmp_path / "a.txt").read_bytes() == b"before"
