"""`halley demo` in small: both trainings run, and the figures say what happened."""

from __future__ import annotations

import json
import sys

import pytest

from halley.cli import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    main(["demo", "--epochs", "1", "--samples", "300", "--batch", "60", "--out", str(out)])
    assert [path.name for path in out.iterdir()] == ["results.json"]
    return json.loads((out / "results.json").read_text())


def test_both_trainings_are_reported_with_their_origin(results):
    for run in ("plain", "compressed"):
        assert results[run]["steps"] == 4
        assert 0 <= results[run]["accuracy"] <= 1
        assert results[run]["step_seconds"] > 0
    assert results["torch"] and results["cpu"] and results["command"]


def test_the_compressed_run_packed_what_it_saved(results):
    report = results["compressed"]["report"]
    assert report["packed_bytes"] < report["saved_bytes"] / 4


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of the process is read from /proc")
def test_the_process_holds_what_was_counted(results):
    report = results["compressed"]["report"]
    assert results["plain"]["held_bytes"] == pytest.approx(report["saved_bytes"], rel=0.1)
    assert results["compressed"]["held_bytes"] < results["plain"]["held_bytes"] / 3
    assert results["compressed"]["peak_bytes"] < results["plain"]["peak_bytes"]
