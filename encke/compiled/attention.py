"""Attention in compiled graphs: the backward graph recomputes its results from decoded inputs.

encke/capture/attention.py explains why; the rule is the same. If the mask is a constant that is causal, or that masks
nothing, both graphs call the operation without it (constant_masks.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from encke.capture.attention import FORWARDS, INPUTS, forward_arguments
from encke.capture.sites import Site
from encke.compiled.constant_masks import ConstantMasks
from encke.compiled.names import ancestors, arguments_of, behind_views, name_of, value
from encke.compiled.pair import Pair

BACKWARDS = {f"{name_of(forward)}_backward": name for name, forward in FORWARDS.items()}
"""Name of the backward operation -> key in `FORWARDS` of the operation that recomputes the results."""


def compute_again(pair: Pair, is_lossy: Callable[[Node], bool]) -> list[tuple[Node, Site]]:
    """Make attention with lossy inputs read results that belong to them; return the saved results that become unread.

    Args:
        pair: The two graphs.
        is_lossy: Returns whether a saved tensor, a node of the forward graph, is packed lossily.
    """
    made = {pair.inputs[node.name]: node for node in pair.saved}
    results: list[tuple[Node, Site]] = []
    masks = ConstantMasks()
    for reader in list(pair.backward.nodes):
        name = BACKWARDS.get(name_of(reader.target)) if reader.op == "call_function" else None
        if name is None:
            continue
        arguments = arguments_of(reader)
        sources = {source for name in INPUTS for source in ancestors(arguments[name])} & made.keys()
        if not any(is_lossy(made[source]) for source in sources):
            continue
        call = behind_views(made[arguments["logsumexp"]]) if arguments["logsumexp"] in made else reader
        if call.target is FORWARDS[name] and masks.drop(call, reader):
            arguments = arguments_of(reader)
        names = ("logsumexp",) if arguments["dropout_p"] else ("out", "logsumexp")
        for result in (made[arguments[name]] for name in names if arguments[name] in made):
            results += [(result, site) for site in pair.sites_of(result) if site.need == "recomputed"]
        output, logsumexp = write_forward(pair, reader, name, arguments)
        for i, formal in enumerate(reader.target._schema.arguments):
            if formal.name in names:
                reader.update_arg(i, output if formal.name == "out" else logsumexp)
    return [(node, site) for node, site in results if not pair.inputs[node.name].users]


def write_forward(pair: Pair, reader: Node, name: str, arguments: dict[str, Any]) -> list[Node]:
    """Insert the operation before its backward; return the nodes of its output and logsumexp."""
    forward, (positional, keywords) = FORWARDS[name], forward_arguments(name, arguments)
    with pair.backward.inserting_before(reader):
        call = pair.backward.call_function(forward, tuple(positional), keywords)
        results = [pair.backward.call_function(operator.getitem, (call, i)) for i in range(2)]
    values = map_arg((call.args, call.kwargs), value)
    # The reading site is the one of the backward operation.
    call.meta = {**reader.meta, "original_aten": forward, "eager_input_vals": values}
    with value(pair.saved[0]).fake_mode:
        call.meta["val"] = forward(*values[0], **values[1])
    for i, node in enumerate(results):
        node.meta = {**call.meta, "val": value(call)[i]}
        del node.meta["eager_input_vals"]
    return results
