"""The data of a training: `load` opens them, `batches` yields them in order.

The same seed gives the same batches, bit for bit, whatever the number of workers and processes and the step at which a
training is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from encke.tools.errors import UsageError
from encke.train.data import formats, own, seeded, text
from encke.train.data.augment import View, statistics
from encke.train.data.in_memory import ImageStore, MemorySource, synthetic_images
from encke.train.data.order import Batch, Source, batch_order
from encke.train.data.seeded import Purpose
from encke.train.settings import Data, is_python_path

SIDE = 32
"""Pixels along a side of synthetic images, unless data.size says otherwise."""


@dataclass(frozen=True)
class Datasets:
    """Training and validation data."""

    train: Source
    validation: Source
    kind: Literal["images", "tokens"]
    classes: int
    """Number of classes of the images, or number of different tokens."""
    shape: tuple[int, ...]
    """(channels, height, width) of an image, or (context,); samples of the user's own may have any shape."""
    mean: tuple[float, ...] = ()
    """Mean of each channel, as a share of the largest value; images are normalised with it."""
    std: tuple[float, ...] = ()
    """Standard deviation of each channel, as a share of the largest value."""
    names: tuple[str, ...] = ()
    """Names of the classes, or the characters of a text; synthetic data have none."""
    dtype: torch.dtype = torch.float32
    """Type of the inputs: float32, or int64 for tokens."""


def load(data: Data, seed: int, context: int | None = None) -> Datasets:
    """Open the data; small sets are read now, files of `folder` and `lmdb` by `batches`.

    Args:
        data: What to open.
        seed: Seed of synthetic data and of the held-out part.
        context: Length of a sequence of tokens.
    """
    if data.validation and data.kind not in ("folder", "lmdb", "text"):
        raise UsageError(f"data.validation {data.validation}: {data.kind} has its own validation data; leave it empty")
    if data.kind == "text" or (data.kind == "synthetic" and data.classes == 0):
        if context is None:
            raise UsageError(f"data.kind {data.kind} gives tokens, which only gpt can take: model.name gpt")
        return tokens(data, seed, context)
    if is_python_path(data.kind):
        return own_data(data, seed)
    return in_files(data, seed) if data.kind in ("folder", "lmdb") else in_memory(data, seed)


def place(path: str) -> Path:
    """Return a path with `~` replaced."""
    return Path(path).expanduser()


def tokens(data: Data, seed: int, context: int) -> Datasets:
    """Open data of tokens."""
    train: Source
    validation: Source
    if data.kind == "synthetic":
        train, validation = text.synthetic_sequences(data.samples, context, seed)
        return Datasets(train, validation, "tokens", text.VOCABULARY, (context,), dtype=torch.int64)
    other = place(data.validation) if data.validation else None
    train, validation, names = text.text(place(data.path), other, context)
    return Datasets(train, validation, "tokens", len(names), (context,), names=names, dtype=torch.int64)


def own_data(data: Data, seed: int) -> Datasets:
    """Open data sets of the user's own: tokens if each has a label of its own."""
    train, validation, classes, names, (values, label) = own.load(data, seed)
    kind: Literal["images", "tokens"] = "tokens" if label.dim() else "images"
    return Datasets(train, validation, kind, classes, tuple(values.shape), names=names, dtype=values.dtype)


def in_memory(data: Data, seed: int) -> Datasets:
    """Read images that fit in memory."""
    if data.kind == "synthetic":
        made = synthetic_images(data.classes, data.samples, data.channels, data.size or SIDE, seed)
        # All images are similar: a few determine mean and deviation.
        return images(data, *made, made[0].take(torch.arange(min(256, data.samples)))[0], ())
    if data.kind == "digits":
        train, validation, names = formats.digits(seed)
    elif data.kind == "mnist":
        train, validation, names = formats.mnist(place(data.path))
    else:
        train, validation, names = formats.cifar(data.kind, place(data.path))
    return images(data, train, validation, train.images, names)


def images(data: Data, train: ImageStore, validation: ImageStore, sample: Tensor, names: tuple[str, ...]) -> Datasets:
    """Return images in memory, normalised with mean and deviation of `sample`."""
    mean, std = statistics(sample)
    channels, height, width = sample.shape[1:]
    size = (data.size, data.size) if data.size else (height, width)
    view = View(data.augment, size, mean, std)
    classes = len(names) or data.classes
    return Datasets(
        MemorySource(train, view),
        MemorySource(validation, view),
        "images",
        classes,
        (channels, *size),
        mean,
        std,
        names,
    )


def in_files(data: Data, seed: int) -> Datasets:
    """Open images that are read when they are needed."""
    # Pillow and lmdb are needed for these alone.
    from encke.train.data.files import FileSource
    from encke.train.data.readers import first_size, mean_and_std, open_sets

    train, validation, names = open_sets(
        data.kind, place(data.path), place(data.validation) if data.validation else None
    )
    subset: tuple[np.ndarray | None, np.ndarray | None] = None, None
    if validation is None:
        validation, subset = train, held_out(len(train.labels), seed, data.path)
    size = (data.size, data.size) if data.size else first_size(train)
    mean, std = mean_and_std(train, data.size is not None, size)
    view = View(data.augment, size, mean, std)
    first, second = (
        FileSource(reader, some, view, data.size is not None, data.workers)
        for reader, some in zip((train, validation), subset, strict=True)
    )
    return Datasets(first, second, "images", len(names), (3, *size), mean, std, names)


def held_out(samples: int, seed: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples for training, and a tenth for validation."""
    if samples < 2:
        raise UsageError(f"data.path {path}: {samples} image cannot be both trained with and held out: add some")
    order = seeded.permutation(samples, seed, Purpose.HELD_OUT).numpy()
    tenth = max(1, samples // 10)
    return np.sort(order[tenth:]), np.sort(order[:tenth])


def batches(
    source: Source,
    batch: int,
    *,
    seed: int,
    epoch: int = 0,
    train: bool = True,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[Batch]:
    """Yield the batches of an epoch: normalised float32 images and their labels, or tokens and their successors.

    In training the epoch has its own order, and an incomplete last batch is left out. Validation reads each sample
    once, in order; a process may get none of a last batch with fewer samples than processes.

    Args:
        source: The data.
        batch: Samples in a batch, of all processes together.
        seed: Seed of order and augmentation.
        epoch: Number of the epoch.
        train: Whether the data are for training.
        rank: Number of this process.
        world: Number of processes.
        start: First batch; earlier batches are not read.
        device: Device of the batches.
    """
    mine = batch_order(len(source), batch, seed=seed, epoch=epoch, train=train, rank=rank, world=world, start=start)
    return source.batches(mine, torch.device(device))
