"""Augmentation and normalisation of images on the device, a whole batch at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Augment = Literal["none", "flip", "crop", "resized"]

DRAWS = 5
"""Random numbers per image: across, down, mirrored, area, ratio."""
AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
MIDDLE = 0.875
"""Share of a side that validation uses of images whose training uses random parts."""


@dataclass(frozen=True)
class View:
    """Presentation of images to the model: augmentation, size and normalisation."""

    augment: Augment
    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def normalise(self, images: Tensor) -> Tensor:
        """Turn images of 0 to 255, (N, C, H, W), into float32 of mean 0 and deviation 1."""
        mean, scale = on_device(self.mean, self.std, images.device)
        return (images - mean).mul_(scale)

    def show(self, images: Tensor, draws: Tensor | None) -> Tensor:
        """Augment stored images by their rows of `draws` (None in validation), scale and normalise them."""
        if self.augment == "resized":
            boxes = middle(images) if draws is None else random_boxes(draws)
            return self.normalise(cut(images, boxes, None if draws is None else draws[:, 2] < 0.5, self.size))
        if draws is not None and self.augment == "crop":
            images = moved(images, draws)
        elif draws is not None and self.augment == "flip":
            images = torch.where(draws[:, 2, None, None, None] < 0.5, images.flip(3), images)
        if images.shape[2:] != self.size:
            images = F.interpolate(images.float(), self.size, mode="bilinear", antialias=True, align_corners=False)
        return self.normalise(images)


@lru_cache
def on_device(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return offset and factor on the device; cached, because a copy to the device makes it wait."""
    constants = torch.tensor([[255 * m for m in mean], [1 / (255 * s) for s in std]], device=device)
    return constants[0].view(1, -1, 1, 1), constants[1].view(1, -1, 1, 1)


def moved(images: Tensor, draws: Tensor) -> Tensor:
    """Shift images by up to an eighth of their sides, filled with black, and mirror some."""
    height, width = images.shape[2:]
    down, across = height // 8, width // 8
    columns = (draws[:, :1] * (2 * across + 1)).long() + torch.arange(width, device=images.device)
    rows = (draws[:, 1:2] * (2 * down + 1)).long() + torch.arange(height, device=images.device)
    columns = torch.where(draws[:, 2:3] < 0.5, columns.flip(1), columns)
    return pick(F.pad(images, (across, across, down, down)), rows, columns)


def pick(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the given rows and columns of each image."""
    _, channels, _, width = images.shape
    images = images.gather(2, rows[:, None, :, None].expand(-1, channels, -1, width))
    return images.gather(3, columns[:, None, None, :].expand(-1, channels, rows.shape[1], -1))


def random_boxes(draws: Tensor) -> Tensor:
    """Return a random part of each image: left, top, width and height as shares of the sides."""
    area = AREA[0] + (AREA[1] - AREA[0]) * draws[:, 3]
    # In float64: a float32 exp may differ in its last bit from place to place in a batch.
    ratio = (RATIO[0] * (math.log(RATIO[1] / RATIO[0]) * draws[:, 4].double()).exp()).float()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    return torch.stack([draws[:, 0] * (1 - width), draws[:, 1] * (1 - height), width, height], 1)


def middle(images: Tensor) -> Tensor:
    """Return the middle of each image as a box."""
    place, side = (torch.full((len(images), 2), value, device=images.device) for value in ((1 - MIDDLE) / 2, MIDDLE))
    return torch.cat([place, side], 1)


def cut(images: Tensor, boxes: Tensor, mirrored: Tensor | None, size: tuple[int, int]) -> Tensor:
    """Return the parts of the images inside the boxes, scaled to one size."""
    height, width = size
    across = (torch.arange(width, device=images.device) + 0.5) / width
    down = (torch.arange(height, device=images.device) + 0.5) / height
    # Not affine_grid: it multiplies matrices, in tf32 where that is allowed, with a result that varies with the batch.
    x, y = 2 * (boxes[:, :1] + boxes[:, 2:3] * across) - 1, 2 * (boxes[:, 1:2] + boxes[:, 3:] * down) - 1
    if mirrored is not None:
        x = torch.where(mirrored[:, None], x.flip(1), x)
    grid = torch.stack([x[:, None, :].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], 3)
    return F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of images of 0 to 255, as shares of 255."""
    count = images.numel() // images.shape[1]
    total = torch.zeros(images.shape[1], dtype=torch.int64)
    squares = torch.zeros_like(total)
    for chunk in images.split(4096):
        values = chunk.int()
        total += values.sum((0, 2, 3))
        squares += values.square().sum((0, 2, 3))
    return from_sums(total.tolist(), squares.tolist(), count)


def from_sums(total: list[int], squares: list[int], count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation from integer sums; the deviation of a constant channel is one level."""
    mean = tuple(t / count / 255 for t in total)
    # Whole numbers as long as possible: no digits are lost in the difference.
    variance = [(count * s - t * t) / (count * count) for t, s in zip(total, squares, strict=True)]
    return mean, tuple(max(math.sqrt(v), 1.0) / 255 for v in variance)
