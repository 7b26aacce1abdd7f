"""Readers that the autograd graph hides: in-place operations on a view.

`leaky_relu_` of a view becomes part of a `CopySlices` node, which exposes neither the operation nor its saved tensors.
An instance norm returns a view, and so does a linear layer with a three-dimensional input. An in-place activation after
either of them saves as much as the layer itself. If the call belongs to one of torch's own layers, which run one
operation, the layer identifies it. Elsewhere the saved tensor is kept as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from encke.capture.encoding import limits_of
from encke.capture.facts import SiteFacts
from encke.capture.needs import COPY_SLICES, need_of
from encke.capture.nodes import operation_name
from encke.capture.passes import EnterHook, Frame
from encke.capture.saved import Pending, Saved
from encke.capture.sites import Site
from encke.codecs.exact import Between
from encke.torch_internals import is_view

LAYERS: dict[type[nn.Module], tuple[str, str]] = {
    nn.ReLU: ("Relu", "result"),
    nn.LeakyReLU: ("LeakyRelu", "result"),
    nn.SiLU: ("Silu", "self"),
    nn.Mish: ("Mish", "self"),
    nn.Hardswish: ("Hardswish", "self"),
    nn.Hardsigmoid: ("Hardsigmoid", "self"),
    nn.Hardtanh: ("Hardtanh", "self"),
    nn.ReLU6: ("Hardtanh", "self"),
}
"""Layers that run one operation, in place if asked to -> the operation, and the slot of its saved tensor."""
FORWARDS = {kind: kind.forward for kind in LAYERS}


def operation_of(frame: Frame) -> tuple[str, str] | None:
    """Return a layer's in-place operation and the slot it saves; None if the layer does not identify them."""
    module: Any = frame.layer.owner()
    kind = type(module)
    if kind not in LAYERS or not module.inplace or kind.forward is not FORWARDS[kind]:
        return None
    own = module.__dict__.get("forward")
    if own is not None and getattr(own, "layer", None) is not frame.layer:
        return None
    # Other hooks that run inside the call may save tensors as well.
    if any(type(hook) is not EnterHook for hook in module._forward_pre_hooks.values()):
        return None
    return LAYERS[kind]


def is_result(t: Tensor) -> bool:
    """Return whether a tensor is a view that an operation has just written in place."""
    node = t.grad_fn
    edges = node.next_functions if node is not None and is_view(t) and t._version else ()
    return bool(edges) and edges[0][0] is not None and operation_name(edges[0][0]) == COPY_SLICES


def still_hidden(facts: SiteFacts, t: Tensor, frame: Frame) -> bool:
    """Return whether a layer's call still identifies the operation and slot with which a site was learnt."""
    told, site = operation_of(frame), facts.site
    return told == (site.operation, site.slot) and frame.index == 1 and (site.slot != "result" or is_result(t))


def site_of_result(t: Tensor, frame: Frame, index: int) -> Site | None:
    """Return the key of a view that a layer's in-place operation has just written; None for any other tensor."""
    told = operation_of(frame) if index == 0 else None
    if told is None or told[1] != "result" or not is_result(t):
        return None
    need = need_of(*told, t.dtype, requires_grad=t.requires_grad)
    return frame.new_site(index, *told, need, t.dtype, t.dim())


def site_of_input(saved: Saved, pending: Pending) -> Site | None:
    """Return the key of the tensor that an in-place operation on a view has read in backward.

    Return None if the layer does not identify the operation.
    """
    facts, frame = saved.facts, pending.frame
    dtype, dimensions, requires_grad, _ = facts.signature
    told = operation_of(frame) if facts.index == 0 and frame.index == 1 else None
    if told is None or told[1] == "result":
        return None
    limits = limits_of(told[0], frame.layer.owner())
    known = limits is not None and Between(*limits).takes(dtype)
    need = need_of(*told, dtype, requires_grad=requires_grad, parameter=pending.parameter, limits=known)
    return frame.new_site(facts.index, *told, need, dtype, dimensions)


def unknown_site(facts: SiteFacts, frame: Frame) -> Site:
    """Return the key of a tensor that is kept as it is because its reader cannot be identified."""
    dtype, dimensions, _, _ = facts.signature
    return frame.new_site(facts.index, COPY_SLICES, "?", "exact", dtype, dimensions)
