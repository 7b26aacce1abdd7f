"""Augmentation: in memory and in files the same, decided by the sample and the epoch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encke.train.data import augment
from encke.train.data.in_memory import MemorySource, StoredImages
from encke.train.data.sources import batches
from tests.train.data.common import picture, taken


def numbered(count: int = 64, side: int = 16) -> Tensor:
    """Images in which no two pixels are alike."""
    pixels = 1 + torch.arange(side * side).view(1, 1, side, side) % 255
    return pixels.expand(count, 3, side, side).to(torch.uint8)


def positions(image: Tensor, original: Tensor, reach: int) -> list[tuple[bool, int, int]]:
    """The ways to get an image from the original by mirroring and moving it."""
    side = original.shape[-1]
    padded = torch.nn.functional.pad(original, (reach,) * 4)
    every = [
        (mirrored, down, across)
        for mirrored in (False, True)
        for down in range(2 * reach + 1)
        for across in range(2 * reach + 1)
    ]
    windows = ((way, padded[:, way[1] : way[1] + side, way[2] : way[2] + side]) for way in every)
    return [way for way, window in windows if torch.equal(image, window.flip(2) if way[0] else window)]


def test_crop_moves_by_up_to_an_eighth_and_mirrors_half_of_the_images():
    images = numbered(400)
    found = [positions(each, images[0], 2) for each in augment.moved(images, torch.rand(400, 5))]
    assert all(len(ways) == 1 for ways in found)
    ways = Counter(ways[0] for ways in found)
    assert len(ways) == 2 * 5 * 5
    assert 150 < sum(count for way, count in ways.items() if way[0]) < 250


def test_files_are_moved_and_mirrored_as_images_in_memory_are():
    from encke.train.data.pictures import shown

    images, draws = numbered(20), torch.rand(20, 5)
    expected = augment.moved(images, draws)
    for image, row, wanted in zip(images, draws, expected, strict=True):
        pil = Image.fromarray(image.permute(1, 2, 0).numpy())
        assert np.array_equal(shown(pil, "crop", (16, 16), False, row.tolist()), wanted.permute(1, 2, 0))


def test_what_is_done_to_a_sample_depends_on_the_epoch_and_not_on_its_batch():
    view = augment.View("crop", (16, 16), (0.5,) * 3, (0.2,) * 3)
    source = MemorySource(StoredImages(numbered(60), torch.arange(60)), view)

    def by_sample(batch: int, epoch: int) -> Tensor:
        images, labels = (torch.cat(parts) for parts in zip(*taken(source, batch, epoch=epoch), strict=True))
        return images[labels.argsort()]

    first = by_sample(60, 0)
    assert torch.equal(by_sample(15, 0), first)
    assert (by_sample(60, 1) != first).flatten(1).any(1).sum() > 50


def test_flip_mirrors_half_and_moves_none():
    images = numbered(200)
    view = augment.View("flip", (16, 16), (0.0,) * 3, (1 / 255,) * 3)
    shown = view.show(images, torch.rand(200, 5))
    mirrored = [torch.equal(each, images[0].flip(2).float()) for each in shown]
    straight = [torch.equal(each, images[0].float()) for each in shown]
    assert all(a != b for a, b in zip(mirrored, straight, strict=True)) and 60 < sum(mirrored) < 140


def test_resized_parts_have_8_to_100_percent_of_the_area_and_lie_inside():
    boxes = augment.random_boxes(torch.rand(5000, 5))
    left, top, width, height = boxes.unbind(1)
    assert boxes.min() >= 0 and (left + width).max() <= 1 + 1e-6 and (top + height).max() <= 1 + 1e-6
    area, ratio = width * height, width / height
    assert 0.08 <= area.min() + 1e-6 and area.min() < 0.1 and 0.9 < area.max() <= 1
    assert 0.74 < ratio.min() < 0.78 and 1.28 < ratio.max() < 1.34


def test_a_cut_takes_what_is_in_the_box():
    ramp = torch.arange(64.0).expand(1, 1, 64, 64)
    whole = augment.cut(ramp, torch.tensor([[0.0, 0.0, 1.0, 1.0]]), None, (64, 64))
    assert torch.allclose(whole, ramp, atol=1e-3)
    box = torch.tensor([[0.25, 0.5, 0.5, 0.25]])
    part = augment.cut(ramp, box, None, (16, 32))
    assert part.shape == (1, 1, 16, 32)
    assert torch.allclose(part[0, 0, 3], torch.arange(16.0, 48.0), atol=1e-3)
    assert torch.allclose(augment.cut(ramp, box, torch.tensor([True]), (16, 32)), part.flip(3), atol=1e-3)


def test_resized_files_see_the_parts_that_images_in_memory_do():
    from encke.train.data.pictures import shown

    pil, draws = picture(3, 64, 64), torch.rand(8, 5)
    image = torch.from_numpy(np.asarray(pil).copy()).permute(2, 0, 1)[None].expand(8, 3, 64, 64)
    view = augment.View("resized", (16, 16), (0.0,) * 3, (1 / 255,) * 3)
    for row, wanted in zip(draws, view.show(image, draws), strict=True):
        found = shown(pil, "resized", (16, 16), True, row.tolist())
        assert np.abs(found.astype(float) - wanted.permute(1, 2, 0).numpy()).mean() < 4
    middle = shown(pil, "resized", (16, 16), True, None)
    assert np.abs(middle.astype(float) - view.show(image[:1], None)[0].permute(1, 2, 0).numpy()).mean() < 4


def test_a_batch_in_memory_is_few_operations_and_none_that_waits_for_the_device():
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    pixels = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    for mode, most in (("none", 6), ("flip", 15), ("crop", 30), ("resized", 60)):
        view = augment.View(mode, (32, 32), (0.5,) * 3, (0.2,) * 3)
        rest = batches(MemorySource(StoredImages(pixels, torch.zeros(64, dtype=torch.long)), view), 16, seed=0)
        next(rest)
        seen: list[str] = []
        with Counting():
            next(rest)
        assert len(seen) <= most
        assert not any("_local_scalar_dense" in name or "nonzero" in name for name in seen)
