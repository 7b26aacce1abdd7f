"""Names in compiled graphs: operations, layers and sites, translated into those of eager mode.

Nodes of the backward graph carry the sequence number of their forward operation, and forward operations carry the stack
of modules around them. These give layer, call, operation, slot and occurrence of a site, the same as in eager mode. Two
cases cannot be matched: an operation that the compiler decomposes before autograd has a different name here, and after
a graph break the calls of a layer are counted from zero in each graph. A policy does not find such a site among those
it has measured, and uses the setting of the layer.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from encke.capture.encoding import limits_of
from encke.capture.needs import CHECKPOINT, NORMS, need_of
from encke.capture.sites import Need, Site

# Operations of the backward graph that read saved tensors: argument -> (operation, slot) as in eager mode.
READERS: dict[str, dict[int, tuple[str, str]]] = {
    "convolution_backward": {1: ("Convolution", "input"), 2: ("Convolution", "weight")},
    "native_batch_norm_backward": {1: ("BatchNorm", "input")},
    "batch_norm_backward": {1: ("BatchNorm", "input")},
    "cudnn_batch_norm_backward": {0: ("BatchNorm", "input")},
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
    "grid_sampler_2d_backward": {1: ("GridSampler2D", "input")},
    "grid_sampler_3d_backward": {1: ("GridSampler3D", "input")},
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
    "pow": {0: ("Pow", "self")},
}
for _kind, _d in itertools.product(("Reflection", "Replication"), (1, 2, 3)):
    READERS[f"{_kind.lower()}_pad{_d}d_backward"] = {1: (f"{_kind}Pad{_d}D", "self")}
SDPA = "ScaledDotProductAttention"
for _name, _output in (("flash_attention", 4), ("cudnn_attention", 4), ("efficient_attention", 5),
                       ("flash_attention_for_cpu", 4)):  # fmt: skip
    _inputs = ((SDPA, "query"), (SDPA, "key"), (SDPA, "value"))
    _results = {_output: (SDPA, "output"), _output + 1: (SDPA, "logsumexp")}
    READERS[f"_scaled_dot_product_{_name}_backward"] = dict(enumerate(_inputs, 1)) | _results
    # Written into backward graphs by encke/compiled/attention.py.
    READERS[f"_scaled_dot_product_{_name}"] = dict(enumerate(_inputs))

# Operations whose gradients are operations of the same kind: only the forward operation shows which operand they read.
PRODUCTS = {"mm", "addmm", "bmm", "mul", "pow"}

# Operations that change neither values, except by a cast, nor their order in memory.
TRANSPARENT = {
    "view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "detach", "alias",
    "clone", "_to_copy", "convert_element_type", "slice", "select", "split", "split_with_sizes", "getitem", "unbind",
}  # fmt: skip
COMPARISONS = {"le", "lt", "ge", "gt", "eq", "ne"}


def name_of(target: Any) -> str:
    """Return a target's name: `aten.mul.Tensor` -> `mul`."""
    schema = getattr(target, "_schema", None)
    return schema.name.rpartition("::")[2] if schema is not None else getattr(target, "__name__", str(target))


def operation_of(node: Node) -> str:
    """Return the operation that a node belongs to: the one it was decomposed from, where that is known."""
    return name_of(node.meta.get("original_aten") or node.target)


def root_of(operation: str) -> str:
    """Return the name shared by an operation and its backward: `native_batch_norm_backward` -> `batch_norm`."""
    words = operation.strip("_").split("_")
    return "_".join(word for word in words if word not in ("native", "legit", "functional", "backward", "data", "no"))


def call_of(node: Node) -> tuple[str, int]:
    """Return the name of the module that a node belongs to, and the number of the module's call in the graph."""
    stack = node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack") or {}
    if not stack:
        return "", 0
    key, (path, *_) = list(stack.items())[-1]
    path = re.sub(r"^L\[[^\]]*\]", "", str(path)).replace("._modules", "")
    words = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path).split(".")
    layer = ".".join(word for word in words if word not in ("", "module", "_orig_mod"))
    # Dynamo marks the second call of a module with `@1`, the third with `@2`.
    _, _, number = str(key).partition("@")
    return layer, int(number) if number.isdigit() else 0


def value(node: Node) -> Any:
    """Return a node's value, as a fake tensor or a size."""
    return node.meta.get("val")


def size_hint(number: Any) -> int:
    """Return a size as a number; for a symbolic size, its value when the graph was made."""
    if isinstance(number, int):
        return number
    symbol = number.node
    return int(symbol.hint if symbol.hint is not None else 1 << 30)


def size_of(node: Node) -> int:
    """Return the number of values in a node's result; zero if it is not a tensor."""
    t = value(node)
    return size_hint(t.numel()) if isinstance(t, Tensor) else 0


def bytes_of(t: Tensor) -> int:
    """Return the bytes of a tensor's values."""
    return size_hint(t.numel()) * t.element_size()


def arguments_of(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name, with defaults for those not given."""
    formals = node.target._schema.arguments  # type: ignore[union-attr]
    given = {formal.name: argument for formal, argument in zip(formals, node.args, strict=False)}
    return {formal.name: formal.default_value for formal in formals} | given | node.kwargs


def set_arguments(node: Node, changed: dict[str, Any]) -> None:
    """Replace arguments of a node, by name, and update the values that the compiler reads."""
    known = arguments_of(node) | changed
    formals = node.target._schema.arguments  # type: ignore[union-attr]
    node.args = tuple(known[formal.name] for formal in formals if not formal.kwarg_only)
    node.kwargs = {formal.name: known[formal.name] for formal in formals if formal.kwarg_only}
    if "eager_input_vals" in node.meta:
        node.meta["eager_input_vals"] = map_arg((node.args, node.kwargs), value)


def ancestors(node: Any) -> set[Node]:
    """Return a node and all that it is computed from."""
    stack, seen = [node], set()
    while stack:
        each = stack.pop()
        if isinstance(each, Node) and each not in seen:
            seen.add(each)
            stack.extend(each.all_input_nodes)
    return seen


def behind_views(node: Node) -> Node:
    """Return the node that a node shows, behind views and casts."""
    while name_of(node.target) in TRANSPARENT and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_relu(node: Node) -> bool:
    """Return whether a node of the forward graph is ReLU's result, behind views and casts: zero or positive."""
    return name_of(behind_views(node).target) == "relu"


def has_dropout(reader: Node) -> bool:
    """Return whether a node is the backward of attention with dropout."""
    formals = reader.target._schema.arguments  # type: ignore[union-attr]
    return any(f.name == "dropout_p" and p != 0 for f, p in zip(formals, reader.args, strict=False))


def is_mean_square(power: Node) -> bool:
    """Return whether a power is the square whose mean over the last dimension is taken, as RMS norms do."""
    last = (-1, value(power).dim() - 1)
    means = [user for user in power.users if name_of(user.target) == "mean" and len(user.args) > 1]
    return bool(power.args[1] == 2) and any(list(user.args[1]) in ([d] for d in last) for user in means)  # type: ignore[arg-type]


def scales(product: Node, slot: str) -> bool:
    """Return whether a product's slot is read for the gradient of one over a deviation, which is the other operand."""
    deviation = product.args[slot == "self"]
    return isinstance(deviation, Node) and name_of(behind_views(deviation).target) == "rsqrt"


class SiteNames:
    """Name the sites of a pair of compiled graphs."""

    def __init__(self, forward: Graph, backward: Graph, min_bytes: int) -> None:
        self.min_bytes = min_bytes
        self.forward = {node.name: node for node in forward.nodes}
        self.operations: dict[int, list[Node]] = {}
        """Nodes of the forward graph by sequence number."""
        for node in forward.nodes:
            if node.op == "call_function" and node.meta.get("seq_nr") is not None:
                self.operations.setdefault(node.meta["seq_nr"], []).append(node)
        self._savings: dict[tuple[str, int, str, str], set[int]] = {}
        """Sequence numbers of the operations that save for the same operation and slot in a call."""
        self._given: dict[Site, Node] = {}
        for reader in backward.nodes:
            if reader.op == "call_function" and operation_of(reader) in READERS:
                self._count(reader)

    def _count(self, reader: Node) -> None:
        for source in reader.all_input_nodes:
            made = self.forward.get(behind_views(source).name)
            if made is None or not isinstance(value(source), Tensor) or bytes_of(value(source)) < self.min_bytes:
                continue
            for name in self._operation_and_slot(made, reader, source)[:1]:
                key = (*self._call(reader, made), *self._in_norm(made, reader, name))
                self._savings.setdefault(key, set()).add(reader.meta.get("seq_nr", -1))

    def _call(self, reader: Node, made: Node) -> tuple[str, int]:
        """Return layer and call of the operation that saved the tensor."""
        operations = self.operations.get(reader.meta.get("seq_nr"), ())  # type: ignore[arg-type]
        return call_of(operations[0] if operations else reader if call_of(reader)[0] else made)

    def _operation_and_slot(self, made: Node, reader: Node, source: Node) -> list[tuple[str, str]]:
        """Return the operations and slots as which `reader` may read `source`, which `made` computes in forward."""
        operation = operation_of(reader)
        table = READERS.get(operation)
        if table is None:
            return []
        if name_of(reader.target) == operation:
            names = [table[i] for i, argument in enumerate(reader.args) if argument is source and i in table]
        else:
            names = list(table.values()) if len(table) == 1 else []
        if len(names) == 1 and operation in PRODUCTS:
            # A product in the backward of another operation: that operation is not listed.
            operand = self._operand(made, reader)
            return [] if operand is None else [(name_of(operand[0].target).capitalize(), operand[1])]
        return names

    def _operand(self, made: Node, reader: Node) -> tuple[Node, str] | None:
        """Return the forward product that has the result of `made` as an operand, and the operand's slot."""
        origin = behind_views(made)
        for product in self.operations.get(reader.meta.get("seq_nr"), ()):  # type: ignore[arg-type]
            name = name_of(product.target)
            if name not in PRODUCTS:
                continue
            for argument, formal in zip(product.args, product.target._schema.arguments, strict=False):  # type: ignore[union-attr]
                if isinstance(argument, Node) and behind_views(argument) is origin:
                    return product, formal.name
        return None

    def _in_norm(self, made: Node, reader: Node, name: tuple[str, str]) -> tuple[str, str]:
        """Return the eager operation and slot of a reader in an RMS norm composed from basic operations."""
        operand = self._operand(made, reader) if name[0] in ("Pow", "Mul") else None
        if operand is not None and name[0] == "Pow" and is_mean_square(operand[0]):
            return "RmsNorm", "input"
        if operand is not None and name[0] == "Mul" and scales(*operand):
            return "RmsNorm", name[1]
        return name

    def _exponent(self, made: Node, reader: Node) -> Any:
        """Return the exponent of the power whose backward reads the result of `made`."""
        operand = self._operand(made, reader)
        return operand[0].args[1] if operand is not None else None

    def site_of(
        self,
        made: Node,
        reader: Node,
        source: Node,
        differentiable: bool,
        parameter: bool = False,
        region: bool = False,
    ) -> Site:
        """Return the site of a saved tensor for one reader.

        Args:
            made: The node of the forward graph that computes the tensor.
            reader: The node of the backward graph that reads it.
            source: The reader's argument: the tensor, or a view of it.
            differentiable: Whether the tensor needs a gradient.
            parameter: Whether it is computed from parameters and constants alone.
            region: Whether the reader belongs to a checkpointed region, which is recomputed from the tensor.
        """
        t, read = value(made), value(source)
        layer, call = self._call(reader, made)
        names = [CHECKPOINT] if region else self._operation_and_slot(made, reader, source)
        operation, slot = names[0] if names else (operation_of(reader), "?")
        need: Need = "exact"
        if len(names) == 1:
            reads_input = True
            if operation == "Convolution" and slot == "input":
                mask = reader.args[10]
                reads_input = isinstance(mask, list | tuple) and bool(mask[1])
            need = need_of(
                operation,
                slot,
                t.dtype,
                requires_grad=differentiable,
                parameter=parameter and differentiable,
                limits=limits_of(operation, None) is not None,
                setting=self._exponent(made, reader) if operation == "Pow" else None,
                reads_input=reads_input,
                dropout=(operation, slot) == (SDPA, "output") and has_dropout(reader),
            )
            operation, slot = self._in_norm(made, reader, (operation, slot))
            largest = max(map(size_of, [reader, *reader.all_input_nodes]))
            if need == "lossy" and any(norm in operation for norm in NORMS) and size_of(made) < largest:
                need = "exact"  # a statistic, spread over the values that the norm takes
        savings = sorted(self._savings.get((layer, call, operation, slot), ()))
        number = reader.meta.get("seq_nr", -1)
        occurrence = savings.index(number) if number in savings else len(savings)
        site = Site(layer, operation, slot, call, occurrence, need, t.dtype, read.dim())
        # Two tensors that an operation was decomposed to save are two sites.
        while self._given.setdefault(site, made) is not made:
            occurrence += 1
            site = Site(layer, operation, slot, call, occurrence, need, t.dtype, read.dim())
        return site
