"""The operations under the codecs: one schema each, three implementations that decode to identical values.

`torch.ops.encke.*` picks `cpu` (numba) for CPU tensors and `gpu` (Triton) for CUDA tensors where these are installed,
and `reference` (plain torch) everywhere else. The format is explained in docs/design.md.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from encke.kernels import reference
from encke.kernels.reference import FLOATS, dp_sizes, gq_sizes, meta_size

__all__ = ["FLOATS", "SCHEMAS", "dp_sizes", "gq_sizes", "implementation", "meta_size", "of"]

SCHEMAS = {
    "eb_encode": "(Tensor x, float bound, float rel, bool stochastic, int seed, bool bitmap, int capacity)"
    " -> (Tensor, Tensor)",
    "eb_decode": "(Tensor meta, Tensor payload, int numel, ScalarType dtype, bool mask, bool bitmap=True) -> Tensor",
    "gq_encode": "(Tensor x, int bits, int group, int seed, int stride=1, bool signs=False) -> Tensor",
    "gq_decode": "(Tensor data, int numel, int bits, int group, ScalarType dtype, bool mask, int seed, int stride=1,"
    " bool signs=False) -> Tensor",
    "dp_encode": "(Tensor x, int height, int width, int block, int bits, bool masked, int seed) -> Tensor",
    "dp_decode": "(Tensor data, int numel, int height, int width, int block, int bits, bool masked, ScalarType dtype,"
    " bool mask) -> Tensor",
    "lp_encode": "(Tensor x, float step, float far, int seed) -> Tensor",
    "lp_decode": "(Tensor data, float step, float far, float shift, int seed, ScalarType dtype) -> Tensor",
    "bits_encode": "(Tensor x, int bits) -> Tensor",
    "bits_decode": "(Tensor data, int bits, int numel) -> Tensor",
}


def implementation(device: str) -> ModuleType:
    """The module that serves tensors on `device` ("cpu", "cuda"): the fast one where its compiler is installed."""
    name, needs = {"cpu": ("cpu", "numba"), "cuda": ("gpu", "triton")}.get(device, ("reference", "torch"))
    if os.environ.get("ENCKE_KERNELS") == "reference" or importlib.util.find_spec(needs) is None:
        return reference
    if name == "cpu":
        from encke.kernels.cpu import launch as cpu

        return cpu
    if name == "gpu":
        from encke.kernels.gpu import launch as gpu

        return gpu
    return reference


@functools.cache
def of(device: str) -> ModuleType:
    """The same, looked up once: what codecs call, past the dispatcher, which costs more than a launch."""
    return implementation(device)


def _eb_encode_fake(
    x: Tensor, bound: float, rel: float, stochastic: bool, seed: int, bitmap: bool, capacity: int
) -> tuple[Tensor, Tensor]:
    size = capacity if capacity >= 0 else torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(meta_size(x.numel()), dtype=torch.uint8), x.new_empty(size, dtype=torch.uint8)


def _decode_fake(numel: int, dtype: torch.dtype, mask: bool, like: Tensor) -> Tensor:
    return like.new_empty(numel, dtype=torch.bool if mask else dtype)


_FAKES: dict[str, Callable[..., Any]] = {
    "eb_encode": _eb_encode_fake,
    "eb_decode": lambda meta, payload, numel, dtype, mask, bitmap=True: _decode_fake(numel, dtype, mask, meta),
    "gq_encode": lambda x, bits, group, seed, stride=1, signs=False: x.new_empty(
        gq_sizes(x.numel(), bits, group, x.dtype, stride)[2], dtype=torch.uint8
    ),
    "gq_decode": lambda data, numel, bits, group, dtype, mask, *rest, **more: _decode_fake(numel, dtype, mask, data),
    "dp_encode": lambda x, height, width, block, bits, masked, seed: x.new_empty(
        dp_sizes(x.numel(), height, width, block, bits, masked, x.dtype)[4], dtype=torch.uint8
    ),
    "dp_decode": lambda data, numel, height, width, block, bits, masked, dtype, mask: _decode_fake(
        numel, dtype, mask, data
    ),
    "lp_encode": lambda x, step, far, seed: x.new_empty(x.numel(), dtype=torch.uint8),
    "lp_decode": lambda data, step, far, shift, seed, dtype: data.new_empty(data.numel(), dtype=dtype),
    "bits_encode": lambda x, bits: x.new_empty((x.numel() * bits + 7) // 8, dtype=torch.uint8),
    "bits_decode": lambda data, bits, numel: data.new_empty(numel, dtype=torch.uint8),
}


class _Late:
    """Imports a device's implementation at its first call, so that `import encke` stays quick."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.function = self.first

    def first(self, *args):
        self.function = getattr(of(self.device), self.name)
        return self.function(*args)

    def __call__(self, *args):
        return self.function(*args)


_library = torch.library.Library("encke", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"encke::{_name}", _FAKES[_name], lib=_library)
    _library.impl(_name, _Late(_name, "cpu"), "CPU")
    _library.impl(_name, _Late(_name, "cuda"), "CUDA")
    _library.impl(_name, getattr(reference, _name), "CompositeExplicitAutograd")
