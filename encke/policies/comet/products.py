"""Weight gradients as products: the factors of each, read from the nodes of the autograd graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from encke.capture.nodes import VIEWS, operation_name
from encke.policies.comet.theory import Product
from encke.torch_internals import saved_setting

WeightGradient = Callable[[Tensor, Tensor], Tensor]
"""Computes a weight's gradient from output gradient and input."""


def leaf_behind(node: Any) -> Tensor | None:
    """Return the parameter behind nothing but views and casts; None for a computed or frozen weight."""
    while node is not None:
        if hasattr(node, "variable"):
            return node.variable
        if operation_name(node) not in VIEWS:
            return None
        node = node.next_functions[0][0]
    return None


class WeightProduct(NamedTuple):
    """A weight's gradient as a product of output gradient and input."""

    product: Product
    weight: Tensor
    channel: int
    """The dimension of the output gradient that has the channels."""
    weight_gradient: WeightGradient


def convolution(node: Any, slot: str, size: tuple[int, ...]) -> WeightProduct | None:
    """Return a convolution's weight gradient, read from its node."""
    weight = leaf_behind(node.next_functions[1][0])
    if slot != "input" or weight is None or len(size) != weight.dim():
        return None
    stride, padding, dilation = (tuple(saved_setting(node, name)) for name in ("stride", "padding", "dilation"))
    transposed, groups = saved_setting(node, "transposed"), saved_setting(node, "groups")
    extra = tuple(saved_setting(node, "output_padding"))
    kernel, plane = tuple(weight.shape[2:]), tuple(size[2:])
    shape = weight.shape

    def extent(d: int) -> int:
        return dilation[d] * (kernel[d] - 1) + 1

    if transposed:
        other = tuple((n - 1) * stride[d] - 2 * padding[d] + extent(d) + extra[d] for d, n in enumerate(plane))
        product = Product(size[0], other, plane, kernel, stride, padding, dilation)
    else:
        other = tuple((n + 2 * padding[d] - extent(d)) // stride[d] + 1 for d, n in enumerate(plane))
        product = Product(size[0], plane, other, kernel, stride, padding, dilation)

    def weight_gradient(g: Tensor, x: Tensor) -> Tensor:
        like = g.new_empty(shape)
        arguments = (None, stride, padding, dilation, transposed, extra, groups, (False, True, False))
        return torch.ops.aten.convolution_backward(g, x, like, *arguments)[1]

    return WeightProduct(product, weight, 1, weight_gradient)


def matrix(node: Any, slot: str, size: tuple[int, ...]) -> WeightProduct | None:
    """Return the weight gradient of mm or addmm, with the weight on either side."""
    offset = 1 if operation_name(node) == "Addmm" else 0
    if offset and saved_setting(node, "alpha", 1) != 1:
        return None
    first = slot in ("self", "mat1")
    weight = leaf_behind(node.next_functions[offset + (1 if first else 0)][0])
    if weight is None or len(size) != 2:
        return None
    if first:
        return WeightProduct(Product(size[0]), weight, 1, lambda g, x: x.t() @ g)
    return WeightProduct(Product(size[1]), weight, 0, lambda g, x: g @ x.t())


def linear(node: Any, slot: str, size: tuple[int, ...]) -> WeightProduct | None:
    """Return the weight gradient of a linear layer as one operation: rows are all dimensions but the last."""
    weight = leaf_behind(node.next_functions[1][0])
    if slot != "input" or weight is None or not size:
        return None
    rows = math.prod(size[:-1])
    return WeightProduct(Product(rows), weight, len(size) - 1, lambda g, x: g.flatten(0, -2).t() @ x.flatten(0, -2))


def scale(node: Any, slot: str, size: tuple[int, ...]) -> WeightProduct | None:
    """Return the gradient of a weight that scales the last dimension, as a norm's weight does."""
    weight = leaf_behind(node.next_functions[slot == "self"][0])
    if weight is None or not size or tuple(weight.shape) != (size[-1],):
        return None
    rows = math.prod(size[:-1])
    return WeightProduct(Product(rows), weight, len(size) - 1, lambda g, x: (g * x).flatten(0, -2).sum(0))


PRODUCTS: dict[str, Callable[[Any, str, tuple[int, ...]], WeightProduct | None]] = {
    "Convolution": convolution,
    "Mm": matrix,
    "Addmm": matrix,
    "Linear": linear,
    "Mul": scale,
}
"""Operations whose backward computes a weight's gradient as a product -> function of (node, slot, input size)."""
