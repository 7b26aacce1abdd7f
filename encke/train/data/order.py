"""The order of the samples: batches of each process, and the random numbers of each sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encke.tools.errors import UsageError
from encke.train.data import seeded
from encke.train.data.seeded import Purpose

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class BatchOrder:
    """The samples of one process in one epoch, batch after batch."""

    index: Tensor
    """Indices of the samples, on the CPU."""
    sizes: tuple[int, ...]
    """Samples in each batch."""
    seed: int
    epoch: int
    train: bool

    def draws(self, columns: int, device: torch.device) -> Tensor:
        """Return a row of random numbers for each sample; they depend on seed, epoch and sample only."""
        return seeded.uniform(self.index.to(device), columns, self.seed, self.epoch, Purpose.AUGMENT)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows that belong to the samples into batches."""
        return rows.split(list(self.sizes))


class Source(Protocol):
    """Samples that can be read in batches."""

    def __len__(self) -> int: ...

    def batches(self, order: BatchOrder, device: torch.device) -> Iterator[Batch]: ...


def batches_per_epoch(samples: int, batch: int) -> int:
    """Return the number of training batches in an epoch; samples that do not fill a batch are left out."""
    if samples < batch:
        raise UsageError(f"a batch of {batch} needs as many training samples, there are {samples}: make batch smaller")
    return samples // batch


def batch_order(
    samples: int, batch: int, *, seed: int, epoch: int, train: bool, rank: int = 0, world: int = 1, start: int = 0
) -> BatchOrder:
    """Return the samples that process `rank` of `world` reads from batch `start` on.

    In training each epoch has its own order and only whole batches; validation reads each sample once, in order.
    """
    if train and batch % world:
        raise UsageError(f"batch ({batch}) must be a multiple of the number of processes ({world})")
    order = seeded.permutation(samples, seed, epoch, Purpose.ORDER) if train else torch.arange(samples)
    end = batches_per_epoch(samples, batch) * batch if train else samples
    shares = []
    for first in range(start * batch, end, batch):
        length = min(batch, end - first)
        shares.append(order[first + length * rank // world : first + length * (rank + 1) // world])
    shares = [share for share in shares if len(share)]
    index = torch.cat(shares) if shares else order[:0]
    return BatchOrder(index, tuple(map(len, shares)), seed, epoch, train)
