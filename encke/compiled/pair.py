"""The forward and backward graph of a compiled model: what passes between them, who reads it, and packing it there.

AOTAutograd cuts the joint graph where little has to be saved, and computes values anew in the backward graph where that
is cheap. From lossy values that would be another gradient than the one of eager mode, so what is computed anew from
them is saved instead, and comparisons (ReLU's mask) are made in the forward graph, from exact values. After that each
saved tensor is packed behind the node that makes it, and unpacked before the first node that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from encke.capture.hooks import SMALL
from encke.capture.sites import Site
from encke.codecs.layout import overlaps
from encke.compiled.names import (
    COMPARISONS,
    TRANSPARENT,
    SiteNames,
    bytes_of,
    is_relu,
    name_of,
    operation_of,
    root_of,
    size_hint,
    value,
)
from encke.kernels import FLOATS


class Pair:
    """The two graphs of one compilation, and what the forward graph saves for the backward graph."""

    def __init__(
        self, forward: Graph, backward: Graph, outputs: int, static: Iterable[int], differentiable: Iterable[int]
    ) -> None:
        """`outputs`: results of the forward graph that are not saved; then inputs, by number: weights and buffers, and
        those that need a gradient.
        """
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
        self.again = {
            node
            for node in backward.nodes
            if node.op == "call_function" and node.name in self.names and self.names[node.name].target == node.target
        }
        """Nodes of the backward graph that the forward graph has as well: computed anew."""
        self.inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
        self.first = self.inputs[self.saved[0].name] if self.saved else None
        """The first placeholder that stands for a saved tensor: sizes come before it."""
        self.new_sizes: list[Node] = []
        self.sizes: dict[str, Node] = {
            str(value(node)): node for node in self.inputs.values() if isinstance(value(node), torch.SymInt)
        }
        self.site_names = SiteNames(forward, backward)
        self._know_forward(set(static), set(differentiable))

    # -- what the forward graph tells ----------------------------------------------------------------------------------

    def _know_forward(self, static: set[int], differentiable: set[int]) -> None:
        """Which values hang on data, which need a gradient, and which memory others hold too."""
        held = [n for n in self.results if isinstance(n, Node)]
        self.data: set[Node] = set()
        self.differentiable: set[Node] = set()
        for i, node in enumerate(self.forward.find_nodes(op="placeholder")):
            held.append(node)
            if i not in static:
                self.data.add(node)
            if i in differentiable:
                self.differentiable.add(node)
        for node in self.forward.nodes:
            if node.op != "call_function":
                continue
            sources = node.all_input_nodes
            # What has no source at all is chance (a seed) or a constant: not a weight.
            if not sources or any(source in self.data for source in sources):
                self.data.add(node)
            t = value(node)
            if any(source in self.differentiable for source in sources) and not_whole(t):
                self.differentiable.add(node)
        self.held = {storage(value(node)) for node in held if isinstance(value(node), Tensor)}

    def may_pack(self, node: Node) -> bool:
        """Whether a saved tensor is large, made by the forward graph from data, and held by nobody else."""
        t = value(node)
        return (
            node.op == "call_function"
            and type(t).__name__ == "FakeTensor"
            and t.layout == torch.strided
            and not overlaps([*map(size_hint, t.shape)], [*map(size_hint, t.stride())])
            and bytes_of(t) >= SMALL
            and node in self.data
            and storage(t) not in self.held
        )

    def may_be_lossy(self, node: Node) -> bool:
        return value(node).dtype in FLOATS and self.may_pack(node)

    # -- the cut -------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Saves what is computed anew from values that may be lossy; compares in the forward graph."""
        lossy = {self.inputs[node.name] for node in self.saved if self.may_be_lossy(node)}
        while (found := self._needless(lossy)) is not None:
            self._cut_at(found, lossy)
        self._compare()
        self._drop_unread()

    def _needless(self, lossy: set[Node]) -> Node | None:
        """The first node computed anew from a lossy value for another operation than its own; None if there is none."""
        behind: dict[Node, frozenset[str]] = {node: frozenset() for node in lossy}
        """For what hangs on a lossy value: the operations in between."""
        for node in self.backward.nodes:
            sources = [source for source in node.all_input_nodes if source in behind]
            if not sources or node in lossy:
                continue
            if node in self.again or name_of(node.target) in TRANSPARENT:
                step = [] if name_of(node.target) in TRANSPARENT else [root_of(operation_of(node))]
                behind[node] = frozenset(step).union(*(behind[source] for source in sources))
                continue
            operation = operation_of(node)
            # From its own input computed anew, softmax would be as wrong as the exponential of the error.
            mine = operation.endswith(("_backward", "_backward_data")) and "softmax" not in operation
            own = root_of(operation) if mine else None
            for source in sources:
                if behind[source] and behind[source] != {own}:
                    return self._where_to_cut(source, own, behind)
        return None

    def _where_to_cut(self, node: Node, own: str | None, behind: dict[Node, frozenset[str]]) -> Node:
        """The value that the reader's own steps, views and casts begin with."""
        while True:
            transparent = name_of(node.target) in TRANSPARENT
            if not transparent and (node not in self.again or root_of(operation_of(node)) != own):
                return node
            node = next(source for source in node.all_input_nodes if behind.get(source))

    def _cut_at(self, node: Node, lossy: set[Node]) -> None:
        """Saves what `node` computes anew, or what it is compared with."""
        made = self.names[node.name]
        readers = list(node.users)
        if all(name_of(reader.target) in COMPARISONS for reader in readers):
            for reader in readers:
                self._compare_before(reader, made)
            return
        placeholder = self.inputs[made.name] if made in self.saved else self.save(made)
        node.replace_all_uses_with(placeholder)
        if self.may_be_lossy(made):
            lossy.add(placeholder)

    def save(self, made: Node) -> Node:
        """A further saved tensor, in front of the others; its placeholder in the backward graph."""
        assert self.first is not None
        with self.backward.inserting_before(self.first):
            placeholder = self.backward.placeholder(made.name)
        placeholder.meta = {**made.meta}
        self.saved.insert(0, made)
        self.inputs[made.name] = self.first = placeholder
        return placeholder

    def _compare_before(self, reader: Node, made: Node) -> None:
        """Makes a comparison in the forward graph; its result is saved."""
        with self.forward.inserting_after(made):
            found = self.forward.call_function(reader.target, (made, *reader.args[1:]))  # type: ignore[arg-type]
        found.meta = {**reader.meta}
        self.data.add(found)
        reader.replace_all_uses_with(self.save(found))
        self.backward.erase_node(reader)

    def _compare(self) -> None:
        """Comparisons with lossy values: in the forward graph, unless zeros come back as zeros anyway."""
        for made in list(self.saved):
            if not self.may_be_lossy(made):
                continue
            readers = self.readers_behind(self.inputs[made.name])
            compared = [node for node, _ in readers if name_of(node.target) in COMPARISONS]
            alone = len(compared) == len(readers)
            for node in compared:
                zeros = is_relu(made) and name_of(node.target) in ("le", "gt") and node.args[1] == 0
                if alone or not zeros:
                    source = node.args[0]
                    if source is self.inputs[made.name]:
                        self._compare_before(node, made)

    def _drop_unread(self) -> None:
        """Takes out what nobody reads any more."""
        for node in reversed(list(self.backward.nodes)):
            if node.op == "call_function" and not node.users and not node.is_impure():
                self.backward.erase_node(node)
        for made in list(self.saved):
            placeholder = self.inputs[made.name]
            if not placeholder.users and len(self.saved) > 1:
                self.saved.remove(made)
                if placeholder is self.first:
                    self.first = self.inputs[self.saved[0].name]
                self.backward.erase_node(placeholder)
                del self.inputs[made.name]

    # -- readers -------------------------------------------------------------------------------------------------------

    def readers_behind(self, placeholder: Node) -> list[tuple[Node, Node]]:
        """(reader, what it reads) for all who read a saved tensor, behind views, casts and their own first steps."""
        found: list[tuple[Node, Node]] = []
        stack, seen = [placeholder], {placeholder}
        while stack:
            node = stack.pop()
            for user in node.users:
                if user.op == "output" or (user not in self.again and name_of(user.target) not in TRANSPARENT):
                    found.append((user, node))
                elif user not in seen:
                    seen.add(user)
                    stack.append(user)
        order = {node: i for i, node in enumerate(self.backward.nodes)}
        return sorted(found, key=lambda pair: order[pair[0]])

    def sites_of(self, made: Node) -> list[Site]:
        """Return the site of each reader of a saved tensor, in the order of `readers_behind`."""
        pairs = self.readers_behind(self.inputs[made.name])
        return [self.site_names.site_of(made, *pair, made in self.differentiable) for pair in pairs]

    # -- sizes ---------------------------------------------------------------------------------------------------------

    def in_backward(self, made: Node, numbers: Sequence[Any], kind: str) -> list[Any]:
        """Sizes or strides of a saved tensor as the backward graph knows them."""
        found: list[Any] = []
        for dimension, number in enumerate(numbers):
            if isinstance(number, int):
                found.append(number)
                continue
            key = str(number)
            if key not in self.sizes:
                self.sizes[key] = self._save_size(made, getattr(torch.ops.aten, kind).int, dimension, number)
            found.append(self.sizes[key])
        return found

    def _save_size(self, made: Node, operation: Any, dimension: int, number: Any) -> Node:
        with self.forward.inserting_after(made):
            node = self.forward.call_function(operation, (made, dimension))
        node.meta["val"] = number
        with self.backward.inserting_before(next(iter(self.backward.nodes))):
            placeholder = self.backward.placeholder(node.name)
        placeholder.meta["val"] = number
        self.new_sizes.insert(0, node)
        return placeholder

    # -- packing -------------------------------------------------------------------------------------------------------

    def swap(self, made: Node, packed: Node, restore: Callable[[Node], Node]) -> tuple[Node, Node]:
        """Saves `packed` in place of `made`, and restores it before its first reader: (saved, restored)."""
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

    def forget(self, made: Node, restore: Callable[[], Node]) -> None:
        """Saves nothing in place of `made`."""
        old = self.inputs.pop(made.name)
        order = {node: i for i, node in enumerate(self.backward.nodes)}
        readers = sorted(old.users, key=order.__getitem__)
        with self.backward.inserting_before(readers[0]):
            restored = restore()
        old.replace_all_uses_with(restored)
        self.saved.remove(made)
        if old is self.first and self.saved:
            self.first = self.inputs[self.saved[0].name]
        self.backward.erase_node(old)

    def ask_for_zeros(
        self, readers: Iterable[tuple[Node, Node]], t: Tensor, mask: Callable[[], Node], gate: Callable[[Node], Node]
    ) -> None:
        """Lets readers of a mask ask what is zero: of ReLU's result a codec keeps that, but not what is positive.

        `mask` writes a node that says what of `t` is not zero, `gate` one that gives a gradient there and zero else;
        behind views restored values are asked.
        """
        for reader, source in readers:
            alike = layout(value(source)) == layout(t)
            gated = the_only_masked(reader) if alike else None
            if gated is not None and fits(gated.args[2], t):
                with self.backward.inserting_before(gated):
                    gated.replace_all_uses_with(gate(gated.args[2]))  # type: ignore[arg-type]
                self.drop(gated)
                continue
            with self.backward.inserting_before(reader):
                flags = mask() if alike else self._not_zero(source)
                if name_of(reader.target) == "threshold_backward":
                    self._threshold(reader, source, flags)
                else:
                    self._mask(reader, flags)
            self.drop(source)

    def _not_zero(self, source: Node) -> Node:
        flags = self.backward.call_function(torch.ops.aten.ne.Scalar, (source, 0))
        with value(source).fake_mode:
            flags.meta["val"] = torch.empty_like(value(source), dtype=torch.bool)
        return flags

    def _threshold(self, reader: Node, source: Node, flags: Node) -> None:
        """One and zero are on the same sides of ReLU's threshold as what is positive and what is zero."""
        kind = {"dtype": value(source).dtype}
        ones = self.backward.call_function(torch.ops.aten._to_copy.default, (flags,), kind)
        ones.meta = {**source.meta}
        reader.replace_input_with(source, ones)

    def _mask(self, reader: Node, flags: Node) -> None:
        if name_of(reader.target) == "le":
            zero = self.backward.call_function(torch.ops.aten.logical_not.default, (flags,))
            zero.meta = {**reader.meta}
            flags = zero
        for masked in reader.users:
            # A gradient that waits for a residual path: inductor is to store it, and not what it is made from.
            if any("norm" not in operation_of(user) for user in masked.users):
                masked.meta["inductor_realize_to_strides"] = True
        reader.replace_all_uses_with(flags)
        self.backward.erase_node(reader)

    def drop(self, node: Node) -> None:
        """Takes a node of the backward graph out, and what it alone read, unless somebody reads it."""
        if node.op == "call_function" and not node.users:
            sources = node.all_input_nodes
            self.backward.erase_node(node)
            for source in sources:
                self.drop(source)

    def finish(self) -> None:
        """Writes what is saved now into the forward graph's results."""
        self.end.args = ((*self.results, *self.saved, *self.new_sizes, *self.others),)
        self.forward.lint()
        self.backward.lint()


def the_only_masked(comparison: Node) -> Node | None:
    """`where(comparison, 0, gradient)`, if that is who alone reads `comparison`."""
    users = list(comparison.users)
    if name_of(comparison.target) != "le" or len(users) != 1 or name_of(users[0].target) != "where":
        return None
    condition, zero, _ = users[0].args
    return users[0] if condition is comparison and is_zero(zero) else None


def is_zero(node: Any) -> bool:
    """Whether a node gives the constant zero."""
    place = {"scalar_tensor": 0, "full": 1}.get(name_of(node.target)) if isinstance(node, Node) else None
    return place is not None and node.args[place] == 0


def fits(gradient: Any, t: Tensor) -> bool:
    """Whether a gradient comes from a convolution, so that inductor has nothing to fuse with, and lies as `t` did."""
    if not isinstance(gradient, Node) or name_of(gradient.target) != "getitem":
        return False
    given = value(gradient)
    return given.dtype == t.dtype and layout(given) == layout(t) and "convolution" in operation_of(gradient)


def layout(t: Tensor) -> list[str]:
    """Size and strides as texts: comparing symbols would make them constants."""
    return [str(number) for number in (*t.shape, *t.stride())]


def storage(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())


def not_whole(t: Any) -> bool:
    """Whether gradients can pass through a value: floats, or several results at once."""
    return not isinstance(t, Tensor) or t.is_floating_point() or t.is_complex()
