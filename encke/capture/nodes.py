"""Autograd nodes: their names, their inputs in the graph, and their saved tensors."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from encke.capture.needs import CANONICAL, FEWEST, NORMALIZED, REDUCTIONS, SETTINGS
from encke.capture.saved import Saved
from encke.torch_internals import RAW_SAVED, raw_saved_slots, saved_setting

LOOKUPS = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"}
VIEWS = {
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "ToCopy", "Unsqueeze", "Squeeze",
    "AsStrided", "Slice", "Select", "Clone", "Alias", "Detach", "Split", "Chunk", "Unbind", "SplitWithSizes",
}  # fmt: skip
PRODUCTS = {"Addmm", "Mm", "Linear", "Addmv", "Mv", "Dot", "Bmm", "Baddbmm", "Convolution"}
LAST = 2**64 - 1
"""The last dimension, as nodes keep it."""
KNOWN: dict[type, str] = {}
"""Names of operations whose nodes have a type of their own."""
_slots: dict[type, list[str]] = {}


def operation_name(node: Any) -> str:
    """Return a node's operation: `ConvolutionBackward0` -> `Convolution`."""
    kind = type(node)
    known = KNOWN.get(kind)
    if known is None:
        name = node.name().rpartition("::")[2]
        known = name.rstrip("0123456789").removesuffix("Backward") or name
        # Operations of C++ extensions and of older releases share one type. Only a type of the node's own identifies
        # the name.
        if kind.__name__ == name:
            KNOWN[kind] = known
    return known


def signature(t: Tensor) -> tuple[Any, ...]:
    """Return the properties that stay the same when a site saves again, whatever the batch size."""
    node = t.grad_fn
    return (t.dtype, t.dim(), t.requires_grad, None if node is None else operation_name(node))


class Origin(enum.IntEnum):
    """Kind of values that a tensor was computed from. A result's origin is the least origin of its inputs."""

    DATA = 0
    LEAVES = 1
    """Leaves of any kind and constants alone."""
    PARAMETERS = 2
    """Parameters and constants alone, as with weight norm and masked weights."""


def origin_of(grad_fn: Any, known: dict[int, Origin]) -> Origin:
    """Return the origin of a tensor.

    Args:
        grad_fn: The node that made the tensor.
        known: Origins found earlier in this forward pass, by the node's sequence number; new ones are added, so that no
            node is visited twice.
    """
    path: list[tuple[int, Iterator[Any], list[Origin]]] = []
    """From `grad_fn` down to the current node: its number, its inputs still to visit, the origins of the others."""
    node = grad_fn
    while True:
        origin, inputs = _look(node, known)
        if origin is None:
            path.append((node._sequence_nr(), iter(inputs), [Origin.PARAMETERS]))
        while path:
            number, rest, found = path[-1]
            if origin is not None:
                found.append(origin)
            # A result computed from data is data, whatever its other inputs are.
            node = None if origin is Origin.DATA else next(rest, None)
            if node is not None:
                break
            origin = known[number] = min(found)
            path.pop()
        else:
            assert origin is not None
            return origin


def _look(node: Any, known: dict[int, Origin]) -> tuple[Origin | None, list[Any]]:
    """Return the origin of a node's result, or None and the nodes of its inputs, which decide.

    Rows looked up in a table are not computed from leaves alone: the choice of rows is data. A tensor without a
    gradient is data if it is an operand of a product or if it is larger than the leaves it meets, and a constant
    otherwise.
    """
    if node is None:
        return Origin.DATA, []
    if hasattr(node, "variable"):
        return Origin.PARAMETERS if isinstance(node.variable, nn.Parameter) else Origin.LEAVES, []
    origin = known.get(node._sequence_nr())
    if origin is not None:
        return origin, []
    operation, edges = operation_name(node), node.next_functions
    inputs = [edge for edge in edges if edge[0] is not None]
    if operation in LOOKUPS or not inputs:
        return Origin.DATA, []
    if len(inputs) < len(edges) and (operation in PRODUCTS or result_size(node) > max(map(input_size, inputs))):
        return Origin.DATA, []
    return None, [source for source, _ in inputs]


def result_size(node: Any, index: int = 0) -> int:
    """Return the number of values in a result of the operation that a node belongs to."""
    return math.prod(node._input_metadata[index].shape)


def input_size(edge: tuple[Any, int]) -> int:
    """Return the number of values that an edge of the graph passes to its node."""
    return result_size(*edge)


def is_view_of_parameter(grad_fn: Any) -> bool:
    """Return whether a tensor is a parameter behind nothing but views and casts."""
    while grad_fn is not None:
        if hasattr(grad_fn, "variable"):
            return True
        if operation_name(grad_fn) not in VIEWS:
            return False
        grad_fn = grad_fn.next_functions[0][0]
    return False


def reads_input(node: Any) -> bool:
    """Return whether a node is a convolution or a batch norm that reads the values of its input.

    Both read it for the gradient of a weight. A batch norm in training also reads it for the gradient of its input.
    """
    operation = operation_name(node)
    if operation == "Convolution":
        return node.next_functions[1][0] is not None
    if CANONICAL.get(operation, operation) != "BatchNorm":
        return False
    return node.next_functions[1][0] is not None or bool(saved_setting(node, "training", True))


def setting_of(node: Any, operation: str) -> Any:
    """Return the setting that decides whether the operation's entry in the table of needs holds; None if none does."""
    # Other overloads save the setting as a tensor: reading it would unpack that tensor.
    known = operation in SETTINGS and node.name().endswith("Backward0")
    return saved_setting(node, SETTINGS[operation][0], None) if known else None


def together(node: Any, operation: str, size: tuple[int, ...]) -> int:
    """Return how many values each result of a reduction is computed from, for an input of this size."""
    if operation not in REDUCTIONS:
        return FEWEST
    return math.prod(size) // max(math.prod(node._input_metadata[0].shape), 1)


def norm_of(node: Any, operation: str, slot: str) -> tuple[str, int] | None:
    """Return the dimensions that a reader normalises over, as `layout.rows_for` takes them; None if it does not."""
    kind, setting = NORMALIZED.get((operation, slot), ("", None))
    if not kind:
        return None
    if setting is None:
        return kind, int(kind == "last")
    number = saved_setting(node, setting)
    return kind, number if isinstance(number, int) else len(number)


def square_of(mean: Any) -> Any:
    """Return the node of the square in a mean of squares over the last dimension, as in RMS norms; None otherwise."""
    if operation_name(mean) != "Mean":
        return None
    square = mean.next_functions[0][0]
    if square is None or operation_name(square) != "Pow" or saved_setting(square, "exponent", None) != 2:
        return None
    last = len(square._input_metadata[0].shape) - 1
    dims = saved_setting(mean, "dim", None)
    # A node keeps -1 as the largest number.
    return square if dims is not None and tuple(dims) in ((last,), (LAST,)) else None


def scales(node: Any, slot: str) -> bool:
    """Return whether the node multiplies a slot with one over a deviation, and reads it for that factor's gradient."""
    if operation_name(node) != "Mul" or slot not in ("self", "other"):
        return False
    deviation = node.next_functions[slot == "self"][0]
    return deviation is not None and operation_name(deviation) == "Rsqrt"


def window_of(node: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return kernel, stride, padding and dilation of a max-pool, or None if the window is not fixed."""
    kernel = saved_setting(node, "kernel_size", None)
    if kernel is None or "Fractional" in node.name():
        return None
    stride, padding, dilation = (saved_setting(node, name) for name in ("stride", "padding", "dilation"))
    return expand_window(kernel, stride or kernel, padding, dilation, dimensions=3 if "3D" in node.name() else 2)


def expand_window(*settings: int | Sequence[int], dimensions: int) -> tuple[tuple[int, ...], ...]:
    """Return kernel, stride, padding and dilation with a number for each dimension."""
    lists = [(value,) if isinstance(value, int) else tuple(value) for value in settings]
    return tuple(v * dimensions if len(v) == 1 else v for v in lists)


def saved_by(node: Any) -> list[tuple[str, Saved]]:
    """Return (slot, Saved) for everything that a node saved through us, without unpacking it."""
    names = _slots.get(type(node))
    if names is None:
        names = _slots[type(node)] = raw_saved_slots(type(node))
    savings: list[tuple[str, Saved]] = []
    for slot in names:
        try:
            raw = getattr(node, RAW_SAVED + slot)
            pieces = raw if isinstance(raw, list | tuple) else (raw,)
            data = [piece.data if piece is not None else None for piece in pieces]
        except RuntimeError:
            continue
        # A function that replaces an operation declares its slots.
        slots = getattr(node, "encke_slots", None) if slot == "tensors" else None
        for i, item in enumerate(data):
            if isinstance(item, Saved):
                savings.append((slots[i] if slots else slot if len(data) == 1 else f"{slot}{i}", item))
    return savings


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in the output of a forward pass: containers and plain objects are searched, each once."""
    stack, seen = [output], set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, nn.Module | type):
            stack.extend(vars(item).values())


def is_parameter_view(t: Tensor) -> bool:
    """Return whether a tensor is a view of a parameter; does not ask whether it is one itself, which would be slow."""
    base = t._base
    # Asking whether a plain tensor is a parameter would take a Python call.
    return base is not None and type(base) is not Tensor and isinstance(base, nn.Parameter)
