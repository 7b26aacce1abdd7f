"""Tables of training steps: what is measured, what is not measured again, and how it is shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from encke.bench import rows as bench_rows
from encke.bench.rows import blank_row
from encke.tools.provenance import read_csv

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import readme_table  # type: ignore[import-not-found]
    import step_table  # type: ignore[import-not-found]
    import transformer_table  # type: ignore[import-not-found]

    return step_table, readme_table, transformer_table


@pytest.fixture
def measured(monkeypatch, scripts):
    """Tasks that were measured; those of `checkpoint` fail."""
    found = []

    def measure_row(task, child=None):
        found.append(task)
        if task.method == "checkpoint":
            return blank_row(task) | {"status": "out of memory"}
        step = 10.0 if task.method == "plain" else 12.0
        figures = {"pipelined_ms": step, "held_bytes": 1e9, "peak_bytes": 3e9, "peak_above_bytes": 2e9}
        return blank_row(task) | figures | {"status": "ok"}

    class NoChild:
        def __init__(self, task):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def close(self):
            pass

        def ask(self, **request):
            assert request == {"warm": True}
            return {}

    monkeypatch.setattr(bench_rows, "measure_row", measure_row)
    monkeypatch.setattr(bench_rows, "Child", NoChild)
    return found


def call(monkeypatch, script, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, arguments)])
    script.main()


def test_a_table_is_not_measured_again_by_the_same_code(monkeypatch, tmp_path, scripts, measured, capsys):
    step_table, readme_table, _ = scripts
    csv = tmp_path / "rows.csv"
    options = ["--models", "cnn", "digits", "--csv", csv, "--rounds", 2]
    call(monkeypatch, readme_table, *options)
    order = [(task.model, task.method) for task in measured]
    assert order == [(m, way) for m in ("cnn", "digits") for _ in range(2) for way in ("plain", "default")]
    assert "| digits, batch 16, bf16 | default | 12.0 ms (n = 2, 12.0 to 12.0) | 1.20x | 2.00 GB |" in (
        capsys.readouterr().out
    )
    # An interrupted call has only a part of a table's rows: that table is measured again, the other is not.
    lines = csv.read_text().splitlines(keepends=True)
    csv.write_text("".join(lines[:-1]))
    measured.clear()
    call(monkeypatch, readme_table, *options)
    assert {task.model for task in measured} == {"digits"} and len(read_csv(csv)) == 8
    assert "1 of 2 tables" in capsys.readouterr().out
    # Other code measures everything again.
    monkeypatch.setattr(step_table, "code_digest", lambda: "other")
    measured.clear()
    call(monkeypatch, readme_table, *options)
    assert len(measured) == len(read_csv(csv)) == 8


def test_rows_of_cases_that_are_not_asked_for_stay(monkeypatch, tmp_path, scripts, measured):
    """They name the code that they were measured with."""
    step_table, readme_table, _ = scripts
    csv = tmp_path / "rows.csv"
    call(monkeypatch, readme_table, "--only", "resnet50", "--csv", csv, "--rounds", 1)
    assert {task.model for task in measured} == {"resnet50"} and len(measured) == 9
    measured.clear()
    monkeypatch.setattr(step_table, "code_digest", lambda: "other")
    call(monkeypatch, readme_table, "--only", "llama", "--csv", csv, "--rounds", 1)
    assert {task.model for task in measured} == {"llama"} and len(read_csv(csv)) == 9 + len(measured)
    measured.clear()
    call(monkeypatch, readme_table, "--only", "batch 64", "256, fp32", "--csv", csv, "--rounds", 1)
    assert [(task.batch, task.precision) for task in measured] == 2 * [(64, "bf16")] + 3 * [(256, "fp32")]


def test_transformers_are_measured_with_chunked_loss_and_failures_are_rows(
    monkeypatch, tmp_path, scripts, measured, capsys
):
    csv = tmp_path / "rows.csv"
    call(monkeypatch, scripts[2], "--models", "llama_small", "--csv", csv, "--rounds", 1)
    found = [(task.method, task.chunked, task.compile) for task in measured]
    assert found == [
        ("plain", True, False),
        ("checkpoint", True, False),
        ("default", True, False),
        ("checkpoint-packed", True, False),
        ("plain", False, False),
        ("default", False, False),
        ("plain", True, True),
        ("budget30", True, True),
        ("default", True, True),
    ]
    measured.clear()
    call(monkeypatch, scripts[2], "--models", "llama_small", "--csv", csv, "--rounds", 2, "--together", 2)
    assert [(task.method, task.chunked, task.compile) for task in measured] == 2 * found
    assert len(read_csv(csv)) == 18
    lines = capsys.readouterr().out
    assert "| llama_small, batch 4 x 128 tokens, bf16, chunked loss | checkpoint | out of memory |" in lines
    assert "| llama_small, batch 4 x 128 tokens, bf16, compiled, chunked loss | budget30 | 12.0 ms" in lines


def test_usual_sizes_of_transformers(scripts):
    _, _, transformer_table = scripts
    cases = [case for model in ("llama", "bert", "vit_b_16") for case in transformer_table.cases(model)]
    assert [(case.model, case.tokens, case.chunked, case.compile) for case in cases] == [
        ("llama", 4096, True, False),
        ("llama", 4096, False, False),
        ("llama", 4096, True, True),
        ("bert", 512, True, False),
        ("bert", 512, True, True),
        ("vit_b_16", None, False, False),
        ("vit_b_16", None, False, True),
    ]
