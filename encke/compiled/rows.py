"""Rows of a saved tensor that a norm in the backward graph reduces together: groups of codes stay within them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Node

from encke.capture.sites import Site
from encke.codecs.layout import Layout, fills_memory, finer, rows_for
from encke.compiled.masks import layout
from encke.compiled.names import name_of, size_hint, size_of, value
from encke.compiled.pair import Pair

VIEWS = {"view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "detach", "alias"}
SETTINGS = {"native_layer_norm_backward": 2, "_fused_rms_norm_backward": 2, "native_group_norm_backward": 8}
"""Index of the argument of a norm's backward that holds what it normalises over."""


def rows_read(pair: Pair, readers: Iterable[tuple[Node, Node]], sites: list[Site]) -> list[tuple[int, int]]:
    """Return number and distance of the values of the rows that norms read in a saved tensor.

    Args:
        pair: The two graphs.
        readers: (reader, its operand) for all readers of the tensor.
        sites: The site of each reader.

    Returns:
        The finest rows alone if they lie within all others; an empty list if no norm reads the tensor.
    """
    found: list[tuple[int, int]] = []
    for (reader, source), site in zip(readers, sites, strict=True):
        norm = norm_of(pair, reader, source, site)
        rows = rows_of_values(value(source), norm) if norm is not None and shows_memory(source) else None
        if rows is not None:
            within = finer(found[0], rows) if len(found) == 1 else None
            found = [within] if within is not None else [*found, rows]
    return found


def norm_of(pair: Pair, reader: Node, source: Node, site: Site) -> tuple[str, int] | None:
    """Return the dimensions that a reader normalises over, as `layout.rows_for` takes them; None if it does not."""
    if site.operation == "BatchNorm":
        return "channels", 0
    if (site.operation, site.slot) == ("RmsNorm", "input"):
        return "last", 1
    groups = site.operation == "NativeGroupNorm"
    if not groups and site.operation not in ("NativeLayerNorm", "FusedRmsNorm"):
        return None
    place = SETTINGS.get(name_of(reader.target))
    if place is not None:
        setting = reader.args[place]
        return ("groups", setting) if isinstance(setting, int) else ("last", len(setting))  # type: ignore[arg-type]
    # Decomposed by the compiler: the forward pass has a mean over the dimensions, for groups from the third one on.
    for node in pair.site_names.operations.get(reader.meta.get("seq_nr"), ()):  # type: ignore[arg-type]
        if (
            name_of(node.target) in ("var_mean", "mean")
            and len(node.args) > 1
            and isinstance(node.args[1], list | tuple)
        ):
            if not groups:
                return "last", len(node.args[1])
            number = value(node.all_input_nodes[0]).shape[1]
            return ("groups", number) if isinstance(number, int) else None
    # Both of these are parts of the values that the norm reduces together.
    channels = value(source).shape[1]
    return ("last", 1) if not groups else ("groups", channels) if isinstance(channels, int) else None


def shows_memory(source: Node) -> bool:
    """Return whether a node of the backward graph covers all of a saved tensor's memory, in its order.

    Views do, and so do pointwise results of it, such as the norm's own first steps.
    """
    while source.op != "placeholder":
        like = [node for node in source.all_input_nodes if size_of(node) == size_of(source)]
        if not like or (name_of(source.target) not in VIEWS and layout(value(like[0])) != layout(value(source))):
            return False
        source = like[0]
    return True


def rows_of_values(t: Tensor, norm: tuple[str, int]) -> tuple[int, int] | None:
    """Return the rows of a tensor's memory; None if it has gaps, or if the size of the rows changes between calls."""
    size, stride = tuple(map(size_hint, t.shape)), tuple(map(size_hint, t.stride()))
    if not fills_memory(size, stride):
        return None
    rows = rows_for(Layout(size, stride), math.prod(size), norm)
    if rows is None:
        return None
    row, step = rows
    # A dimension of unknown size must lie outside of the rows, not between their values.
    symbols = [stride[d] for d in range(t.dim()) if isinstance(t.shape[d], torch.SymInt)]
    return rows if all(distance >= row * step for distance in symbols) else None
