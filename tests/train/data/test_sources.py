"""Data: every kind is read as it is written, and the same seed gives the same batches however they are read."""

from __future__ import annotations

import gc
import gzip
import json
import pickle
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encke.tools.errors import UsageError
from encke.train.data import augment, files
from encke.train.data.in_memory import MemorySource, StoredImages
from encke.train.data.order import batch_order, batches_per_epoch
from encke.train.data.readers import list_images
from encke.train.data.sources import Datasets, batches, load
from encke.train.settings import Data

AUGMENTS = ("none", "flip", "crop", "resized")


def taken(source, batch: int, **how) -> list[tuple[Tensor, Tensor]]:
    return list(batches(source, batch, **{"seed": 5, **how}))


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def picture(seed: int, height: int = 24, width: int = 24) -> Image.Image:
    """A smooth picture, which JPEG keeps nearly as it is."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def image_folder(root: Path, classes: str = "ab", count: int = 9, ending: str = "png", **size) -> Path:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(100 * label + i, **size).save(root / name / f"{i}.{ending}")
    return root


def folder_sets(path: Path, **settings) -> Datasets:
    return load(Data(**{"kind": "folder", "path": str(path), "workers": 0, **settings}), 0)


# Order, shares, resuming: in memory, from files, and for tokens.


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> Path:
    return image_folder(tmp_path_factory.mktemp("images") / "all", count=16)


def make(kind: str, places: Path, mode: str = "crop") -> Datasets:
    if kind == "folder":
        return folder_sets(places, size=16, augment=mode)
    if kind == "tokens":
        return load(Data(classes=0, samples=40), 0, context=7)
    if kind == "text":
        file = places.parent / "text.txt"
        file.write_text("to be or not to be, that is the question. " * 20)
        return load(Data(kind="text", path=str(file)), 0, context=7)
    return load(Data(samples=40, size=16, augment=mode, classes=3), 0)


@pytest.mark.parametrize("mode", AUGMENTS)
@pytest.mark.parametrize("kind", ["synthetic", "folder"])
def test_processes_share_each_batch_and_a_resumed_epoch_is_its_rest(kind, mode, places):
    sets = make(kind, places, mode)
    whole = taken(sets.train, 8, epoch=2)
    assert len(whole) == batches_per_epoch(len(sets.train), 8) >= 3
    shares = [taken(sets.train, 8, epoch=2, rank=rank, world=4) for rank in range(4)]
    joined = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in zip(*shares, strict=True)]
    assert same(joined, whole)
    assert same(taken(sets.train, 8, epoch=2, start=2), whole[2:])
    assert taken(sets.train, 8, epoch=2, start=len(whole)) == []
    assert not torch.equal(taken(sets.train, 8, epoch=3)[0][0], whole[0][0])
    assert not torch.equal(taken(sets.train, 8, epoch=2, seed=6)[0][0], whole[0][0])


@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_tokens_are_shared_and_resumed_the_same_way(kind, places):
    sets = make(kind, places)
    whole = taken(sets.train, 8, epoch=1)
    shares = [taken(sets.train, 8, epoch=1, rank=rank, world=2, start=1) for rank in range(2)]
    joined = [tuple(torch.cat(parts) for parts in zip(*each, strict=True)) for each in zip(*shares, strict=True)]
    assert same(joined, whole[1:])
    assert not torch.equal(taken(sets.train, 8, epoch=0)[0][0], whole[0][0])


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_takes_every_sample_once_in_order(world):
    parts = [batch_order(23, 8, seed=0, epoch=0, train=False, rank=rank, world=world) for rank in range(world)]
    assert sorted(torch.cat([part.index for part in parts]).tolist()) == list(range(23))
    if world == 1:
        assert parts[0].index.tolist() == list(range(23)) and parts[0].sizes == (8, 8, 7)
    assert max(sum(part.sizes) for part in parts) - min(sum(part.sizes) for part in parts) <= 3


def test_validation_is_not_augmented_and_the_same_in_every_epoch():
    sets = load(Data(samples=64, augment="crop"), 0)
    assert same(taken(sets.validation, 5, train=False), taken(sets.validation, 5, train=False, epoch=3, seed=9))
    plain = load(Data(samples=64), 0)
    assert same(taken(sets.validation, 5, train=False), taken(plain.validation, 5, train=False))


def test_an_epoch_has_each_sample_once_and_drops_what_does_not_fill_a_batch():
    mine = batch_order(21, 4, seed=1, epoch=0, train=True)
    assert len(mine.index.unique()) == len(mine.index) == 20
    assert not torch.equal(mine.index, batch_order(21, 4, seed=1, epoch=1, train=True).index)


def test_batches_that_cannot_be_are_refused_at_once():
    source = load(Data(samples=10), 0).train
    with pytest.raises(UsageError, match="batch of 11 needs as many training samples, there are 10"):
        batches(source, 11, seed=0)
    with pytest.raises(UsageError, match=r"batch \(9\) must be a multiple of the number of processes \(2\)"):
        batches(source, 9, seed=0, world=2)


# Augmentation.


def numbered(count: int = 64, side: int = 16) -> Tensor:
    """Images in which no two pixels are alike."""
    pixels = 1 + torch.arange(side * side).view(1, 1, side, side) % 255
    return pixels.expand(count, 3, side, side).to(torch.uint8)


def positions(image: Tensor, original: Tensor, reach: int) -> list[tuple[bool, int, int]]:
    """The ways to get an image from the original by mirroring and moving it."""
    side = original.shape[-1]
    padded = torch.nn.functional.pad(original, (reach,) * 4)
    every = [
        (mirrored, down, across)
        for mirrored in (False, True)
        for down in range(2 * reach + 1)
        for across in range(2 * reach + 1)
    ]
    windows = ((way, padded[:, way[1] : way[1] + side, way[2] : way[2] + side]) for way in every)
    return [way for way, window in windows if torch.equal(image, window.flip(2) if way[0] else window)]


def test_crop_moves_by_up_to_an_eighth_and_mirrors_half_of_the_images():
    images = numbered(400)
    found = [positions(each, images[0], 2) for each in augment.moved(images, torch.rand(400, 5))]
    assert all(len(ways) == 1 for ways in found)
    ways = Counter(ways[0] for ways in found)
    assert len(ways) == 2 * 5 * 5
    assert 150 < sum(count for way, count in ways.items() if way[0]) < 250


def test_files_are_moved_and_mirrored_as_images_in_memory_are():
    from encke.train.data.pictures import shown

    images, draws = numbered(20), torch.rand(20, 5)
    expected = augment.moved(images, draws)
    for image, row, wanted in zip(images, draws, expected, strict=True):
        pil = Image.fromarray(image.permute(1, 2, 0).numpy())
        assert np.array_equal(shown(pil, "crop", (16, 16), False, row.tolist()), wanted.permute(1, 2, 0))


def test_what_is_done_to_a_sample_depends_on_the_epoch_and_not_on_its_batch():
    view = augment.View("crop", (16, 16), (0.5,) * 3, (0.2,) * 3)
    source = MemorySource(StoredImages(numbered(60), torch.arange(60)), view)

    def by_sample(batch: int, epoch: int) -> Tensor:
        images, labels = (torch.cat(parts) for parts in zip(*taken(source, batch, epoch=epoch), strict=True))
        return images[labels.argsort()]

    first = by_sample(60, 0)
    assert torch.equal(by_sample(15, 0), first)
    assert (by_sample(60, 1) != first).flatten(1).any(1).sum() > 50


def test_flip_mirrors_half_and_moves_none():
    images = numbered(200)
    view = augment.View("flip", (16, 16), (0.0,) * 3, (1 / 255,) * 3)
    shown = view.show(images, torch.rand(200, 5))
    mirrored = [torch.equal(each, images[0].flip(2).float()) for each in shown]
    straight = [torch.equal(each, images[0].float()) for each in shown]
    assert all(a != b for a, b in zip(mirrored, straight, strict=True)) and 60 < sum(mirrored) < 140


def test_resized_parts_have_8_to_100_percent_of_the_area_and_lie_inside():
    boxes = augment.random_boxes(torch.rand(5000, 5))
    left, top, width, height = boxes.unbind(1)
    assert boxes.min() >= 0 and (left + width).max() <= 1 + 1e-6 and (top + height).max() <= 1 + 1e-6
    area, ratio = width * height, width / height
    assert 0.08 <= area.min() + 1e-6 and area.min() < 0.1 and 0.9 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.78 and 1.28 < ratio.max() < 1.34


def test_a_cut_takes_what_is_in_the_box():
    ramp = torch.arange(64.0).expand(1, 1, 64, 64)
    whole = augment.cut(ramp, torch.tensor([[0.0, 0.0, 1.0, 1.0]]), None, (64, 64))
    assert torch.allclose(whole, ramp, atol=1e-3)
    box = torch.tensor([[0.25, 0.5, 0.5, 0.25]])
    part = augment.cut(ramp, box, None, (16, 32))
    assert part.shape == (1, 1, 16, 32)
    assert torch.allclose(part[0, 0, 3], torch.arange(16.0, 48.0), atol=1e-3)
    assert torch.allclose(augment.cut(ramp, box, torch.tensor([True]), (16, 32)), part.flip(3), atol=1e-3)


def test_resized_files_see_the_parts_that_images_in_memory_do():
    from encke.train.data.pictures import shown

    pil, draws = picture(3, 64, 64), torch.rand(8, 5)
    image = torch.from_numpy(np.asarray(pil).copy()).permute(2, 0, 1)[None].expand(8, 3, 64, 64)
    view = augment.View("resized", (16, 16), (0.0,) * 3, (1 / 255,) * 3)
    for row, wanted in zip(draws, view.show(image, draws), strict=True):
        found = shown(pil, "resized", (16, 16), True, row.tolist())
        assert np.abs(found.astype(float) - wanted.permute(1, 2, 0).numpy()).mean() < 4
    middle = shown(pil, "resized", (16, 16), True, None)
    assert np.abs(middle.astype(float) - view.show(image[:1], None)[0].permute(1, 2, 0).numpy()).mean() < 4


def test_a_batch_in_memory_is_few_operations_and_none_that_waits_for_the_device():
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    pixels = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    for mode, most in (("none", 6), ("flip", 15), ("crop", 30), ("resized", 60)):
        view = augment.View(mode, (32, 32), (0.5,) * 3, (0.2,) * 3)
        rest = batches(MemorySource(StoredImages(pixels, torch.zeros(64, dtype=torch.long)), view), 16, seed=0)
        next(rest)
        seen: list[str] = []
        with Counting():
            next(rest)
        assert len(seen) <= most
        assert not any("_local_scalar_dense" in name or "nonzero" in name for name in seen)


# SyntheticImages-up data.


def test_made_up_images_are_normalised_and_depend_on_the_seed_alone():
    sets = load(Data(samples=512, channels=2, size=20), 3)
    assert (sets.kind, sets.classes, sets.shape, len(sets.validation)) == ("images", 10, (2, 20, 20), 64)
    images = torch.cat([x for x, _ in taken(sets.train, 64)])
    assert images.dtype == torch.float32 and abs(images.mean()) < 0.05 and abs(images.std() - 1) < 0.05
    assert same(taken(load(Data(samples=512, channels=2, size=20), 3).train, 64), taken(sets.train, 64))
    assert not same(taken(load(Data(samples=512, channels=2, size=20), 4).train, 64), taken(sets.train, 64))


def test_made_up_classes_can_be_told_apart_and_validation_is_new():
    sets = load(Data(samples=1000), 0)
    (x, y), *_ = taken(sets.train, 1000)
    means = torch.stack([x[y == label].mean(0) for label in range(10)])
    (u, v), *_ = taken(sets.validation, 125, train=False)
    guess = torch.cdist(u.flatten(1), means.flatten(1)).argmin(1)
    assert (guess == v).double().mean() > 0.6
    assert torch.cdist(u.flatten(1), x.flatten(1)).min() > 1


def test_made_up_tokens_follow_from_the_two_before_them():
    sets = load(Data(classes=0, samples=200), 0, context=32)
    assert (sets.kind, sets.classes, sets.shape) == ("tokens", 256, (32,))
    (x, y), *_ = taken(sets.train, 200)
    assert torch.equal(x[:, 1:], y[:, :-1])
    place = torch.empty(256, dtype=torch.long)
    place[sets.train.hidden] = torch.arange(256)
    ranks = torch.cat([place[x], place[y[:, -1:]]], 1)
    step = ranks.diff(dim=1) % 256
    assert (step[:, 1:] == step[:, :-1]).double().mean() > 0.6


def test_tokens_need_a_model_that_takes_them():
    with pytest.raises(UsageError, match="model.name gpt"):
        load(Data(classes=0), 0)


# Text.


def test_text_is_characters_in_windows_with_what_follows_each(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    sets = load(Data(kind="text", path=str(tmp_path / "a.txt")), 0, context=10)
    assert sets.names == tuple("abcdefghijklmnopqrstuvwxyz") and sets.classes == 26
    (x, y), *_ = taken(sets.train, 89)
    assert x.shape == (89, 10) and x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal((x + 1) % 26, y)
    assert len(x[:, 0].unique()) > 20
    windows = torch.cat([x for x, _ in taken(sets.validation, 4, train=False)])
    held_out = [ord(character) - 97 for character in text[900:]]
    assert windows.flatten().tolist() == held_out[:90]


def test_random_windows_reach_the_first_and_the_last_character(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(1000, 1100))))
    source = load(Data(kind="text", path=str(tmp_path / "a.txt")), 0, context=9).train
    seen = torch.cat([torch.cat([x[:, :1], y], 1) for epoch in range(60) for x, y in taken(source, 9, epoch=epoch)])
    assert seen.unique().tolist() == list(range(90))


def test_text_may_be_a_folder_have_many_characters_and_a_validation_file(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 300))), encoding="utf-8")
    (tmp_path / "in" / "a.txt").write_text("start\r\n" * 20, newline="")
    (tmp_path / "val.txt").write_text("Zz" * 30)
    sets = load(Data(kind="text", path=str(tmp_path / "in"), validation=str(tmp_path / "val.txt")), 0, context=8)
    assert sets.classes == 300 + len(set("start\r\nZz"))
    assert list(sets.names) == sorted(sets.names) and "\r" in sets.names
    decoded = "".join(sets.names[token] for x, _ in taken(sets.validation, 1, train=False) for token in x[0])
    assert decoded == ("Zz" * 30)[:56]


def test_bad_texts_are_named(tmp_path):
    def attempt(path: Path, context: int = 8) -> None:
        load(Data(kind="text", path=str(path)), 0, context=context)

    with pytest.raises(UsageError, match="none.txt: no such file"):
        attempt(tmp_path / "none.txt")
    (tmp_path / "short.txt").write_text("0123456789" * 5)
    with pytest.raises(UsageError, match="5 characters of validation text are too few for a context of 8"):
        attempt(tmp_path / "short.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 100)
    with pytest.raises(UsageError, match=r"latin.txt: not a text in UTF-8 \(byte 3\)"):
        attempt(tmp_path / "latin.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="0 characters of training text"):
        attempt(tmp_path / "empty")


# CIFAR, MNIST, digits.


def cifar10(root: Path, per_file: int = 10, protocol: int = 2) -> Path:
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        content = {b"data": data, b"labels": [int(row[0]) % 10 for row in data], b"batch_label": b"x"}
        (root / name).write_bytes(pickle.dumps(content, protocol))
    (root / "batches.meta").write_bytes(pickle.dumps({b"label_names": [f"k{i}".encode() for i in range(10)]}, protocol))
    return root


@pytest.mark.parametrize("protocol", [2, 5])
def test_cifar10_is_read_from_its_folder_or_the_one_above(tmp_path, protocol):
    root = cifar10(tmp_path / "cifar-10-batches-py", protocol=protocol)
    sets = load(Data(kind="cifar10", path=str(tmp_path)), 0)
    assert (len(sets.train), len(sets.validation), sets.shape, sets.classes) == (50, 10, (3, 32, 32), 10)
    assert sets.names[3] == "k3"
    (x, y), *_ = taken(sets.validation, 10, train=False)
    raw = pickle.loads((root / "test_batch").read_bytes())
    pixels = torch.from_numpy(raw[b"data"]).view(10, 3, 32, 32).double() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (sets.mean, sets.std))
    assert torch.allclose(x.double(), (pixels - mean) / std, atol=1e-5) and y.tolist() == raw[b"labels"]
    train = np.concatenate(
        [pickle.loads((root / f"data_batch_{i}").read_bytes())[b"data"].reshape(-1, 3, 32, 32) for i in range(1, 6)]
    )
    assert sets.mean == pytest.approx((train / 255).mean((0, 2, 3))) and sets.std == pytest.approx(
        (train / 255).std((0, 2, 3))
    )
    assert same(taken(load(Data(kind="cifar10", path=str(root)), 0).train, 10), taken(sets.train, 10))


def test_cifar100_has_fine_labels(tmp_path):
    for name in ("train", "test"):
        content = {b"data": np.zeros((3, 3072), np.uint8), b"fine_labels": [0, 99, 5], b"coarse_labels": [0, 1, 2]}
        (tmp_path / name).write_bytes(pickle.dumps(content, 2))
    sets = load(Data(kind="cifar100", path=str(tmp_path)), 0)
    assert sets.classes == 100
    assert taken(sets.validation, 3, train=False)[0][1].tolist() == [0, 99, 5]


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("harm-was-done"),))


def test_bad_cifar_files_are_named_and_run_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def attempt(path: Path = tmp_path / "c") -> None:
        load(Data(kind="cifar10", path=str(path)), 0)

    with pytest.raises(UsageError, match="missing: no cifar-10-batches-py there"):
        attempt(tmp_path / "missing")
    cifar10(tmp_path / "c")
    (tmp_path / "c" / "data_batch_2").write_bytes(pickle.dumps({b"data": Harmful()}))
    with pytest.raises(
        UsageError, match="data_batch_2: not a file of CIFAR's python version .*which no CIFAR file has"
    ):
        attempt()
    assert not Path("harm-was-done").exists()
    whole = (tmp_path / "c" / "data_batch_1").read_bytes()
    (tmp_path / "c" / "data_batch_1").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="data_batch_1: not a file of CIFAR"):
        attempt()
    (tmp_path / "c" / "data_batch_1").write_bytes(pickle.dumps({b"data": np.zeros((2, 3071), np.uint8)}))
    with pytest.raises(UsageError, match="data_batch_1: 'data' must be bytes in rows of 3072"):
        attempt()
    (tmp_path / "c" / "data_batch_1").unlink()
    with pytest.raises(UsageError, match="data_batch_1: no such file"):
        attempt()
    with pytest.raises(UsageError, match="is a file; cifar10 needs the folder"):
        attempt(tmp_path / "c" / "test_batch")
    with pytest.raises(UsageError, match="data.validation here: cifar10 has its own validation data"):
        load(Data(kind="cifar10", path=str(tmp_path / "c"), validation="here"), 0)


def mnist(root: Path, packed: bool) -> Path:
    root.mkdir()
    for prefix, count in (("train", 20), ("t10k", 5)):
        images = np.arange(count * 784, dtype=np.int64).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        parts = {
            f"{prefix}-images-idx3-ubyte": struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + images.tobytes(),
            f"{prefix}-labels-idx1-ubyte": struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes(),
        }
        for name, content in parts.items():
            (root / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return root


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_packed_or_not(tmp_path, packed):
    sets = load(Data(kind="mnist", path=str(mnist(tmp_path / "m", packed))), 0)
    assert (len(sets.train), len(sets.validation), sets.shape, sets.classes) == (20, 5, (1, 28, 28), 10)
    (x, y), *_ = taken(sets.validation, 5, train=False)
    pixels = x * sets.std[0] + sets.mean[0]
    assert torch.allclose(255 * pixels[1].flatten(), torch.arange(784, 1568) % 256.0, atol=1e-2)
    assert y.tolist() == [0, 1, 2, 3, 4]


def test_bad_idx_files_are_named(tmp_path):
    root = mnist(tmp_path / "m", False)

    def attempt(path: Path = root) -> None:
        load(Data(kind="mnist", path=str(path)), 0)

    images = root / "train-images-idx3-ubyte"
    whole = images.read_bytes()
    images.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(UsageError, match="starts with 50 4b 03 04, an IDX file of this kind with 00 00 08 03"):
        attempt()
    images.write_bytes(whole[:-1])
    with pytest.raises(UsageError, match="train-images-idx3-ubyte: 15,680 bytes promised, 15,679 there"):
        attempt()
    images.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 2, 28, 28) + bytes(2 * 784))
    with pytest.raises(UsageError, match="2 train images but 20 labels"):
        attempt()
    images.unlink()
    (root / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(UsageError, match="train-images-idx3-ubyte.gz: cannot be unpacked"):
        attempt()
    (root / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(UsageError, match="no train-images-idx3-ubyte or train-images-idx3-ubyte.gz there"):
        attempt()
    with pytest.raises(UsageError, match="absent is not there; kind mnist needs the folder"):
        attempt(tmp_path / "absent")


def test_digits_hold_a_fifth_out_and_shuffle_with_the_seed():
    first, again, other = (load(Data(kind="digits"), seed) for seed in (0, 0, 1))
    assert (len(first.train), len(first.validation), first.shape) == (4000, 1000, (1, 28, 28))
    assert torch.equal(first.train.store.images, again.train.store.images)
    assert not torch.equal(first.train.store.images, other.train.store.images)
    both = torch.cat([first.train.store.images, first.validation.store.images])
    assert (
        both.flatten(1).double().sum()
        == torch.cat([other.train.store.images, other.validation.store.images]).double().sum()
    )
    assert first.train.store.labels.bincount().min() > 350


@pytest.mark.parametrize("mode", AUGMENTS)
def test_size_scales_images_in_memory(tmp_path, mode):
    path = str(mnist(tmp_path / "m", False))
    sets = load(Data(kind="mnist", path=path, size=14, augment=mode), 0)
    assert sets.shape == (1, 14, 14)
    for source, train in ((sets.train, True), (sets.validation, False)):
        assert taken(source, 5, train=train)[0][0].shape == (5, 1, 14, 14)


# Folders of images.


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
    workers = source.loader._iterator._workers
    cycle = [source, source.loader._iterator]
    cycle.append(cycle)
    del source, cycle
    gc.collect()
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)


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
        monkeypatch.setattr(files.os, "sched_getaffinity", lambda _, cores=cores: range(cores))
        assert files.default_workers() == expected


@pytest.mark.slow
def test_workers_start_beside_kernels_that_run_in_threads(tmp_path):
    import encke

    codec, x = encke.codecs.ErrorBounded(bound=1e-3), torch.randn(1 << 16)
    before = codec.encode(x).decode()
    sets = folder_sets(image_folder(tmp_path / "f"), size=16, workers=2)
    assert len(taken(sets.train, 2)) == 8
    assert torch.equal(codec.encode(x).decode(), before)
