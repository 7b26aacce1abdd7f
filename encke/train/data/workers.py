"""Samples that worker processes read batch by batch, ahead of the training."""

from __future__ import annotations

import atexit
import os
import signal
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from encke.tools.errors import UsageError
from encke.torch_internals import shutdown_workers
from encke.train.data.order import Batch, BatchOrder

Request = tuple[np.ndarray, np.ndarray | None]
"""Samples of a batch and their random numbers; not tensors, which are sent to workers as open files."""


@dataclass(frozen=True)
class Failure:
    """An error that a worker sends instead of a batch: raised in the worker, it would arrive as a page of traceback."""

    message: str


@dataclass
class Requests:
    """The batches that the workers are to read next."""

    now: list[Request] = field(default_factory=list)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.now)

    def __len__(self) -> int:
        return len(self.now)


class BatchReader(Protocol):
    """Reads a batch in a worker process."""

    def __getitem__(self, request: Request) -> Batch | Failure: ...


class WorkerSource:
    """A source that workers read. They start with the first batches and persist for the next epochs.

    A subclass defines the number of samples, the requests, and the processing of inputs on the device.
    """

    def __init__(self, reader: BatchReader, workers: int | None) -> None:
        self.batch_reader = reader
        self.workers = default_workers() if workers is None else workers
        self.requests = Requests()
        self.loader: DataLoader[Any] | None = None
        self.turn = 0

    def requested(self, order: BatchOrder) -> list[Request]:
        """Return the batches to read."""
        raise NotImplementedError

    def finish(self, inputs: Tensor) -> Tensor:
        """Return the model's input, from inputs on the device."""
        return inputs

    def start(self, device: torch.device) -> DataLoader[Any]:
        """Make the loader of this source."""
        return DataLoader(
            self.batch_reader,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self.requests,
            num_workers=self.workers,
            pin_memory=device.type == "cuda",
            persistent_workers=self.workers > 0,
            worker_init_fn=be_quiet,
            generator=torch.Generator(),  # else epochs draw from the training's generator, resumed ones once more
        )

    def batches(self, order: BatchOrder, device: torch.device) -> Iterator[Batch]:
        """Yield the batches of the order on the device."""
        self.turn += 1
        self.requests.now = self.requested(order)
        first = self.loader is None
        if self.loader is None:
            self.loader = self.start(device)
        loaded = iter(self.loader)
        if first and self.workers:
            atexit.register(weakref.finalize(self, end_workers, loaded))
        return self.received(loaded, self.turn, device)

    def received(self, loaded: Iterator[Batch | Failure], turn: int, device: torch.device) -> Iterator[Batch]:
        """Yield the batches that the workers have read."""
        for batch in loaded:
            if turn != self.turn:
                raise RuntimeError("these batches have ended: others of the same source were started")
            if isinstance(batch, Failure):
                raise UsageError(batch.message)
            inputs, labels = (each.to(device, non_blocking=True) for each in batch)
            yield self.finish(inputs), labels


def end_workers(loaded: Any) -> None:
    """End the workers when their source is collected, or when the program ends.

    The caller keeps `loaded` alive until then. If it were collected in a cycle with its queues, the queues would close
    first, and no worker would be told to end. The garbage collector would wait for each worker, and multiprocessing,
    whose SIGTERM they ignore, would wait forever.
    """
    shutdown_workers(loaded)


def be_quiet(_: int) -> None:
    """Ignore Ctrl-C and SIGTERM, as a worker ends with the training, and hide Pillow's warnings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warnings.simplefilter("ignore")


def default_workers() -> int:
    """Return the number of cores that this process may use, less one, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(cores - 1, 0), 8)
