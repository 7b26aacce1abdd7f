"""Kernels as operators, `torch.ops.encke.*`, for tensor subclasses, fake tensors and traced code.

Operators take a format as a list of numbers. `dispatched` has the functions of a backend and calls the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from encke.kernels.backends import Backend, backend_for
from encke.kernels.formats import BoundedFormat, DualFormat, Format, GroupFormat, LogFormat, Seed
from encke.kernels.plans import GroupPlan

_library = torch.library.Library("encke", "FRAGMENT")


def register(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()
) -> None:
    """Register an operator: "name(arguments) -> results", its implementation on all devices, and its fake."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.register_fake(f"encke::{name}", fake, lib=_library)
    _library.impl(name, function, "CompositeExplicitAutograd")


def plan_of(data: Tensor, format: list[int], numel: int) -> GroupPlan:
    return backend_for(data.device.type).group_plan(GroupFormat.from_numbers(format), numel, data.device)


def new_bytes(like: Tensor, size: Any) -> Tensor:
    return like.new_empty(size, dtype=torch.uint8)


def decoded(like: Tensor, numel: Any, dtype: torch.dtype, mask: bool = False) -> Tensor:
    return like.new_empty(numel, dtype=torch.bool if mask else dtype)


def bounded_sizes(x: Tensor, format: list[float], seed: int) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return new_bytes(x, BoundedFormat.meta_size(x.numel())), new_bytes(x, size)


def backend_function(name: str, format: type[Format]) -> Callable[..., Any]:
    """Return a function that rebuilds the format from its numbers and calls `name` of the tensor's backend."""

    def call(first: Tensor, *others: Any) -> Any:
        arguments = [format.from_numbers(each) if isinstance(each, list) else each for each in others]
        return getattr(backend_for(first.device.type), name)(first, *arguments)

    return call


register(
    "group_encode(Tensor x, int[] format, int seed) -> Tensor",
    lambda x, format, seed: plan_of(x, format, x.numel()).encode(x.reshape(-1), seed),
    lambda x, format, seed: new_bytes(x, GroupFormat.from_numbers(format).nbytes(x.numel())),
)
register(
    "group_decode(Tensor data, int[] format, SymInt numel, int seed) -> Tensor",
    lambda data, format, numel, seed: plan_of(data, format, numel).decode(data, seed),
    lambda data, format, numel, seed: decoded(data, numel, GroupFormat.from_numbers(format).dtype),
)
register(
    "group_mask(Tensor data, int[] format, SymInt numel) -> Tensor",
    lambda data, format, numel: plan_of(data, format, numel).mask(data),
    lambda data, format, numel: decoded(data, numel, torch.bool),
)
# Schema, format class and fake of the functions that all backends have.
OPERATORS: dict[str, tuple[str, type[Format], Callable[..., Any]]] = {
    "bounded_encode": (
        "(Tensor x, float[] format, int seed) -> (Tensor, Tensor)", BoundedFormat, bounded_sizes
    ),
    "bounded_decode": (
        "(Tensor meta, Tensor payload, float[] format, SymInt numel, bool mask) -> Tensor", BoundedFormat,
        lambda meta, payload, format, numel, mask: decoded(meta, numel, BoundedFormat.from_numbers(format).dtype, mask),
    ),
    "dual_encode": (
        "(Tensor x, int[] format, int seed) -> Tensor", DualFormat,
        lambda x, format, seed: new_bytes(x, DualFormat.from_numbers(format).nbytes(x.numel())),
    ),
    "dual_decode": (
        "(Tensor data, int[] format, SymInt numel, bool mask) -> Tensor", DualFormat,
        lambda data, format, numel, mask: decoded(data, numel, DualFormat.from_numbers(format).dtype, mask),
    ),
    "log_encode": (
        "(Tensor x, float[] format, int seed) -> Tensor", LogFormat, lambda x, format, seed: new_bytes(x, x.numel())
    ),
    "log_decode": (
        "(Tensor data, float[] format, int seed) -> Tensor", LogFormat,
        lambda data, format, seed: decoded(data, data.numel(), LogFormat.from_numbers(format).dtype),
    ),
    "bits_encode": (
        "(Tensor x, int bits) -> Tensor", Format, lambda x, bits: new_bytes(x, (x.numel() * bits + 7) // 8)
    ),
    "bits_decode": (
        "(Tensor data, int bits, SymInt numel) -> Tensor", Format, lambda data, bits, numel: new_bytes(data, numel)
    ),
}  # fmt: skip
for name, (schema, format, fake) in OPERATORS.items():
    register(name + schema, backend_function(name, format), fake)


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
    """Return a function that calls the operator `name` and passes formats as numbers."""

    def call(*args: Any) -> Any:
        numbers = [arg.numbers() if hasattr(arg, "numbers") else arg for arg in args]
        return getattr(torch.ops.encke, name)(*numbers)

    return call


dispatched = cast(
    Backend,
    SimpleNamespace(
        NAME="operators",
        group_plan=lambda format, numel, device, seed_table=False: DispatchedPlan(format, numel, device),
        **{name: _dispatched(name) for name in OPERATORS},
    ),
)
