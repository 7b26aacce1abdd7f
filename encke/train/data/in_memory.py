"""Images that are all in memory, on the device that trains: a batch takes a few operations and no worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encke.train.data import seeded
from encke.train.data.augment import DRAWS, View, pick
from encke.train.data.order import Batch, BatchOrder
from encke.train.data.seeded import Purpose

TILES = 64


class ImageStore(Protocol):
    """Images by index."""

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> ImageStore: ...

    def take(self, index: Tensor) -> Batch: ...


@dataclass(frozen=True)
class StoredImages:
    """Images of 0 to 255 (N, C, H, W), uint8, and their labels, int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> StoredImages:
        return StoredImages(self.images.to(device), self.labels.to(device))

    def take(self, index: Tensor) -> Batch:
        return self.images[index], self.labels[index]


@dataclass(frozen=True)
class SyntheticImages:
    """Synthetic images, generated when they are read: the smooth pattern of their class, shifted, with noise."""

    patterns: Tensor
    """(classes, C, H, W), int16."""
    noise: Tensor
    """(TILES, C, H, W), int16."""
    samples: int
    first: int
    """Index of the first sample: training and validation have none in common."""
    seed: int

    def __len__(self) -> int:
        return self.samples

    def to(self, device: torch.device) -> SyntheticImages:
        return SyntheticImages(self.patterns.to(device), self.noise.to(device), self.samples, self.first, self.seed)

    def take(self, index: Tensor) -> Batch:
        classes, _, side, _ = self.patterns.shape
        labels = index % classes
        draws = seeded.uniform(index + self.first, 5, self.seed, Purpose.PLACE)
        tile = (draws[:, 4] * TILES).long()
        near, far = (draws[:, :2] * (side // 4 + 1)).long(), (draws[:, 2:4] * side).long()
        images = rolled(self.patterns[labels], near) + rolled(self.noise[tile], far)
        return images.clamp_(0, 255).to(torch.uint8), labels


def rolled(images: Tensor, by: Tensor) -> Tensor:
    """Roll square images, each down and across by its row of `by`."""
    side = torch.arange(images.shape[2], device=images.device)
    rows, columns = ((by[:, axis, None] + side) % len(side) for axis in (0, 1))
    return pick(images, rows, columns)


def synthetic_images(
    classes: int, samples: int, channels: int, side: int, seed: int
) -> tuple[SyntheticImages, SyntheticImages]:
    """Make synthetic images for training, and an eighth as many for validation."""
    generator = torch.Generator().manual_seed(seeded.key_of(seed, Purpose.PATTERN))
    place = torch.linspace(0, 2 * torch.pi, side + 1)[:-1]
    patterns = torch.zeros(classes, channels, side, side)
    for _ in range(3):
        # Whole waves, so that a rolled pattern has no edge.
        waves = torch.randint(0, 4, (2, classes, channels, 1), generator=generator)
        phases = 2 * torch.pi * torch.rand(2, classes, channels, 1, generator=generator)
        down, across = torch.cos(waves * place + phases)
        patterns += 40 * down[..., :, None] * across[..., None, :]
    noise = 32 * torch.randn(
        TILES, channels, side, side, generator=generator.manual_seed(seeded.key_of(seed, Purpose.NOISE))
    )
    tables = (128 + patterns).round().to(torch.int16), noise.round().to(torch.int16)
    return SyntheticImages(*tables, samples, 0, seed), SyntheticImages(*tables, max(1, samples // 8), samples, seed)


class MemorySource:
    """A source of images in memory; the first batches copy them to the device."""

    def __init__(self, store: ImageStore, view: View) -> None:
        self.store = store
        self.view = view
        self.there: tuple[torch.device, ImageStore] | None = None

    def __len__(self) -> int:
        return len(self.store)

    def copy_on(self, device: torch.device) -> ImageStore:
        if self.there is None or self.there[0] != device:
            self.there = device, self.store.to(device)
        return self.there[1]

    def batches(self, order: BatchOrder, device: torch.device) -> Iterator[Batch]:
        store = self.copy_on(device)
        draws = order.split(order.draws(DRAWS, device)) if order.train and self.view.augment != "none" else None
        for batch, index in enumerate(order.split(order.index.to(device))):
            images, labels = store.take(index)
            yield self.view.show(images, draws[batch] if draws else None), labels
