"""The table of needs: what the operation that reads a saved tensor needs of it.

The need decides how far a policy may go: a weight is never packed, a shape costs nothing, a mask is one bit, an index
or a statistic stays exact, and only what remains may be lossy.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from encke.capture.sites import Need, Site
from encke.codecs.exact import Between
from encke.kernels import FLOATS

SHAPE_ONLY = {
    ("MaxPool2DWithIndices", "self"),
    ("MaxPool3DWithIndices", "self"),
    ("AdaptiveMaxPool2D", "self"),
    ("AdaptiveMaxPool3D", "self"),
    ("AvgPool2D", "self"),
    ("AvgPool3D", "self"),
    ("AdaptiveAvgPool2D", "self"),
    ("AdaptiveAvgPool3D", "self"),
    ("NllLoss", "self"),
    ("NllLoss2D", "self"),
}
MASK_ONLY = {("Relu", "result")}
SIGN_ONLY = {("LeakyRelu", "self"), ("LeakyRelu", "result")}
# Slots that hold data whether or not it needs a gradient: the first layer's input is such a tensor.
DATA_SLOTS = {"input", "query", "key", "value", "output"}
ATTENTION = ("ScaledDotProduct", "Bmm", "Baddbmm", "Softmax", "SafeSoftmax", "EfficientAttention", "FlashAttention")
# Derivatives that divide by what was saved or raise it to a power: a bounded error is not a small one there.
FRAGILE = (
    "Div", "Log", "Sqrt", "Rsqrt", "Reciprocal", "Pow", "Atan2", "Acos", "Asin", "Acosh", "Atanh", "Erfinv", "Logit",
    "Norm", "LinalgVectorNorm", "LinalgInv", "Cholesky", "Std", "Var", "Prod", "Cumprod", "Digamma", "Lgamma", "Hypot",
)  # fmt: skip
# Losses, and checkpointing, which computes again from what it saves.
EXACT_WORDS = ("Loss", "CrossEntropy", "NoopSaveInputs", "CheckpointFunction")
NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RmsNorm", "RMSNorm")
# Powers whose derivatives are polynomials: errors stay in proportion there. Roots and inverses are not like that, and
# other powers of a value that came back below zero are not numbers.
POLYNOMIAL = (2, 3)
LINEAR_MODULES = (nn.Linear, nn.LazyLinear)
MATMULS = {"Addmm", "Mm", "Linear", "Addmv", "Mv", "Matmul"}
SECOND = {"mat2", "other", "vec"}
LOOKUPS = {"Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take"}
VIEWS = {
    "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "ToCopy", "Unsqueeze", "Squeeze",
    "AsStrided", "Slice", "Select", "Clone", "Alias", "Detach", "Split", "Chunk", "Unbind", "SplitWithSizes",
}  # fmt: skip


def operation_name(node: Any) -> str:
    """`ConvolutionBackward0` -> `Convolution`."""
    kind = type(node)
    known = KNOWN.get(kind)
    if known is None:
        name = node.name().rpartition("::")[2]
        known = name.rstrip("0123456789").removesuffix("Backward") or name
        # Operations of C++ extensions and of older releases share one type: only a type of its own tells the name.
        if kind.__name__ == name:
            KNOWN[kind] = known
    return known


KNOWN: dict[type, str] = {}
"""The names of operations whose nodes have a type of their own."""


def comes_from_leaves(grad_fn: Any, parameters: bool, limit: int = 64) -> bool:
    """Whether a tensor was computed from leaves alone, as weight norm does; `parameters`: only nn.Parameters count.

    Looking rows up in a table is not that: which rows is data.
    """
    stack, seen = [grad_fn], 0
    while stack:
        node = stack.pop()
        seen += 1
        if node is None or seen > limit:
            return False
        if hasattr(node, "variable"):
            if parameters and not isinstance(node.variable, nn.Parameter):
                return False
            continue
        if operation_name(node) in LOOKUPS:
            return False
        stack.extend(next_node for next_node, _ in node.next_functions)
        if not node.next_functions:
            return False
    return True


def is_view_of_parameter(grad_fn: Any) -> bool:
    """Whether a tensor is a parameter behind nothing but views and casts."""
    for _ in range(16):
        if grad_fn is None:
            return False
        if hasattr(grad_fn, "variable"):
            return True
        if operation_name(grad_fn) not in VIEWS:
            return False
        grad_fn = grad_fn.next_functions[0][0]
    return False


def needs_weight_gradient(node: Any) -> bool:
    """Whether a node is a convolution whose weight needs a gradient, and so its input's values."""
    return operation_name(node) == "Convolution" and node.next_functions[1][0] is not None


def is_polynomial(node: Any) -> bool:
    """Whether a node raises a tensor to a small whole power, given as a number."""
    # Other forms of `pow` save the exponent as a tensor: to ask for it would unpack it.
    return node is not None and node.name() == "PowBackward0" and node._saved_exponent in POLYNOMIAL


def limits_of(operation: str, module: nn.Module | None) -> tuple[float, float] | None:
    """Between which values of its input an operation of `module` passes gradients on unchanged, and elsewhere none.

    Only layers tell: numbers that somebody gives to a function may be others in the next step.
    """
    if operation == "Hardsigmoid":
        return (-3.0, 3.0)
    if operation == "Hardtanh" and isinstance(module, nn.Hardtanh) and type(module).forward is nn.Hardtanh.forward:
        return (float(module.min_val), float(module.max_val))
    return None


def need_of(site: Site, node: Any, module: nn.Module | None, weight: bool, computed: bool) -> Need:
    """What the reader `node` needs of the tensor saved at `site`.

    `weight` says whether it is a parameter behind views and casts or computed from parameters alone, `computed` whether
    it is computed from any leaves alone.
    """
    operation, slot = site.operation, site.slot
    dtype, _, requires_grad, _ = site.signature
    if slot.startswith("weight") or (dtype in FLOATS and weight):
        return "weight"
    if (operation, slot) in SHAPE_ONLY:
        return "shape"
    if operation == "Convolution" and slot == "input" and not needs_weight_gradient(node):
        return "shape"
    if dtype not in FLOATS:
        return "exact"
    if (
        operation in MATMULS
        and slot in SECOND
        and (not requires_grad or isinstance(module, LINEAR_MODULES) or computed)
    ):
        return "weight"
    if (operation, slot) in MASK_ONLY:
        return "mask"
    if (operation, slot) in SIGN_ONLY:
        return "sign"
    limits = limits_of(operation, module)
    if limits is not None and Between(*limits).takes(dtype):
        return "range"
    if operation == "LogSoftmax":
        return "logprob"
    if any(word in operation for word in EXACT_WORDS) or "logsumexp" in slot:
        return "exact"
    if any(name in operation for name in NORMS):
        return "lossy" if slot == "input" else "exact"
    fragile = operation.startswith(FRAGILE) and not is_polynomial(node)
    if fragile or not (requires_grad or slot in DATA_SLOTS):
        return "exact"
    return "attention" if operation.startswith(ATTENTION) else "lossy"
