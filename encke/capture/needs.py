"""The table of needs: how much of a saved tensor the operation that reads it needs.

Eager mode translates the names of autograd nodes (`ConvolutionBackward0` -> `Convolution`, encke/capture/nodes.py),
compiled mode those of aten operations (`convolution_backward` -> `Convolution`, encke/compiled/names.py); both ask
`need_of`. The need decides how far a policy may go:

    weight      never packed
    shape       only size and strides are read: costs nothing
    mask        only zero or not is read: one bit
    sign        only the sign is read: one bit
    range       only inside or outside of known limits is read: one bit
    exact       every bit matters: lossless, or kept
    recomputed  a result of attention: not kept where its inputs are lossy, else exact (encke/capture/attention.py)
    attention   lossy, but a softmax amplifies errors: bits by the predicted error of a score (encke/capture/scores.py)
    logprob     lossy, read through an exponential: an absolute bound
    lossy       the policy decides

The table is an allow-list. An operation or slot that it does not list is exact: the effect of errors on its derivative
is unknown. The kind of a lossy entry states that effect:

    linear      the gradient is linear in the tensor: unbiased noise gives an unbiased gradient
    quadratic   the tensor is read twice in a product: unbiased noise adds a bias in proportion to its variance.
                A softmax read from its result P is of this kind, as P * (g - sum(P * g)): its error is at most a step
                of P
    smooth      the derivative is a function of each value: an error changes it by at most `LIPSCHITZ` times the error,
                plus `JUMPS` where the value crosses a corner of the function
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import torch

from encke.capture.sites import Need
from encke.kernels import FLOATS

Kind = Literal["linear", "quadratic", "smooth"]
"""Effects of errors in a lossy tensor on the gradients of its reader."""

# One name for operations that several backends of torch implement.
CANONICAL = {
    "NativeBatchNorm": "BatchNorm",
    "CudnnBatchNorm": "BatchNorm",
    "MiopenBatchNorm": "BatchNorm",
    "ScaledDotProductFlashAttention": "ScaledDotProductAttention",
    "ScaledDotProductFlashAttentionForCpu": "ScaledDotProductAttention",
    "ScaledDotProductEfficientAttention": "ScaledDotProductAttention",
    "ScaledDotProductCudnnAttention": "ScaledDotProductAttention",
}

NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RmsNorm", "RMSNorm")
"""Parts of the names of normalisations."""

NORMALIZED: dict[tuple[str, str], tuple[str, str | None]] = {
    ("BatchNorm", "input"): ("channels", None),
    ("NativeLayerNorm", "input"): ("last", "normalized_shape"),
    ("FusedRmsNorm", "input"): ("last", "normalized_shape"),
    ("NativeGroupNorm", "input"): ("groups", "group"),
    # Composed from basic operations: sites of x.pow(2).mean(-1), and of x * rsqrt(..), have this name
    # (`Readers._site`).
    ("RmsNorm", "input"): ("last", None),
}
"""Readers that normalise -> the dimensions they normalise over, and the node's setting that gives their number."""

# need or kind -> {operation: slots}.
LISTED: dict[Need | Kind, dict[str, str]] = {
    "shape": {
        "MaxPool2DWithIndices": "self",
        "MaxPool3DWithIndices": "self",
        "AdaptiveMaxPool2D": "self",
        "AdaptiveMaxPool3D": "self",
        "AvgPool2D": "self",
        "AvgPool3D": "self",
        "AdaptiveAvgPool2D": "self",
        "AdaptiveAvgPool3D": "self",
        "FractionalMaxPool2D": "self",
        "FractionalMaxPool3D": "self",
        "ReflectionPad1D": "self",
        "ReflectionPad2D": "self",
        "ReflectionPad3D": "self",
        "ReplicationPad1D": "self",
        "ReplicationPad2D": "self",
        "ReplicationPad3D": "self",
        "Cummax": "self",
        "Cummin": "self",
        "Gather": "self",
        "Take": "self",
        "MaskedSelect": "self",
        "IndexAdd": "source",
        "IndexCopy": "source",
        "Put": "source",
        "NllLoss": "self",
        "NllLoss2D": "self",
    },
    # The noise is saved first and drawn afterwards.
    "weight": {"RreluWithNoise": "noise"},
    "mask": {"Relu": "result"},
    "sign": {"LeakyRelu": "self result"},
    "range": {"Hardsigmoid": "self", "Hardtanh": "self"},
    "linear": {
        "Convolution": "input",
        "Linear": "input",
        "Mm": "self mat2",
        "Addmm": "mat1 mat2",
        "Mv": "self vec",
        "Addmv": "mat vec",
        "Dot": "self tensor",
        # Scores are saved as the result of their softmax, so a product reads no value through an exponential.
        "Bmm": "self mat2",
        "Baddbmm": "batch1 batch2",
        "GroupedMm": "self mat2",
        "ScaledDotProductAttention": "value",
        "Mul": "self other",
        "Addcmul": "tensor1 tensor2",
        # The divisor is exact: the gradient divides by it.
        "Div": "self",
        "Exp": "result",
        "Exp2": "result",
        "Expm1": "result",
        # The derivative of |x| is x / |x|, that of the variance is 2 (x - mean) / n; the results are exact.
        "LinalgVectorNorm": "self",
        "Var": "self",
        "VarMean": "self",
        "Std": "self",
        "StdMean": "self",
        "GridSampler2D": "input",
        "GridSampler3D": "input",
    },
    "quadratic": {
        "BatchNorm": "input",
        "NativeLayerNorm": "input",
        "NativeGroupNorm": "input",
        "FusedRmsNorm": "input",
        "Softmax": "result",
        "SafeSoftmax": "result",
    },
    "smooth": {
        "Gelu": "self",
        "Silu": "self",
        "Mish": "self",
        "Sigmoid": "result",
        "Tanh": "result",
        "Hardswish": "self",
        "PreluKernel": "self",
        "Elu": "self",
        "Softplus": "self",
        "Pow": "self",
    },
    "attention": {"ScaledDotProductAttention": "query key"},
    "recomputed": {"ScaledDotProductAttention": "output logsumexp log_sumexp"},
    "logprob": {"LogSoftmax": "result"},
}

TABLE: dict[tuple[str, str], Need | Kind] = {
    (operation, slot): need
    for need, operations in LISTED.items()
    for operation, slots in operations.items()
    for slot in slots.split()
}
"""(operation, slot) -> its need, or the kind of a lossy one."""

LIPSCHITZ = {
    "Gelu": 0.8,
    "Silu": 0.5,
    "Mish": 0.65,
    "Sigmoid": 1.0,
    "Tanh": 2.0,
    "Hardswish": 1 / 3,
    "PreluKernel": 0.0,
    "Elu": 1.76,
    "Softplus": 0.25,
    "Pow": 2.0,
}
"""Change of a smooth operation's derivative for each unit of error in its saved tensor.

Sigmoid and tanh save their results: where one is decoded outside of the function's range, by an error e, the constant
is e larger. The third power has 6 times the largest value in place of the constant.
"""
JUMPS = {"Hardswish": 0.5, "PreluKernel": 1.0, "Elu": 0.71}
"""Change of the derivative at a corner: hard swish at -3 and 3, SELU and PReLU (with a slope from 0 to 2) at zero."""

COPY_SLICES = "CopySlices"
"""Node that hides an in-place operation on a view (encke/capture/hidden.py)."""
CHECKPOINT = ("Checkpoint", "input")
"""Reader of the inputs of `torch.utils.checkpoint(..., use_reentrant=False)`, from which a region is recomputed.

Exact, unless a user calls `register_reader("Checkpoint", "input", "smooth")`.
"""

MIN_BITS = {
    CHECKPOINT: 8,
    # Their errors propagate to all layers before them, and are not averaged over a batch as those of a weight gradient.
    ("Bmm", "self"): 4,
    ("Bmm", "mat2"): 4,
    ("Baddbmm", "batch1"): 4,
    ("Baddbmm", "batch2"): 4,
    ("GroupedMm", "self"): 4,
    ("GroupedMm", "mat2"): 4,
    ("ScaledDotProductAttention", "value"): 4,
    # Subtracted from a nearly equal value where attention is sharp.
    ("ScaledDotProductAttention", "output"): 8,
    ("Softmax", "result"): 8,
    ("SafeSoftmax", "result"): 8,
    # The numerator of a softmax that is composed from basic operations.
    ("Exp", "result"): 4,
}
"""Fewest bits of some lossy entries, whatever the policy; 8 for every entry if rounding is biased."""

SETTINGS: dict[str, tuple[str, tuple[float, ...]]] = {
    # Derivatives of other powers divide, or are NaN where a value was decoded below zero.
    "Pow": ("exponent", (2, 3)),
    "Softplus": ("beta", (1,)),
    # ELU with its default, and SELU.
    "Elu": ("alpha", (1, 1.6732632423543772)),
    "LinalgVectorNorm": ("ord", (2,)),
}
"""Settings of an operation for which its entry holds: name and values. With other values it is exact."""

REDUCTIONS = {"LinalgVectorNorm", "Var", "VarMean", "Std", "StdMean"}
FEWEST = 8
"""Fewest values that a lossy norm, variance or deviation must reduce. Its own derivative or that of the next operation
divides by it. Over few values it may be almost zero beside its neighbours, whose values decide the error."""

# Slots that hold data whether or not it needs a gradient: the first layer's input is such a tensor.
DATA_SLOTS = {"input", "query", "key", "value", "output"}
MATMULS = {"Addmm", "Mm", "Linear", "Addmv", "Mv", "GroupedMm"}
SECOND = {"mat2", "vec"}
"""Slots of a product's second operand."""

REGISTRABLE = ("exact", "shape", *get_args(Kind), "attention", "logprob")
_registered: dict[tuple[str, str], tuple[Need | Kind, type | None]] = {}
"""Readers that users have added: need, and the class of their nodes where a function was given."""


def register_reader(function_or_name: type[torch.autograd.Function] | str, slot: str | int, need: str) -> None:
    """Declare what an operation unknown to Encke needs of a saved tensor. Without a declaration the tensor is exact.

    Call it before the first training step. It holds for every model, in eager mode. A compiled model sees the
    operations inside of a function instead.

    Args:
        function_or_name: A class derived from `torch.autograd.Function`, or an operation's name: its autograd node's
            name without `Backward0`.
        slot: Number of the tensor among those given to `save_for_backward`; for an operation of torch its name in the
            node, `self` for `node._saved_self`.
        need: `linear` if the gradients are linear in the tensor, so that unbiased noise does no harm; `quadratic` if it
            is read twice in a product, as in a norm; `smooth` for a function of each value whose derivative has no
            steep places; `attention` for the input of a softmax; `logprob` for logarithms of probabilities; `shape` if
            no value is read; `exact` to remove an operation from the table.

    Raises:
        TypeError: The first argument is neither such a class nor a name, or the slot is neither text nor number.
        ValueError: The need does not exist, or may not be registered.

    Example:
        >>> import torch, encke
        >>> class Gate(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x, gate):
        ...         ctx.save_for_backward(x, gate)
        ...         return x * gate
        ...
        ...     @staticmethod
        ...     def backward(ctx, gradient):
        ...         x, gate = ctx.saved_tensors
        ...         return gradient * gate, gradient * x
        >>> encke.register_reader(Gate, 0, "linear")
        >>> encke.register_reader(Gate, 1, "linear")
    """
    function = function_or_name if isinstance(function_or_name, type) else None
    if function is not None and issubclass(function, torch.autograd.Function):
        name, node_class = function.__name__, function._backward_cls
    elif isinstance(function_or_name, str) and function_or_name:
        name, node_class = CANONICAL.get(function_or_name, function_or_name), None
    else:
        raise TypeError(
            "register_reader takes a class derived from torch.autograd.Function or an operation's name such as "
            f"'Mul', got {function_or_name!r}"
        )
    if isinstance(slot, bool) or not isinstance(slot, str | int):
        raise TypeError(f"a slot is a number such as 0 or a name such as 'self', got {slot!r}")
    if need not in REGISTRABLE:
        raise ValueError(f"need of {name}: one of {', '.join(REGISTRABLE)}, got {need!r}")
    slots = [slot] if isinstance(slot, str) else [f"tensors{slot}"] if slot else ["tensors", "tensors0"]
    for each in slots:
        _registered[name, each] = (need, node_class)  # type: ignore[assignment]
    listed_need.cache_clear()


@functools.lru_cache(maxsize=4096)
def listed_need(operation: str, slot: str, node_class: type | None = None) -> Need | Kind | None:
    """Return the need, or kind, that the table lists for a reader; None if it lists none.

    Args:
        operation: The operation that reads.
        slot: The name under which it saved the tensor.
        node_class: The class of its autograd node, if there is one.
    """
    need, registered = _registered.get((operation, slot), (None, None))
    # Two functions may have one name.
    if need is not None and registered in (None, node_class):
        return need
    return "weight" if slot.startswith("weight") else TABLE.get((operation, slot))


def need_of(
    operation: str,
    slot: str,
    dtype: torch.dtype,
    *,
    requires_grad: bool,
    parameter: bool = False,
    from_leaves: bool = False,
    in_linear: bool = False,
    limits: bool = False,
    setting: Any = None,
    together: int = FEWEST,
    reads_input: bool = True,
    dropout: bool = False,
    node_class: type | None = None,
) -> Need:
    """Return what a reader needs of the tensor saved for it.

    Args:
        operation: The operation that reads.
        slot: The name under which it saved the tensor.
        dtype: The tensor's dtype.
        requires_grad: Whether the tensor needs a gradient.
        parameter: The tensor is a parameter behind views and casts, or computed from parameters and constants alone.
        from_leaves: The tensor is computed from leaves of any kind alone.
        in_linear: The layer that saves it is a linear layer.
        limits: The operation has known limits, inside which it propagates the gradient unchanged.
        setting: Value of the setting that `SETTINGS` names for the operation; None if it is not known.
        together: Values that each result of a reduction is computed from.
        reads_input: A convolution or batch norm reads its input's values. It does not if it is frozen; a batch norm
            must also be in evaluation mode.
        dropout: The operation is attention with dropout.
        node_class: The class of the operation's autograd node, if there is one.
    """
    is_float = dtype in FLOATS
    if parameter and is_float:
        return "weight"
    need = listed_need(operation, slot, node_class)
    if need in ("weight", "shape"):
        return need
    if operation in ("Convolution", "BatchNorm") and slot == "input" and not reads_input:
        return "shape"
    if not is_float or need is None or (need == "range" and not limits):
        return "exact"
    if operation in MATMULS and slot in SECOND and (not requires_grad or in_linear or from_leaves):
        return "weight"
    if operation in SETTINGS and setting not in SETTINGS[operation][1]:
        return "exact"
    if operation in REDUCTIONS and together < FEWEST:
        return "exact"
    if need == "recomputed" and dropout and slot == "output":
        return "lossy"
    if need in ("logprob", "mask", "sign", "range", "exact", "recomputed"):
        return need
    if not (requires_grad or slot in DATA_SLOTS or (operation, slot) in _registered):
        return "exact"
    return "attention" if need == "attention" else "lossy"
