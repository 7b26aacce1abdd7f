"""Tensors as functions of saved tensors: the rules by which backward recomputes the results of operations.

On a GPU one kernel each computes norms, activations and gated products from the codes of their operands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from encke.capture.attention import value_of
from encke.capture.casts import CastWeight
from encke.capture.saved import Saved
from encke.codecs import Codec, Packed
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import Layout, rows_inside
from encke.kernels import backend_for
from encke.torch_internals import saved_setting

LEAF = "leaf"
"""Slot name of an operand that is not saved: a leaf behind an edge of the graph."""
GELUS = {"none": "gelu", "tanh": "gelu tanh"}
"""Kernel of GELU by the setting of its node."""

Kernel = Callable[[list[Any], torch.dtype], Tensor | None]
"""Computes an operation's result, in a dtype, from its saved operands; returns None if it does not support them."""


@dataclass(frozen=True)
class Rule:
    """Way to compute the result of an operation from its node's saved tensors and settings."""

    operands: tuple[tuple[str, int | None], ...]
    """Slot of each operand, and the graph edge to follow if the slot is empty; None if the operand may be missing."""
    function: Callable[[Any], Callable[..., Tensor]]
    """Returns the function of the operands, given the node."""
    curved: bool = False
    """Whether the function is not linear in each operand."""
    same_bits: bool = True
    """Whether it returns the bits that the operation did."""
    kernel: Callable[[Any], Kernel] | None = None
    """Returns a kernel that does the same on a GPU, given the node."""
    applies: Callable[[Any], bool] | None = None
    """Returns whether the rule holds for a node; None: it always does."""


class Expression:
    """Tensor as a function of saved tensors."""

    __slots__ = ("dtypes", "function", "kernel", "operands", "shape", "signature")

    def __init__(
        self, operation: str, function: Callable[..., Tensor], kernel: Kernel | None, dtypes: tuple[torch.dtype, ...],
        shape: Any,
    ) -> None:  # fmt: skip
        self.function = function
        self.kernel = kernel
        self.operands: list[Any] = []
        """Expressions, objects that our hooks gave to autograd, and None."""
        self.dtypes = dtypes
        """Casts of the result, in order."""
        self.shape = shape
        self.signature: tuple[Any, ...] = (operation, dtypes)
        """Operations and casts, by which a decision is remembered."""

    def value(self) -> Tensor:
        """Compute the tensor."""
        dtypes, result = self.dtypes, None
        if self.kernel is not None:
            # A kernel computes in fp32: a result that is cast from there is rounded once.
            direct = int(len(dtypes) > 1 and dtypes[0] == torch.float32)
            result = self.kernel(self.operands, dtypes[direct])
            dtypes = dtypes[direct + 1 :]
        if result is None:
            dtypes, result = self.dtypes, self.function(*map(operand_value, self.operands))
        for dtype in dtypes:
            result = result.to(dtype)
        return result.reshape(self.shape)


def operand_value(raw: Any) -> Tensor | None:
    """Return the tensor that an operand of an expression represents."""
    if raw is None:
        return None
    if isinstance(raw, Expression):
        return raw.value()
    if isinstance(raw, Tensor):
        return raw  # a number
    return raw.restore() if isinstance(raw, CastWeight) else value_of(raw)


class Recomputed(Packed):
    """Stand-in for a recomputed tensor. Every source is packed at least as finely as its codec asks."""

    __slots__ = ("expression",)

    def __init__(self, codec: Codec, layout: Layout, dtype: torch.dtype, numel: int, expression: Expression) -> None:
        super().__init__(codec, layout, dtype, numel)
        self.expression = expression

    def decode(self) -> Tensor:
        """Compute the tensor."""
        if not torch.is_grad_enabled():  # as in any backward that is not recorded
            return self.expression.value()
        with torch.no_grad():
            return self.expression.value()

    def intact(self, source: Tensor) -> bool:
        """Return True: a source that holds a NaN or an infinity is exact, so the result is unchanged."""
        return True


def widened(x: Tensor) -> Tensor:
    """Return 16-bit values in 32 bits."""
    return x.float() if x.element_size() == 2 else x


def layer_norm(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalise with the mean and deviation of the exact input; linear in `x`."""
    y = (widened(x) - mean) * rstd
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Tensor, rstd: Tensor, weight: Tensor | None, offset: float = 0.0) -> Tensor:
    """Normalise with the deviation of the exact input; linear in `x`. Some layers add an offset to the weight."""
    y = widened(x) * rstd
    return y if weight is None else y * (weight + offset if offset else weight)


def norm_kernel(operands: list[Any], out: torch.dtype, centred: bool, offset: float = 0.0) -> Tensor | None:
    """Compute `layer_norm` (`centred`) or `rms_norm` in one kernel, which decodes a packed input in registers."""
    raw, *rest = operands
    mean, rstd, weight, *others = map(operand_value, rest if centred else (None, *rest))
    bias = others[0] if others else None
    if rstd is None or not rstd.numel() or not runs_kernels(rstd.device):
        return None
    for t in (mean, rstd):
        if t is not None and (t.dtype != torch.float32 or not t.is_contiguous() or t.numel() != rstd.numel()):
            return None
    size = size_of(raw)
    width = math.prod(size) // rstd.numel()
    for t in (weight, bias):
        if t is not None and (t.numel() != width or not t.is_contiguous()):
            return None
    if bias is not None and (weight is None or weight.dtype != bias.dtype):
        return None
    packed, inner = packed_rows(raw, width), None
    if packed is not None:
        data, seed, format, dtype = packed.buffers[0], packed.seed, packed.plan.format, packed.dtype
        inner = rows_inside(raw.layout, width)
    else:
        x = operand_value(raw)
        assert x is not None
        data, seed, format, dtype = x.contiguous(), 0, None, x.dtype
    return row_kernels().normalise_again(data, seed, format, dtype, size, mean, rstd, weight, bias, offset, out, inner)


def batch_norm(x: Tensor, mean: Tensor, invstd: Tensor, bias: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise with the statistics of the exact input; linear in `x`."""
    variance = invstd.pow(-2) - eps
    return functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)


def batch_norm_kernel(operands: list[Any], out: torch.dtype) -> Tensor | None:
    """Compute `batch_norm` in one kernel, which decodes a packed input in registers, in channels_last memory."""
    raw, *rest = operands
    packed = packed_values(raw)
    if packed is None or packed.dtype != out or raw.layout.channels_last is not True or not runs_kernels(raw.device):
        return None
    norm = [t for t in map(operand_value, rest) if t is not None and t.dtype == torch.float32 and t.is_contiguous()]
    if len(norm) != len(rest) or any(t.numel() != packed.plan.format.stride for t in norm):
        return None
    mean, invstd, bias, weight = norm
    layout = raw.layout
    found: Tensor = packed.plan.decode_strided(
        packed.buffers[0], packed.seed, layout.size, layout.stride, (mean, invstd, weight, bias)
    )
    return found


def group_norm(x: Tensor, mean: Tensor, rstd: Tensor, bias: Tensor, weight: Tensor | None, groups: int) -> Tensor:
    """Normalise groups of channels with the statistics of the exact input: linear in `x`."""
    samples, channels = x.shape[:2]
    each = (samples, channels, *[1] * (x.dim() - 2))
    mean, scale = (t.view(samples, groups, 1).expand(-1, -1, channels // groups).reshape(each) for t in (mean, rstd))
    if weight is not None:
        scale = scale * weight.view(each[1:])
    return torch.addcmul(bias.view(each[1:]), widened(x) - mean, scale)


def normalised(
    source: Saved, rows: Tensor, weight: tuple[Tensor, int], eps: float, dtype: torch.dtype, shape: Any
) -> Expression:
    """Return the result of a batch norm as a function of its packed input.

    Args:
        source: The input.
        rows: Mean, 1 / deviation, scale and bias of each channel.
        weight: The weight, and its version.
        eps: Added to the variance.
        dtype: Dtype of the result.
        shape: Shape of the result.
    """
    found = Expression("NativeBatchNorm", partial(batch_norm, eps=eps), batch_norm_kernel, (dtype,), shape)
    mean, invstd, _, bias = ((row, row._version) for row in rows.unbind())
    found.operands = [source, mean, invstd, bias, weight]
    return found


def packed_values(raw: Any) -> GroupQuantPacked | None:
    """Return the codes of a tensor if it is packed in a format that kernels read."""
    if not isinstance(raw, Saved) or raw.tensor is not None or raw.cell is None or raw.cell.held is not None:
        return None
    packed: Any = raw.cell.packed
    # A recomputed tensor has a codec, but no codes and no plan.
    if packed is None or packed.plan is None or not packed.codec.reads_packed or packed.dtype != raw.dtype:
        return None
    return packed


def codes_of(raw: Any) -> GroupQuantPacked | None:
    """Return the codes of a contiguous tensor if it is packed in a format that kernels read."""
    packed = packed_values(raw)
    return packed if packed is not None and raw.layout.channels_last is False else None


def packed_rows(raw: Any, width: int) -> GroupQuantPacked | None:
    """Return the codes of a tensor if kernels read them as rows of `width` values, transposed or not."""
    packed = packed_values(raw)
    if packed is None or rows_inside(raw.layout, width) is None:
        return None
    return packed if row_kernels().readable(packed.plan.format, width) else None


def runs_kernels(device: torch.device) -> bool:
    """Return whether the GPU kernels serve this device."""
    return backend_for(device.type).NAME == "triton"


@functools.cache
def row_kernels() -> Any:
    """Return the kernels of norms over rows. Imported when first needed: they need Triton."""
    from encke.kernels.gpu import row_norm

    return row_norm


def activation_kernel(operands: list[Any], out: torch.dtype, kind: str) -> Tensor | None:
    """Compute an activation of a packed tensor in one kernel."""
    return activate(kind, operands[0], None, size_of(operands[0]), out)


def product_kernel(operands: list[Any], out: torch.dtype) -> Tensor | None:
    """Compute the product of an activation and another tensor of its size in one kernel, as gated MLPs use it."""
    size = size_of(operands[0])
    if size != size_of(operands[1]):
        return None
    for first, second in (operands, operands[::-1]):
        expression = expression_of(first)
        kernel = None if expression is None else expression.kernel
        if expression is not None and isinstance(kernel, partial) and kernel.func is activation_kernel:
            return activate(kernel.keywords["kind"], expression.operands[0], second, size, out)
    return None


def activate(kind: str, raw: Any, factor: Any, size: tuple[int, ...], out: torch.dtype) -> Tensor | None:
    """Return an activation of a packed tensor, times a factor; None if the kernel does not support the operands."""
    packed = codes_of(raw)
    if packed is None or not runs_kernels(raw.device):
        return None
    kernels, format = activation_kernels(), packed.plan.format
    if kernels.row_width(format, packed.numel) is None:
        return None
    values: Any = None
    if factor is not None:
        other = codes_of(factor)
        if other is not None and other.plan.format == format and other.numel == packed.numel:
            values = (other.buffers[0], other.seed)
        else:
            values = operand_value(factor)
            values = values.contiguous()
    return kernels.activate(kind, packed.buffers[0], packed.seed, format, values, size, out)


def expression_of(raw: Any) -> Expression | None:
    """Return the expression of a contiguous recomputed tensor."""
    if isinstance(raw, Expression):
        return raw
    packed = raw.cell.packed if isinstance(raw, Saved) and raw.cell is not None and raw.cell.held is None else None
    plain = isinstance(packed, Recomputed) and raw.layout.channels_last is packed.layout.channels_last is False
    return packed.expression if plain else None  # type: ignore[union-attr]


def size_of(raw: Any) -> tuple[int, ...]:
    """Return the size of an operand."""
    if isinstance(raw, Expression):
        return tuple(raw.shape)
    if isinstance(raw, Saved):
        return raw.layout.size
    if isinstance(raw, CastWeight):
        return raw.size
    return tuple(raw.shape if isinstance(raw, Tensor) else raw[0].shape)


@functools.cache
def activation_kernels() -> Any:
    """Return the kernels of activations. Imported when first needed: they need Triton."""
    from encke.kernels.gpu import activations

    return activations


def offset_of(node: Any) -> float:
    """Return the offset that an RMS norm adds to its weight; only functions that replace the operation have one."""
    return float(getattr(node, "encke_offset", 0.0))


def dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Scale the values that `mask` keeps, and zero the others."""
    return x * mask * (0.0 if p == 1 else 1 / (1 - p))


def elu_of(node: Any) -> Callable[[Tensor], Tensor]:
    """Return the ELU or SELU of a node."""
    alpha, scale, input_scale = (saved_setting(node, name) for name in ("alpha", "scale", "input_scale"))
    return partial(torch.ops.aten.elu.default, alpha=alpha, scale=scale, input_scale=input_scale)


def eps_of(node: Any) -> float:
    """Return the value that a batch norm adds to the variance."""
    epsilon = saved_setting(node, "epsilon", None)  # cuDNN's name
    return float(saved_setting(node, "eps") if epsilon is None else epsilon)


BATCH_NORM = Rule(
    (("input", 0), ("result1", None), ("result2", None), (LEAF, 2), ("weight", None)),
    lambda node: partial(batch_norm, eps=eps_of(node)),
    same_bits=False,
    kernel=lambda node: batch_norm_kernel,
    applies=lambda node: bool(saved_setting(node, "training", True)),
)
RULES = {
    "NativeBatchNorm": BATCH_NORM,
    "CudnnBatchNorm": BATCH_NORM,
    "Mul": Rule((("self", 0), ("other", 1)), lambda node: torch.mul, kernel=lambda node: product_kernel),
    "Silu": Rule(
        (("self", None),),
        lambda node: functional.silu,
        curved=True,
        kernel=lambda node: partial(activation_kernel, kind="silu"),
    ),
    "Gelu": Rule(
        (("self", None),),
        lambda node: partial(functional.gelu, approximate=saved_setting(node, "approximate")),
        curved=True,
        kernel=lambda node: partial(activation_kernel, kind=GELUS[saved_setting(node, "approximate")]),
    ),
    "Hardswish": Rule((("self", None),), lambda node: functional.hardswish, curved=True),
    "Mish": Rule((("self", None),), lambda node: functional.mish, curved=True),
    "Elu": Rule((("self", None),), elu_of, curved=True),
    "NativeGroupNorm": Rule(
        (("input", 0), ("result1", None), ("result2", None), (LEAF, 2), ("weight", None)),
        lambda node: partial(group_norm, groups=saved_setting(node, "group")),
        same_bits=False,
    ),
    "NativeLayerNorm": Rule(
        (("input", 0), ("result1", None), ("result2", None), ("weight", None), ("bias", None)),
        lambda node: layer_norm,
        same_bits=False,
        kernel=lambda node: partial(norm_kernel, centred=True),
    ),
    "FusedRmsNorm": Rule(
        (("input", 0), ("result1", None), ("weight", None)),
        lambda node: partial(rms_norm, offset=offset_of(node)),
        same_bits=False,
        kernel=lambda node: partial(norm_kernel, centred=False, offset=offset_of(node)),
    ),
    "NativeDropout": Rule(
        (("", 0), ("result1", None)), lambda node: partial(dropout, p=saved_setting(node, "p")), same_bits=False
    ),
    "Softmax": Rule((("result", None),), lambda node: torch.Tensor.detach),
    "SafeSoftmax": Rule((("result", None),), lambda node: torch.Tensor.detach),
}
"""Operations whose result can be recomputed from the tensors they save."""
