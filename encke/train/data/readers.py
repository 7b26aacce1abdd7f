"""Image files in folders or an LMDB: their classes, sizes and brightness. Contents are read by number."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from encke.tools.errors import UsageError
from encke.train.data.augment import statistics
from encke.train.data.pictures import ENDINGS, complaint, shown
from encke.train.data.records import Records


class Reader(Protocol):
    """Image files by number."""

    labels: np.ndarray

    def read(self, index: int) -> bytes: ...

    def name(self, index: int) -> str: ...


class ImageFolder:
    """The images of a folder with one folder for each class."""

    def __init__(self, root: Path, listed: Sequence[tuple[str, int]]) -> None:
        self.root = root
        # One array instead of many strings: workers share it, but would copy each string they touch.
        self.paths = np.array([os.fsencode(path) for path, _ in listed])
        self.labels = np.array([label for _, label in listed], dtype=np.int64)

    def name(self, index: int) -> str:
        return str(self.root / os.fsdecode(self.paths[index]))

    def read(self, index: int) -> bytes:
        return Path(self.name(index)).read_bytes()


def classes_of(root: Path, what: str = "data.path") -> tuple[str, ...]:
    """Return the sorted names of a folder's subfolders: one for each class."""
    if not root.is_dir():
        state = "is a file" if root.exists() else "is not there"
        raise UsageError(f"{what} {root} {state}; it must be a folder with one folder of images for each class")
    entries = [entry for entry in scan(root) if not entry.name.startswith(".")]
    found = sorted(entry.name for entry in entries if entry.is_dir())
    for entry in entries:
        refuse_dangling(entry)
    if not found:
        raise UsageError(f"{what} {root}: no folders in it; it must hold one folder of images for each class")
    return tuple(found)


def list_images(root: Path, classes: Sequence[str], keep_lost: bool = False) -> list[tuple[str, int]]:
    """Return the images of all classes, sorted: paths relative to `root`, and the index of the class.

    Links are followed, but no folder may be in two classes or inside itself. A dangling link is an error, unless
    `keep_lost` says that the caller leaves out unreadable images.
    """
    found: list[tuple[str, int]] = []
    walk = FolderWalk(root, keep_lost)
    for label, name in enumerate(classes):
        before = len(found)
        found += [(path, label) for path in walk.images(name, label, (os.path.realpath(root),))]
        if len(found) == before:
            raise UsageError(
                f"{root / name}: no images in this class's folder ({', '.join(ENDINGS)}): add some or remove it"
            )
    return sorted(found, key=lambda each: (each[1], each[0]))


@dataclass
class FolderWalk:
    """A walk through image folders that follows links and refuses cycles and shared folders."""

    root: Path
    keep_lost: bool
    """Whether dangling links are listed too, for a caller that leaves out broken images."""
    owners: dict[str, int] = field(default_factory=dict)
    """Labels of the folders seen so far, by real path."""

    def images(self, place: str, label: int, above: tuple[str, ...]) -> Iterator[str]:
        """Yield the images in a folder and below it; paths are relative to the root.

        Args:
            place: The folder, relative to the root.
            label: The class of its images.
            above: Real paths of the folders that contain it.
        """
        folder = self.root / place
        real = os.path.realpath(folder)
        if any(Path(each).is_relative_to(real) for each in above):
            raise UsageError(f"{folder} is a link to {real}, a folder that it lies in: remove the link")
        if self.owners.setdefault(real, label) != label:
            raise UsageError(f"{folder} is {real}, whose images are in another class already: remove the link")
        for entry in scan(folder):
            inside = os.path.join(place, entry.name)
            is_image = entry.name.lower().endswith(ENDINGS) and not entry.name.startswith(".")
            if not (is_image and self.keep_lost):
                refuse_dangling(entry)
            if entry.is_dir():
                yield from self.images(inside, label, (*above, real))
            elif is_image:
                yield inside


def scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({error.strerror}): mend that, or remove it") from None


def refuse_dangling(entry: os.DirEntry[str]) -> None:
    """Raise an error for a dangling link: it may have pointed to a folder of images."""
    if entry.is_symlink() and not os.path.exists(entry.path):
        target = os.readlink(entry.path)
        raise UsageError(f"{entry.path} is a link to {target}, which is not there: put that back or remove the link")


def open_sets(kind: str, path: Path, validation: Path | None) -> tuple[Reader, Reader | None, tuple[str, ...]]:
    """Open training images, validation images if they are separate, and return them with the classes."""
    inside = path / "train"
    if (inside / "data.mdb").is_file() if kind == "lmdb" else is_split(inside):
        path = inside
    if validation is None and path.name == "train" and (path.parent / "val").is_dir():
        validation = path.parent / "val"
    readers: list[Reader] = []
    classes: list[tuple[str, ...]] = []
    for place, what in ((path, "data.path"), (validation, "data.validation")):
        if place is None:
            continue
        if kind == "lmdb":
            found = Records(place, what)
            readers.append(found)
            classes.append(tuple(found.meta["classes"]))
        else:
            classes.append(classes_of(place, what))
            readers.append(ImageFolder(place, list_images(place, classes[-1])))
    if len(readers) == 1:
        return readers[0], None, classes[0]
    if classes[0] != classes[1]:
        lone = sorted(set(classes[0]) ^ set(classes[1]))
        raise UsageError(
            f"{validation} must have the same classes as {path}: {lone[0]!r} is in one of them alone"
            + (f", and so are {len(lone) - 1} others" if len(lone) > 1 else "")
        )
    return readers[0], readers[1], classes[0]


def is_split(path: Path) -> bool:
    """Return whether a folder contains folders, which makes it a set of classes and not a class."""
    return path.is_dir() and any(each.is_dir() for each in path.iterdir())


def mean_and_std(reader: Reader, scale: bool, size: tuple[int, int]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each channel, from the LMDB, from mean.json beside the folder, or from a sample."""
    if isinstance(reader, Records):
        return tuple(reader.meta["mean"]), tuple(reader.meta["std"])
    assert isinstance(reader, ImageFolder)
    file = reader.root.parent / "mean.json"
    if not file.is_file():
        return statistics(sampled(reader, scale, size))
    try:
        found = json.loads(file.read_text())
        mean, std = ([float(value) for value in found[name]] for name in ("mean", "std"))
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0 or not np.isfinite([mean, std]).all():
            raise ValueError("three finite numbers each, std above 0")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f'{file}: must be {{"mean": [R, G, B], "std": [R, G, B]}} ({error}): remove it') from None
    return tuple(mean), tuple(std)


def sampled(reader: Reader, scale: bool, size: tuple[int, int], most: int = 512) -> Tensor:
    """Return some images spread over all, (N, 3, H, W), as the model will see them; broken ones are skipped."""
    count = len(reader.labels)
    found = []
    for number in np.linspace(0, count - 1, min(most, count)).astype(int).tolist():
        try:
            with Image.open(io.BytesIO(reader.read(number))) as image:
                found.append(torch.from_numpy(shown(image, "none", size, scale, None).copy()))
        except UsageError as error:
            raise UsageError(complaint(reader.name(number), error)) from None
        except Exception:
            continue
    if not found:
        raise UsageError(f"{reader.name(0)}: neither this nor any other of {min(most, count)} images can be read")
    return torch.stack(found).permute(0, 3, 1, 2)


def first_size(reader: Reader) -> tuple[int, int]:
    """Return height and width of the first image that can be read."""
    for number in range(len(reader.labels)):
        try:
            with Image.open(io.BytesIO(reader.read(number))) as image:
                return image.height, image.width
        except Exception:
            continue
    raise UsageError(f"{reader.name(0)}: neither this nor any other image here can be read")
