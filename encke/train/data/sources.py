"""The data of a training: `load` finds and reads them, `batches` gives them in order.

The same seed gives the same batches, bit for bit, whatever the number of workers and processes and wherever a
training goes on.
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
from encke.train.data import formats, seeded, text
from encke.train.data.augment import View, statistics
from encke.train.data.in_memory import Images, Store
from encke.train.data.in_memory import made as made_images
from encke.train.data.order import Batch, Source, plan
from encke.train.data.seeded import Use
from encke.train.settings import Data

SIDE = 32
"""Pixels along a side of made-up images, unless data.size says otherwise."""


@dataclass(frozen=True)
class Sets:
    """What a training reads."""

    train: Source
    validation: Source
    kind: Literal["images", "tokens"]
    classes: int
    """Classes of the images, or different tokens."""
    shape: tuple[int, ...]
    """(channels, height, width) of an image, or (context,)."""
    mean: tuple[float, ...] = ()
    """Of each channel, in shares of the largest value: what images are normalised with."""
    std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    """Of the classes; of a text its characters. Made-up data have none."""


def load(data: Data, seed: int, context: int | None = None) -> Sets:
    """Finds and reads the data; files of `folder` and `lmdb` are read later, by `batches`.

    `seed` decides what is held out and what is made up, `context` is the length of a sequence of tokens.
    """
    if data.validation and data.kind not in ("folder", "lmdb", "text"):
        raise UsageError(f"data.validation {data.validation}: {data.kind} has its own validation data; leave it empty")
    if data.kind == "text" or (data.kind == "synthetic" and data.classes == 0):
        if context is None:
            raise UsageError(f"data.kind {data.kind} gives tokens, which only gpt can take: model.name gpt")
        return tokens(data, seed, context)
    return in_files(data, seed) if data.kind in ("folder", "lmdb") else in_memory(data, seed)


def place(path: str) -> Path:
    return Path(path).expanduser()


def tokens(data: Data, seed: int, context: int) -> Sets:
    train: Source
    validation: Source
    if data.kind == "synthetic":
        train, validation = text.sequences(data.samples, context, seed)
        return Sets(train, validation, "tokens", text.KINDS, (context,))
    other = place(data.validation) if data.validation else None
    train, validation, names = text.text(place(data.path), other, context)
    return Sets(train, validation, "tokens", len(names), (context,), names=names)


def in_memory(data: Data, seed: int) -> Sets:
    if data.kind == "synthetic":
        made = made_images(data.classes, data.samples, data.channels, data.size or SIDE, seed)
        # All images are alike: a few tell mean and deviation.
        return images(data, *made, made[0].take(torch.arange(min(256, data.samples)))[0], ())
    if data.kind == "digits":
        train, validation, names = formats.digits(seed)
    elif data.kind == "mnist":
        train, validation, names = formats.mnist(place(data.path))
    else:
        train, validation, names = formats.cifar(data.kind, place(data.path))
    return images(data, train, validation, train.images, names)


def images(data: Data, train: Store, validation: Store, sample: Tensor, names: tuple[str, ...]) -> Sets:
    """Sets of images in memory that are normalised as `sample` says."""
    mean, std = statistics(sample)
    channels, height, width = sample.shape[1:]
    size = (data.size, data.size) if data.size else (height, width)
    view = View(data.augment, size, mean, std)
    classes = len(names) or data.classes
    return Sets(Images(train, view), Images(validation, view), "images", classes, (channels, *size), mean, std, names)


def in_files(data: Data, seed: int) -> Sets:
    # Pillow and lmdb are needed for these alone.
    from encke.train.data.files import Files
    from encke.train.data.readers import first_size, mean_and_std, open_sets

    train, validation, names = open_sets(
        data.kind, place(data.path), place(data.validation) if data.validation else None
    )
    chosen: tuple[np.ndarray | None, np.ndarray | None] = None, None
    if validation is None:
        validation, chosen = train, held_out(len(train.labels), seed, data.path)
    size = (data.size, data.size) if data.size else first_size(train)
    mean, std = mean_and_std(train, data.size is not None, size)
    view = View(data.augment, size, mean, std)
    first, second = (
        Files(reader, some, view, data.size is not None, data.workers)
        for reader, some in zip((train, validation), chosen, strict=True)
    )
    return Sets(first, second, "images", len(names), (3, *size), mean, std, names)


def held_out(samples: int, seed: int, path: str) -> tuple[np.ndarray, np.ndarray]:
    """The samples to train with, and a tenth for validation."""
    if samples < 2:
        raise UsageError(f"data.path {path}: {samples} image cannot be both trained with and held out: add some")
    order = seeded.permutation(samples, seed, Use.HELD_OUT).numpy()
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
    """The batches of an epoch on `device`: normalised float32 images and their labels, or tokens and what follows each.

    `batch` counts the samples of all processes; this one, `rank` of `world`, gets its share of each batch. In training
    the epoch has an order of its own and a last batch that is not full is left out; in validation each sample comes
    once, in order (a process may get nothing of a last batch with fewer samples than processes). `start` is the first
    batch wanted: those before it are not read.
    """
    mine = plan(len(source), batch, seed=seed, epoch=epoch, train=train, rank=rank, world=world, start=start)
    return source.batches(mine, torch.device(device))
