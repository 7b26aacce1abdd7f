"""Which samples are in which batch of which process, and the random numbers that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encke.tools.errors import UsageError
from encke.train.data import seeded
from encke.train.data.seeded import Use

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """The samples of one process in one epoch, batch behind batch."""

    order: Tensor
    """The samples' indices, on the CPU."""
    sizes: tuple[int, ...]
    """How many of them are in each batch."""
    seed: int
    epoch: int
    train: bool

    def draws(self, columns: int, device: torch.device) -> Tensor:
        """A row of random numbers for each sample, the same ones for the same sample in the same epoch."""
        return seeded.uniform(self.order.to(device), columns, self.seed, self.epoch, Use.AUGMENT)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows that belong to the samples, batch by batch."""
        return rows.split(list(self.sizes))


class Source(Protocol):
    """Samples that can be read in batches."""

    def __len__(self) -> int: ...

    def batches(self, plan: Plan, device: torch.device) -> Iterator[Batch]: ...


def steps(samples: int, batch: int) -> int:
    """Training batches in an epoch; the samples that do not fill one are left for another epoch."""
    if samples < batch:
        raise UsageError(f"a batch of {batch} needs as many training samples, there are {samples}: make batch smaller")
    return samples // batch


def plan(
    samples: int, batch: int, *, seed: int, epoch: int, train: bool, rank: int = 0, world: int = 1, start: int = 0
) -> Plan:
    """What process `rank` of `world` reads from batch `start` on.

    In training each epoch has its own order and whole batches alone; in validation each sample comes once, in order.
    """
    if train and batch % world:
        raise UsageError(f"batch ({batch}) must be a multiple of the number of processes ({world})")
    order = seeded.permutation(samples, seed, epoch, Use.ORDER) if train else torch.arange(samples)
    end = steps(samples, batch) * batch if train else samples
    parts = []
    for first in range(start * batch, end, batch):
        length = min(batch, end - first)
        parts.append(order[first + length * rank // world : first + length * (rank + 1) // world])
    parts = [part for part in parts if len(part)]
    mine = torch.cat(parts) if parts else order[:0]
    return Plan(mine, tuple(map(len, parts)), seed, epoch, train)
