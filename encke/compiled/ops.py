"""Operators that graphs with constant sizes call: pack, restore, and compute gradients that read packed tensors.

CUDA graphs need constant sizes; other graphs call the operators of payloads.py. Sizes are constants of a graph or
symbols in it; step and rank are not. From step and rank a forward pass computes the seeds of all its sites, one small
tensor on the device, which its backward pass reads too: kernels in a recorded CUDA graph round differently in every
step. A `GroupFormat` is passed as a list of numbers. Inductor calls the `*_into` functions on a GPU (lowerings.py):
they write into existing memory without gaps between elements.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.codecs.base import operations
from encke.codecs.layout import fills_in_order
from encke.kernels import GroupFormat, GroupPlan, backend_for
from encke.kernels.formats import NORM_GROUP, Seed
from encke.kernels.operators import register
from encke.kernels.plans import Gate, Norm
from encke.torch_internals import storageless

if TYPE_CHECKING:
    from encke.compiled.model import CompiledModel

graph_owners: dict[int, weakref.ref[CompiledModel]] = {}
"""The compiled model that owns each forward graph, by graph id."""


def forward_seeds(graph: int, sites: list[int], salts: list[int], device: torch.device, first: bool) -> Tensor:
    """Return the seeds of all sites for the forward pass that begins, with the same hash as in eager mode.

    Each device has one tensor of seeds; the call with `first` notifies the owner that the graph runs.
    """
    owner = graph_owners[graph]()
    if owner is None:
        return torch.zeros(len(sites), dtype=torch.int64, device=device)
    if first:
        owner.ran.append(graph)
    step, rank = owner.capture.step, owner.capture.rank
    return backend_for(device.type).site_seeds(tuple(sites), tuple(salts), step, rank, device)


@functools.lru_cache(maxsize=4096)
def plan_of(format: tuple[int, ...], numel: int, device: torch.device) -> GroupPlan:
    """Return the plan for tensors of this size, which reads seeds on the device."""
    return backend_for(device.type).group_plan(GroupFormat.from_numbers(format), numel, device, True)


def run_in_order(x: Tensor, order: list[int]) -> Tensor:
    """Return the elements of a tensor as a flat run, with its dimensions in this order; a copy only if needed."""
    return x.permute(order).reshape(-1)


def restore_in_order(flat: Tensor, size: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return the tensor with this size and strides whose run in this order is `flat`."""
    if fills_in_order(size, strides, order):
        return flat.as_strided(size, strides)
    x = flat.view([size[d] for d in order]).permute([order.index(d) for d in range(len(order))])
    return torch.empty_strided(size, strides, dtype=flat.dtype, device=flat.device).copy_(x)


def site_encode(x: Tensor, seeds: Tensor, row: int, format: list[int], order: list[int]) -> Tensor:
    """Return a saved tensor packed, its dimensions in this order."""
    return plan_of(tuple(format), x.numel(), x.device).encode(run_in_order(x, order), (seeds, row))


def encode_into(x: Tensor, seeds: Tensor, row: int, format: list[int], *, out: Tensor) -> None:
    """Write the result of `site_encode` into `out`."""
    plan_of(tuple(format), x.numel(), x.device).encode_into(x, (seeds, row), out)


def site_encode_moments(
    x: Tensor, seeds: Tensor, row: int, format: list[int], order: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `site_encode`, and variance and mean of x's channels, as `var_mean` in fp32 computes them."""
    if fills_in_order(x.shape, x.stride(), order):
        return encode_moments(x, seeds, row, format)
    return site_encode(x, seeds, row, format, order), *moments(x)


def encode_moments(x: Tensor, seeds: Tensor, row: int, format: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return `site_encode_moments` of a tensor in its memory order."""
    plan, seed = plan_of(tuple(format), x.numel(), x.device), (seeds, row)
    return encode_measured(plan, x, seed) or (plan.encode(x, seed), *moments(x))


def encode_measured(plan: GroupPlan, x: Tensor, seed: Seed) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return codes, variance and mean of a tensor in its memory order; None if no kernel computes all three."""
    if not plan.fuses_forward or plan.format.group != NORM_GROUP or x.data_ptr() & 3:
        return None
    from encke.kernels.gpu.norm_forward import forward_plan

    forward = forward_plan(tuple(x.shape), x.stride(), x.dtype, x.device)
    if forward is None:
        return None
    workspace = torch.empty(forward.workspace_numel, dtype=torch.float32, device=x.device)
    data = plan.encode_moments(x, workspace, seed)
    var, mean = (torch.empty(channel_shape(x), dtype=torch.float32, device=x.device) for _ in range(2))
    forward.measure(workspace, mean, var)
    return data, var, mean


def site_encode_norm_relu(
    x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor, seeds: Tensor, row: int, format: list[int],
    order: list[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `site_encode` of `norm_relu`, and that itself."""
    if fills_in_order(x.shape, x.stride(), order):
        return encode_norm_relu(x, mean, invstd, weight, bias, seeds, row, format)
    y = norm_relu(x, (mean, invstd, weight, bias))
    return site_encode(y, seeds, row, format, order), y


def encode_norm_relu(
    x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor, seeds: Tensor, row: int, format: list[int]
) -> tuple[Tensor, Tensor]:
    """Return `site_encode_norm_relu` of a tensor in its memory order."""
    plan, seed, norm = plan_of(tuple(format), x.numel(), x.device), (seeds, row), (mean, invstd, weight, bias)
    encoded = encode_normalised(plan, x, norm, seed)
    if encoded is not None:
        return encoded
    y = norm_relu(x, norm)
    return plan.encode(y, seed), y


def encode_normalised(plan: GroupPlan, x: Tensor, norm: Norm, seed: Seed) -> tuple[Tensor, Tensor] | None:
    """Return codes and values of `norm_relu` of a tensor in its memory order; None if no kernel computes both."""
    if not plan.fuses_norm_relu or x.data_ptr() & 3:
        return None
    y = torch.empty_like(x)
    return plan.encode_norm_relu(x, norm, y, seed), y


def norm_relu(x: Tensor, norm: Norm) -> Tensor:
    """Return the ReLU of a normalised tensor."""
    mean, invstd, weight, bias = (vector.reshape(channel_shape(x)) for vector in norm)
    return torch.relu(((x.float() - mean) * invstd * weight + bias).to(x.dtype))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return variance and mean of each channel."""
    over = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x.float(), over, correction=0)
    return var.view(channel_shape(x)), mean.view(channel_shape(x))


def channel_shape(x: Tensor) -> list[Any]:
    """Return the shape that broadcasts one number per channel."""
    return [x.shape[d] if d == 1 else 1 for d in range(x.dim())]


def site_decode(
    data: Tensor, seeds: Tensor, row: int, format: list[int], size: list[int], strides: list[int], order: list[int]
) -> Tensor:
    """Return the tensor that `site_encode` packed, with its original size and strides."""
    flat = plan_of(tuple(format), math.prod(size), data.device).decode(data, (seeds, row))
    return restore_in_order(flat, size, strides, order)


def decode_into(data: Tensor, seeds: Tensor, row: int, format: list[int], *, out: Tensor) -> None:
    """Write the result of `site_decode` into `out`."""
    plan_of(tuple(format), out.numel(), out.device).decode_into(data, (seeds, row), out)


def site_mask(data: Tensor, format: list[int], size: list[int], strides: list[int], order: list[int]) -> Tensor:
    """Return which values that `site_encode` packed are not zero, read from the codes."""
    flat = plan_of(tuple(format), math.prod(size), data.device).mask(data)
    return restore_in_order(flat, size, strides, order)


def mask_into(data: Tensor, format: list[int], *, out: Tensor) -> None:
    """Write the result of `site_mask` into `out`."""
    plan_of(tuple(format), out.numel(), out.device).mask_into(data, out)


def site_gate(grad: Tensor, data: Tensor, other: Tensor | None, format: list[int]) -> Tensor:
    """Return a gradient where the packed values, in the same memory order, are not zero, and zero elsewhere.

    With `other`, the gradient is the sum of both.
    """
    out = torch.empty_like(grad)
    gate_into(grad, data, other, format, out=out)
    return out


def gate_into(grad: Tensor, data: Tensor, other: Tensor | None, format: list[int], *, out: Tensor) -> None:
    """Write the result of `site_gate` into `out`."""
    plan_of(tuple(format), grad.numel(), grad.device).gate_into(data, grad, out, other)


def mask_encode(flags: Tensor, order: list[int]) -> Tensor:
    """Return a bit for each flag."""
    flat = run_in_order(flags, order)
    return operations(flat).bits_encode(flat.view(torch.uint8), 1)


def mask_decode(data: Tensor, size: list[int], strides: list[int], order: list[int]) -> Tensor:
    """Return the flags that `mask_encode` packed."""
    flat = operations(data).bits_decode(data, 1, math.prod(size))
    return restore_in_order(flat.view(torch.bool), size, strides, order)


def norm_sums(
    grad: Tensor, data: Tensor, seeds: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, gate: Tensor | None,
    row: int, format: list[int], gate_format: list[int],
) -> Tensor:  # fmt: skip
    """Return k1, k2, k3 of `norm_apply` and gradients of weight and bias, from batch norm's packed input.

    With `gate`, the codes of a ReLU's result, `grad` is the gradient of the ReLU.
    """
    out = torch.empty(5, weight.numel(), dtype=torch.float32, device=grad.device)
    norm_sums_into(grad, data, seeds, mean, invstd, weight, gate, row, format, gate_format, out=out)
    return out


def norm_sums_into(
    grad: Tensor, data: Tensor, seeds: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, gate: Tensor | None,
    row: int, format: list[int], gate_format: list[int], *, out: Tensor,
) -> None:  # fmt: skip
    """Write the result of `norm_sums` into `out`."""
    plan, gated = plan_of(tuple(format), grad.numel(), grad.device), gate_of(gate, gate_format, grad)
    backend_for(grad.device.type).norm_sums(grad, data, mean, invstd, weight, plan, (seeds, row), out, gated)


def norm_apply(
    grad: Tensor, data: Tensor, seeds: Tensor, sums: Tensor, gate: Tensor | None, row: int, format: list[int],
    gate_format: list[int],
) -> Tensor:  # fmt: skip
    """Return g * k1 + x * k2 + k3: the gradient of batch norm's input."""
    out = torch.empty_like(grad)
    norm_apply_into(grad, data, seeds, sums, gate, row, format, gate_format, out=out)
    return out


def norm_apply_into(
    grad: Tensor, data: Tensor, seeds: Tensor, sums: Tensor, gate: Tensor | None, row: int, format: list[int],
    gate_format: list[int], *, out: Tensor,
) -> None:  # fmt: skip
    """Write the result of `norm_apply` into `out`."""
    plan, gated = plan_of(tuple(format), grad.numel(), grad.device), gate_of(gate, gate_format, grad)
    backend_for(grad.device.type).norm_apply(grad, data, sums, plan, (seeds, row), out, gated)


def gate_of(codes: Tensor | None, format: list[int], grad: Tensor) -> Gate | None:
    """Return the codes of a ReLU's result with their plan."""
    return None if codes is None else (codes, plan_of(tuple(format), grad.numel(), grad.device))


def conv_input_grad(
    grad: Tensor, weight: Tensor, size: list[int], strides: list[int], stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of a convolution's input, which needs only the input's size and strides."""
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    x = storageless(tuple(size), tuple(strides), grad)
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [True, False, False])[0]


def _conv_input_grad_fake(grad: Tensor, weight: Tensor, size: Any, strides: Any, *settings: Any) -> Tensor:
    x = _restored_fake(size, strides, grad.dtype, grad)
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [True, False, False])[0]


def _restored_fake(size: Any, strides: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=like.device)


def _encode_fake(x: Tensor, seeds: Tensor, row: int, format: list[int], order: Any) -> Tensor:
    return x.new_empty(GroupFormat.from_numbers(format).nbytes(x.numel()), dtype=torch.uint8)


def _norm_relu_fake(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return _encode_fake(x, *settings[4:]), torch.empty_like(x)


def _encode_moments_fake(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    var, mean = (x.new_empty(channel_shape(x), dtype=torch.float32) for _ in range(2))
    return _encode_fake(x, *settings), var, mean


OPERATORS: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {
    forward_seeds: (
        "(int graph, int[] sites, int[] salts, Device device, bool first) -> Tensor",
        lambda graph, sites, salts, device, first: torch.empty(len(sites), dtype=torch.int64, device=device),
    ),
    site_encode: ("(Tensor x, Tensor seeds, int row, int[] format, int[] order) -> Tensor", _encode_fake),
    site_encode_moments: (
        "(Tensor x, Tensor seeds, int row, int[] format, int[] order) -> (Tensor, Tensor, Tensor)",
        _encode_moments_fake,
    ),
    site_encode_norm_relu: (
        "(Tensor x, Tensor mean, Tensor invstd, Tensor weight, Tensor bias, Tensor seeds, int row, int[] format,"
        " int[] order) -> (Tensor, Tensor)",
        _norm_relu_fake,
    ),
    site_decode: (
        "(Tensor data, Tensor seeds, int row, int[] format, SymInt[] size, SymInt[] strides, int[] order) -> Tensor",
        lambda data, seeds, row, format, size, strides, order: _restored_fake(
            size, strides, GroupFormat.from_numbers(format).dtype, data
        ),
    ),
    site_mask: (
        "(Tensor data, int[] format, SymInt[] size, SymInt[] strides, int[] order) -> Tensor",
        lambda data, format, size, strides, order: _restored_fake(size, strides, torch.bool, data),
    ),
    site_gate: (
        "(Tensor grad, Tensor data, Tensor? other, int[] format) -> Tensor",
        lambda grad, *rest: torch.empty_like(grad),
    ),
    mask_encode: (
        "(Tensor flags, int[] order) -> Tensor",
        lambda flags, order: flags.new_empty((flags.numel() + 7) // 8, dtype=torch.uint8),
    ),
    mask_decode: (
        "(Tensor data, SymInt[] size, SymInt[] strides, int[] order) -> Tensor",
        lambda data, size, strides, order: _restored_fake(size, strides, torch.bool, data),
    ),
    norm_sums: (
        "(Tensor grad, Tensor data, Tensor seeds, Tensor mean, Tensor invstd, Tensor weight, Tensor? gate, int row,"
        " int[] format, int[] gate_format) -> Tensor",
        lambda grad, data, seeds, mean, invstd, weight, *rest: grad.new_empty((5, weight.numel()), dtype=torch.float32),
    ),
    norm_apply: (
        "(Tensor grad, Tensor data, Tensor seeds, Tensor sums, Tensor? gate, int row, int[] format,"
        " int[] gate_format) -> Tensor",
        lambda grad, *rest: torch.empty_like(grad),
    ),
    conv_input_grad: (
        "(Tensor grad, Tensor weight, SymInt[] size, SymInt[] strides, SymInt[] stride, SymInt[] padding,"
        " SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
        _conv_input_grad_fake,
    ),
}
"""Each operator's arguments and results, and its fake."""

for _function, (_schema, _fake) in OPERATORS.items():
    # Seeds, which the host computes in every step, stay outside of CUDA graphs.
    _tags = [torch.Tag.needs_exact_strides, *[torch.Tag.cudagraph_unsafe] * (_function is forward_seeds)]
    register(_function.__name__ + _schema, _function, _fake, tuple(_tags))
