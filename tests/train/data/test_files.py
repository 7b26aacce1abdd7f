"""Folders of images: what is read, how workers end, and which errors name the way out."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from encke.tools.errors import UsageError
from encke.train.data import workers
from encke.train.data.readers import list_images
from encke.train.data.sources import batches, load
from encke.train.settings import Data
from tests.train.data.common import folder_sets, image_folder, picture, same, taken


def test_folders_are_classes_in_the_order_of_their_names(tmp_path):
    root = image_folder(tmp_path / "f" / "train", "cab", 4)
    image_folder(tmp_path / "f" / "val", "abc", 2)
    (root / "a" / "notes.txt").write_text("not an image")
    (root / "a" / ".hidden.png").write_text("not an image")
    for path in (root, root.parent):
        sets = folder_sets(path)
        assert (sets.names, sets.shape, len(sets.train), len(sets.validation)) == (("a", "b", "c"), (3, 24, 24), 12, 6)
    assert torch.cat([y for _, y in taken(sets.validation, 4, train=False)]).tolist() == [0, 0, 1, 1, 2, 2]
    (x, _), *_ = taken(sets.validation, 6, train=False)
    pixels = np.asarray(Image.open(root.parent / "val" / "b" / "1.png")) / 255
    assert np.allclose(x[3].permute(1, 2, 0).numpy() * sets.std + sets.mean, pixels, atol=1e-5)


def test_images_are_listed_in_the_order_of_their_names_however_deep(tmp_path):
    names = [f"a/{i:02}.png" for i in range(30)] + [f"b/deep/er/{i}.JPEG" for i in range(5)]
    for name in reversed(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert list_images(tmp_path, ("a", "b")) == [(name, "ab".index(name[0])) for name in names]


def test_without_validation_a_tenth_is_held_out(tmp_path):
    root = image_folder(tmp_path / "f", count=20)
    sets = folder_sets(root)
    assert (len(sets.train), len(sets.validation)) == (36, 4)
    assert not set(sets.train.subset) & set(sets.validation.subset)
    other = load(Data(kind="folder", path=str(root), workers=0), 1)
    assert set(other.validation.subset) != set(sets.validation.subset)


def test_mean_and_std_come_from_the_images_or_from_mean_json(tmp_path):
    root = image_folder(tmp_path / "f" / "train")
    every = np.stack([np.asarray(Image.open(path)) for path in sorted(root.rglob("*.png"))]) / 255
    sets = folder_sets(root)
    assert sets.mean == pytest.approx(every.mean((0, 1, 2))) and sets.std == pytest.approx(every.std((0, 1, 2)))
    (tmp_path / "f" / "mean.json").write_text(json.dumps({"mean": [0.1, 0.2, 0.3], "std": [1, 2, 3]}))
    sets = folder_sets(root)
    assert (sets.mean, sets.std) == ((0.1, 0.2, 0.3), (1.0, 2.0, 3.0))
    (tmp_path / "f" / "mean.json").write_text('{"mean": [0.1]}')
    with pytest.raises(UsageError, match="mean.json: must be"):
        folder_sets(root)


MODES = {
    "grey.png": lambda image: image.convert("L"),
    "alpha.png": lambda image: image.convert("RGBA"),
    "palette.png": lambda image: image.quantize(16),
    "cmyk.jpg": lambda image: image.convert("CMYK"),
    "one.png": lambda image: image.convert("1"),
    "deep.png": lambda image: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 256),
}


@pytest.mark.parametrize("name", MODES)
def test_every_kind_of_image_becomes_rgb(tmp_path, name):
    image = MODES[name](picture(1))
    for label in "ab":
        (tmp_path / label).mkdir()
        options = {"transparency": b"\x80" * 16} if name == "palette.png" else {}
        image.save(tmp_path / label / name, **options)
    sets = folder_sets(tmp_path)
    (x, _), *_ = taken(sets.train, 1)
    found = x[0].permute(1, 2, 0).numpy() * sets.std + sets.mean
    expected = picture(1).convert("L").convert("RGB") if name in ("grey.png", "deep.png") else image.convert("RGB")
    assert np.abs(found * 255 - np.asarray(expected)).mean() < 5


def test_large_jpegs_are_decoded_smaller_with_nearly_the_same_result():
    import io

    from encke.train.data.pictures import shown

    pil, buffer = picture(2, 400, 600), io.BytesIO()
    pil.save(buffer, "JPEG", quality=95)
    for mode, draws in (("none", None), ("resized", [0.3, 0.6, 0.9, 0.5, 0.5]), ("resized", None)):
        jpeg = Image.open(buffer)
        found = shown(jpeg, mode, (32, 32), True, draws)
        assert jpeg.size[0] < 600
        exact = shown(pil, mode, (32, 32), True, draws)
        assert np.abs(found.astype(int) - exact).mean() < 2


def test_workers_and_epochs_do_not_change_a_bit(tmp_path):
    root = image_folder(tmp_path / "f", count=12, ending="jpg", height=30, width=40)
    alone = folder_sets(root, size=16, augment="resized")
    expected = [taken(alone.train, 4, epoch=epoch) for epoch in range(3)]
    others = folder_sets(root, size=16, augment="resized", workers=2)
    next(batches(others.train, 4, seed=5, epoch=7))  # left in the middle, as the last epoch of a training may be
    assert all(same(taken(others.train, 4, epoch=epoch), expected[epoch]) for epoch in range(3))
    assert same(taken(others.validation, 1, train=False), taken(alone.validation, 1, train=False))


def test_workers_end_with_their_source_also_as_part_of_a_cycle(tmp_path):
    """Collected together with their queues, these would be closed before the workers are told to end."""
    source = folder_sets(image_folder(tmp_path / "f"), size=16, workers=2).train
    next(batches(source, 2, seed=0))
    started = source.loader._iterator._workers
    cycle = [source, source.loader._iterator]
    cycle.append(cycle)
    del source, cycle
    gc.collect()
    assert len(started) == 2 and not any(worker.is_alive() for worker in started)


@pytest.mark.slow
def test_a_program_ends_with_workers_that_nobody_stopped(tmp_path):
    code = (
        "import sys\n"
        "from encke.train.data.sources import batches, load\n"
        "from encke.train.settings import Data\n"
        "sets = load(Data(kind='folder', path=sys.argv[1], size=16, workers=2), 0)\n"
        "rest = batches(sets.train, 2, seed=0)\n"
        "next(rest)\n"
    )
    root = image_folder(tmp_path / "f")
    subprocess.run([sys.executable, "-c", code, str(root)], check=True, timeout=60)


def test_batches_of_a_source_end_when_others_start(tmp_path):
    source = folder_sets(image_folder(tmp_path / "f"), size=16).train
    old = batches(source, 2, seed=0)
    next(old)
    next(batches(source, 2, seed=0))
    with pytest.raises(RuntimeError, match="others of the same source were started"):
        next(old)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_broken_image_is_named_in_one_line(tmp_path, workers):
    root = image_folder(tmp_path / "train", ending="jpg")
    image_folder(tmp_path / "val")
    whole = (root / "a" / "3.jpg").read_bytes()
    (root / "a" / "3.jpg").write_bytes(whole[: len(whole) // 2])
    sets = folder_sets(root, size=16, workers=workers)
    with pytest.raises(UsageError) as caught:
        taken(sets.train, 2)
    message = str(caught.value)
    assert "3.jpg: a broken image (" in message and "encke data lmdb skips such files" in message
    assert "\n" not in message
    (root / "a" / "3.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match=r"3.jpg: a broken image \(not an image\)"):
        taken(sets.train, 2)


def test_bad_folders_are_named_with_the_way_out(tmp_path):
    def attempt(path: Path, **settings) -> None:
        folder_sets(path, **settings)

    with pytest.raises(UsageError, match="data.path .*absent is not there; it must be a folder"):
        attempt(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file is a file"):
        attempt(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="empty: no folders in it"):
        attempt(tmp_path / "empty")
    root = image_folder(tmp_path / "f")
    (root / "c").mkdir()
    with pytest.raises(UsageError, match="c: no images in this class's folder"):
        attempt(root)
    (root / "c").rmdir()
    image_folder(tmp_path / "g", "abz")
    with pytest.raises(UsageError, match="must have the same classes as .*'z' is in one of them alone"):
        attempt(root, validation=str(tmp_path / "g"))
    picture(9, 24, 30).save(root / "b" / "wide.png")
    with pytest.raises(UsageError, match="wide.png: it has 30 x 24 pixels, others have 24 x 24: set data.size"):
        attempt(root)
    attempt(root, size=24)


def test_images_of_other_sizes_that_the_start_did_not_see_are_named_later(tmp_path):
    image_folder(tmp_path / "train")
    val = image_folder(tmp_path / "val", count=2)
    picture(9, 24, 30).save(val / "b" / "wide.png")
    sets = folder_sets(tmp_path)
    with pytest.raises(UsageError, match="wide.png: it has 30 x 24 pixels, .*: set data.size"):
        taken(sets.validation, 3, train=False)


def test_default_workers_leave_a_core_and_are_at_most_eight(monkeypatch):
    for cores, expected in ((1, 0), (2, 1), (9, 8), (64, 8)):
        monkeypatch.setattr(workers.os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        assert workers.default_workers() == expected


@pytest.mark.slow
def test_workers_start_beside_kernels_that_run_in_threads(tmp_path):
    import encke

    codec, x = encke.codecs.ErrorBounded(bound=1e-3), torch.randn(1 << 16)
    before = codec.encode(x).decode()
    sets = folder_sets(image_folder(tmp_path / "f"), size=16, workers=2)
    assert len(taken(sets.train, 2)) == 8
    assert torch.equal(codec.encode(x).decode(), before)
