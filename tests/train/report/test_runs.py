"""Run folders: whole, half-written, resumed, killed, broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from encke.tools.errors import UsageError
from encke.train.report import runs
from encke.train.settings import Data, Model, Policy, Settings, to_yaml


def write(folder: Path, lines: list[dict], settings: Settings | None = None, **files: object) -> Path:
    """A run folder with these lines of metrics; `files` are further ones by their stem, as JSON."""
    folder.mkdir(parents=True)
    (folder / "settings.yaml").write_text(to_yaml(settings or Settings()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def step(n: int, **more: object) -> dict:
    return {"event": "step", "step": n, "epoch": n / 10, "loss": 1 / n, "seconds": float(n), **more}


def epoch(n: int, **more: object) -> dict:
    return {"event": "epoch", "step": n, "epoch": n / 10, "validation_loss": 2.0, "validation_accuracy": 0.5, **more}


def only(folder: Path) -> runs.Run:
    (run,) = runs.read_all([folder])
    return run


def test_figures_of_an_ended_run_are_those_of_its_result(tmp_path):
    result = {"finished": True, "reason": "done", "steps": 20, "validation_accuracy": 0.7, "peak_above_bytes": 5}
    result |= {"saved_bytes": 100, "packed_bytes": 8, "ratio": 12.5}
    run = only(write(tmp_path / "a", [step(10), epoch(10)], result=result, environment={"device": "cpu x"}))
    assert run.ended and run.on_cpu and not any("ended" in text for text in run.warnings)
    assert (run.figures["validation_accuracy"], run.figures["steps"], run.figures["ratio"]) == (0.7, 20, 12.5)
    assert run.figures["peak_above_bytes"] == 5


def test_figures_of_a_killed_run_are_those_of_its_last_lines(tmp_path):
    lines = [step(10, step_seconds=1.0), epoch(10, peak_bytes=90, memory_before_bytes=40, validation_accuracy=0.8)]
    lines += [step(15, step_seconds=3.0, peak_bytes=95), epoch(20, validation_accuracy=0.6), step(25)]
    run = only(write(tmp_path / "a", lines))
    figures = run.figures
    assert not run.ended and any("still running, or killed" in text for text in run.warnings)
    assert (figures["steps"], figures["validation_accuracy"], figures["best_validation_accuracy"]) == (25, 0.6, 0.8)
    assert (figures["peak_bytes"], figures["peak_above_bytes"], figures["step_seconds"]) == (95, 55, 2.0)


def test_an_interrupted_run_says_so(tmp_path):
    run = only(write(tmp_path / "a", [step(10)], result={"finished": True, "reason": "interrupted"}))
    assert not run.ended and "interrupted at step 10" in " ".join(run.warnings)


def test_a_half_written_last_line_is_left_out(tmp_path):
    folder = write(tmp_path / "a", [step(10), step(20)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "step": 3')
    run = only(folder)
    assert [line["step"] for line in run.steps] == [10, 20]
    assert any("last line of metrics.jsonl" in text for text in run.warnings)


@pytest.mark.parametrize("broken", ['{"event": "st', "[1, 2]", '{"event": "step"}', '{"step": NaN}', "\ufffd"])
def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path, broken):
    folder = write(tmp_path / "a", [])
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(step(1)), broken, json.dumps(step(3)), ""]))
    with pytest.raises(UsageError, match=r"metrics\.jsonl, line 2: ") as caught:
        only(folder)
    assert "\n" not in str(caught.value)


def test_lines_after_a_resume_replace_earlier_ones(tmp_path):
    lines = [step(10), epoch(10), step(20), epoch(20), step(30), {"event": "resume", "step": 10}, step(20, loss=7.0)]
    run = only(write(tmp_path / "a", lines))
    assert [(line["step"], line["loss"]) for line in run.steps] == [(10, 0.1), (20, 7.0)]
    assert [line["step"] for line in run.epochs] == [10]
    assert run.resumed == 1


def test_without_a_resume_line_too_a_step_replaces_itself_and_what_came_later(tmp_path):
    run = only(write(tmp_path / "a", [step(10), step(20), step(30), step(20, loss=7.0), epoch(20), epoch(20)]))
    assert [line["step"] for line in run.steps] == [10, 20] and run.steps[-1]["loss"] == 7.0
    assert len(run.epochs) == 1


def test_a_long_log_of_layers_is_thinned_evenly_and_keeps_its_end(tmp_path):
    folder = write(tmp_path / "a", [step(10)])
    row = {"layer": "x", "codec": "GroupQuant", "saved_bytes": 8, "packed_bytes": 1, "ratio": 8.0}
    lines = [{"step": n, "saved_bytes": 8, "packed_bytes": 1, "layers": [row]} for n in range(1, 1001)]
    (folder / "sites.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps = [line["step"] for line in only(folder).forwards]
    assert runs.MOST_FORWARDS <= len(steps) <= 2 * runs.MOST_FORWARDS + 1
    assert steps[0] == 1 and steps[-1] == 1000
    assert len({b - a for a, b in zip(steps[:-1], steps[1:-1], strict=False)}) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None, "text", True])
def test_what_is_no_finite_number_is_no_figure_and_a_bad_loss_is_told(tmp_path, bad):
    run = only(write(tmp_path / "a", [step(10), step(20, loss=bad, peak_bytes=bad), epoch(20, validation_loss=bad)]))
    assert run.figures["validation_loss"] is None and run.figures["peak_bytes"] is None
    assert any("not finite from step 20" in text for text in run.warnings)


def test_what_is_no_run_folder_is_named_with_the_missing_file(tmp_path):
    def message(path: Path) -> str:
        with pytest.raises(UsageError) as caught:
            runs.read_all([path])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not exist" in message(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file" in message(tmp_path / "file")
    folder = write(tmp_path / "many" / "a", [step(1)])
    above = message(tmp_path / "many")
    assert "has no settings.yaml" in above and "a run folder is" in above and str(folder) in above
    (folder / "metrics.jsonl").write_text("")
    assert "no line of a step yet" in message(folder)
    (folder / "metrics.jsonl").unlink()
    assert "has no metrics.jsonl" in message(folder)
    (folder / "environment.json").write_text("{}")
    assert "no line of a step yet" in message(folder)


@pytest.mark.parametrize("name", ["result", "environment"])
@pytest.mark.parametrize("text", ['{\n"a": ', "[]", "\udc80"])
def test_a_broken_json_file_is_named(tmp_path, name, text):
    folder = write(tmp_path / "a", [step(1)])
    (folder / f"{name}.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=rf"{name}\.json"):
        only(folder)


def test_a_run_given_twice_is_shown_once_and_equal_names_are_told_apart(tmp_path):
    one, two = write(tmp_path / "x" / "run", [step(1)]), write(tmp_path / "y" / "run", [step(1)])
    found = runs.read_all([one, two, one, one / ".." / "run"])
    assert [run.name for run in found] == ["x/run", "y/run"]


def test_a_compressed_run_is_paired_with_the_plain_one_that_differs_least(tmp_path):
    def made(name: str, **settings: object) -> Path:
        return write(tmp_path / name, [step(1)], Settings(**settings))

    none = Policy(name="none")
    found = runs.read_all(
        [
            made("plain0", policy=none, seed=0),
            made("plain1", policy=none, seed=1),
            made("comet1", seed=1, metrics=5),
            made("comet2", seed=2, batch=64),
            made("other", model=Model(name="vgg16")),
            made("elsewhere", data=Data(kind="text", path="b"), seed=0),
            made("plain3", policy=none, data=Data(kind="text", path="a")),
        ]
    )
    pairs = {pair.compressed.name: pair for pair in runs.pairs(found)}
    assert set(pairs) == {"comet1", "comet2"}
    assert pairs["comet1"].plain.name == "plain1" and pairs["comet1"].differences == ()
    assert pairs["comet2"].differences == ("batch (128, 64)", "seed (0, 2)")


def test_chance_shrinks_with_samples_and_is_not_zero_for_perfect_runs():
    assert runs.margin_of_error(0.978, 0.979, 1000) == pytest.approx(2 * (2 * 0.978 * 0.022 / 1000) ** 0.5, rel=0.03)
    assert runs.margin_of_error(1.0, 1.0, 100) > 0
    assert runs.margin_of_error(0.9, 0.9, 10000) < runs.margin_of_error(0.9, 0.9, 100) / 9


@pytest.mark.parametrize("memory", [{"step": 1}, {"bytes": [1]}, {"bytes": "many"}, [1], {"bytes": [None]}])
def test_the_memory_of_a_step_that_is_none_is_an_error(tmp_path, memory):
    folder = write(tmp_path / "a", [step(10)], memory=memory)
    with pytest.raises(UsageError, match=r"memory\.json"):
        only(folder)
