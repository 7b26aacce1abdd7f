"""The forward and backward graph of a compiled model: the tensors that pass between them, their readers and packing.

Each saved tensor is packed after the node that computes it, and unpacked before the first node that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy

from encke.capture.hooks import SMALL
from encke.capture.sites import Site
from encke.codecs.layout import overlaps
from encke.compiled.names import (
    TRANSPARENT,
    SiteNames,
    bytes_of,
    name_of,
    size_hint,
    value,
)
from encke.kernels import FLOATS

DRAWN_AGAIN = ("run_with_rng_state", "graphsafe_run_with_rng_state")
"""Operations of backward graphs that run another operation with the random numbers of the forward pass."""


class Pair:
    """The two graphs of one compilation, and the tensors that the forward graph saves for the backward graph."""

    def __init__(
        self,
        forward: Graph,
        backward: Graph,
        outputs: int,
        static: Iterable[int],
        differentiable: Iterable[int],
        min_bytes: int = SMALL,
        mutated: Iterable[int] = (),
    ) -> None:
        """Analyse the two graphs.

        Args:
            forward: The forward graph.
            backward: The backward graph.
            outputs: Number of results of the forward graph that are not saved; they come first.
            static: Indices of the forward graph's inputs that are weights and buffers.
            differentiable: Indices of the forward graph's inputs that need a gradient.
            min_bytes: Size from which tensors are packed.
            mutated: Indices of the forward graph's inputs that the forward pass modifies.
        """
        self.min_bytes = min_bytes
        self.forward = forward
        self.backward = backward
        self.outputs = outputs
        self.end = forward.output_node()
        results = list(self.end.args[0])  # type: ignore[arg-type]
        self.results = results[:outputs]
        saved = results[outputs:]
        self.saved: list[Node] = [n for n in saved if isinstance(n, Node) and isinstance(value(n), Tensor)]
        self.others = [n for n in saved if n not in self.saved]
        """Sizes and the like."""
        self.names = {node.name: node for node in forward.nodes}
        self.recomputed = {node for node in backward.nodes if is_same(node, self.names.get(node.name))}
        """Nodes of the backward graph that also exist in the forward graph: recomputed."""
        self.regions = {node for node in backward.nodes if is_in_region(node)}
        """Nodes of the backward graph that a region of `torch.utils.checkpoint` recomputes."""
        placeholders = backward.find_nodes(op="placeholder")
        self.inputs = {node.name: node for node in placeholders}
        # The states of random generators at the start of a checkpointed region have other names in the backward graph.
        sizes = sum(isinstance(value(node), torch.SymInt) for node in self.others if isinstance(node, Node))
        self.inputs |= {n.name: placeholder for n, placeholder in zip(self.saved, placeholders[sizes:], strict=False)}
        self.first = self.inputs[self.saved[0].name] if self.saved else None
        """The first placeholder of a saved tensor: sizes come before it."""
        self.new_sizes: list[Node] = []
        self.sizes: dict[str, Node] = {
            str(value(node)): node for node in self.inputs.values() if isinstance(value(node), torch.SymInt)
        }
        self.site_names = SiteNames(forward, backward, min_bytes)
        self.copies: set[Node] = set()
        """Nodes of the backward graph that recompute saved tensors from other saved tensors (recompute.py)."""
        placeholders = forward.find_nodes(op="placeholder")
        self.mutated = {placeholders[i] for i in mutated}
        self._know_forward(set(static), set(differentiable))

    def _know_forward(self, static: set[int], differentiable: set[int]) -> None:
        """Find out which values depend on data, which need a gradient, and which memory is also held elsewhere."""
        held = [n for n in self.results if isinstance(n, Node)]
        self.data: set[Node] = set()
        self.from_inputs: set[Node] = set()
        self.differentiable: set[Node] = set()
        for i, node in enumerate(self.forward.find_nodes(op="placeholder")):
            held.append(node)
            if i not in static:
                self.data.add(node)
                self.from_inputs.add(node)
            if i in differentiable:
                self.differentiable.add(node)
        for node in self.forward.nodes:
            if node.op != "call_function":
                continue
            sources = node.all_input_nodes
            if any(source in self.from_inputs for source in sources):
                self.from_inputs.add(node)
            # A node without sources is a random seed or a constant, not a weight.
            if not sources or any(source in self.data for source in sources):
                self.data.add(node)
            t = value(node)
            if any(source in self.differentiable for source in sources) and may_have_gradient(t):
                self.differentiable.add(node)
        self.held = {storage(value(node)) for node in held if isinstance(value(node), Tensor)}

    def may_pack(self, node: Node) -> bool:
        """Return whether a saved tensor is large, computed by the forward graph from data, and not held elsewhere."""
        t = value(node)
        return (
            node.op == "call_function"
            and type(t).__name__ == "FakeTensor"
            and t.layout == torch.strided
            and not overlaps([*map(size_hint, t.shape)], [*map(size_hint, t.stride())])
            and bytes_of(t) >= self.min_bytes
            and node in self.data
            and storage(t) not in self.held
        )

    def may_be_lossy(self, node: Node) -> bool:
        """Return whether a saved tensor may be packed and holds floats."""
        return value(node).dtype in FLOATS and self.may_pack(node)

    def save(self, made: Node) -> Node:
        """Save one more tensor, before the others; return its placeholder in the backward graph."""
        assert self.first is not None
        with self.backward.inserting_before(self.first):
            placeholder = self.backward.placeholder(made.name)
        placeholder.meta = {**made.meta}
        self.saved.insert(0, made)
        self.inputs[made.name] = self.first = placeholder
        return placeholder

    def made_in_forward(self, node: Node) -> Node | None:
        """Return the node of the forward graph that computes the same value as a backward node; None if there is none.

        A view, or one of an operation's results, that exists only in the backward graph is added.
        """
        if node in self.recomputed:
            return self.names[node.name]
        if node.op == "placeholder":
            return next((made for made in self.saved if self.inputs[made.name] is node), None)
        sources = {source: self.made_in_forward(source) for source in node.all_input_nodes}
        if name_of(node.target) not in TRANSPARENT or None in sources.values():
            return None
        made = write_in(self.forward, node, sources)  # type: ignore[arg-type]
        for known in (self.data, self.from_inputs, self.differentiable):
            known |= {made} if known & set(sources.values()) else set()
        return made

    def readers_behind(self, placeholder: Node) -> list[tuple[Node, Node]]:
        """Return (reader, its operand) for all readers of a saved tensor, behind views, casts and recomputed steps.

        This excludes readers of tensors that are recomputed from it instead of saved.
        """
        readers: list[tuple[Node, Node]] = []
        stack, seen = [placeholder], {placeholder}
        while stack:
            node = stack.pop()
            for user in node.users:
                if user in self.copies:
                    continue
                passes = user in self.recomputed or name_of(user.target) in TRANSPARENT
                if user.op == "output" or user in self.regions or not passes:
                    readers.append((user, node))
                elif user not in seen:
                    seen.add(user)
                    stack.append(user)
        order = {node: i for i, node in enumerate(self.backward.nodes)}
        return sorted(readers, key=lambda pair: order[pair[0]])

    def sites_of(self, made: Node) -> list[Site]:
        """Return the site of each reader of a saved tensor, in the order of `readers_behind`."""
        pairs = self.readers_behind(self.inputs[made.name])
        known = (made in self.differentiable, made not in self.from_inputs)
        return [self.site_names.site_of(made, *pair, *known, pair[0] in self.regions) for pair in pairs]

    def in_backward(self, made: Node, numbers: Sequence[Any], kind: str) -> list[Any]:
        """Return sizes or strides of a saved tensor as values of the backward graph."""
        known: list[Any] = []
        for dimension, number in enumerate(numbers):
            if isinstance(number, int):
                known.append(number)
                continue
            if str(number) not in self.sizes:
                with self.forward.inserting_after(made):
                    node = self.forward.call_function(getattr(torch.ops.aten, kind).int, (made, dimension))
                node.meta["val"] = number
                self.size(node)
            known.append(self.sizes[str(number)])
        return known

    def size(self, node: Node) -> Node:
        """Return the backward graph's node for a size that a node of the forward graph computes."""
        key = str(value(node))
        if key not in self.sizes:
            with self.backward.inserting_before(next(iter(self.backward.nodes))):
                self.sizes[key] = self.backward.placeholder(node.name)
            self.sizes[key].meta["val"] = value(node)
            self.new_sizes.insert(0, node)
        return self.sizes[key]

    def swap(self, made: Node, packed: Node, restore: Callable[[Node], Node]) -> tuple[Node, Node]:
        """Save `packed` in place of `made`, and restore it before its first reader; return (saved, restored)."""
        old = self.inputs.pop(made.name)
        with self.backward.inserting_before(old):
            new = self.backward.placeholder(packed.name)
        new.meta["val"] = value(packed)
        self.saved[self.saved.index(made)] = packed
        self.inputs[packed.name] = new
        if old is self.first:
            self.first = new
        order = {node: i for i, node in enumerate(self.backward.nodes)}
        readers = sorted(old.users, key=order.__getitem__)
        with self.backward.inserting_before(readers[0]):
            restored = restore(new)
        old.replace_all_uses_with(restored)
        self.backward.erase_node(old)
        return new, restored

    def unsave(self, made: Node) -> None:
        """Stop saving a tensor that has no readers."""
        old = self.inputs.pop(made.name)
        self.saved.remove(made)
        if old is self.first and self.saved:
            self.first = self.inputs[self.saved[0].name]
        self.backward.erase_node(old)

    def forget(self, made: Node, restore: Callable[[], Node]) -> None:
        """Save nothing in place of `made`."""
        old = self.inputs[made.name]
        order = {node: i for i, node in enumerate(self.backward.nodes)}
        readers = sorted(old.users, key=order.__getitem__)
        with self.backward.inserting_before(readers[0]):
            restored = restore()
        old.replace_all_uses_with(restored)
        self.unsave(made)

    def drop(self, node: Node) -> None:
        """Remove a node without readers from the backward graph, and those operands that had no other reader."""
        if node.op == "call_function" and not node.users:
            sources = node.all_input_nodes
            self.backward.erase_node(node)
            for source in sources:
                self.drop(source)

    def finish(self) -> None:
        """Write the saved tensors into the forward graph's results."""
        self.end.args = ((*self.results, *self.saved, *self.new_sizes, *self.others),)
        self.forward.eliminate_dead_code()
        self.forward.lint()
        self.backward.lint()


def write_in(graph: Graph, node: Node, operands: dict[Node, Node]) -> Node:
    """Copy a node of another graph into this one, after the nodes that replace its operands."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    with graph.inserting_after(max(operands.values(), key=order.__getitem__)):
        return graph.node_copy(node, operands.__getitem__)


def is_same(node: Node, made: Node | None) -> bool:
    """Return whether a node of the backward graph equals one of the forward graph, by target and names of operands."""
    if node.op != "call_function" or made is None or made.target != node.target:
        return False
    return [each.name for each in made.all_input_nodes] == [each.name for each in node.all_input_nodes]


def is_in_region(node: Node) -> bool:
    """Return whether a user's checkpoint recomputes a node: it is marked so, or draws its random numbers again."""
    asked = node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return node.op == "call_function" and (asked or name_of(node.target) in DRAWN_AGAIN)


def storage(t: Tensor) -> StorageWeakRef:
    """Return the identity of a tensor's memory."""
    return StorageWeakRef(t.untyped_storage())


def may_have_gradient(t: Any) -> bool:
    """Return whether gradients can propagate through a value: floats, or several results at once."""
    return not isinstance(t, Tensor) or t.is_floating_point() or t.is_complex()
