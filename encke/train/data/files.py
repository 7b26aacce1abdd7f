"""Images that are read when they are needed, from a folder or an LMDB, by worker processes."""

from __future__ import annotations

import atexit
import io
import os
import signal
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from encke.tools.errors import UsageError
from encke.torch_internals import shutdown_workers
from encke.train.data import records
from encke.train.data.augment import DRAWS, View
from encke.train.data.order import Batch, BatchOrder
from encke.train.data.pictures import complaint, shown
from encke.train.data.readers import Reader

Request = tuple[np.ndarray, np.ndarray | None]
"""Samples of a batch and their random numbers; no tensors, which travel to workers as open files."""


@dataclass(frozen=True)
class Failure:
    """An error that a worker sends instead of a batch: raised there, it would arrive as a page of traceback."""

    message: str


@dataclass
class Requests:
    """The batches that the workers are to read next."""

    now: list[Request] = field(default_factory=list)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class BatchReader:
    """Reads and decodes a batch in a worker process."""

    def __init__(self, reader: Reader, view: View, scale: bool) -> None:
        self.reader, self.view, self.scale = reader, view, scale

    def __getitem__(self, request: Request) -> Batch | Failure:
        index, draws = request
        pixels = np.empty((len(index), *self.view.size, 3), dtype=np.uint8)
        for place, number in enumerate(index.tolist()):
            try:
                with Image.open(io.BytesIO(self.reader.read(number))) as image:
                    row = None if draws is None else draws[place].tolist()
                    pixels[place] = shown(image, self.view.augment, self.view.size, self.scale, row)
            except Exception as error:
                return Failure(complaint(self.reader.name(number), error))
        return torch.from_numpy(pixels), torch.from_numpy(self.reader.labels[index])


class FileSource:
    """A source of images in files. Workers start with the first batches and stay for the next epochs."""

    def __init__(self, reader: Reader, subset: np.ndarray | None, view: View, scale: bool, workers: int | None) -> None:
        self.reader, self.subset, self.view, self.scale = reader, subset, view, scale
        self.workers = default_workers() if workers is None else workers
        self.requests = Requests()
        self.loader: DataLoader[Any] | None = None
        self.turn = 0

    def __len__(self) -> int:
        return len(self.reader.labels) if self.subset is None else len(self.subset)

    def start(self, device: torch.device) -> DataLoader[Any]:
        records.close()
        return DataLoader(
            BatchReader(self.reader, self.view, self.scale),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.requests,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            persistent_workers=self.workers > 0,
            worker_init_fn=be_quiet,
        )

    def batches(self, order: BatchOrder, device: torch.device) -> Iterator[Batch]:
        self.turn += 1
        self.requests.now = self.requested(order)
        first = self.loader is None
        if self.loader is None:
            self.loader = self.start(device)
        loaded = iter(self.loader)
        if first and self.workers:
            atexit.register(weakref.finalize(self, end_workers, loaded))
        return self.received(loaded, self.turn, device)

    def requested(self, order: BatchOrder) -> list[Request]:
        samples = order.index.numpy() if self.subset is None else self.subset[order.index.numpy()]
        index = order.split(torch.from_numpy(samples))
        if not order.train or self.view.augment == "none":
            return [(each.numpy(), None) for each in index]
        draws = order.split(order.draws(DRAWS, torch.device("cpu")))
        return [(each.numpy(), some.numpy()) for each, some in zip(index, draws, strict=True)]

    def received(self, loaded: Iterator[Batch | Failure], turn: int, device: torch.device) -> Iterator[Batch]:
        for batch in loaded:
            if turn != self.turn:
                raise RuntimeError("these batches have ended: others of the same source were started")
            if isinstance(batch, Failure):
                raise UsageError(batch.message)
            pixels, labels = (each.to(device, non_blocking=True) for each in batch)
            yield self.view.normalise(pixels.permute(0, 3, 1, 2).contiguous()), labels


def end_workers(loaded: Any) -> None:
    """End the workers when their source is collected, or when the program ends.

    The caller keeps `loaded` alive until then. Collected in a cycle with its queues, these would close first and no
    worker would be told to end; the collector would wait for each, and multiprocessing, whose SIGTERM they ignore,
    would wait forever.
    """
    shutdown_workers(loaded)


def be_quiet(_: int) -> None:
    """Leave Ctrl-C and SIGTERM to the training, with which a worker ends, and hide warnings of Pillow."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")


def default_workers() -> int:
    """Return the number of cores that this process may use, less one, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores - 1, 0), 8)
