"""The options of conftest.py, in a run of pytest of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest
from hypothesis import given, settings, strategies as st

examples = []

def test_usual():
    pass

@pytest.mark.soak
def test_long():
    pass

@settings(max_examples=3, derandomize=True, database=None)
@given(st.integers())
def test_property(x):
    examples.append(x)

@pytest.mark.soak
def test_examples():
    assert len(examples) == 30
"""


TORCH = """
class cuda:
    is_available = staticmethod(lambda: True)
"""
"""In place of torch, which takes three seconds to import."""


pytestmark = pytest.mark.slow


def run(folder: Path, *options: str) -> str:
    (folder / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (folder / "torch.py").write_text(TORCH)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = soak: long\n")
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *options]
    # With a GPU, as the stand-in for torch has one, Triton's interpreter is not used.
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True).stdout


def test_tests_marked_soak_are_left_out_by_default(tmp_path: Path) -> None:
    shown = run(tmp_path)
    assert "test_usual PASSED" in shown and "test_property PASSED" in shown
    assert "2 passed, 2 deselected" in shown


def test_soak_runs_the_marked_tests_and_property_tests_at_length(tmp_path: Path) -> None:
    shown = run(tmp_path, "--soak")
    assert "test_long PASSED" in shown and "test_examples PASSED" in shown
    assert "3 passed, 1 deselected" in shown


@pytest.mark.parametrize("processes", [(), pytest.param(("-n", "2", "--dist", "worksteal"), marks=pytest.mark.soak)])
def test_no_test_is_started_after_the_time_box(processes: tuple[str, ...], tmp_path: Path) -> None:
    shown = run(tmp_path, "--soak", "--minutes", "0", *processes)
    assert "3 tests were not started within 0 minutes" in shown
    assert "3 skipped, 1 deselected" in shown if not processes else "3 skipped" in shown
