"""Choice of a backend for each type of device."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from encke.kernels import reference
from encke.kernels.formats import BoundedFormat, DualFormat, GroupFormat, LogFormat, PackedUse, RowUse, Seed, UsualUse
from encke.kernels.plans import Gate, GroupPlan
from encke.kernels.reference import slow

COMPILERS = {"cpu": "numba", "cuda": "triton"}
"""Package that compiles the kernels, by type of device."""
INSTALL = {"cpu": "install encke[cpu] for speed", "cuda": "install triton for speed"}


class Backend(Protocol):
    """Functions that every backend has; `reference` documents them."""

    NAME: str

    def group_plan(
        self, format: GroupFormat, numel: int, device: torch.device, seed_table: bool = False
    ) -> GroupPlan: ...
    def bounded_encode(self, x: Tensor, format: BoundedFormat, seed: int) -> tuple[Tensor, Tensor]: ...
    def bounded_decode(
        self, meta: Tensor, payload: Tensor, format: BoundedFormat, numel: int, mask: bool
    ) -> Tensor: ...
    def dual_encode(self, x: Tensor, format: DualFormat, seed: int) -> Tensor: ...
    def dual_decode(self, data: Tensor, format: DualFormat, numel: int, mask: bool) -> Tensor: ...
    def log_encode(self, x: Tensor, format: LogFormat, seed: int) -> Tensor: ...
    def log_decode(self, data: Tensor, format: LogFormat, seed: int) -> Tensor: ...
    def bits_encode(self, x: Tensor, bits: int) -> Tensor: ...
    def bits_decode(self, data: Tensor, bits: int, numel: int) -> Tensor: ...


class GraphBackend(Backend, Protocol):
    """Functions that compiled graphs call as well."""

    def site_seeds(
        self, sites: tuple[int, ...], salts: tuple[int, ...], step: int, rank: int, device: torch.device
    ) -> Tensor: ...
    def norm_sums(
        self, grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, plan: GroupPlan, seed: Seed,
        out: Tensor, gate: Gate | None = None,
    ) -> None: ...  # fmt: skip
    def norm_apply(
        self, grad: Tensor, data: Tensor, sums: Tensor, plan: GroupPlan, seed: Seed, out: Tensor,
        gate: Gate | None = None,
    ) -> None: ...  # fmt: skip


@dataclass(frozen=True)
class BackendChoice:
    """Choice of the backend for a type of device, with the reason."""

    device: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.device.upper().replace('CUDA', 'GPU')} kernels: {self.name}, {self.reason}"


def choose_backend(device: str) -> BackendChoice:
    """Choose the backend for a type of device ("cpu", "cuda"): the fast one if its compiler is installed."""
    if os.environ.get("ENCKE_KERNELS") == "reference":
        return BackendChoice(device, reference.NAME, "as ENCKE_KERNELS asks")
    compiler = COMPILERS.get(device)
    if compiler is None:
        return BackendChoice(device, reference.NAME, "there are no faster ones for this type of device")
    if importlib.util.find_spec(compiler) is None:
        return BackendChoice(device, reference.NAME, INSTALL[device])
    return BackendChoice(device, compiler, f"version {importlib.metadata.version(compiler)}")


def describe_backends() -> list[BackendChoice]:
    """Return the backends that serve CPU and CUDA tensors, with the reasons.

    >>> [choice.device for choice in describe_backends()]
    ['cpu', 'cuda']
    """
    return [choose_backend(device) for device in COMPILERS]


@functools.cache
def backend_for(device: str) -> GraphBackend:
    """Return the backend for tensors on a type of device. It is imported on the first call."""
    choice = choose_backend(device)
    if choice.name == "numba":
        from encke.kernels import cpu

        return cpu
    if choice.name == "triton":
        from encke.kernels import gpu

        return gpu
    if choice.reason in INSTALL.values():
        slow.hints[device] = str(choice)
    return reference


def compile_ahead(
    uses: Iterable[PackedUse] = (), rows: Iterable[RowUse] = (), usual: Iterable[UsualUse] = (),
    rates: Iterable[int] = (),
) -> None:  # fmt: skip
    """Start to compile kernels for a GPU in the background and return at once.

    Args:
        uses: Uses of packed tensors, with the numbers of bits that they may have.
        rows: Norms over rows.
        usual: Uses of tensors by typical models.
        rates: Numbers of bits to compile `rows` and `usual` for, the most urgent first.
    """
    if choose_backend("cuda").name == "triton":
        from encke.kernels.gpu import compiler

        compiler.request(uses, rows, usual, tuple(rates))


def wait_for_kernels() -> None:
    """Wait until the background processes have compiled all requested kernels."""
    compiler = sys.modules.get("encke.kernels.gpu.compiler")
    if compiler is not None:
        compiler.wait()
