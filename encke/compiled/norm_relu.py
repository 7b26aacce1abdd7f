"""Batch norm's last step and ReLU in forward graphs, computed by the encoder of the result (kernels/gpu/norm_relu.py).

Inductor fuses both and writes the result; a separate encoder would read it again. A graph that does not match is left
unchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from encke.compiled.masks import layout
from encke.compiled.names import name_of, value
from encke.compiled.rewrites import CASTS, PatternMismatch, arguments, expect_op, other, single, unexpanded


class NormRelu(NamedTuple):
    """Nodes that ReLU's result is computed from: relu((x - mean) * invstd * weight + bias)."""

    x: Node
    mean: Node
    invstd: Node
    weight: Node
    bias: Node


def find_norm_relu(relu: Node) -> NormRelu | None:
    """Return the operands of ReLU's result if it is that of a batch norm in bf16; else None."""
    if name_of(relu.target) != "relu" or value(relu).dtype != torch.bfloat16:
        return None
    try:
        found = _match(relu)
    except PatternMismatch:
        return None
    t, x, vectors = value(relu), value(found.x), [value(node) for node in found[1:]]
    alike = x.dtype == t.dtype and layout(x) == layout(t)
    return found if alike and all(v.dtype == torch.float32 and v.numel() == t.shape[1] for v in vectors) else None


def _match(relu: Node) -> NormRelu:
    """Match the decomposition of batch norm's last step, in which each value has one reader."""
    cast = alone(relu.args[0], *CASTS)
    shifted = alone(arguments(cast)[0], "add")
    scaled = alone(shifted.args[0], "mul")
    product = alone(scaled.args[0], "mul")
    centred = alone(product.args[0], "sub")
    x = single([centred.args[0]])
    if name_of(x.target) in CASTS:
        x = arguments(x)[0]
    invstd, mean = expect_op(other(product, [centred]), "rsqrt"), single([centred.args[1]])
    return NormRelu(x, mean, invstd, unexpanded(scaled.args[1]), unexpanded(shifted.args[1]))


def alone(node: object, *names: str) -> Node:
    """Return the node if it calls one of these operations and has one reader, else raise `PatternMismatch`."""
    if not isinstance(node, Node) or name_of(node.target) not in names or len(node.users) != 1:
        raise PatternMismatch
    return node
