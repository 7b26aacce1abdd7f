"""Tokens for a language model: the characters of a text, or synthetic sequences."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from encke.tools.errors import UsageError
from encke.train.data import seeded
from encke.train.data.order import Batch, BatchOrder
from encke.train.data.seeded import Purpose

VOCABULARY = 256
"""Number of different tokens in synthetic sequences."""


class TextSource:
    """A text in windows of `context` tokens: at random places in training, side by side in validation."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context
        self.there: tuple[torch.device, Tensor] | None = None

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def batches(self, order: BatchOrder, device: torch.device) -> Iterator[Batch]:
        if self.there is None or self.there[0] != device:
            self.there = device, self.tokens.to(device)
        tokens, index = self.there[1], order.index.to(device)
        if order.train:
            places = seeded.below(index, len(tokens) - self.context, order.seed, order.epoch, Purpose.WINDOW)
        else:
            places = index * self.context
        window = torch.arange(self.context + 1, device=device)
        for first in order.split(places):
            yield targets(tokens[first[:, None] + window])


class SyntheticSequences:
    """Synthetic sequences: each counts up by its own step in a hidden order of the tokens, with some random tokens.

    Two tokens determine the next one.
    """

    def __init__(self, samples: int, first: int, context: int, seed: int) -> None:
        self.samples, self.first, self.context, self.seed = samples, first, context, seed
        self.hidden = seeded.permutation(VOCABULARY, seed, Purpose.VOCABULARY)

    def __len__(self) -> int:
        return self.samples

    def batches(self, order: BatchOrder, device: torch.device) -> Iterator[Batch]:
        hidden = self.hidden.to(device)
        place = torch.arange(self.context + 1, device=device)
        for index in order.split(order.index.to(device) + self.first):
            draws = seeded.uniform(index, 2 + 2 * len(place), self.seed, Purpose.SEQUENCE)
            begin, step = (draws[:, :1] * VOCABULARY).long(), 1 + (draws[:, 1:2] * 8).long()
            stray, instead = draws[:, 2:].chunk(2, 1)
            tokens = torch.where(
                stray < 0.1, (instead * VOCABULARY).long(), hidden[(begin + step * place) % VOCABULARY]
            )
            yield targets(tokens)


def targets(tokens: Tensor) -> Batch:
    """Split sequences into tokens and, for each token, the one that follows."""
    tokens = tokens.long()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def synthetic_sequences(samples: int, context: int, seed: int) -> tuple[SyntheticSequences, SyntheticSequences]:
    """Make synthetic sequences for training, and an eighth as many for validation."""
    return SyntheticSequences(samples, 0, context, seed), SyntheticSequences(
        max(1, samples // 8), samples, context, seed
    )


def read(path: Path, setting: str) -> str:
    """Read a text file, or all files of a folder in the order of their names."""
    if not path.exists():
        raise UsageError(f"{setting} {path}: no such file or folder; kind text reads a text file or a folder of them")
    files = [path]
    if path.is_dir():
        inside = (Path(folder) / name for folder, _, names in os.walk(path) for name in names if name[0] != ".")
        files = sorted(inside)
    parts = []
    for file in files:
        try:
            parts.append(file.read_bytes().decode())
        except UnicodeDecodeError as error:
            raise UsageError(f"{file}: not a text in UTF-8 (byte {error.start}): convert it or move it away") from None
    return "".join(parts)


def text(path: Path, validation: Path | None, context: int) -> tuple[TextSource, TextSource, tuple[str, ...]]:
    """Return training text, validation text and their characters; without `validation` a tenth is held out."""
    train = characters(read(path, "data.path"))
    if validation is None:
        end = len(train) * 9 // 10
        train, held_out = train[:end], train[end:]
    else:
        held_out = characters(read(validation, "data.validation"))
    for what, part, where in (("training", train, path), ("validation", held_out, validation or path)):
        if len(part) <= context:
            raise UsageError(
                f"{where}: {len(part)} characters of {what} text are too few for a context of {context}: "
                "more text, or a smaller model.context"
            )
    known = np.zeros(0x110000, dtype=bool)
    known[train] = known[held_out] = True
    number = (np.cumsum(known) - 1).astype(np.uint8 if known.sum() <= 256 else np.int32)
    names = tuple(map(chr, np.flatnonzero(known).tolist()))
    first, second = (TextSource(torch.from_numpy(number[part]), context) for part in (train, held_out))
    return first, second, names


def characters(string: str) -> np.ndarray:
    """Return the code points of a text."""
    return np.frombuffer(string.encode("utf-32-le"), dtype=np.uint32)
