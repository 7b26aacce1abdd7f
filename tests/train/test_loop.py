"""The training loop: it learns, writes its files, resumes bit for bit, and ends with one clear line."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from encke.cli import main
from encke.tools import progress
from encke.tools.errors import UsageError
from encke.tools.process import ALLOCATOR
from encke.tools.units import size
from encke.train import loop, metrics
from encke.train.loop import train
from encke.train.settings import read

SMALL = (
    "--data synthetic --data.samples 96 --data.size 12 --data.channels 1 --batch 16 --epochs 2 --metrics 2 --sites 3"
)
TIMES = ("seconds", "step_seconds", "per_second", "memory_bytes", "peak_bytes", "held_bytes", "memory_before_bytes")


NO_BATCH_NORM = """
from torch import nn


def net(classes):
    first, second, last = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, stride=2), nn.Linear(400, classes)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), last)
"""


def settings(out: Path, *more: str):
    return read("digits", [*SMALL.split(), "--out", str(out), *more])


def lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def repeatable(out: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock or a memory gauge says."""
    found = [line for line in lines(out) if line["event"] != "resume"]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in found]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return torch.load(out / "checkpoint.pt", weights_only=True)["model"]


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def interrupt_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the step with this number."""
    plain, calls = loop.step, []

    def step(*args: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        plain(*args)

    monkeypatch.setattr(loop, "step", step)


@pytest.mark.slow
def test_a_run_learns_and_its_folder_tells_what_happened(tmp_path):
    result = train(settings(tmp_path / "run", "--epochs", "8", "--data.size", "28"))
    out = tmp_path / "run"
    assert result["finished"] and result["reason"] == "done" and result["steps"] == 48
    assert json.loads((out / "result.json").read_text())["validation_accuracy"] == result["validation_accuracy"]
    found = lines(out)
    steps, epochs = ([line for line in found if line["event"] == event] for event in ("step", "epoch"))
    assert [line["step"] for line in steps] == list(range(2, 49, 2)) and len(epochs) == 8
    assert epochs[-1]["train_loss"] < 0.5 * epochs[0]["train_loss"]
    assert epochs[-1]["validation_accuracy"] > 0.8
    assert steps[-1]["ratio"] == pytest.approx(steps[-1]["saved_bytes"] / steps[-1]["packed_bytes"])
    assert steps[-1]["ratio"] > 3 and result["ratio"] == steps[-1]["ratio"]
    assert [line["step"] for line in lines(out, "sites.jsonl")] == [1, *range(3, 49, 3)]
    environment = json.loads((out / "environment.json").read_text())
    assert environment["train_samples"] == 96 and environment["validation_samples"] == 12
    assert environment["torch"] == torch.__version__ and environment["world"] == 1


def test_the_mean_loss_of_an_epoch_is_that_of_its_steps(tmp_path):
    train(settings(tmp_path / "run", "--metrics", "1", "--epochs", "1"))
    found = lines(tmp_path / "run")
    steps = [line["loss"] for line in found if line["event"] == "step"]
    assert found[-1]["train_loss"] == pytest.approx(sum(steps) / len(steps))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nobody interrupted. Tests read it alone."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(settings(out))
    return out


@pytest.mark.slow
def test_the_same_settings_give_the_same_run(tmp_path, whole):
    train(settings(tmp_path / "other"))
    train(settings(tmp_path / "seed", "--seed", "1"))
    assert repeatable(whole) == repeatable(tmp_path / "other")
    assert same_weights(whole, tmp_path / "other")
    assert not same_weights(whole, tmp_path / "seed")


def test_plain_training_is_the_baseline_of_the_same_recipe(tmp_path):
    result = train(settings(tmp_path / "plain", "--policy", "none"))
    assert result["ratio"] is None and result["report"] is None
    assert not (tmp_path / "plain" / "sites.jsonl").exists()


@pytest.mark.parametrize("number", [1, 5, 6, 11])
def test_ctrl_c_saves_and_the_resumed_run_ends_bit_for_bit_as_if_nothing_had_happened(
    tmp_path, monkeypatch, whole, number
):
    with monkeypatch.context() as patch:
        interrupt_at(number, patch)
        result = train(settings(tmp_path / "part"))
    assert not result["finished"] and result["steps"] == number
    assert train(settings(tmp_path / "part"), resume=True)["finished"]
    assert same_weights(whole, tmp_path / "part")
    assert repeatable(whole) == repeatable(tmp_path / "part")
    assert lines(whole, "sites.jsonl") == lines(tmp_path / "part", "sites.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--policy", "none"],
        ["--policy", "division"],
        ["--policy", "bounded", "--policy.rounding", "nearest"],
        ["--optimizer.momentum", "0.9", "--optimizer", "sgd", "--optimizer.lr", "0.01", "--accumulate", "2"],
        ["--optimizer.clip", "0.5", "--schedule", "cosine", "--label-smoothing", "0.1", "--data.augment", "crop"],
    ],
)
def test_every_kind_of_training_resumes_bit_for_bit(tmp_path, monkeypatch, more):
    more = [*more, "--data.samples", "48"]  # three steps an epoch
    train(settings(tmp_path / "whole", *more))
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        train(settings(tmp_path / "part", *more))
    train(settings(tmp_path / "part", *more), resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "part")


def test_tokens_train_and_resume(tmp_path, monkeypatch):
    more = "--data.classes 0 --model gpt --model.context 32 --model.layers 2 --model.heads 2 --model.width 64"
    more += " --data.size none --schedule constant --data.samples 48"
    whole = train(read("digits", [*SMALL.split(), *more.split(), "--out", str(tmp_path / "whole")]))
    assert whole["validation_accuracy"] is None and whole["validation_loss"] > 0
    with monkeypatch.context() as patch:
        interrupt_at(4, patch)
        train(read("digits", [*SMALL.split(), *more.split(), "--out", str(tmp_path / "part")]))
    train(read(str(tmp_path / "part")), resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "part")


@pytest.mark.slow
def test_accumulated_parts_give_the_gradient_of_the_whole_batch(tmp_path):
    (tmp_path / "net.py").write_text(NO_BATCH_NORM)
    more = ["--policy", "none", "--model", f"{tmp_path / 'net.py'}:net"]
    more += ["--steps", "2", "--optimizer", "sgd", "--optimizer.lr", "0.01"]
    train(settings(tmp_path / "whole", *more))
    train(settings(tmp_path / "parts", *more, "--accumulate", "4"))
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_fp16_scales_its_gradients(tmp_path):
    result = train(settings(tmp_path / "run", "--precision", "fp16", "--epochs", "4", "--policy", "group2"))
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert state["scaler"]["scale"] > 1
    found = [line["train_loss"] for line in lines(tmp_path / "run") if line["event"] == "epoch"]
    assert found[-1] < found[0] and result["ratio"] > 2


@pytest.mark.slow
def test_compiled_and_bf16_and_channels_last_train(tmp_path, monkeypatch):
    # Inductor has tests of its own: tests/compiled/test_lowerings.py.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    result = train(settings(tmp_path / "run", "--compile", "--precision", "bf16", "--channels-last", "--epochs", "1"))
    assert result["finished"] and result["ratio"] > 2


def test_a_table_of_sites_is_shown_on_request(tmp_path, capsys):
    train(settings(tmp_path / "run", "--table", "6", "--epochs", "1"))
    shown = capsys.readouterr().out
    assert shown.count("saved") >= 1 and "Convolution.input" in shown and "ratio" in shown


def test_a_first_step_that_takes_long_says_that_kernels_are_compiled(tmp_path, monkeypatch, capsys):
    def slow(run):
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()

    monkeypatch.setattr(progress, "SLOW", 0.0)
    monkeypatch.setattr(loop, "rehearse", slow)
    train(settings(tmp_path / "run", "--steps", "1", "--policy", "none"))
    assert capsys.readouterr().out.startswith("preparing; the first run on a machine compiles")


def test_a_run_is_not_overwritten_by_mistake(tmp_path):
    train(settings(tmp_path / "run", "--steps", "2"))
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    with pytest.raises(UsageError, match="holds a run already.*--resume.*--overwrite.*--out"):
        train(settings(tmp_path / "run", "--steps", "2"))
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before
    assert train(settings(tmp_path / "run", "--steps", "3"), overwrite=True)["steps"] == 3


def test_resuming_with_other_settings_is_an_error_that_names_them(tmp_path):
    train(settings(tmp_path / "run", "--steps", "2"))
    with pytest.raises(UsageError, match=r"optimizer.lr 0.005, not 0.5"):
        train(settings(tmp_path / "run", "--steps", "2", "--optimizer.lr", "0.5"), resume=True)
    with pytest.raises(UsageError, match="no run to resume"):
        train(settings(tmp_path / "none"), resume=True)


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = train(settings(tmp_path / "run"))
    before = weights(tmp_path / "run")
    again = train(settings(tmp_path / "run"), resume=True)
    assert again["finished"] and again["validation_accuracy"] == first["validation_accuracy"]
    assert all(torch.equal(before[name], value) for name, value in weights(tmp_path / "run").items())


@pytest.mark.parametrize("schedule", [["constant"], ["step", "--schedule.milestones", "1.5"]])
def test_a_longer_run_is_bit_for_bit_the_one_that_was_started_so_long(tmp_path, schedule):
    schedule = ["--schedule", *schedule, "--schedule.warmup", "0.5"]
    train(settings(tmp_path / "whole", *schedule))
    train(settings(tmp_path / "part", *schedule, "--epochs", "1"))
    main(["train", str(tmp_path / "part"), "--epochs", "2"])
    assert same_weights(tmp_path / "whole", tmp_path / "part")
    assert repeatable(tmp_path / "whole") == repeatable(tmp_path / "part")
    result = json.loads((tmp_path / "part" / "result.json").read_text())
    assert result["finished"] and result["steps"] == 12 and read(str(tmp_path / "part")).epochs == 2


def test_a_schedule_with_an_end_is_that_of_the_new_end_and_says_so(tmp_path, capsys):
    train(settings(tmp_path / "whole", "--schedule", "cosine", "--metrics", "1"))
    train(settings(tmp_path / "part", "--schedule", "cosine", "--metrics", "1", "--epochs", "1"))
    main(["train", str(tmp_path / "part"), "--epochs", "2"])
    assert (
        "the schedule cosine now ends at step 12: after step 6 the learning rate goes from" in capsys.readouterr().out
    )
    whole, part = ([line["lr"] for line in lines(tmp_path / each) if "lr" in line] for each in ("whole", "part"))
    assert whole[6:] == part[6:] and whole[:6] != part[:6]


def test_a_run_that_is_killed_on_its_way_to_more_epochs_is_not_finished(tmp_path, monkeypatch):
    train(settings(tmp_path / "whole", "--schedule", "constant"))
    train(settings(tmp_path / "part", "--schedule", "constant", "--epochs", "1"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(settings(tmp_path / "part", "--schedule", "constant"), resume=True)
    assert train(settings(tmp_path / "part", "--schedule", "constant"), resume=True)["steps"] == 12
    assert same_weights(tmp_path / "whole", tmp_path / "part")


def test_a_run_that_cannot_go_on_says_why_and_stays(tmp_path):
    out = tmp_path / "run"
    train(settings(out, "--epochs", "1"))
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(UsageError, match="has done 6 steps, and 3 are asked for"):
        train(settings(out, "--epochs", "0.5"), resume=True)
    with pytest.raises(UsageError, match="has done 6 steps, and 6 are asked for"):
        train(settings(out, "--steps", "6"), resume=True)
    with pytest.raises(UsageError, match="optimizer.lr 0.005, not 0.5"):
        train(settings(out, "--optimizer.lr", "0.5"), resume=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (out / "checkpoint.pt").unlink()
    with pytest.raises(UsageError, match="no checkpoint to go on from.*--overwrite"):
        train(settings(out), resume=True)
    assert (out / "result.json").exists()
    train(settings(out, "--steps", "3"), overwrite=True)
    with pytest.raises(UsageError, match="steps 3, which epochs do not change.*--steps none --epochs 9"):
        train(settings(out, "--steps", "3", "--epochs", "9"), resume=True)


def test_the_memory_of_one_step_is_recorded_and_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "RECORDED", 3)
    result = train(settings(tmp_path / "run", "--epochs", "1"))
    shown = capsys.readouterr().out
    assert f"peak of all tensors {size(result['step_peak_bytes'])}" in shown.splitlines()[-1]
    assert ", memory" not in shown
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["memory_bytes"] for line in lines if line["event"] == "step"} == {None}
    found = json.loads((tmp_path / "run" / "memory.json").read_text())
    assert found["step"] == 3 and found["peak_bytes"] == max(found["bytes"]) == result["step_peak_bytes"]
    assert found["resting_bytes"] < found["peak_bytes"] and 0 < found["forward_seconds"] < found["seconds"]
    train(settings(tmp_path / "short", "--steps", "2"))
    assert json.loads((tmp_path / "short" / "memory.json").read_text())["step"] == 2


def test_the_ratio_of_every_convolution_is_shown_at_every_step(tmp_path, capsys):
    train(settings(tmp_path / "run", "--steps", "3", "--ratios", "1", "--data.size", "28"))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, words in enumerate(shown) if words and words[0] == "step")
    assert len(shown[start]) == 7 and shown[start][-1] == "all"  # five convolutions
    steps = [words for words in shown if len(words) == 7 and words[0] in "123"]
    assert [words[0] for words in steps] == ["1", "2", "3"] and all(float(word) > 3 for word in steps[-1][1:])


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "part")
    (tmp_path / "part" / "checkpoint.pt").unlink()
    (tmp_path / "part" / "result.json").unlink()
    train(settings(tmp_path / "part"), resume=True)
    assert same_weights(whole, tmp_path / "part")
    assert repeatable(whole) == repeatable(tmp_path / "part")


def test_a_broken_checkpoint_is_named(tmp_path):
    train(settings(tmp_path / "run", "--steps", "2"))
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"half a checkpoint")
    (tmp_path / "run" / "result.json").unlink()
    with pytest.raises(UsageError, match="checkpoint.pt cannot be read.*--overwrite"):
        train(settings(tmp_path / "run", "--steps", "2"), resume=True)


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    (tmp_path / "run").mkdir()
    hold = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path / "run" / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(UsageError, match="another process is training"):
            train(settings(tmp_path / "run"))
    finally:
        other.communicate("\n")


def test_a_folder_that_cannot_be_written_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to out"):
        train(settings(tmp_path / "file" / "run"))


def test_too_little_disk_is_an_error_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    with pytest.raises(UsageError, match="disk left"):
        train(settings(tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_training_that_diverges_ends_with_the_way_out(tmp_path):
    with pytest.raises(UsageError, match=r"the loss is (nan|inf).*--optimizer.lr"):
        train(settings(tmp_path / "run", "--optimizer", "sgd", "--optimizer.lr", "1e30"))


def test_a_batch_larger_than_the_data_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="batch"):
        train(settings(tmp_path / "run", "--batch", "1000"))


def run_command(*arguments: str, allocator: bool = False, session: bool = False) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **(ALLOCATOR if allocator else {})}
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=session,
    )


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of the process is read from /proc")
def test_memory_of_a_process_is_told_where_it_means_something(tmp_path):
    command = ["-m", "encke", "train", "digits", *SMALL.split(), "--batch", "48", "--metrics", "1", "--steps", "4"]
    found = {}
    for name, policy in (("plain", "none"), ("compressed", "default")):
        process = run_command(*command, "--policy", policy, "--out", str(tmp_path / name), allocator=True)
        assert process.wait() == 0
        found[name] = json.loads((tmp_path / name / "result.json").read_text())
    assert found["plain"]["held_bytes"] == pytest.approx(found["compressed"]["saved_bytes"], rel=0.25)
    assert found["compressed"]["held_bytes"] < found["plain"]["held_bytes"] / 3
    assert found["compressed"]["peak_above_bytes"] < found["plain"]["peak_above_bytes"]
    result = train(settings(tmp_path / "here", "--steps", "2"))
    assert result["peak_bytes"] is None and result["held_bytes"] is None


@pytest.mark.parametrize("wait", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.5, marks=pytest.mark.soak)])
def test_a_run_killed_at_any_moment_resumes_and_ends_with_the_same_result(tmp_path, wait):
    more = [*SMALL.split(), "--epochs", "4", "--save", "0.01"]
    train(read("digits", [*more, "--out", str(tmp_path / "whole")]))
    out = tmp_path / "part"
    process = run_command("-m", "encke", "train", "digits", *more, "--out", str(out))
    while not (out / "checkpoint.pt").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(wait)
    process.kill()
    process.wait()
    assert train(read(str(out)), resume=True)["finished"]
    assert same_weights(tmp_path / "whole", out)
    assert repeatable(tmp_path / "whole") == repeatable(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_signal_to_all_processes_of_a_run_saves_too(tmp_path, number):
    for split, count in (("train", 12), ("val", 2)):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.new("RGB", (28, 28), (20 * i, 100, 255 * (name == "a")))
                image.save(tmp_path / split / name / f"{i}.png")
    command = ["-m", "encke", "train", "digits", "--data", "folder", "--data.path", str(tmp_path / "train")]
    command += [
        "--data.workers",
        "1",
        "--batch",
        "8",
        "--epochs",
        "4000",
        "--metrics",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    process = run_command(*command, session=True)
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, number)
    shown, _ = process.communicate()
    assert process.returncode == 130
    assert f"Go on with: encke train {tmp_path / 'run'} --resume" in shown.splitlines()[-1], shown
    assert (tmp_path / "run" / "checkpoint.pt").exists()
