"""Batch norm's last step and ReLU in forward graphs, computed by the encoder of the result (kernels/gpu/norm_relu.py).

Inductor fuses normalisation, a residual sum and ReLU, and writes the result; an encoder behind that would read it
again. A graph that does not look as expected stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from encke.compiled.masks import layout
from encke.compiled.names import name_of, value
from encke.compiled.rewrites import CASTS, PatternMismatch, arguments, expect_op, other, single, unexpanded


@dataclass(frozen=True)
class NormRelu:
    """What ReLU's result is computed from: relu((x - mean) * invstd * weight + bias + added)."""

    x: Node
    mean: Node
    invstd: Node
    weight: Node
    bias: Node
    added: Node | None
    """The other operand of a residual sum, if there is one."""

    def nodes(self) -> tuple[Node, Node, Node, Node, Node]:
        """Return all nodes that are always there."""
        return self.x, self.mean, self.invstd, self.weight, self.bias


def find_norm_relu(relu: Node) -> NormRelu | None:
    """Return what ReLU's result is computed from, if that is a batch norm's result or a sum of one; else None."""
    if name_of(relu.target) != "relu" or value(relu).dtype != torch.bfloat16:
        return None
    summed = relu.args[0]
    assert isinstance(summed, Node)
    candidates: list[tuple[Node, Node | None]] = [(summed, None)]
    if name_of(summed.target) == "add" and len(summed.users) == 1 and len(arguments(summed)) == 2:
        one, two = arguments(summed)
        # What is computed in passing would have to be written for us.
        candidates = [(a, b) for a, b in ((one, two), (two, one)) if is_stored(b)]
    for normalised, added in candidates:
        try:
            found = _match(normalised, added)
        except PatternMismatch:
            continue
        if fits(found, relu):
            return found
    return None


def is_stored(node: Node) -> bool:
    """Return whether inductor stores a tensor in any case: another ReLU's result, or what several operations read."""
    return name_of(node.target) in ("relu", "getitem") and len(node.users) > 1


def _match(normalised: Node, added: Node | None) -> NormRelu:
    """Match the decomposition of batch norm's last step, each of whose values has one reader."""
    cast = alone(normalised, *CASTS)
    shifted = alone(arguments(cast)[0], "add")
    scaled = alone(shifted.args[0], "mul")
    product = alone(scaled.args[0], "mul")
    centred = alone(product.args[0], "sub")
    x = single([centred.args[0]])
    if name_of(x.target) in CASTS:
        x = arguments(x)[0]
    invstd, mean = expect_op(other(product, [centred]), "rsqrt"), single([centred.args[1]])
    return NormRelu(x, mean, invstd, unexpanded(scaled.args[1]), unexpanded(shifted.args[1]), added)


def alone(node: object, *names: str) -> Node:
    """Return the node if it calls one of these operations and has one reader, else raise `PatternMismatch`."""
    if not isinstance(node, Node) or name_of(node.target) not in names or len(node.users) != 1:
        raise PatternMismatch
    return node


def fits(found: NormRelu, relu: Node) -> bool:
    """Return whether everything has the dtype and the layout that the kernel takes."""
    alike = (found.x,) if found.added is None else (found.x, found.added)
    t, vectors = value(relu), (found.mean, found.invstd, found.weight, found.bias)
    return all(value(a).dtype == t.dtype and layout(value(a)) == layout(t) for a in alike) and all(
        value(v).dtype == torch.float32 and value(v).numel() == t.shape[1] for v in vectors
    )
