"""Masks of attention that are constants of a graph: causal ones, and ones without effect, become settings.

A traced model often computes an explicit mask where in eager mode it would pass `is_causal`, as transformers' models
do. With an explicit mask the kernels compute all scores, including masked ones. Such a mask is computed from sizes
alone, so it is computed here, while the graph is written, and compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate, map_arg

from encke.compiled.names import ancestors, arguments_of, name_of, set_arguments, value
from encke.torch_internals import without_modes

MASKS = ("attn_bias", "attn_mask")
"""Names under which operations take the mask."""
HIDDEN = -6e4
"""Largest number whose addition hides a score: masks use minus infinity, or -65504 (torch 2.11 for cuDNN)."""
LARGEST = 1 << 30
"""Largest tensor in bytes that is computed on the host."""


class ConstantMasks:
    """Constant masks of one pair of graphs."""

    def __init__(self) -> None:
        self.causal: dict[Node, bool | None] = {}
        """Whether each mask is causal; None if it is neither causal nor without effect."""

    def drop(self, call: Node, reader: Node) -> bool:
        """Call attention, and its backward, without a mask where that is the same; return whether it is.

        Args:
            call: The operation in the forward graph.
            reader: Its backward in the backward graph.
        """
        arguments = arguments_of(call)
        mask = next((arguments[name] for name in MASKS if isinstance(arguments.get(name), Node)), None)
        if mask is None or arguments["is_causal"] or arguments["dropout_p"]:
            return False
        if mask not in self.causal:
            with without_modes():
                constant = constant_of(mask)
                self.causal[mask] = None if constant is None else is_causal(constant)
        causal = self.causal[mask]
        if causal is None:
            return False
        for node in (call, reader):
            known = arguments_of(node)
            changed: dict[str, Any] = {"is_causal": causal} | dict.fromkeys(MASKS)
            set_arguments(node, {name: argument for name, argument in changed.items() if name in known})
        return True


def constant_of(node: Node) -> Tensor | None:
    """Return the value of a node, computed on the host; None if it is not a constant of the graph, or is large."""
    needed = ancestors(node)
    if not all(map(is_computed, needed)):
        return None
    known: dict[Node, Any] = {}
    for each in node.graph.nodes:
        if each in needed:
            arguments, keywords = map_arg((each.args, each.kwargs), known.__getitem__)
            on_host = map_aggregate((arguments, keywords), lambda a: torch.device("cpu") if is_device(a) else a)
            known[each] = each.target(*on_host[0], **on_host[1])
    return known[node]


def is_device(argument: Any) -> bool:
    """Return whether an argument names a device."""
    return isinstance(argument, torch.device)


def is_computed(node: Node) -> bool:
    """Return whether a node computes the same tensor every time from the same arguments."""
    t = value(node)
    if node.op != "call_function" or not isinstance(t, Tensor) or not all(isinstance(n, int) for n in t.shape):
        return False
    drawn = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or "empty" in name_of(node.target)
    return not drawn and t.untyped_storage().nbytes() <= LARGEST


def is_causal(mask: Tensor) -> bool | None:
    """Return whether a boolean or additive mask is causal; False if it masks nothing, None for any other mask."""
    for dimension in range(mask.dim() - 2):
        if mask.stride(dimension) == 0:
            mask = mask.narrow(dimension, 0, 1)
    seen = mask if mask.dtype == torch.bool else mask == 0
    if bool(seen.all()):
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask <= HIDDEN
    before = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    square = mask.shape[-2] == mask.shape[-1]
    return True if square and bool((seen == before).all()) and bool((hidden == ~before).all()) else None
