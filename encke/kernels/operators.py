"""The kernels as operators, `torch.ops.encke.*`: for tensor subclasses, fake tensors and traced code.

A format travels as a list of numbers. `dispatched` has the functions of a backend and calls the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from encke.kernels.backends import Backend, backend_for
from encke.kernels.formats import BoundedFormat, DualFormat, GroupFormat, LogFormat, Seed
from encke.kernels.plans import GroupPlan

_library = torch.library.Library("encke", "FRAGMENT")
SCHEMAS: dict[str, str] = {}
"""Schemas of the operators in this file."""


def register(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> None:
    """Register an operator: "name(arguments) -> results", its implementation on all devices, and its fake."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.register_fake(f"encke::{name}", fake, lib=_library)
    _library.impl(name, function, "CompositeExplicitAutograd")


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function, under its own name, as an operator with these arguments and results."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        SCHEMAS[function.__name__] = schema
        register(function.__name__ + schema, function, fake)
        return function

    return decorate


def plan_of(data: Tensor, format: list[int], numel: int) -> GroupPlan:
    return backend_for(data.device.type).group_plan(GroupFormat.from_numbers(format), numel, data.device)


def new_bytes(like: Tensor, size: Any) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)


def decoded(like: Tensor, numel: Any, dtype: torch.dtype, mask: bool) -> Tensor:
    return like.new_empty(numel, dtype=torch.bool if mask else dtype)


@operator(
    "(Tensor x, int[] format, int seed) -> Tensor",
    lambda x, format, seed: new_bytes(x, GroupFormat.from_numbers(format).nbytes(x.numel())),
)
def group_encode(x: Tensor, format: list[int], seed: int) -> Tensor:
    return plan_of(x, format, x.numel()).encode(x.reshape(-1), seed)


@operator(
    "(Tensor data, int[] format, SymInt numel, int seed) -> Tensor",
    lambda data, format, numel, seed: decoded(data, numel, GroupFormat.from_numbers(format).dtype, False),
)
def group_decode(data: Tensor, format: list[int], numel: int, seed: int) -> Tensor:
    return plan_of(data, format, numel).decode(data, seed)


@operator(
    "(Tensor data, int[] format, SymInt numel) -> Tensor",
    lambda data, format, numel: decoded(data, numel, torch.bool, True),
)
def group_mask(data: Tensor, format: list[int], numel: int) -> Tensor:
    return plan_of(data, format, numel).mask(data)


def _bounded_sizes(x: Tensor, format: list[float], seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    size = capacity if capacity >= 0 else torch.library.get_ctx().new_dynamic_size()
    return new_bytes(x, BoundedFormat.meta_size(x.numel())), new_bytes(x, size)


@operator("(Tensor x, float[] format, int seed, int capacity) -> (Tensor, Tensor)", _bounded_sizes)
def bounded_encode(x: Tensor, format: list[float], seed: int, capacity: int) -> tuple[Tensor, Tensor]:
    return backend_for(x.device.type).bounded_encode(x, BoundedFormat.from_numbers(format), seed, capacity)


@operator(
    "(Tensor meta, Tensor payload, float[] format, SymInt numel, bool mask) -> Tensor",
    lambda meta, payload, format, numel, mask: decoded(meta, numel, BoundedFormat.from_numbers(format).dtype, mask),
)
def bounded_decode(meta: Tensor, payload: Tensor, format: list[float], numel: int, mask: bool) -> Tensor:
    backend = backend_for(meta.device.type)
    return backend.bounded_decode(meta, payload, BoundedFormat.from_numbers(format), numel, mask)


@operator(
    "(Tensor x, int[] format, int seed) -> Tensor",
    lambda x, format, seed: new_bytes(x, DualFormat.from_numbers(format).nbytes(x.numel())),
)
def dual_encode(x: Tensor, format: list[int], seed: int) -> Tensor:
    return backend_for(x.device.type).dual_encode(x, DualFormat.from_numbers(format), seed)


@operator(
    "(Tensor data, int[] format, SymInt numel, bool mask) -> Tensor",
    lambda data, format, numel, mask: decoded(data, numel, DualFormat.from_numbers(format).dtype, mask),
)
def dual_decode(data: Tensor, format: list[int], numel: int, mask: bool) -> Tensor:
    return backend_for(data.device.type).dual_decode(data, DualFormat.from_numbers(format), numel, mask)


@operator("(Tensor x, float[] format, int seed) -> Tensor", lambda x, format, seed: new_bytes(x, x.numel()))
def log_encode(x: Tensor, format: list[float], seed: int) -> Tensor:
    return backend_for(x.device.type).log_encode(x, LogFormat.from_numbers(format), seed)


@operator(
    "(Tensor data, float[] format, int seed) -> Tensor",
    lambda data, format, seed: decoded(data, data.numel(), LogFormat.from_numbers(format).dtype, False),
)
def log_decode(data: Tensor, format: list[float], seed: int) -> Tensor:
    return backend_for(data.device.type).log_decode(data, LogFormat.from_numbers(format), seed)


@operator("(Tensor x, int bits) -> Tensor", lambda x, bits: new_bytes(x, (x.numel() * bits + 7) // 8))
def bits_encode(x: Tensor, bits: int) -> Tensor:
    return backend_for(x.device.type).bits_encode(x, bits)


@operator("(Tensor data, int bits, SymInt numel) -> Tensor", lambda data, bits, numel: new_bytes(data, numel))
def bits_decode(data: Tensor, bits: int, numel: int) -> Tensor:
    return backend_for(data.device.type).bits_decode(data, bits, numel)


class DispatchedPlan(GroupPlan):
    """Plan whose methods are operators."""

    __slots__ = ()

    def encode(self, x: Tensor, seed: Seed) -> Tensor:
        return torch.ops.encke.group_encode(x, self.format.numbers(), seed)

    def decode(self, data: Tensor, seed: Seed) -> Tensor:
        return torch.ops.encke.group_decode(data, self.format.numbers(), self.numel, seed)

    def mask(self, data: Tensor) -> Tensor:
        return torch.ops.encke.group_mask(data, self.format.numbers(), self.numel)

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        data.copy_(self.encode(x, seed))

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        out.copy_(self.decode_strided(data, seed, out.shape, out.stride()))

    def mask_into(self, data: Tensor, out: Tensor) -> None:
        out.copy_(self.mask(data).as_strided(out.shape, out.stride()))


def _dispatched(name: str) -> Callable[..., Any]:
    """Return a function that calls an operator with formats as numbers."""

    def call(*args: Any) -> Any:
        numbers = [arg.numbers() if hasattr(arg, "numbers") else arg for arg in args]
        return getattr(torch.ops.encke, name)(*numbers)

    return call


dispatched = cast(
    Backend,
    SimpleNamespace(
        NAME="operators",
        group_plan=lambda format, numel, device, seed_table=False: DispatchedPlan(format, numel, device),
        **{name: _dispatched(name) for name in SCHEMAS if not name.startswith("group")},
    ),
)
