"""Images, folders and batches that the tests of data share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from encke.train.data.sources import Datasets, batches, load
from encke.train.settings import Data

AUGMENTS = ("none", "flip", "crop", "resized")


def taken(source, batch: int, **how) -> list[tuple[Tensor, Tensor]]:
    return list(batches(source, batch, **{"seed": 5, **how}))


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(a, b, strict=True)
    )


def picture(seed: int, height: int = 24, width: int = 24) -> Image.Image:
    """A smooth picture, which JPEG keeps nearly as it is."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def image_folder(root: Path, classes: str = "ab", count: int = 9, ending: str = "png", **size) -> Path:
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            picture(100 * label + i, **size).save(root / name / f"{i}.{ending}")
    return root


def folder_sets(path: Path, **settings) -> Datasets:
    return load(Data(**{"kind": "folder", "path": str(path), "workers": 0, **settings}), 0)
