"""Data of `encke bench codec`: tensors from a file, or generated ones."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from encke.tools.errors import UsageError

CHANNELS, SIDE = 64, 56
Mode = Literal["abs", "rel"]


@dataclass(frozen=True)
class Sample:
    """A tensor and the bound under which it is to be encoded."""

    data: str
    name: str
    tensor: Tensor
    bound: float
    mode: Mode

    @property
    def absolute(self) -> float:
        """The bound as an absolute error."""
        if self.mode == "abs":
            return self.bound
        finite = self.tensor[torch.isfinite(self.tensor)].double()
        return self.bound * float(finite.max() - finite.min())


def smooth_field(shape: tuple[int, int, int, int], generator: torch.Generator) -> Tensor:
    """Return images that are each a sum of four cosines of low frequency."""
    n, c, h, w = shape
    y = torch.linspace(0, 1, h)[:, None]
    x = torch.linspace(0, 1, w)[None, :]
    field = torch.zeros(n * c, h, w)
    for _ in range(4):
        fy, fx, phase = torch.rand(3, n * c, 1, 1, generator=generator)
        field += torch.cos(2 * math.pi * (3 * fy * y + 3 * fx * x + phase))
    return field.view(shape)


def generated(size: float | None, bound: float, mode: Mode, dtype: torch.dtype, device: str) -> list[Sample]:
    """Return ReLU of noise, normal noise and smooth fields, about `size` MiB each; (16, 64, 56, 56) if None."""
    image = CHANNELS * SIDE * SIDE * dtype.itemsize
    n = 16 if size is None else max(1, round(size * 2**20 / image))
    shape = (n, CHANNELS, SIDE, SIDE)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(shape, generator=generator)
    fields = {"relu": noise.relu(), "normal": noise, "smooth": smooth_field(shape, generator)}
    name = "x".join(map(str, shape))
    return [Sample(kind, name, x.to(device, dtype), bound, mode) for kind, x in fields.items()]


def own_bounds(text: str, path: Path) -> dict[str, float]:
    """Return the absolute bounds in a file's metadata: {tensor: {"bound": 0.01}} as JSON."""
    try:
        bounds = {name: entry["bound"] for name, entry in json.loads(text).items() if "bound" in entry}
        if not all(isinstance(bound, int | float) and 0 < bound < math.inf for bound in bounds.values()):
            raise ValueError("a bound is not a positive number")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise UsageError(f"--data {path}: metadata 'meta' must be {{tensor: {{\"bound\": 0.01}}}} ({error})") from error
    return bounds


def from_file(path: Path, bound: float, mode: Mode, dtype: torch.dtype | None, device: str) -> list[Sample]:
    """Return the floating-point tensors of a safetensors file, with the absolute bounds in its metadata.

    The metadata key "meta" holds JSON: {tensor: {"bound": 0.01}}. Other tensors get `bound` in `mode`.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise UsageError(f"--data {path}: no such file")
    samples = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            bounds = own_bounds((file.metadata() or {}).get("meta", "{}"), path)
            for name in file.keys():
                tensor = file.get_tensor(name)
                if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.numel() == 0:
                    continue
                tensor = tensor.to(device, dtype or tensor.dtype)
                own = bounds.get(name)
                samples.append(Sample(path.stem, name, tensor, own or bound, "abs" if own else mode))
    except SafetensorError as error:
        raise UsageError(f"--data {path}: not a safetensors file ({error})") from error
    if not samples:
        raise UsageError(f"--data {path}: no tensor of dtype float16, bfloat16, float32 or float64 in it")
    return samples
