"""`encke data dogs`: the archive's layout becomes folders that train, by the official lists or at random."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from encke.tools.errors import UsageError
from encke.train.data import dogs as module
from encke.train.data.dogs import dogs
from encke.train.data.sources import batches, load
from encke.train.settings import Data

BREEDS = ("n02085620-Chihuahua", "n02085782-Japanese_spaniel", "n02116738-African_hunting_dog")


def archive(root: Path, count: int = 10, lists: bool = True) -> Path:
    """The layout of the archives: Images/BREED/ID_NUMBER.jpg and lists/*.mat."""
    rng = np.random.default_rng(0)
    listed: dict[str, list[tuple[str, int]]] = {"train": [], "test": []}
    for label, breed in enumerate(BREEDS):
        (root / "Images" / breed).mkdir(parents=True)
        for i in range(count):
            name = f"{breed}/{breed.partition('-')[0]}_{100 + i}.jpg"
            pixels = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((40, 30), Image.Resampling.BICUBIC).save(root / "Images" / name)
            listed["train" if i < 6 else "test"].append((name, label + 1))
    if lists:
        (root / "lists").mkdir()
        for name, files in listed.items():
            cells = np.empty((len(files), 1), dtype=object)
            cells[:, 0] = [file for file, _ in files]
            labels = np.array([[label] for _, label in files], dtype=np.float64)
            savemat(root / "lists" / f"{name}_list.mat", {"file_list": cells, "labels": labels})
    return root


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.parametrize("given", [".", "Images"])
def test_the_official_split_follows_the_lists(tmp_path, given, capsys):
    root, dst = archive(tmp_path / "dogs"), tmp_path / "ready"
    dogs(root / given, dst, workers=1)
    assert lines(dst / "train.txt")[0] == "n02085620-Chihuahua/n02085620_100.jpg 0"
    assert (len(lines(dst / "train.txt")), len(lines(dst / "val.txt"))) == (18, 12)
    assert lines(dst / "classes.txt") == list(BREEDS)
    for name in ("train", "val"):
        for line in lines(dst / f"{name}.txt"):
            path, label = line.split()
            assert (dst / name / path).read_bytes() == (root / "Images" / path).read_bytes()
            assert path.startswith(BREEDS[int(label)])
        assert len(list((dst / name).rglob("*.jpg"))) == len(lines(dst / f"{name}.txt"))
    assert not (dst / "broken.txt").exists()
    assert "18 images of 3 breeds" in capsys.readouterr().out


def test_the_folders_train_with_the_mean_of_the_training_images(tmp_path):
    root, dst = archive(tmp_path / "dogs"), tmp_path / "ready"
    dogs(root, dst)
    sets = load(Data(kind="folder", path=str(dst), size=24, workers=0), 0)
    assert (sets.names, len(sets.train), len(sets.validation)) == (BREEDS, 18, 12)
    every = [np.asarray(Image.open(dst / "train" / line.split()[0])) / 255 for line in lines(dst / "train.txt")]
    mean, std = np.mean(every, (0, 1, 2)), np.std(every, (0, 1, 2))
    assert sets.mean == pytest.approx(mean.tolist(), rel=0.02) and sets.std == pytest.approx(std.tolist(), rel=0.02)
    assert sum(len(y) for _, y in batches(sets.validation, 5, seed=0, train=False)) == 12


def test_a_random_split_holds_out_a_part_of_each_breed_by_the_seed(tmp_path):
    root = archive(tmp_path / "dogs", lists=False)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        dogs(root, tmp_path / name, split="random", fraction=0.3, seed=seed)
    held_out = {name: lines(tmp_path / name / "val.txt") for name in "abc"}
    assert held_out["a"] == held_out["b"] != held_out["c"]
    assert [sum(line.endswith(f" {label}") for line in held_out["a"]) for label in range(3)] == [3, 3, 3]
    assert not set(held_out["a"]) & set(lines(tmp_path / "a" / "train.txt"))
    assert len(lines(tmp_path / "a" / "train.txt")) == 21


def test_broken_images_are_left_out_and_listed(tmp_path, capsys):
    root, dst = archive(tmp_path / "dogs"), tmp_path / "ready"
    broken = f"{BREEDS[1]}/n02085782_107.jpg"
    (root / "Images" / broken).write_bytes(b"\xff\xd8 not really")
    dogs(root, dst, workers=2)
    assert len(lines(dst / "val.txt")) == 11 and not (dst / "val" / broken).exists()
    assert lines(dst / "broken.txt")[0].startswith(str(root / "Images" / broken))
    assert "broken images left out: 1, listed in" in capsys.readouterr().out


@pytest.mark.parametrize("ways", [("link",), ("link", "symlink")])
def test_where_links_cannot_be_made_the_next_best_is(tmp_path, monkeypatch, ways):
    root, dst = archive(tmp_path / "dogs"), tmp_path / "ready"

    def refused(*_):
        raise OSError(18, "Invalid cross-device link")

    for way in ways:
        monkeypatch.setattr(module.os, way, refused)
    dogs(root, dst)
    path = lines(dst / "train.txt")[0].split()[0]
    assert (dst / "train" / path).is_symlink() == ("symlink" not in ways)
    assert (dst / "train" / path).read_bytes() == (root / "Images" / path).read_bytes()
    assert len(load(Data(kind="folder", path=str(dst), size=24, workers=0), 0).train) == 18


def test_links_take_no_space(tmp_path):
    root, dst = archive(tmp_path / "dogs"), tmp_path / "ready"
    dogs(root, dst)
    path = lines(dst / "train.txt")[0].split()[0]
    assert os.path.samefile(dst / "train" / path, root / "Images" / path)


def test_the_same_command_may_run_again_and_another_may_not(tmp_path):
    root, dst = archive(tmp_path / "dogs"), tmp_path / "ready"
    dogs(root, dst)
    removed = dst / "train" / lines(dst / "train.txt")[0].split()[0]
    removed.unlink()
    before = {path.name: path.read_text() for path in dst.glob("*.*")}
    dogs(root, dst)
    assert removed.exists() and {path.name: path.read_text() for path in dst.glob("*.*")} == before
    with pytest.raises(UsageError, match="holds another split: remove it or name another folder"):
        dogs(root, dst, split="random")


def test_missing_lists_name_the_random_split(tmp_path):
    root = archive(tmp_path / "dogs", lists=False)
    with pytest.raises(UsageError, match="no lists/train_list.mat beside .*: .* or use --split random"):
        dogs(root, tmp_path / "ready")
    assert not (tmp_path / "ready").exists()


def test_bad_lists_and_folders_are_named(tmp_path):
    root = archive(tmp_path / "dogs")
    (root / "Images" / BREEDS[0] / "n02085620_103.jpg").unlink()
    with pytest.raises(UsageError, match=r"lists 1 images that are not in .*n02085620_103.jpg\): unpack the images"):
        dogs(root, tmp_path / "ready")
    (root / "lists" / "train_list.mat").write_bytes(b"not a matlab file" * 20)
    with pytest.raises(UsageError, match="train_list.mat cannot be read as a MATLAB file"):
        dogs(root, tmp_path / "ready")
    savemat(root / "lists" / "train_list.mat", {"other": 1})
    with pytest.raises(UsageError, match="train_list.mat holds no file_list"):
        dogs(root, tmp_path / "ready")
    with pytest.raises(UsageError, match="SRC .*absent is not there"):
        dogs(tmp_path / "absent", tmp_path / "ready")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"full holds other files \(thesis.txt\)"):
        dogs(root, tmp_path / "full", split="random")
    with pytest.raises(UsageError, match=r"cannot be written \(Not a directory\)"):
        dogs(root, tmp_path / "full" / "thesis.txt" / "below", split="random")
    with pytest.raises(UsageError, match="is inside .* taken for a breed"):
        dogs(root, root / "Images" / "ready", split="random")
    with pytest.raises(UsageError, match="--fraction must be between 0 and 1, got 1"):
        dogs(root, tmp_path / "ready", split="random", fraction=1)


def test_means_are_written_as_json(tmp_path):
    dogs(archive(tmp_path / "dogs"), tmp_path / "ready", split="random")
    found = json.loads((tmp_path / "ready" / "mean.json").read_text())
    assert set(found) == {"mean", "std"} and all(0 < value < 1 for values in found.values() for value in values)
