"""Save instead of recompute: no reader of a compiled backward graph uses values recomputed from lossy ones.

AOTAutograd cuts the joint graph where little has to be saved, and recomputes values in the backward graph where that is
cheap. Recomputed from lossy values, they would give a different gradient than eager mode. So such values are saved as
well, and comparisons (ReLU's mask) move to the forward graph, with exact values. Tensors that eager mode recomputes are
then removed by its rules (recompute.py).
"""

from __future__ import annotations

import operator

from torch.fx import Node

from encke.compiled.names import COMPARISONS, TRANSPARENT, is_relu, name_of, operation_of, root_of
from encke.compiled.pair import Pair, write_in


def save_instead_of_recompute(pair: Pair) -> None:
    """Save values that are recomputed from possibly lossy ones; move comparisons to the forward graph."""
    lossy = {pair.inputs[node.name] for node in pair.saved if pair.may_be_lossy(node)}
    while (node := _recomputed(pair, lossy)) is not None:
        _save_result(pair, node, lossy)
    _compare_in_forward(pair)
    drop_unread(pair)


def _recomputed(pair: Pair, lossy: set[Node]) -> Node | None:
    """Return the first value recomputed from a lossy one for a different operation; None if there is none."""
    between: dict[Node, frozenset[str]] = {node: frozenset() for node in lossy}
    """For each value computed from a lossy one, the operations between the two."""
    for node in pair.backward.nodes:
        sources = [source for source in node.all_input_nodes if source in between]
        # A checkpointed region has a reader's need of its own: if its inputs are lossy, the user has asked for that.
        if not sources or node in lossy or node in pair.regions:
            continue
        transparent = name_of(node.target) in TRANSPARENT
        if transparent or node in pair.recomputed:
            step = [] if transparent else [root_of(operation_of(node))]
            between[node] = frozenset(step).union(*(between[source] for source in sources))
            continue
        operation = operation_of(node)
        # Softmax from its own recomputed input would be off by the exponential of the error.
        recomputes = operation.endswith(("_backward", "_backward_data")) and "softmax" not in operation
        own = root_of(operation) if recomputes else None
        for source in sources:
            if between[source] and between[source] != {own}:
                return _first_step(pair, source, own, between)
    return None


def _first_step(pair: Pair, node: Node, own: str | None, between: dict[Node, frozenset[str]]) -> Node:
    """Return the value that the reader's own steps, views and casts begin with."""
    while True:
        # Each result of an operation with several results is a value of its own.
        step = node.all_input_nodes[0] if node.target is operator.getitem else node
        transparent = name_of(step.target) in TRANSPARENT
        if not transparent and (step not in pair.recomputed or root_of(operation_of(step)) != own):
            return node
        node = next(source for source in step.all_input_nodes if between.get(source))


def _save_result(pair: Pair, node: Node, lossy: set[Node]) -> None:
    """Save the value that `node` recomputes, or its comparisons if it has no other readers."""
    readers = list(node.users)
    if all(name_of(reader.target) in COMPARISONS for reader in readers):
        readers = [reader for reader in readers if not _save_comparison(pair, reader)]
    if not readers:
        return
    made = pair.made_in_forward(node)
    assert made is not None, "a recomputed value is one of the forward graph's"
    placeholder = pair.inputs[made.name] if made in pair.saved else pair.save(made)
    node.replace_all_uses_with(placeholder)
    if pair.may_be_lossy(made):
        lossy.add(placeholder)


def _save_comparison(pair: Pair, reader: Node) -> bool:
    """Make a comparison in the forward graph and save its result; return whether both operands are there."""
    operands = {node: pair.made_in_forward(node) for node in reader.all_input_nodes}
    if None in operands.values():
        return False
    compared = write_in(pair.forward, reader, operands)  # type: ignore[arg-type]
    pair.data.add(compared)
    reader.replace_all_uses_with(pair.save(compared))
    pair.backward.erase_node(reader)
    return True


def _compare_in_forward(pair: Pair) -> None:
    """Compare lossy values in the forward graph, unless their zeros decode to zeros anyway."""
    for made in list(pair.saved):
        if not pair.may_be_lossy(made):
            continue
        readers = dict(pair.readers_behind(pair.inputs[made.name]))
        comparisons = [node for node in readers if name_of(node.target) in COMPARISONS and node not in pair.regions]
        alone = len(comparisons) == len(readers)
        for node in comparisons:
            keeps_zeros = is_relu(made) and name_of(node.target) in ("le", "gt") and node.args[1] == 0
            if (alone or not keeps_zeros) and node.args[0] is pair.inputs[made.name]:
                _save_comparison(pair, node)


def drop_unread(pair: Pair) -> None:
    """Remove nodes without readers."""
    for node in reversed(list(pair.backward.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            pair.backward.erase_node(node)
    for made in list(pair.saved):
        if not pair.inputs[made.name].users and len(pair.saved) > 1:
            pair.unsave(made)
