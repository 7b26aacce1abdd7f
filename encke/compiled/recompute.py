"""Saved tensors that need not be packed: the backward graph recomputes them from other packed tensors.

The rules are those of eager mode (encke/capture/recompute.py). Results of norms, activations, products and dropout are
recomputed if all their readers accept a lossy value, from sources that are packed at least as finely as the tensor
itself would be: in every pass a source takes into account the readers of tensors recomputed from it (`Packing.serve`).
So one packed copy of a norm's input serves the norm and the layers after it, and a gated MLP packs only gate and up
projection. Inductor fuses the recomputation into the kernels that read its result.

Copies of weights that autocast makes are recomputed as well, from the weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from encke.capture.thresholds import CAST_MIN_BYTES
from encke.compiled.names import TRANSPARENT, bytes_of, name_of, operation_of, size_hint, value
from encke.compiled.pair import Pair
from encke.compiled.writer import Form, Packing

CURVED = {
    "mul": False,
    "native_dropout": False,
    "native_layer_norm": False,
    "_fused_rms_norm": False,
    "silu": True,
    "gelu": True,
}
"""Operations whose results are recomputed -> whether they are curved. Norms use the exact statistics."""

Sources = dict[Node, bool]
"""Packed tensors that a value is computed from -> whether through a curved function."""


def recompute_from_packed(
    pair: Pair, packings: dict[Node, Packing], may_recompute: Callable[[Packing], bool]
) -> list[Packing]:
    """Recompute saved tensors in the backward graph; return their packings for the report.

    Args:
        pair: The two graphs.
        packings: Forms of the saved tensors. Recomputed tensors are removed.
        may_recompute: Returns whether a tensor of this packing may be recomputed from lossy ones.
    """
    finder = Expressions(pair, packings)
    found: list[Node] = []
    stands: list[Packing] = []
    # In the order of the forward graph: sources precede the tensors computed from them.
    saved = set(pair.saved)
    for node in [node for node in pair.forward.nodes if node in saved]:
        packing = packings.get(node)
        if packing is None:
            if finder.is_cast_of_weight(node):
                found.append(node)
            continue
        if packing.form is not Form.CODES or not may_recompute(packing):
            continue
        sources = finder.sources_of(node)
        if not sources or not all(packings[source].can_serve(packing, curved) for source, curved in sources.items()):
            continue
        for source, curved in sources.items():
            packings[source].serve(packing, curved)
        finder.known[node] = sources
        found.append(node)
        stands += [Packing.recomputed(site, value(node)) for site in packing.sites[:1]]
        del packings[node]
    write(pair, found)
    return stands


class Expressions:
    """Find out which values of a forward graph can be recomputed from its saved tensors."""

    def __init__(self, pair: Pair, packings: dict[Node, Packing]) -> None:
        self.pair = pair
        self.packings = packings
        self.saved = set(pair.saved)
        self.known: dict[Node, Sources] = {}
        """Sources of saved tensors that are recomputed."""

    def is_cast_of_weight(self, node: Node) -> bool:
        """Return whether a saved tensor is the copy of a large weight in another dtype, behind views."""
        if node in self.pair.data or node.op != "call_function" or bytes_of(value(node)) < CAST_MIN_BYTES:
            return False
        origin = node
        while origin.op == "call_function" and name_of(origin.target) in TRANSPARENT:
            if len(origin.all_input_nodes) != 1:
                return False
            origin = origin.all_input_nodes[0]
        return origin.op == "placeholder" and value(origin).numel() == value(node).numel() and self.is_there(origin)

    def is_there(self, placeholder: Node) -> bool:
        """Return whether backward may read an input of the forward graph."""
        return placeholder in self.saved or (placeholder not in self.pair.data and placeholder not in self.pair.mutated)

    def sources_of(self, node: Node) -> Sources | None:
        """Return the packed tensors that a saved one can be computed from; None if it cannot."""
        return self._through(node, size_hint(value(node).numel()))

    def _sources(self, node: Node, numel: int) -> Sources | None:
        """Return the packed tensors from which a value is computed, for a result of `numel` values."""
        if node in self.known:
            return self.known[node]
        if isinstance(value(node), torch.SymInt):
            return {}
        if node.op == "placeholder":
            return {} if self.is_there(node) else None
        if node not in self.saved:
            return self._through(node, numel)
        packing = self.packings.get(node)
        if packing is None or packing.form is Form.KEPT or value(node).dtype == torch.bool:
            return {}
        same = packing.form is Form.CODES and size_hint(value(node).numel()) == numel
        return {node: False} if same else None

    def _through(self, node: Node, numel: int) -> Sources | None:
        """Return the sources of an operation's result."""
        if node.op != "call_function" or not isinstance(value(node), Tensor):
            return None
        transparent, curved = name_of(node.target) in TRANSPARENT, CURVED.get(operation_of(node))
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        # Functions of weights alone are always exact.
        listed = curved is not None or node not in self.pair.data
        if not (transparent or (pointwise and listed)):
            return None
        operands = [self._sources(operand, numel) for operand in node.all_input_nodes]
        lossy = [sources for sources in operands if sources]
        if None in operands or (lossy and size_hint(value(node).numel()) != numel):
            return None
        union = {source: any(each.get(source, False) for each in lossy) for each in lossy for source in each}
        if transparent or not lossy:
            return union
        if curved:
            return dict.fromkeys(union, True)
        # Linear in each operand: not a product of operands that share a source. A sum has the errors of both.
        name, shared = name_of(node.target), len(union) < sum(map(len, lossy))
        product = name == "mul" and not shared and node.args[0] is not node.args[1]
        linear = len(lossy) == 1 and (
            name in ("add", "sub", "neg") or (name == "div" and self._sources(node.args[-1], numel) == {})  # type: ignore[arg-type]
        )
        return union if product or linear else None


def write(pair: Pair, found: list[Node]) -> None:
    """Write the recomputation of saved tensors into the backward graph, each before the tensor's first reader."""
    order = {node: i for i, node in enumerate(pair.backward.nodes)}
    olds = {node: pair.inputs[node.name] for node in found}
    firsts = {node: min(old.users, key=order.__getitem__) for node, old in olds.items()}
    copies: dict[Node, Node] = {}
    pending = set(found)

    def copy(node: Node) -> Node:
        """Return the node of the backward graph that computes the same value as a node of the forward graph."""
        if node in copies:
            return copies[node]
        if isinstance(value(node), torch.SymInt):
            return pair.size(node)
        if node not in pending and (node.op == "placeholder" or node in pair.saved):
            return pair.inputs[node.name] if node in pair.saved else pair.save(node)
        arguments, keywords = map_arg((node.args, node.kwargs), copy)
        made = pair.backward.call_function(node.target, arguments, keywords)  # type: ignore[arg-type]
        made.meta = {**node.meta}
        copies[node] = made
        pair.copies.add(made)
        return made

    for node in sorted(found, key=lambda node: order[firsts[node]]):
        with pair.backward.inserting_before(firsts[node]):
            made = copy(node)
        olds[node].replace_all_uses_with(made)
    for node in found:
        pair.unsave(node)
