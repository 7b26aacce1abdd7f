"""Rewrites graphs so that less of what was packed has to be restored, and for less long, and less is read twice.

In the forward graph an encoder that reads the input of a batch norm computes its statistics too.

Half of what a convolutional network saves are inputs of batch norms: their backward reads codes. ReLU's backward takes
its mask from the codes. A convolution computes its weight's gradient first, after which its restored input is let go of
and the input's gradient takes that memory. What does not look as expected stays as it is.
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
from encke.compiled.pair import bytes_of, hint, name_of, operation_of, value
from encke.kernels import implementation
from encke.torch_internals import conv_memory_format

NORMS_ON = {"cuda"}
"""Kinds of devices on which batch norm's backward reads codes."""
CASTS = ("convert_element_type", "_to_copy")


@dataclass(frozen=True)
class Norm:
    """Batch norm's backward in a graph: what it reads beside its input, and the nodes that give its gradients."""

    grad: Node
    mean: Node
    invstd: Node
    weight: Node
    result: Node
    grad_weights: list[Node]
    grad_bias: Node


class Different(Exception):
    """A graph is not what was looked for."""


def norm_behind(x: Node) -> Norm | None:
    """Batch norm's backward as torch decomposes it, if nothing else reads `x`."""
    try:
        return _norm_behind(x)
    except Different:
        return None


def _norm_behind(x: Node) -> Norm:
    wide = [x, *(user for user in x.users if name_of(user.target) in CASTS)]
    centred = [user for node in wide for user in node.users if user not in wide]
    mean = the_only({_of(node, "sub").args[1] for node in centred})
    products = {_of(user, "mul") for node in centred for user in node.users}
    summed = the_only(node for node in products if [name_of(user.target) for user in node.users] == ["sum"])
    scaled = the_only(products - {summed})
    dot, grad = the_only(summed.users), other(summed, centred)
    without = _of(the_only(_of(the_only(scaled.users), "sub").users), "sub")
    product = _of(the_only(without.users), "mul")
    # proj = (x - mean) * (dot / n * invstd^2); result = (grad - proj - sum / n) * (invstd * weight)
    if the_only(scaled.users).args != (grad, scaled) or without.args[0] is not the_only(scaled.users):
        raise Different
    spread = _of(vector(other(scaled, centred)), "mul")
    square = the_only(a for a in arguments(spread) if name_of(a.target) == "mul" and a.args[0] is a.args[1])
    share = _of(other(spread, [square]), "mul")
    invstd, gain = the_only({square.args[0]}), _of(vector(other(product, [without])), "mul")
    if invstd not in arguments(gain):
        raise Different
    part = _of(vector(without.args[1]), "mul")
    total = _of(part.args[0], "sum")
    if share.args[0] is not dot or total.args[0] is not grad or not over_channels(total, x):
        raise Different
    result, raw = product, grad
    if value(x).dtype != value(product).dtype:
        result = the_only(product.users)
        if name_of(result.target) not in CASTS or name_of(grad.target) not in CASTS:
            raise Different
        raw = the_only(arguments(grad))
    weights = [user for user in dot.users if user is not share]
    if any(set(arguments(_of(node, "mul"))) != {dot, invstd} for node in weights) or total.args[1:] != dot.args[1:]:
        raise Different
    # Whoever reads these gradients within the graph might stand before the node that will give them.
    if any(user.op != "output" for node in (*weights, total) for user in node.users if user is not part):
        raise Different
    return Norm(raw, mean, invstd, other(gain, [invstd]), result, weights, total)


def statistics_of(x: Node) -> list[Node]:
    """The nodes of a forward graph that compute variance and mean of x's channels in fp32, as batch norm does."""
    wide = [node for node in x.users if name_of(node.target) in CASTS and value(node).dtype == torch.float32]
    return [node for cast in wide for node in cast.users if measures(node, cast)]


def measures(node: Node, x: Node) -> bool:
    """Whether a node gives variance and mean over all dimensions of x but the second, which stay as one element."""
    dims, settings = node.args[1:2], {**node.kwargs}
    if name_of(node.target) != "var_mean" or len(node.args) > 2 or not dims or not isinstance(dims[0], list | tuple):
        return False
    count = value(x).dim()
    alike = sorted(d % count for d in dims[0]) == [d for d in range(count) if d != 1]
    return alike and settings == {"correction": 0, "keepdim": True}


def measured_by_encoder(t: Tensor, bits: int, group: int, stride: int, signs: bool) -> bool:
    """Whether there are kernels that compute variance and mean of t's channels while they encode it."""
    if t.device.type not in NORMS_ON or t.dtype.itemsize != 2 or signs or bytes_of(t) < FUSE_MIN_BYTES or t.dim() < 4:
        return False
    if not isinstance(t.shape[1], int) or no_kernels(t.device):
        return False
    from encke.kernels.gpu import launch, norm_forward

    like = sized(t)
    forward = norm_forward.forward_plan(tuple(like.shape), like.stride(), t.dtype, t.device)
    plan = launch.gq_plan(like.numel(), bits, group, t.dtype, stride, signs, t.device)
    if forward is None or plan is None or group != forward.GROUP or stride != t.shape[1]:
        return False
    return plan.statistics is not None


def update_early(graph: Graph) -> None:
    """Moves updates of running statistics from the end of a forward graph to where these are computed.

    There they share a kernel with what else is computed from the variance; inductor fuses nothing from afar.
    """
    for update in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        old, new = update.args[:2]
        others = [user for user in old.users if user is not update]
        if old.op == "placeholder" and name_of(new.target) == "add" and [name_of(n.target) for n in others] == ["mul"]:
            if others[0] in new.all_input_nodes and "batch_norm" in operation_of(new):
                new.append(update)


def no_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and implementation("cuda").__name__.endswith("reference")


def _of(node: Any, name: str) -> Node:
    if not isinstance(node, Node) or name_of(node.target) != name:
        raise Different
    return node


def the_only(nodes: Iterable[Any]) -> Node:
    found = list(nodes)
    if len(found) != 1 or not isinstance(found[0], Node):
        raise Different
    return found[0]


def arguments(node: Node) -> list[Node]:
    return [a for a in node.args if isinstance(a, Node)]


def other(node: Node, known: Iterable[Node]) -> Node:
    """The operand that is none of those known."""
    return the_only(a for a in arguments(node) if a not in known)


def vector(node: Any) -> Node:
    """What was given further dimensions of one element."""
    while isinstance(node, Node) and name_of(node.target) == "unsqueeze":
        node = node.args[0]
    return the_only([node])


def over_channels(total: Node, x: Node) -> bool:
    """Whether all dimensions but the second are summed over."""
    return list(total.args[1]) == [d for d in range(value(x).dim()) if d != 1]  # type: ignore[arg-type]


def reads_codes(norm: Norm, t: Tensor, bits: int, group: int, stride: int, signs: bool) -> bool:
    """Whether there are kernels for this batch norm, whose input was `t`."""
    last = stride > 1
    grad, fixed = value(norm.grad), t.shape[1:2] if last else t.shape[1:]
    if t.device.type not in NORMS_ON or signs or bytes_of(t) < FUSE_MIN_BYTES or t.dim() < 3:
        return False
    if not all(isinstance(extent, int) for extent in fixed) or grad.dtype != t.dtype:
        return False
    vectors = (norm.mean, norm.invstd, norm.weight)
    if any(value(v).dtype != torch.float32 or value(v).numel() != t.shape[1] for v in vectors):
        return False
    form = FORMATS[t.dim()] if last else torch.contiguous_format
    if not all(sized(x).is_contiguous(memory_format=form) for x in (t, grad)):
        return False
    if no_kernels(t.device):
        return False
    from encke.kernels.gpu import norm_backward

    return norm_backward.supported(tuple(map(hint, t.shape)), stride, last, bits, group, t.dtype)


def sized(t: Tensor) -> Tensor:
    """The same without symbols."""
    with t.fake_mode:  # type: ignore[attr-defined]
        size, stride = [hint(n) for n in t.shape], [hint(n) for n in t.stride()]
        return torch.empty_strided(size, stride, dtype=t.dtype, device=t.device)


def parts(conv: Node, x: Node) -> bool:
    """Whether a convolution's backward that restores `x` should be two calls, the weight's gradient first."""
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
        last = conv_memory_format(read, sized(value(weight)), tuple(settings))  # type: ignore[arg-type]
    return last is not None and given.is_contiguous(memory_format=last)
