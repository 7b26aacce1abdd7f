"""`encke data lmdb`: what goes in comes out, broken images are listed, and a killed run goes on to the same result."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import lmdb as library
import numpy as np
import pytest
import torch
from PIL import Image

from encke.tools import progress
from encke.tools.errors import UsageError
from encke.train.data import lmdb as lmdb_command
from encke.train.data import records, verify
from encke.train.data.lmdb import lmdb
from encke.train.data.sources import Datasets, batches, load
from encke.train.settings import Data


def picture(seed: int, height: int = 24, width: int = 32) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def image_folder(root: Path, classes: str = "ab", count: int = 6, **size) -> Path:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(1000 * label + i, **size).save(root / name / f"{i:05}.{'jpg' if i % 2 else 'png'}")
    return root


def contents(path: Path) -> dict[bytes, bytes]:
    records.close()
    with library.open(str(path), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return {bytes(key): bytes(value) for key, value in transaction.cursor()}


def sets_of(path: Path, **settings) -> Datasets:
    return load(Data(**{"kind": "lmdb", "path": str(path), "workers": 0, **settings}), 0)


def test_files_are_stored_as_they_are_with_labels_names_mean_and_std(tmp_path, capsys):
    src = image_folder(tmp_path / "src")
    lmdb(src, tmp_path / "dst", workers=1)
    stored = contents(tmp_path / "dst")
    files = [path for name in "ab" for path in sorted((src / name).iterdir())]
    assert [stored[b"%08d" % i] for i in range(12)] == [file.read_bytes() for file in files]
    assert np.frombuffer(stored[b".labels"], "<u4").tolist() == [0] * 6 + [1] * 6
    assert json.loads(stored[b".names"]) == [str(file.relative_to(src)) for file in files]
    meta = json.loads(stored[b".meta"])
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]) / 255
    assert meta["mean"] == pytest.approx(pixels.mean((0, 1, 2))) and meta["std"] == pytest.approx(pixels.std((0, 1, 2)))
    assert (meta["classes"], meta["count"], meta["broken"]) == (["a", "b"], 12, [])
    assert len(stored) == 12 + 3 and not (tmp_path / "dst" / "broken.txt").exists()
    assert "12 images of 2 classes" in capsys.readouterr().out


def test_an_lmdb_trains_like_the_folder_it_was_made_from(tmp_path):
    src = tmp_path / "src"
    image_folder(src / "train", count=10)
    image_folder(src / "val", count=2)
    lmdb(src, tmp_path / "dst", workers=2)
    settings = {"size": 16, "augment": "resized"}
    packed = sets_of(tmp_path / "dst", **settings)
    workers = sets_of(tmp_path / "dst" / "train", **settings, workers=2)
    folder = load(Data(kind="folder", path=str(src), workers=0, **settings), 0)
    assert (packed.names, packed.shape, len(packed.train), len(packed.validation)) == (("a", "b"), (3, 16, 16), 20, 4)

    def restored(sets: Datasets) -> list[torch.Tensor]:
        std, mean = (torch.tensor(values).view(3, 1, 1) for values in (sets.std, sets.mean))
        train = [x * std + mean for epoch in range(2) for x, _ in batches(sets.train, 5, seed=1, epoch=epoch)]
        return train + [x * std + mean for x, _ in batches(sets.validation, 3, seed=1, train=False)]

    for a, b, c in zip(restored(packed), restored(folder), restored(workers), strict=True):
        assert torch.allclose(a, b, atol=1e-5) and torch.equal(a, c)


def test_without_val_a_tenth_is_held_out_and_two_sets_may_be_open(tmp_path):
    lmdb(image_folder(tmp_path / "src"), tmp_path / "dst")
    first, second = sets_of(tmp_path / "dst"), sets_of(tmp_path / "dst" / ".." / "dst")
    assert (len(first.train), len(first.validation)) == (11, 1)
    pairs = zip(batches(first.train, 3, seed=0), batches(second.train, 3, seed=0), strict=True)
    assert all(torch.equal(a, b) for (a, _), (b, _) in pairs)


def test_broken_images_are_skipped_and_listed(tmp_path, capsys):
    src = image_folder(tmp_path / "src")
    whole = (src / "a" / "00001.jpg").read_bytes()
    (src / "a" / "00001.jpg").write_bytes(whole[: len(whole) // 2])
    (src / "b" / "00000.png").write_bytes(b"")
    (src / "b" / "00005.jpg").write_text("<html>404</html>")
    lmdb(src, tmp_path / "dst", workers=2)
    lines = (tmp_path / "dst" / "broken.txt").read_text().splitlines()
    assert [line.partition("\t")[0] for line in lines] == [
        str(src / name) for name in ("a/00001.jpg", "b/00000.png", "b/00005.jpg")
    ]
    assert "truncated" in lines[0].lower() and lines[1].endswith("\tnot an image")
    assert "broken images left out: 3, listed in" in capsys.readouterr().out
    sets = sets_of(tmp_path / "dst", size=16)
    assert len(sets.train) + len(sets.validation) == 9
    assert sum(len(y) for _, y in batches(sets.train, 1, seed=0)) == len(sets.train)
    names = json.loads(contents(tmp_path / "dst")[b".names"])
    assert "a/00001.jpg" not in names and len(names) == 9


def test_size_scales_larger_images_down(tmp_path):
    src = image_folder(tmp_path / "src", count=2, height=60, width=90)
    picture(7, 10, 12).save(src / "b" / "tiny.png")
    lmdb(src, tmp_path / "dst", size=20)
    lmdb(src, tmp_path / "coarse", size=20, quality=10)
    stored, coarse = contents(tmp_path / "dst"), contents(tmp_path / "coarse")
    images = [stored[b"%08d" % i] for i in range(5)]
    sizes = [opened(content).size for content in images]
    assert sizes == [(30, 20)] * 4 + [(12, 10)]
    assert opened(images[0]).format == "JPEG" and images[4] == (src / "b" / "tiny.png").read_bytes()
    assert len(coarse[b"%08d" % 0]) < len(images[0])


def opened(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content))


def done_at(path: Path) -> int:
    """How many files the transactions so far hold."""
    if not (path / "data.mdb").exists() or not (path / "data.mdb").stat().st_size:
        return 0
    stored = contents(path)
    return json.loads(stored[b".progress"])["done"] if b".progress" in stored else len(stored)


def run_until_killed(src: Path, dst: Path, seconds: float) -> None:
    """Runs the tool in a process of its own that is killed after so many seconds."""
    child = multiprocessing.get_context("fork").Process(target=lmdb, args=(src, dst, 2))
    child.start()
    child.join(seconds)
    assert child.is_alive() or child.exitcode == 0
    os.kill(child.pid, signal.SIGKILL)
    child.join()


@pytest.mark.slow
def test_after_kill_9_at_any_moment_the_same_command_goes_on_to_the_same_result(tmp_path, monkeypatch):
    src, cut = image_folder(tmp_path / "src", count=300), tmp_path / "cut"
    for i in (3, 150):
        (src / "b" / f"{i:05}.{'jpg' if i % 2 else 'png'}").write_bytes(b"broken")
    monkeypatch.setattr(verify, "COUNTED", 100)
    lmdb(src, tmp_path / "whole")
    monkeypatch.setattr(lmdb_command, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(verify, "FILES", 4)
    moments, stopped = np.random.default_rng(0).uniform(0.02, 0.25, 12), [0]
    while stopped[-1] < 100 and len(stopped) < 200:
        run_until_killed(src, cut, moments[len(stopped) % len(moments)])
        stopped.append(done_at(cut))
    assert stopped == sorted(stopped) and stopped[-1] < 600
    with pytest.raises(UsageError, match="not finished: run the same encke data lmdb again"):
        sets_of(cut)
    lmdb(src, cut)
    assert contents(cut) == contents(tmp_path / "whole")
    assert (cut / "broken.txt").read_text() == (tmp_path / "whole" / "broken.txt").read_text()


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed(tmp_path):
    code = (
        "import multiprocessing, os, signal, sys\n"
        "from pathlib import Path\n"
        "from encke.train.data import verify\n"
        "with verify.checks([sys.argv[1]] * 8, [1] * 8, 2, verify.Wanted(False)) as results:\n"
        "    next(results)\n"
        "    Path(sys.argv[2]).write_text(' '.join(str(child.pid) for child in multiprocessing.active_children()))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    picture(0).save(tmp_path / "a.png")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.png"), str(tmp_path / "pids")])
    workers = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in workers if alive(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_finished_lmdb_is_left_as_it_is(tmp_path, capsys):
    src, dst = image_folder(tmp_path / "src"), tmp_path / "dst"
    lmdb(src, dst)
    before = (dst / "data.mdb").read_bytes()
    capsys.readouterr()
    lmdb(src, dst)
    assert (dst / "data.mdb").read_bytes() == before
    assert "12 of 12 images are done already" in capsys.readouterr().out


def test_a_map_that_is_too_small_grows(tmp_path, monkeypatch):
    src = image_folder(tmp_path / "src", count=20)
    lmdb(src, tmp_path / "whole")
    real = library.open

    def small(path, map_size=0, **options):
        return real(path, map_size=64 << 10, **options) if map_size else real(path, **options)

    monkeypatch.setattr(library, "open", small)
    lmdb(src, tmp_path / "dst")
    monkeypatch.undo()
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_another_dst_is_not_touched(tmp_path):
    src, dst = image_folder(tmp_path / "src"), tmp_path / "dst"
    dst.mkdir()
    (dst / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"dst holds other files \(thesis.txt\): name a new folder"):
        lmdb(src, dst)
    split = tmp_path / "split"
    image_folder(split / "train", count=1)
    with pytest.raises(UsageError, match=r"dst holds other files \(thesis.txt\)"):
        lmdb(split, dst)
    foreign = tmp_path / "foreign"
    with library.open(str(foreign)) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"a", b"b")
    with pytest.raises(UsageError, match="foreign holds another LMDB"):
        lmdb(src, foreign)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file: name a folder"):
        lmdb(src, tmp_path / "file")
    with pytest.raises(UsageError, match=r"cannot be made \(Not a directory\)"):
        lmdb(src, tmp_path / "file" / "below")
    with pytest.raises(UsageError, match="is inside SRC"):
        lmdb(src, src / "lmdb")


def test_other_files_or_another_size_do_not_mix(tmp_path):
    src, dst = image_folder(tmp_path / "src"), tmp_path / "dst"
    lmdb(src, dst)
    with pytest.raises(UsageError, match="made from other files or with another --size"):
        lmdb(src, dst, size=10)
    picture(99).save(src / "a" / "new.png")
    with pytest.raises(UsageError, match="made from other files"):
        lmdb(src, dst)


def test_bad_sources_and_options_are_named(tmp_path):
    dst = tmp_path / "dst"
    with pytest.raises(UsageError, match="SRC .*absent is not there"):
        lmdb(tmp_path / "absent", dst)
    src = image_folder(tmp_path / "src", count=1)
    for file in src.rglob("*.*"):
        file.write_bytes(b"broken")
    with pytest.raises(UsageError, match="none of 2 images can be decoded"):
        lmdb(src, dst)
    for options, message in (({"size": 0}, "--size"), ({"quality": 101}, "--quality"), ({"workers": 0}, "--workers")):
        with pytest.raises(UsageError, match=message):
            lmdb(src, dst, **options)
    split = tmp_path / "split"
    image_folder(split / "train", "ab", 1)
    image_folder(split / "val", "abc", 1)
    with pytest.raises(UsageError, match="same classes; 'c' is in one alone"):
        lmdb(split, dst)


def test_too_little_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    src = image_folder(tmp_path / "src")
    usage = lmdb_command.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(lmdb_command.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(UsageError, match=r"needs about [0-9.]+ kB, 1.0 kB are free: make room there"):
        lmdb(src, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


FULL = """
import resource, sys
from pathlib import Path
from encke.train.data import lmdb as lmdb_command
from encke.tools import progress
from encke.train.data import records
from encke.train.data import verify
lmdb_command.COMMIT_SECONDS, verify.FILES = 0.0, 4
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    lmdb_command.lmdb(Path(sys.argv[1]), Path(sys.argv[2]), workers=1)
except lmdb_command.UsageError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_disk_that_fills_up_stops_it_in_a_line_and_the_rest_follows_later(tmp_path):
    src = image_folder(tmp_path / "src", count=40)
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(src), str(tmp_path / "dst")], stdout=subprocess.PIPE, text=True, check=True
    )
    assert "cannot be written (" in ran.stdout and "the same command goes on" in ran.stdout
    lmdb(src, tmp_path / "dst")
    lmdb(src, tmp_path / "whole")
    assert contents(tmp_path / "dst") == contents(tmp_path / "whole")


def test_a_worker_that_dies_is_said_in_a_line(tmp_path, monkeypatch):
    src = image_folder(tmp_path / "src")
    monkeypatch.setattr(verify, "rgb", lambda image: os._exit(9))
    with pytest.raises(UsageError, match="a worker process has died"):
        lmdb(src, tmp_path / "dst", workers=1)
    monkeypatch.undo()
    lmdb(src, tmp_path / "dst", workers=1)
    assert len(contents(tmp_path / "dst")) == 15


def test_what_is_no_lmdb_of_ours_is_refused_for_training(tmp_path):
    with pytest.raises(UsageError, match="absent is not there; an lmdb is a folder with data.mdb in it"):
        sets_of(tmp_path / "absent")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "data.mdb").write_bytes(b"garbage" * 5000)
    with pytest.raises(UsageError, match="cannot be read as LMDB"):
        sets_of(tmp_path / "bad")
    with library.open(str(tmp_path / "foreign")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"a", b"b")
    with pytest.raises(UsageError, match="not ours: make one with encke data lmdb SRC DST"):
        sets_of(tmp_path / "foreign")


def test_a_broken_image_in_an_lmdb_is_named_by_its_key(tmp_path):
    lmdb(image_folder(tmp_path / "src"), tmp_path / "dst")
    with library.open(str(tmp_path / "dst")) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"00000004", b"broken")
    sets = sets_of(tmp_path / "dst", size=16, workers=1)
    chosen = (sets.train, True) if 4 in sets.train.subset else (sets.validation, False)
    with pytest.raises(UsageError, match=r"key 00000004 \(a/00004.png\): a broken image \(not an image\)"):
        list(batches(chosen[0], 1, seed=0, train=chosen[1]))


def test_portions_are_small_in_number_and_in_bytes():
    def lengths(sizes: list[int]) -> list[int]:
        return [part.stop - part.start for part in verify.portions(sizes)]

    assert lengths([1] * 130) == [64, 64, 2]
    assert lengths([verify.BYTES, verify.BYTES, 1, 1]) == [1, 1, 2]
    assert lengths([]) == []


def test_brightness_is_counted_for_some_of_many_images(tmp_path, monkeypatch):
    src = image_folder(tmp_path / "src", count=60, height=90, width=120)
    every = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in src.rglob("*.*")]) / 255
    monkeypatch.setattr(verify, "COUNTED", 40)
    lmdb(src, tmp_path / "dst")
    meta = json.loads(contents(tmp_path / "dst")[b".meta"])
    assert meta["mean"] == pytest.approx(every.mean((0, 1, 2)).tolist(), rel=0.05)
    assert meta["std"] == pytest.approx(every.std((0, 1, 2)).tolist(), rel=0.05)


def test_without_a_terminal_plain_lines_say_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "PAUSE", 0.0)
    monkeypatch.setattr(verify, "FILES", 4)
    lmdb(image_folder(tmp_path / "src"), tmp_path / "dst")
    assert "dst: 4 of 12 images, about 0 s left\ndst: 8 of 12 images" in capsys.readouterr().out


def test_an_lmdb_of_release_0_1_is_read(tmp_path):
    lmdb(image_folder(tmp_path / "src"), tmp_path / "dst")
    with library.open(str(tmp_path / "dst")) as environment, environment.begin(write=True) as transaction:
        meta = json.loads(transaction.get(b".meta"))
        transaction.put(b".meta", json.dumps({**meta, "format": "halley images 1"}).encode())
    assert len(sets_of(tmp_path / "dst", size=16).train) == 11
    lmdb(tmp_path / "src", tmp_path / "dst")  # it is complete: nothing is written again
