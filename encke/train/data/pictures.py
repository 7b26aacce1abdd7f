"""Decoding, cropping, scaling and mirroring one image with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from encke.tools.errors import UsageError
from encke.train.data.augment import AREA, MIDDLE, RATIO, Augment

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""File name extensions of images."""

Box = tuple[float, float, float, float]


def rgb(image: Image.Image) -> Image.Image:
    """Decode an image to RGB with 8 bits; transparency is dropped."""
    if image.mode.startswith("I"):
        # Pillow would clip 16 bits at 255 instead of scaling them. Mode I is 32 bits wide and may hold fewer.
        values = np.asarray(image)
        if image.mode != "I" or values.max(initial=0) > 255:
            values = values >> 8
        image = Image.fromarray(values.clip(0, 255).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    # For an image that is already RGB this makes no copy, but decodes it.
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def shown(
    image: Image.Image, augment: Augment, shape: tuple[int, int], scale: bool, draws: Sequence[float] | None
) -> np.ndarray:
    """Return the image as the model sees it, (H, W, 3), augmented by the random numbers `draws` (None in validation).

    With `scale` the middle square (resized: a part) is scaled to `shape`; without it the image must have that shape.
    """
    height, width = shape
    if not scale and image.size != (width, height):
        raise UsageError(
            f"it has {image.width} x {image.height} pixels, others have {width} x {height}: set data.size, "
            "which scales all to one size"
        )
    if augment == "resized":
        box = centred(image.size, MIDDLE, shape) if draws is None else random_box(image.size, draws)
    else:
        box = centred(image.size, 1.0, shape)
    whole = box == (0, 0, *image.size)
    if whole and image.size == (width, height):
        image = rgb(image)
    else:
        box = draft(image, box, shape)
        image = rgb(image).resize((width, height), Image.Resampling.BILINEAR, box=box)
    if draws is not None and augment == "crop":
        across, down = (
            int(u * (2 * (side // 8) + 1)) - side // 8 for u, side in zip(draws[:2], (width, height), strict=True)
        )
        image = image.crop((across, down, across + width, down + height))
    pixels = np.asarray(image)
    return pixels[:, ::-1] if draws is not None and augment != "none" and draws[2] < 0.5 else pixels


def centred(size: tuple[int, int], share: float, shape: tuple[int, int]) -> Box:
    """Return the largest box in the middle with the aspect ratio of `shape`, times `share`."""
    fit = min(size[0] / shape[1], size[1] / shape[0]) * share
    width, height = shape[1] * fit, shape[0] * fit
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, left + width, top + height


def random_box(size: tuple[int, int], draws: Sequence[float]) -> Box:
    """Return a random part of an image: 8 to 100 % of its area, with an aspect ratio of 3/4 to 4/3."""
    area = (AREA[0] + (AREA[1] - AREA[0]) * draws[3]) * size[0] * size[1]
    ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** draws[4]
    width, height = min(math.sqrt(area * ratio), size[0]), min(math.sqrt(area / ratio), size[1])
    left, top = draws[0] * (size[0] - width), draws[1] * (size[1] - height)
    return left, top, left + width, top + height


def draft(image: Image.Image, box: Box, shape: tuple[int, int]) -> Box:
    """Let a JPEG be decoded at a half, quarter or eighth where that is enough for the box at `shape`.

    Returns the box in the image that will be decoded.
    """
    before = image.size
    wanted = before[0] * shape[1] / (box[2] - box[0]), before[1] * shape[0] / (box[3] - box[1])
    found = image.draft(None, (max(1, math.ceil(wanted[0])), max(1, math.ceil(wanted[1]))))
    if found is None:
        return box
    across, down = found[1][2] / before[0], found[1][3] / before[1]
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def complaint(name: str, error: Exception) -> str:
    """Return one line about an image that cannot be used."""
    if isinstance(error, UsageError):
        return f"{name}: {error}"
    if isinstance(error, FileNotFoundError):
        return f"{name}: it is gone since the training started"
    return f"{name}: a broken image ({error_line(error)}): remove it; encke data lmdb skips such files"


def error_line(error: Exception) -> str:
    """Return an error in one line."""
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image"
    return (str(error).splitlines() or [type(error).__name__])[0]
