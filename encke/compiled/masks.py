"""ReLU's mask from packed codes: readers that compare a restored tensor with zero read the codes instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from encke.compiled.names import arguments_of, name_of, operation_of, set_arguments, value
from encke.compiled.pair import Pair

GATES = ("site_gate", "packed_gate")
NORMS = ("norm_sums", "norm_apply", "packed_norm_sums", "packed_norm_apply")


def read_mask_from_codes(
    pair: Pair,
    readers: Iterable[tuple[Node, Node]],
    t: Tensor,
    mask: Callable[[], Node],
    gate: Callable[[Node, Node | None], Node],
) -> bool:
    """Make readers of a mask read which values are zero.

    A codec keeps that for ReLU's result, but not which values are positive.

    Return whether one of them still compares restored values, because it reads them through a view.

    Args:
        pair: The two graphs.
        readers: (reader, its operand) for the readers of the mask.
        t: The saved tensor.
        mask: Writes a node that computes which values of `t` are not zero.
        gate: Writes a node that propagates a gradient, or the sum of two, where `t` is not zero, and is zero elsewhere.
    """
    compares_values = False
    for reader, source in readers:
        # Behind views, the restored values are compared.
        alike = layout(value(source)) == layout(t)
        compares_values |= not alike
        gated = sole_masked_where(reader) if alike else None
        gradients = gradients_like(gated.args[2], t) if gated is not None else None
        if gated is not None and gradients is not None:
            with pair.backward.inserting_before(gated):
                gated.replace_all_uses_with(gate(*gradients))
            pair.drop(gated)
            continue
        with pair.backward.inserting_before(reader):
            flags = mask() if alike else _not_zero(pair, source)
            if name_of(reader.target) == "threshold_backward":
                _replace_threshold(pair, reader, source, flags)
            else:
                _replace_comparison(pair, reader, flags)
        pair.drop(source)
    return compares_values


def pass_gates_to_norms(graph: Graph) -> None:
    """Make a batch norm whose gradient comes from a ReLU alone read the ReLU's codes, which removes the separate gate.

    Only kernels for channels_last memory support this.
    """
    for gate in [node for node in graph.nodes if name_of(node.target) in GATES and node.users]:
        given = arguments_of(gate)
        only_norms = all(name_of(user.target) in NORMS for user in gate.users)
        if given["other"] is not None or not only_norms or str(value(gate).stride(1)) != "1":
            continue
        codes = {"gate": given.get("handle", given.get("data"))}
        if "format" in given:
            codes["gate_format"] = given["format"]
        for norm in list(gate.users):
            set_arguments(norm, {"grad": given["grad"], **codes})
        graph.erase_node(gate)


def _not_zero(pair: Pair, source: Node) -> Node:
    flags = pair.backward.call_function(torch.ops.aten.ne.Scalar, (source, 0))
    with value(source).fake_mode:
        flags.meta["val"] = torch.empty_like(value(source), dtype=torch.bool)
    return flags


def _replace_threshold(pair: Pair, reader: Node, source: Node, flags: Node) -> None:
    """Pass ones and zeros to `threshold_backward`: they lie on the same sides of ReLU's threshold as the values."""
    cast = torch.ops.prims.convert_element_type.default
    ones = pair.backward.call_function(cast, (flags, value(source).dtype))
    ones.meta = {**source.meta}
    reader.replace_input_with(source, ones)


def _replace_comparison(pair: Pair, reader: Node, flags: Node) -> None:
    if name_of(reader.target) == "le":
        zero = pair.backward.call_function(torch.ops.aten.logical_not.default, (flags,))
        zero.meta = {**reader.meta}
        flags = zero
    for masked in reader.users:
        # This gradient is kept for a residual path: inductor is to store it, and not its operands.
        if any("norm" not in operation_of(user) for user in masked.users):
            masked.meta["inductor_realize_to_strides"] = True
    reader.replace_all_uses_with(flags)
    pair.backward.erase_node(reader)


def sole_masked_where(comparison: Node) -> Node | None:
    """Return `where(comparison, 0, gradient)`, if that alone reads `comparison`."""
    users = list(comparison.users)
    if name_of(comparison.target) != "le" or len(users) != 1 or name_of(users[0].target) != "where":
        return None
    condition, zero, _ = users[0].args
    return users[0] if condition is comparison and is_zero(zero) else None


def is_zero(node: Any) -> bool:
    """Return whether a node is the constant zero."""
    place = {"scalar_tensor": 0, "full": 1}.get(name_of(node.target)) if isinstance(node, Node) else None
    return place is not None and node.args[place] == 0


def gradients_like(gradient: Any, t: Tensor) -> tuple[Node, Node | None] | None:
    """Return a gradient that lies in memory as `t` did, or the two that it is the sum of; None if there are none."""
    if is_stored_like(gradient, t):
        return gradient, None
    if not isinstance(gradient, Node) or name_of(gradient.target) != "add" or len(gradient.users) != 1:
        return None
    one, other = gradient.args[:2]
    return (one, other) if not gradient.kwargs and is_stored_like(one, t) and is_stored_like(other, t) else None  # type: ignore[return-value]


def is_stored_like(gradient: Any, t: Tensor) -> bool:
    """Return whether inductor stores a gradient with the layout of `t`: a convolution's, or that of a shared ReLU."""
    if not isinstance(gradient, Node) or not isinstance(value(gradient), Tensor):
        return False
    given, name = value(gradient), name_of(gradient.target)
    if given.dtype != t.dtype or layout(given) != layout(t):
        return False
    if name == "where" or name in GATES:
        return len(gradient.users) > 1
    return name == "conv_input_grad" or (name == "getitem" and "convolution" in operation_of(gradient))


def layout(t: Tensor) -> list[str]:
    """Return size and strides as texts: comparing symbols would make them constants."""
    return [str(number) for number in (*t.shape, *t.stride())]
