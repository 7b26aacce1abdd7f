"""Data of every other kind are read as they are written: made up, text, CIFAR, MNIST and the digits."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from encke.tools.errors import UsageError
from encke.train.data.sources import load
from encke.train.settings import Data
from tests.train.data.common import AUGMENTS, same, taken

# Made-up data.


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
