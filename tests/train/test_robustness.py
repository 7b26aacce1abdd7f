"""Runs that are copied, moved, killed, damaged or out of room: each goes on rightly or ends in one clear line."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encke.cli import main
from encke.tools.errors import UsageError
from encke.tools.process import environment
from encke.train import checkpoint, loop
from encke.train.checkpoint import RunFolder
from encke.train.data.lmdb import lmdb
from encke.train.data.readers import classes_of, list_images
from encke.train.data.records import Records, close
from encke.train.loop import train
from encke.train.settings import read

SMALL = "--data synthetic --data.samples 32 --data.size 8 --data.channels 1 --data.classes 3 --batch 8 --epochs 2"
SMALL += " --metrics 1 --policy group8 --model cnn"


def command(out: Path, *more: str) -> list[str]:
    return ["train", "digits", *SMALL.split(), "--out", str(out), *more]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name != "lock"}


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command that must end with one line about what is wrong, and return the line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([str(each) for each in arguments])
    assert end.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.strip().splitlines() if line]
    assert line.startswith("encke: ")
    return line


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> Path:
    """A run that was interrupted after step 3 of 8."""
    out = tmp_path_factory.mktemp("runs") / "interrupted"
    plain, calls = loop.step, []

    def step(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        plain(*args)

    loop.step = step
    try:
        train(read("digits", command(out)[2:]))
    finally:
        loop.step = plain
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "finished"
    main(command(out))
    return out


@pytest.fixture
def run(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of the interrupted run."""
    shutil.copytree(interrupted, tmp_path / "run")
    return tmp_path / "run"


def weights(out: Path) -> list[torch.Tensor]:
    return list(torch.load(out / "checkpoint.pt", weights_only=True)["model"].values())


def test_a_copy_is_resumed_in_the_copy(interrupted, finished, run, capsys):
    before = files(interrupted)
    main(["train", str(run), "--resume"])
    assert files(interrupted) == before
    assert all(map(torch.equal, weights(run), weights(finished)))
    assert f"into {run}; goes on after step 3" in capsys.readouterr().out
    assert read(str(run)).out == str(run)


def test_overwriting_a_copy_leaves_the_original(interrupted, finished, run):
    before = files(interrupted)
    main(["train", str(run), "--overwrite"])
    assert files(interrupted) == before
    assert all(map(torch.equal, weights(run), weights(finished)))


def test_a_moved_run_is_resumed_where_it_is(run, finished, tmp_path):
    shutil.move(run, tmp_path / "elsewhere")
    main(["train", str(tmp_path / "elsewhere"), "--resume"])
    assert all(map(torch.equal, weights(tmp_path / "elsewhere"), weights(finished)))
    assert not run.exists()


def test_the_settings_of_a_run_start_another_with_out(interrupted, run, tmp_path):
    before = files(run)
    main(["train", str(run), "--out", str(tmp_path / "other")])
    assert files(run) == before and (tmp_path / "other" / "result.json").exists()


def test_a_run_without_a_word_of_what_to_do_with_it_is_left_alone(run, capsys):
    before = files(run)
    assert f"{run} holds a run already: --resume" in failure(capsys, "train", run)
    assert files(run) == before


def test_resuming_a_finished_run_changes_no_file(finished, capsys):
    before = files(finished)
    main(["train", str(finished), "--resume"])
    assert "has finished its 8 steps: nothing to resume" in capsys.readouterr().out
    assert files(finished) == before


def test_a_failed_start_leaves_nothing(tmp_path, capsys):
    out, data = tmp_path / "run", tmp_path / "absent.txt"
    options = ["--data", "text", "--model", "gpt", "--data.path", str(data)]
    assert str(data) in failure(capsys, *command(out, *options))
    assert not out.exists()
    main(command(out, "--steps", "1"))
    assert json.loads((out / "result.json").read_text())["steps"] == 1


def test_a_start_that_fails_before_its_first_line_of_metrics_does_not_block_the_next(tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(loop, "step", lambda *_: (_ for _ in ()).throw(UsageError("a broken image")))
        with pytest.raises(UsageError, match="a broken image"):
            train(read("digits", command(out)[2:]))
    assert train(read("digits", command(out, "--steps", "1")[2:]))["finished"]


def test_an_overwriting_command_that_fails_to_start_deletes_nothing(run, capsys):
    before = files(run)
    assert "batch" in failure(capsys, *command(run, "--overwrite", "--batch", "1000"))
    assert files(run) == before


def test_a_run_without_a_checkpoint_says_that_it_starts_again(run, finished, capsys):
    (run / "checkpoint.pt").unlink()
    main(["train", str(run), "--resume"])
    assert f"{run} has no checkpoint: the run starts again at step 0" in capsys.readouterr().out
    assert all(map(torch.equal, weights(run), weights(finished)))


def test_a_folder_without_a_run_cannot_be_resumed_and_is_not_made(tmp_path, capsys):
    assert "there is no run to resume" in failure(capsys, *command(tmp_path / "none", "--resume"))
    assert not (tmp_path / "none").exists()


def test_flipped_bytes_in_a_checkpoint_are_found(run, capsys):
    file = run / "checkpoint.pt"
    whole = file.read_bytes()
    weight = weights(run)[0].numpy().tobytes()
    place = whole.index(weight) + len(weight) // 2
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    before = files(run)
    line = failure(capsys, "train", run, "--resume")
    assert f"{file} cannot be read (its part" in line and "wrong checksum" in line and "--overwrite" in line
    assert files(run) == before
    file.write_bytes(whole)
    main(["train", str(run), "--resume"])


@pytest.mark.parametrize("kept", [0, 100, 0.5, 0.99])
def test_a_cut_checkpoint_is_named(run, kept, capsys):
    whole = (run / "checkpoint.pt").read_bytes()
    (run / "checkpoint.pt").write_bytes(whole[: int(kept * len(whole)) if kept < 1 else kept])
    before = files(run)
    assert "checkpoint.pt cannot be read" in failure(capsys, "train", run, "--resume")
    assert files(run) == before


@pytest.mark.parametrize("change", ["another model", "no sizes", "no dictionary"])
def test_a_checkpoint_of_something_else_is_named(run, change, capsys):
    state = torch.load(run / "checkpoint.pt", weights_only=True)
    if change == "another model":
        state["model"] = {"layer.weight": torch.ones(3)}
    elif change == "no sizes":
        del state["sizes"]
    torch.save([state] if change == "no dictionary" else state, run / "checkpoint.pt")
    before = files(run)
    assert "checkpoint.pt is not of this run" in failure(capsys, "train", run, "--resume")
    assert files(run) == before


def test_a_process_killed_while_it_saves_leaves_the_checkpoint_before(run, finished):
    (run / "checkpoint.pt.part").write_bytes(b"half a checkpoint")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "st')
    main(["train", str(run), "--resume"])
    assert all(map(torch.equal, weights(run), weights(finished)))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 9))


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.pt", "memory.json", "result.json"])
def test_a_disk_that_fills_up_names_the_file_and_the_way_on(run, finished, name, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        if name == "metrics.jsonl":
            patch.setattr(checkpoint.json, "dumps", full)
        elif name == "checkpoint.pt":
            patch.setattr(checkpoint.torch, "save", full)
        else:
            write = checkpoint.write_json
            patch.setattr(
                checkpoint, "write_json", lambda path, data: (full if path.name == name else write)(path, data)
            )
        line = failure(capsys, "train", run, "--resume")
    assert f"cannot write {run / name} (No space left on device; " in line
    assert line.endswith(f"encke train {run} --resume goes on")
    main(["train", str(run), "--resume"])
    assert all(map(torch.equal, weights(run), weights(finished)))


def test_a_loss_that_is_not_a_number_keeps_the_checkpoint_before(tmp_path, monkeypatch, capsys):
    plain, calls = loop.step, []

    def step(run: Any, *args: Any) -> None:
        plain(run, *args)
        calls.append(1)
        if len(calls) == 6:
            next(run.model.parameters()).data.fill_(float("nan"))

    monkeypatch.setattr(loop, "step", step)
    options = ["--metrics", "100", "--save", "0.5"]
    line = failure(capsys, *command(tmp_path / "run", *options))
    assert "is not finite after step 6" in line and "--optimizer.lr" in line
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run"))
    assert torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["progress"]["step"] == 4


def test_a_huge_loss_is_not_called_done(tmp_path, monkeypatch, capsys):
    plain = loop.cross_entropy
    monkeypatch.setattr(loop, "cross_entropy", lambda *args: plain(*args) + 1e22)
    with pytest.raises(SystemExit) as end:
        main(command(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert end.value.code == 2
    assert "diverged: train loss 1e+22" in shown and "--optimizer.lr" in shown and "done" not in shown
    assert json.loads((tmp_path / "run" / "result.json").read_text())["reason"] == "diverged"


def test_a_run_that_saves_nothing_does_not_say_that_it_did(tmp_path, monkeypatch, capsys):
    plain = loop.step
    monkeypatch.setattr(loop, "step", lambda *args: (signal.raise_signal(signal.SIGINT), plain(*args)))
    with pytest.raises(SystemExit) as end:
        main(command(tmp_path / "run", "--save", "none"))
    assert end.value.code == 130
    assert "nothing is saved" in capsys.readouterr().out


def test_the_lock_of_a_start_that_was_abandoned_is_not_taken(tmp_path):
    settings = read("digits", command(tmp_path / "run")[2:])
    first = RunFolder(settings, False, False)
    first.abandon()
    assert not (tmp_path / "run").exists()
    again = RunFolder(settings, False, False)
    with pytest.raises(UsageError, match="another process is training"):
        RunFolder(settings, False, False)
    again.abandon()


def image_folder(root: Path, *classes: str) -> Path:
    """Two tiny images for each class."""
    for name in classes:
        (root / name).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (number * 200, 100, 50)).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize("target", [".", "..", "../..", "../b", "inner/.."])
def test_a_link_out_of_a_class_to_a_parent_or_to_another_class_is_refused(tmp_path, target):
    root = image_folder(tmp_path / "data" / "train", "a", "b")
    (root / "a" / "inner").mkdir()
    (root / "a" / "inner" / "up").symlink_to(root / "a" / target)
    with pytest.raises(UsageError, match=r"(up|/b) is .*: remove the link"):
        list_images(root, classes_of(root))


def test_links_in_a_circle_are_refused_and_others_are_followed(tmp_path):
    root, other = image_folder(tmp_path / "data", "a", "b"), image_folder(tmp_path / "other", "x", "y")
    (root / "a" / "more").symlink_to(other / "x")
    (root / "c").symlink_to(other / "y")
    (root / "a" / "2.png").symlink_to(other / "x" / "0.png")
    listed = list_images(root, classes_of(root))
    assert [label for _, label in listed] == [0] * 5 + [1] * 2 + [2] * 2
    (other / "x" / "circle").symlink_to(other / "y")
    (other / "y" / "circle").symlink_to(other / "x")
    with pytest.raises(UsageError, match="circle is a link to .*: remove the link"):
        list_images(root, classes_of(root))


def test_a_link_to_nothing_is_named_for_training_and_left_out_of_an_lmdb(tmp_path, capsys):
    root = image_folder(tmp_path / "data", "a", "b")
    (root / "a" / "lost.png").symlink_to(tmp_path / "gone.png")
    options = ["--data", "folder", "--data.path", str(root), "--data.channels", "3"]
    line = failure(capsys, *command(tmp_path / "run", *options))
    assert f"{root / 'a' / 'lost.png'} is a link to {tmp_path / 'gone.png'}, which is not there" in line
    lmdb(root, tmp_path / "packed", workers=1)
    assert Records(tmp_path / "packed").meta["count"] == 4
    assert "lost.png" in (tmp_path / "packed" / "broken.txt").read_text()


def test_a_class_that_is_a_link_to_nothing_does_not_vanish(tmp_path):
    root = image_folder(tmp_path / "data", "a", "b")
    (root / "c").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UsageError, match="c is a link to .*unmounted, which is not there"):
        classes_of(root)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> bytes:
    """The file of an LMDB with two levels of pages, and images both inside and outside them."""
    folder = tmp_path_factory.mktemp("lmdb")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    for name in ("a", "b"):
        (folder / "src" / name).mkdir(parents=True)
        for number in range(60):
            side = 4 + number % 37
            Image.fromarray(pixels[:side, :side]).save(folder / "src" / name / f"{number}.png")
    lmdb(folder / "src", folder / "dst", workers=1)
    close()
    return (folder / "dst" / "data.mdb").read_bytes()


def read_all(folder: Path) -> int:
    """Read every image of an LMDB in a process of its own, as a bus error would end this one; return its exit code."""
    child = os.fork()
    if not child:
        code = 2
        try:
            found = Records(folder)
            for number in range(found.meta["count"]):
                found.read(number)
            code = 0
        except UsageError as error:
            code = 1 if "\n" not in str(error) else 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.parametrize("times", [20, pytest.param(200, marks=pytest.mark.soak)])
def test_a_damaged_lmdb_is_one_line_and_not_a_bus_error(packed, tmp_path, times):
    rng = random.Random(0)
    file = tmp_path / "data.mdb"
    file.write_bytes(packed)
    assert read_all(tmp_path) == 0
    for part in (0.02, 0.3, 0.6, 0.9, 0.99):
        file.write_bytes(packed[: int(part * len(packed))])
        assert read_all(tmp_path) == 1
    tree = [page for page in range(0, len(packed), 4096) if page < 8192 or packed[page + 10] in (1, 2)]
    for _ in range(times):
        damaged = bytearray(packed)
        for _ in range(rng.choice((1, 5, 20))):
            damaged[rng.choice(tree) + rng.choice((rng.randrange(160), rng.randrange(4096)))] = rng.randrange(256)
        file.write_bytes(damaged)
        assert read_all(tmp_path) in (0, 1)


def test_packing_does_not_go_on_in_a_damaged_lmdb(packed, tmp_path):
    root = image_folder(tmp_path / "src", "a", "b")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "data.mdb").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UsageError, match=r"data.mdb is damaged \(it is cut off.*remove .*, and start again"):
        lmdb(root, tmp_path / "dst", workers=1)


@pytest.mark.slow
def test_making_the_dogs_ends_without_a_traceback(tmp_path):
    root = image_folder(tmp_path / "Images", "n1-beagle", "n2-boxer")
    command = [sys.executable, "-m", "encke", "data", "dogs", str(root), str(tmp_path / "dst"), "--split", "random"]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert ended.returncode == 0 and ended.stderr == ""
