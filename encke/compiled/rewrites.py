"""Rewrites of graph patterns, so that backward restores less, releases it earlier and avoids reading data twice.

- The encoder of a batch norm's input also computes its statistics (forward graph); norm_relu.py has more of that kind.
- A batch norm's backward reads codes. Half of the bytes that a convolutional network saves are inputs of batch norms.
- A convolution computes its weight's gradient first. Then its restored input is released, and the input's gradient
  takes that memory.

A graph that does not match is left unchanged. ReLU's masks are read from codes in masks.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from encke.capture.thresholds import FUSE_MIN_BYTES, SPLIT_CONV_MIN_BYTES
from encke.codecs.layout import FORMATS
from encke.compiled.names import bytes_of, name_of, operation_of, size_hint, value
from encke.kernels import GroupFormat, backend_for
from encke.kernels.formats import NORM_GROUP
from encke.torch_internals import conv_memory_format

NORMS_ON = {"cuda"}
"""Device types on which batch norms read codes. Tests add the CPU, where slow operators replace the kernels."""
CASTS = ("convert_element_type", "_to_copy")


@dataclass(frozen=True)
class NormBackward:
    """Batch norm's backward in a graph: its operands besides its input, and the nodes of its gradients."""

    grad: Node
    mean: Node
    invstd: Node
    weight: Node
    result: Node
    grad_weights: list[Node]
    grad_bias: Node


class PatternMismatch(Exception):
    """A graph does not have the pattern that was looked for."""


def find_norm_backward(x: Node) -> NormBackward | None:
    """Return batch norm's backward as torch decomposes it, if it alone reads `x`; else None."""
    try:
        return _match_norm_backward(x)
    except PatternMismatch:
        return None


def _match_norm_backward(x: Node) -> NormBackward:
    """Match the decomposition of batch norm's backward; `[c]` marks values with one number per channel.

        centred = x - mean[c]
        dot[c] = sum(grad * centred)                        weight's gradient: dot * invstd
        total[c] = sum(grad)                                bias's gradient
        projection = centred * (dot / n * invstd^2)[c]
        result = (grad - projection - (total / n)[c]) * (invstd * weight)[c]

    For 16-bit inputs `x`, `grad` and `result` pass through a cast.
    """
    upcasts = [x, *(user for user in x.users if name_of(user.target) in CASTS)]
    centred = [user for node in upcasts for user in node.users if user not in upcasts]
    mean = single({expect_op(node, "sub").args[1] for node in centred})
    products = {expect_op(user, "mul") for node in centred for user in node.users}
    summed = single(node for node in products if [name_of(user.target) for user in node.users] == ["sum"])
    projection = single(products - {summed})
    dot, grad = single(summed.users), other(summed, centred)
    difference = expect_op(single(projection.users), "sub")
    unscaled = expect_op(single(difference.users), "sub")
    product = expect_op(single(unscaled.users), "mul")
    if difference.args != (grad, projection) or unscaled.args[0] is not difference:
        raise PatternMismatch
    scale = expect_op(unexpanded(other(projection, centred)), "mul")
    square = single(a for a in arguments(scale) if name_of(a.target) == "mul" and a.args[0] is a.args[1])
    mean_dot = expect_op(other(scale, [square]), "mul")
    invstd, gain = single({square.args[0]}), expect_op(unexpanded(other(product, [unscaled])), "mul")
    if invstd not in arguments(gain):
        raise PatternMismatch
    mean_grad = expect_op(unexpanded(unscaled.args[1]), "mul")
    total = expect_op(mean_grad.args[0], "sum")
    if mean_dot.args[0] is not dot or total.args[0] is not grad or not sums_channels(total, x):
        raise PatternMismatch
    result, raw_grad = product, grad
    if value(x).dtype != value(product).dtype:
        result = single(product.users)
        if name_of(result.target) not in CASTS or name_of(grad.target) not in CASTS:
            raise PatternMismatch
        raw_grad = single(arguments(grad))
    weights = [user for user in dot.users if user is not mean_dot]
    if any(set(arguments(expect_op(node, "mul"))) != {dot, invstd} for node in weights):
        raise PatternMismatch
    if total.args[1:] != dot.args[1:]:
        raise PatternMismatch
    # Readers of these gradients within the graph might precede the node that will compute them.
    if any(user.op != "output" for node in (*weights, total) for user in node.users if user is not mean_grad):
        raise PatternMismatch
    return NormBackward(raw_grad, mean, invstd, other(gain, [invstd]), result, weights, total)


def statistics_of(x: Node) -> list[Node]:
    """Return the nodes of a forward graph that compute variance and mean of x's channels in fp32 for a batch norm."""
    upcasts = [node for node in x.users if name_of(node.target) in CASTS and value(node).dtype == torch.float32]
    return [node for cast in upcasts for node in cast.users if measures_channels(node, cast)]


def measures_channels(node: Node, x: Node) -> bool:
    """Return whether a node computes variance and mean over all dimensions of x but the second, with `keepdim`."""
    dims, settings = node.args[1:2], {**node.kwargs}
    if name_of(node.target) != "var_mean" or len(node.args) > 2 or not dims or not isinstance(dims[0], list | tuple):
        return False
    count = value(x).dim()
    all_but_channels = sorted(d % count for d in dims[0]) == [d for d in range(count) if d != 1]
    return all_but_channels and settings == {"correction": 0, "keepdim": True}


def fuses_encoder(t: Tensor, format: GroupFormat) -> bool:
    """Return whether kernels exist that compute part of a batch norm before or after `t` while they encode it."""
    if t.device.type not in NORMS_ON or t.dtype.itemsize != 2 or format.signs or t.dim() < 4:
        return False
    if bytes_of(t) < FUSE_MIN_BYTES or not isinstance(t.shape[1], int) or no_kernels(t.device):
        return False
    from encke.kernels.gpu import norm_forward, plans

    like = sized(t)
    forward = norm_forward.forward_plan(tuple(like.shape), like.stride(), t.dtype, t.device)
    if forward is None or format.group != NORM_GROUP or format.stride != t.shape[1]:
        return False
    return plans.group_plan(format, like.numel(), t.device).fuses_forward


def update_early(graph: Graph) -> None:
    """Move updates of running statistics from the end of a forward graph to where the statistics are computed.

    There they share a kernel with other computations from the variance: inductor does not fuse distant nodes.
    """
    for update in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        old, new = update.args[:2]
        others = [user for user in old.users if user is not update]
        if old.op == "placeholder" and name_of(new.target) == "add" and [name_of(n.target) for n in others] == ["mul"]:
            if others[0] in new.all_input_nodes and "batch_norm" in operation_of(new):
                new.append(update)


def no_kernels(device: torch.device) -> bool:
    """Return whether a GPU is served by the reference, because Triton is missing."""
    return device.type == "cuda" and backend_for("cuda").NAME == "reference"


def expect_op(node: Any, name: str) -> Node:
    """Return the node if it calls this operation, else raise `PatternMismatch`."""
    if not isinstance(node, Node) or name_of(node.target) != name:
        raise PatternMismatch
    return node


def single(nodes: Iterable[Any]) -> Node:
    """Return the only node there is, else raise `PatternMismatch`."""
    candidates = list(nodes)
    if len(candidates) != 1 or not isinstance(candidates[0], Node):
        raise PatternMismatch
    return candidates[0]


def arguments(node: Node) -> list[Node]:
    """Return those arguments of a node that are nodes."""
    return [a for a in node.args if isinstance(a, Node)]


def other(node: Node, known: Iterable[Node]) -> Node:
    """Return the only operand that is not known."""
    return single(a for a in arguments(node) if a not in known)


def unexpanded(node: Any) -> Node:
    """Return the node without the dimensions of one element that were added to it."""
    while isinstance(node, Node) and name_of(node.target) == "unsqueeze":
        node = node.args[0]
    return single([node])


def sums_channels(total: Node, x: Node) -> bool:
    """Return whether all dimensions but the second are summed over."""
    return list(total.args[1]) == [d for d in range(value(x).dim()) if d != 1]  # type: ignore[arg-type]


def reads_codes(norm: NormBackward, t: Tensor, format: GroupFormat) -> bool:
    """Return whether there are kernels for this batch norm, whose input was `t`."""
    channels_last = format.stride > 1
    grad, fixed = value(norm.grad), t.shape[1:2] if channels_last else t.shape[1:]
    if t.device.type not in NORMS_ON or format.signs or bytes_of(t) < FUSE_MIN_BYTES or t.dim() < 3:
        return False
    if not all(isinstance(extent, int) for extent in fixed) or grad.dtype != t.dtype:
        return False
    vectors = (norm.mean, norm.invstd, norm.weight)
    if any(value(v).dtype != torch.float32 or value(v).numel() != t.shape[1] for v in vectors):
        return False
    memory_format = FORMATS.get(t.dim()) if channels_last else torch.contiguous_format
    if memory_format is None or not all(sized(x).is_contiguous(memory_format=memory_format) for x in (t, grad)):
        return False
    if no_kernels(t.device):
        return False
    from encke.kernels.gpu import norm_backward

    size = tuple(map(size_hint, t.shape))
    return norm_backward.norm_plan(size, format, channels_last, torch.float32, t.device) is not None


def sized(t: Tensor) -> Tensor:
    """Return a fake tensor like `t` whose symbolic sizes are numbers: those for which the graph was made."""
    with t.fake_mode:  # type: ignore[attr-defined]
        size, stride = [size_hint(n) for n in t.shape], [size_hint(n) for n in t.stride()]
        return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device)


def should_split_conv_backward(conv: Node, x: Node) -> bool:
    """Return whether a convolution's backward that restores `x` should be two calls, the weight's gradient first."""
    if (
        name_of(conv.target) != "convolution_backward"
        or conv.args[1] is not x
        or bytes_of(value(x)) < SPLIT_CONV_MIN_BYTES
    ):
        return False
    grad, _, weight, _, *settings, mask = conv.args
    if grad is x or weight is x or not (mask[0] and mask[1]):  # type: ignore[index]
        return False
    read, given = sized(value(x)), sized(value(grad))  # type: ignore[arg-type]
    with read.fake_mode:  # type: ignore[attr-defined]
        memory_format = conv_memory_format(read, sized(value(weight)), tuple(settings))  # type: ignore[arg-type]
    return memory_format is not None and given.is_contiguous(memory_format=memory_format)
