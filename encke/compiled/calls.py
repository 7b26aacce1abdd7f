"""Calls that a graph makes for one quantised tensor: with the codec as a constant, or read at run time."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.fx import Node

from encke.compiled.norm_relu import NormRelu
from encke.kernels import GroupFormat

Call = tuple[Any, tuple[Any, ...]]
"""An operator and its arguments."""


class Calls(Protocol):
    """Calls for one saved tensor. `data` is the value that passes from the forward to the backward graph."""

    def encode(self, x: Node, measures: bool) -> Call:
        """Pack; an encoder that `measures` also returns variance and mean of the channels."""
        ...

    def encode_norm_relu(self, norm: NormRelu) -> Call:
        """Compute and pack a batch norm's ReLU; the second result is the unpacked ReLU."""
        ...

    def decode(self, data: Node) -> Call: ...
    def mask(self, data: Node) -> Call: ...
    def gate(self, grad: Node, data: Node, other: Node | None) -> Call: ...
    def norm_sums(self, grad: Node, data: Node, statistics: tuple[Node, Node, Node]) -> Call: ...
    def norm_apply(self, grad: Node, data: Node, sums: Node) -> Call: ...


class ConstantCalls:
    """Calls of ops.py, for CUDA graphs: format and size are constants, seeds come from the device."""

    def __init__(
        self, seeds: tuple[Node, Node], row: int, format: GroupFormat, layout: tuple[list[Any], list[Any]],
        order: list[int],
    ) -> None:  # fmt: skip
        self.forward_seeds, self.seeds = seeds
        self.settings = (row, format.numbers())
        self.layout = (*layout, order)

    def encode(self, x: Node, measures: bool) -> Call:
        ops = torch.ops.encke
        operator = ops.site_encode_moments.default if measures else ops.site_encode.default
        return operator, (x, self.forward_seeds, *self.settings, self.layout[2])

    def encode_norm_relu(self, norm: NormRelu) -> Call:
        operator = torch.ops.encke.site_encode_norm_relu.default
        return operator, (*norm, self.forward_seeds, *self.settings, self.layout[2])

    def decode(self, data: Node) -> Call:
        return torch.ops.encke.site_decode.default, (data, self.seeds, *self.settings, *self.layout)

    def mask(self, data: Node) -> Call:
        return torch.ops.encke.site_mask.default, (data, self.settings[1], *self.layout)

    def gate(self, grad: Node, data: Node, other: Node | None) -> Call:
        return torch.ops.encke.site_gate.default, (grad, data, other, self.settings[1])

    def norm_sums(self, grad: Node, data: Node, statistics: tuple[Node, Node, Node]) -> Call:
        return torch.ops.encke.norm_sums.default, (grad, data, self.seeds, *statistics, None, *self.settings, [])

    def norm_apply(self, grad: Node, data: Node, sums: Node) -> Call:
        return torch.ops.encke.norm_apply.default, (grad, data, self.seeds, sums, None, *self.settings, [])


class RunTimeCalls:
    """Calls of payloads.py: `data` is a handle to the payload, whose settings were chosen in the forward pass."""

    def __init__(self, graph: int, row: int, layout: tuple[list[Any], list[Any]], dtype: torch.dtype) -> None:
        self.settings = (graph, row)
        self.layout = layout
        self.dtype = dtype

    def encode(self, x: Node, measures: bool) -> Call:
        ops = torch.ops.encke
        return ops.site_pack_moments.default if measures else ops.site_pack.default, (x, *self.settings)

    def encode_norm_relu(self, norm: NormRelu) -> Call:
        return torch.ops.encke.site_pack_norm_relu.default, (*norm, *self.settings)

    def decode(self, data: Node) -> Call:
        return torch.ops.encke.packed_decode.default, (data, *self.layout, self.dtype)

    def mask(self, data: Node) -> Call:
        return torch.ops.encke.packed_mask.default, (data, *self.layout)

    def gate(self, grad: Node, data: Node, other: Node | None) -> Call:
        return torch.ops.encke.packed_gate.default, (grad, data, other)

    def norm_sums(self, grad: Node, data: Node, statistics: tuple[Node, Node, Node]) -> Call:
        return torch.ops.encke.packed_norm_sums.default, (grad, data, *statistics, None)

    def norm_apply(self, grad: Node, data: Node, sums: Node) -> Call:
        return torch.ops.encke.packed_norm_apply.default, (grad, data, sums, None)
