"""The table of needs: what the operation that reads a saved tensor needs of it.

Eager mode translates the names of autograd nodes (`ConvolutionBackward0` -> `Convolution`, encke/capture/nodes.py),
compiled mode those of aten operations (`convolution_backward` -> `Convolution`, encke/compiled/names.py); both ask
`need_of`. The need decides how far a policy may go:

    weight      never packed
    shape       only size and strides are read: costs nothing
    mask        only zero or not is read: one bit
    sign        only the sign is read: one bit
    range       only inside or outside of known limits is read: one bit
    exact       every bit matters: lossless, or kept
    attention   lossy, but the softmax amplifies errors: the policy refines its codec
    logprob     lossy, read through an exponential: an absolute bound
    lossy       the policy decides
"""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase

import torch

from encke.capture.sites import Need
from encke.kernels import FLOATS

# Operations that different backends of torch implement: one name for all of them.
CANONICAL = {
    "NativeBatchNorm": "BatchNorm",
    "CudnnBatchNorm": "BatchNorm",
    "MiopenBatchNorm": "BatchNorm",
    "ScaledDotProductFlashAttention": "ScaledDotProductAttention",
    "ScaledDotProductFlashAttentionForCpu": "ScaledDotProductAttention",
    "ScaledDotProductEfficientAttention": "ScaledDotProductAttention",
    "ScaledDotProductCudnnAttention": "ScaledDotProductAttention",
    "ScaledDotProductFusedAttentionOverrideable": "ScaledDotProductAttention",
}

# (operation, slot) -> need; the first match counts. `*` stands for any text.
TABLE: tuple[tuple[str, str, Need], ...] = (
    ("*", "weight*", "weight"),
    ("MaxPool2DWithIndices", "self", "shape"),
    ("MaxPool3DWithIndices", "self", "shape"),
    ("AdaptiveMaxPool2D", "self", "shape"),
    ("AdaptiveMaxPool3D", "self", "shape"),
    ("AvgPool2D", "self", "shape"),
    ("AvgPool3D", "self", "shape"),
    ("AdaptiveAvgPool2D", "self", "shape"),
    ("AdaptiveAvgPool3D", "self", "shape"),
    ("NllLoss", "self", "shape"),
    ("NllLoss2D", "self", "shape"),
    ("Relu", "result", "mask"),
    ("LeakyRelu", "self", "sign"),
    ("LeakyRelu", "result", "sign"),
    # Where the limits are known; lossy otherwise.
    ("Hardsigmoid", "*", "range"),
    ("Hardtanh", "*", "range"),
    ("LogSoftmax", "*", "logprob"),
    # Losses, and checkpointing, which computes again from what it saves.
    ("*Loss*", "*", "exact"),
    ("*CrossEntropy*", "*", "exact"),
    ("*NoopSaveInputs*", "*", "exact"),
    ("*CheckpointFunction*", "*", "exact"),
    ("*", "*logsumexp*", "exact"),
    # Normalisations: the input may be lossy, statistics may not.
    ("*BatchNorm*", "input", "lossy"),
    ("*BatchNorm*", "*", "exact"),
    ("*LayerNorm*", "input", "lossy"),
    ("*LayerNorm*", "*", "exact"),
    ("*GroupNorm*", "input", "lossy"),
    ("*GroupNorm*", "*", "exact"),
    ("*InstanceNorm*", "input", "lossy"),
    ("*InstanceNorm*", "*", "exact"),
    ("*RmsNorm*", "input", "lossy"),
    ("*RmsNorm*", "*", "exact"),
    ("*RMSNorm*", "input", "lossy"),
    ("*RMSNorm*", "*", "exact"),
    ("ScaledDotProduct*", "*", "attention"),
    ("Bmm*", "*", "attention"),
    ("Baddbmm*", "*", "attention"),
    ("Softmax*", "*", "attention"),
    ("SafeSoftmax*", "*", "attention"),
    ("EfficientAttention*", "*", "attention"),
    ("FlashAttention*", "*", "attention"),
)

# The rule for operations that the table does not list: lossy, except for these. Their derivatives divide by what was
# saved or raise it to a power: a bounded error is not a small one there.
FRAGILE = (
    "Div", "Log", "Sqrt", "Rsqrt", "Reciprocal", "Pow", "Atan2", "Acos", "Asin", "Acosh", "Atanh", "Erfinv", "Logit",
    "Norm", "LinalgVectorNorm", "LinalgInv", "Cholesky", "Std", "Var", "Prod", "Cumprod", "Digamma", "Lgamma", "Hypot",
)  # fmt: skip

# Slots that hold data whether or not it needs a gradient: the first layer's input is such a tensor.
DATA_SLOTS = {"input", "query", "key", "value", "output"}
NORMS = ("BatchNorm", "LayerNorm", "GroupNorm", "InstanceNorm", "RmsNorm", "RMSNorm")
MATMULS = {"Addmm", "Mm", "Linear", "Addmv", "Mv", "Matmul"}
SECOND = {"mat2", "other", "vec"}
"""Slots of a product's second operand."""


@functools.lru_cache(maxsize=4096)
def listed_need(operation: str, slot: str) -> Need | None:
    """Return the need that the table lists for a reader; None if it lists none."""
    for operations, slots, need in TABLE:
        if fnmatchcase(operation, operations) and fnmatchcase(slot, slots):
            return need
    return None


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
    polynomial: bool = False,
    weight_gradient: bool = True,
) -> Need:
    """Return what a reader needs of the tensor saved for it.

    Args:
        operation: The operation that reads.
        slot: The name under which it saved the tensor.
        dtype: The tensor's dtype.
        requires_grad: Whether the tensor needs a gradient.
        parameter: It is a parameter behind views and casts, or computed from parameters alone.
        from_leaves: It is computed from leaves of any kind alone.
        in_linear: The layer that saves it is a linear layer.
        limits: The operation has limits that are known, inside of which it propagates the gradient unchanged.
        polynomial: The operation raises to a small whole power: its derivative is a polynomial.
        weight_gradient: The operation computes its weight's gradient, for which a convolution reads its input.
    """
    lossless = dtype not in FLOATS
    if parameter and not lossless:
        return "weight"
    need = listed_need(operation, slot)
    if need in ("weight", "shape"):
        return need
    if operation == "Convolution" and slot == "input" and not weight_gradient:
        return "shape"
    if lossless:
        return "exact"
    if operation in MATMULS and slot in SECOND and (not requires_grad or in_linear or from_leaves):
        return "weight"
    if need == "range" and not limits:
        need = None
    if need is None:
        need = "exact" if operation.startswith(FRAGILE) and not polynomial else "lossy"
    if need in ("lossy", "attention") and not (requires_grad or slot in DATA_SLOTS):
        return "exact"
    return need
