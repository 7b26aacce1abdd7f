"""The forward and backward graph of a compiled model: what passes between them, who reads it, and packing it there.

AOTAutograd cuts the joint graph where little has to be saved, and computes values anew in the backward graph where that
is cheap. From lossy values that would be another gradient than the one of eager mode, so what is computed anew from
them is saved instead, and comparisons (ReLU's mask) are made in the forward graph, from exact values. After that each
saved tensor is packed behind the node that makes it, and unpacked before the first node that reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.multiprocessing.reductions import StorageWeakRef

from encke.capture.hooks import SMALL
from encke.capture.needs import need_of
from encke.capture.sites import Site
from encke.codecs.layout import overlaps
from encke.kernels import FLOATS

# Operations of the backward graph that read saved tensors: argument -> (operation, slot) as in eager mode.
READERS: dict[str, dict[int, tuple[str, str]]] = {
    "convolution_backward": {1: ("Convolution", "input"), 2: ("Convolution", "weight")},
    "native_batch_norm_backward": {1: ("NativeBatchNorm", "input")},
    "batch_norm_backward": {1: ("BatchNorm", "input")},
    "cudnn_batch_norm_backward": {0: ("CudnnBatchNorm", "input")},
    "native_layer_norm_backward": {1: ("NativeLayerNorm", "input")},
    "native_group_norm_backward": {1: ("NativeGroupNorm", "input")},
    "_fused_rms_norm_backward": {1: ("FusedRmsNorm", "input")},
    "threshold_backward": {1: ("Relu", "result")},
    "leaky_relu_backward": {1: ("LeakyRelu", "self")},
    "max_pool2d_with_indices_backward": {1: ("MaxPool2DWithIndices", "self")},
    "max_pool3d_with_indices_backward": {1: ("MaxPool3DWithIndices", "self")},
    "avg_pool2d_backward": {1: ("AvgPool2D", "self")},
    "avg_pool3d_backward": {1: ("AvgPool3D", "self")},
    "_adaptive_avg_pool2d_backward": {1: ("AdaptiveAvgPool2D", "self")},
    "_adaptive_avg_pool3d_backward": {1: ("AdaptiveAvgPool3D", "self")},
    "gelu_backward": {1: ("Gelu", "self")},
    "silu_backward": {1: ("Silu", "self")},
    "mish_backward": {1: ("Mish", "self")},
    "elu_backward": {5: ("Elu", "self")},
    "hardswish_backward": {1: ("Hardswish", "self")},
    "hardsigmoid_backward": {1: ("Hardsigmoid", "self")},
    "hardtanh_backward": {1: ("Hardtanh", "self")},
    "softplus_backward": {1: ("Softplus", "self")},
    "sigmoid_backward": {1: ("Sigmoid", "result")},
    "tanh_backward": {1: ("Tanh", "result")},
    "_softmax_backward_data": {1: ("Softmax", "result")},
    "_log_softmax_backward_data": {1: ("LogSoftmax", "result")},
    "mm": {0: ("Mm", "self"), 1: ("Mm", "mat2")},
    "addmm": {1: ("Addmm", "mat1"), 2: ("Addmm", "mat2")},
    "bmm": {0: ("Bmm", "self"), 1: ("Bmm", "mat2")},
    "mul": {0: ("Mul", "self"), 1: ("Mul", "other")},
}
for _name, _output in (("flash", 4), ("cudnn", 4), ("efficient", 5), ("flash_attention_for_cpu", 4)):
    _word = _name if "attention" in _name else f"{_name}_attention"
    _slots = {1: "query", 2: "key", 3: "value", _output: "output"}
    READERS[f"_scaled_dot_product_{_word}_backward"] = {
        i: ("ScaledDotProductAttention", slot) for i, slot in _slots.items()
    }

# What changes neither values nor their order in memory by more than a cast.
TRANSPARENT = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "detach", "alias",
    "clone", "_to_copy", "convert_element_type", "slice", "select", "split", "split_with_sizes", "getitem", "unbind",
}  # fmt: skip
COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne"}


def name_of(target: Any) -> str:
    """`aten.mul.Tensor` -> `mul`."""
    schema = getattr(target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema is not None else getattr(target, "__name__", str(target))


def operation_of(node: Node) -> str:
    """The operation that a node belongs to: the one it was decomposed from, where that is known."""
    return name_of(node.meta.get("original_aten") or node.target)


def root_of(operation: str) -> str:
    """What an operation and its backward have in common: `_native_batch_norm_legit_functional` -> `batch_norm`."""
    words = operation.strip("_").split("_")
    return "_".join(word for word in words if word not in ("native", "legit", "functional", "backward", "data", "no"))


def layer_of(node: Node) -> str:
    """The name of the module whose forward pass a node belongs to."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = re.sub(r"^L\[[^\]]*\]", "", path).replace("._modules", "")
    parts = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).split(".")
    return ".".join(part for part in parts if part not in ("", "module", "_orig_mod"))


def value(node: Node) -> Any:
    return node.meta.get("val")


def hint(number: Any) -> int:
    """A size as a number: for a symbolic one, what it was when the graph was made."""
    if isinstance(number, int):
        return number
    symbol = number.node
    return int(symbol.hint if symbol.hint is not None else 1 << 30)


def bytes_of(t: Tensor) -> int:
    return hint(t.numel()) * t.element_size()


def is_relu(node: Node) -> bool:
    """Whether a node of the forward graph is ReLU's result, behind views and casts: zero or positive."""
    while name_of(node.target) in TRANSPARENT and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return name_of(node.target) == "relu"


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
            and not overlaps([*map(hint, t.shape)], [*map(hint, t.stride())])
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

    def site_of(self, made: Node, reader: Node, source: Node) -> Site:
        """Where and for whom a tensor is saved."""
        t = value(made)
        site = Site(layer_of(reader) or layer_of(made), 0, (t.dtype, t.dim(), made in self.differentiable, None))
        operation = operation_of(reader)
        table = READERS.get(operation)
        known = None
        if table is not None and name_of(reader.target) == operation:
            known = [table[i] for i, argument in enumerate(reader.args) if argument is source and i in table]
        elif table is not None and len(table) == 1:
            known = list(table.values())
        if not known:
            site.operation, site.slot = operation, "?"
            return site
        site.operation, site.slot = known[0]
        if len(known) > 1:
            return site
        if site.operation == "Convolution":
            mask = reader.args[10]
            wanted = site.slot == "input" and isinstance(mask, list | tuple) and mask[1]
            site.need = "weight" if site.slot == "weight" else "lossy" if wanted else "shape"
        else:
            site.need = need_of(site, None, None, False, False)
        return site

    def sites_of(self, made: Node) -> list[Site]:
        return [self.site_of(made, *pair) for pair in self.readers_behind(self.inputs[made.name])]

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
