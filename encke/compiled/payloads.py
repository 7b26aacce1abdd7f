"""Operators whose codecs are read at run time: the graph holds a handle of one element, which leads to any payload.

Bits, bounds and sizes are not constants of the graph. `site_pack` asks the policy in every forward pass, as eager mode
does, so a changed setting holds from the next step on without recompilation. It returns a handle, a tensor of one byte.
The packed tensor is an attribute of the handle's storage and lives exactly as long: until backward has read it, or
until the graph is dropped. Copies of a handle have no payload, and reading one is an error. Therefore CUDA graphs,
which copy what they read, use ops.py instead.

Inductor calls the `*_into` functions on a GPU (lowerings.py): they write into existing memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.codecs import Codec, Lossless, Packed
from encke.codecs.base import AdaptedPacked
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import Layout, layout_of, with_rows
from encke.compiled.ops import (
    channel_shape,
    encode_measured,
    encode_normalised,
    graph_owners,
    moments,
    norm_relu,
)
from encke.kernels import GroupPlan, backend_for, mix
from encke.kernels.operators import register
from encke.kernels.plans import Gate
from encke.kernels.reference.norm import norm_apply_from, norm_sums_from

if TYPE_CHECKING:
    from encke.compiled.writer import Packing

ERROR_LOST = (
    "encke: backward got a copy of a handle, and what was packed is not behind it. Handles must reach backward as they "
    "are: detach() the model before CUDA graphs are recorded by anything but torch.compile(mode='reduce-overhead'), "
    "and before saved tensors are copied or moved."
)


def hold(packed: Packed, device: torch.device) -> Tensor:
    """Return a handle that keeps `packed` alive and leads to it."""
    handle = torch.empty(1, dtype=torch.uint8, device=device)
    # A storage's Python object lives as long as its memory does, even if only C++ code holds the memory.
    handle.untyped_storage().encke_payload = packed  # type: ignore[attr-defined]
    return handle


def payload_of(handle: Tensor) -> Any:
    """Return the packed tensor of a handle."""
    packed = getattr(handle.untyped_storage(), "encke_payload", None)
    if packed is None:
        raise RuntimeError(ERROR_LOST)
    return packed


def prepare(x: Tensor, graph: int, row: int) -> tuple[Packing, Codec, Layout, int, int]:
    """Return the entry of a tensor that is to be packed, with the codec, layout, length and key to use."""
    owner = graph_owners[graph]()
    assert owner is not None, "a compiled model runs its own graphs only"
    if graph not in owner.ran:
        owner.ran.append(graph)
    capture, packing = owner.capture, owner.packings[graph][row]
    key = mix(capture.step, packing.number, capture.rank)
    layout, length = layout_of(x.shape, x.stride())
    if packing.rows is not None and layout.dense:
        layout = with_rows(layout, packing.rows)
    return packing, packing.codec_now(capture.scores.codec, x.dtype), layout, length, key


def hold_packed(packing: Packing, x: Tensor, packed: Packed) -> Tensor:
    """Record a packed tensor for the report and return its handle.

    Pack again exactly if a NaN or an infinity corrupts other values. The host never waits for a GPU here.
    """
    if not (x.is_cuda or packed.codec.exact or packed.intact(x)):
        packing.not_finite.update(packing.choosing, packing.served)
        packed = Lossless().encode_run(x, *layout_of(x.shape, x.stride()), 0, packing.state)
    record, plan = packing.record, packed.plan
    if plan is None or plan is not packing.plan or packed.codec is not record.codec:
        packing.plan = plan
        record.codec, record.saved_bytes, record.packed_bytes = packed.codec, x.nbytes, packed.nbytes
    return hold(packed, x.device)


def site_pack(x: Tensor, graph: int, row: int) -> Tensor:
    """Return the handle of a saved tensor, packed with the codec that the policy currently chooses."""
    packing, codec, layout, length, key = prepare(x, graph, row)
    return hold_packed(packing, x, codec.encode_run(x, layout, length, key, packing.state))


def site_pack_moments(x: Tensor, graph: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `site_pack`, and variance and mean of x's channels, as `var_mean` in fp32 computes them."""
    packing, codec, layout, length, key = prepare(x, graph, row)
    plan, seed = codec.planned(x, layout, length, packing.state), mix(codec.seed, key)
    measured = None if plan is None else encode_measured(plan, x, seed)
    if plan is None or measured is None:
        packed = codec.encode_run(x, layout, length, key, packing.state)
        return hold_packed(packing, x, packed), *moments(x)
    data, var, mean = measured
    return hold_packed(packing, x, GroupQuantPacked(codec, layout, data, seed, plan)), var, mean


def site_pack_norm_relu(
    x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, bias: Tensor, graph: int, row: int
) -> tuple[Tensor, Tensor]:
    """Return `site_pack` of `norm_relu`, and that itself."""
    packing, codec, layout, length, key = prepare(x, graph, row)
    plan, seed = codec.planned(x, layout, length, packing.state), mix(codec.seed, key)
    norm = (mean, invstd, weight, bias)
    encoded = None if plan is None else encode_normalised(plan, x, norm, seed)
    if plan is None or encoded is None:
        y = norm_relu(x, norm)
        return hold_packed(packing, y, codec.encode_run(y, layout, length, key, packing.state)), y
    data, y = encoded
    return hold_packed(packing, y, GroupQuantPacked(codec, layout, data, seed, plan)), y


def plan_for(packed: Packed, like: Tensor) -> GroupPlan | None:
    """Return the plan with which kernels read codes alongside `like`; None if the memory layouts differ."""
    layout = packed.layout
    return packed.plan if packed.codec.reads_packed and layout.dense and layout.stride == like.stride() else None


def decoded(packed: Packed) -> Tensor:
    """Return the tensor as it was packed, in newly allocated memory."""
    x = packed.decode_in(packed.layout)
    return x.clone() if isinstance(packed, AdaptedPacked) else x


def packed_mask_of(packed: Packed) -> Tensor:
    """Return which values are not zero."""
    return packed.layout.restore(packed.decode_flat(mask=True))


def with_strides(x: Tensor, size: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Return a tensor as the graph expects it."""
    if x.stride() == tuple(strides):
        return x
    return torch.empty_strided(size, strides, dtype=x.dtype, device=x.device).copy_(x)


def packed_decode(handle: Tensor, size: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
    """Return the tensor that `site_pack` packed, with the size and strides that the graph expects."""
    return with_strides(decoded(payload_of(handle)), size, strides)


def decode_into(handle: Tensor, *, out: Tensor) -> None:
    """Write the result of `packed_decode` into `out`."""
    packed = payload_of(handle)
    plan = plan_for(packed, out)
    if plan is None:
        out.copy_(packed.decode_in(packed.layout))
    else:
        plan.decode_into(packed.buffers[0], packed.seed, out)


def packed_mask(handle: Tensor, size: list[int], strides: list[int]) -> Tensor:
    """Return which values that `site_pack` packed are not zero, read from the codes."""
    return with_strides(packed_mask_of(payload_of(handle)), size, strides)


def mask_into(handle: Tensor, *, out: Tensor) -> None:
    """Write the result of `packed_mask` into `out`."""
    packed = payload_of(handle)
    plan = plan_for(packed, out)
    if plan is None:
        out.copy_(packed_mask_of(packed))
    else:
        plan.mask_into(packed.buffers[0], out)


def packed_gate(grad: Tensor, handle: Tensor, other: Tensor | None) -> Tensor:
    """Return a gradient, or the sum of two, where the packed values are not zero, and zero elsewhere."""
    out = torch.empty_like(grad)
    gate_into(grad, handle, other, out=out)
    return out


def gate_into(grad: Tensor, handle: Tensor, other: Tensor | None, *, out: Tensor) -> None:
    """Write the result of `packed_gate` into `out`."""
    packed = payload_of(handle)
    alike = out.stride() == grad.stride() == (grad if other is None else other).stride()
    plan = plan_for(packed, grad) if alike else None
    if plan is None:
        out.copy_(torch.where(packed_mask_of(packed), grad if other is None else grad + other, 0))
    else:
        plan.gate_into(packed.buffers[0], grad, out, other)


def norm_plan_for(packed: Packed, grad: Tensor) -> GroupPlan | None:
    """Return the plan with which batch norm's kernels read codes; None if they would mistake the groups.

    In channels_last memory the kernels expect groups within channels. Tensors with too few pixels have no such groups.
    """
    plan = plan_for(packed, grad)
    return plan if plan is not None and packed.layout.channels_last is (plan.format.stride > 1) else None


def through_gate(grad: Tensor, handle: Tensor | None, plan: GroupPlan | None) -> tuple[Tensor, Gate | None]:
    """Return a gradient, and the ReLU's codes that a kernel has yet to apply; None if the gradient is final.

    Args:
        grad: The gradient of the ReLU's result.
        handle: Handle of the ReLU's codes; None if there is no ReLU.
        plan: Plan of the input of the preceding batch norm; None if no kernel reads its codes.
    """
    if handle is None:
        return grad, None
    packed = payload_of(handle)
    codes = plan_for(packed, grad) if plan is not None else None
    return (packed_gate(grad, handle, None), None) if codes is None else (grad, (packed.buffers[0], codes))


def packed_norm_sums(
    grad: Tensor, handle: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, gate: Tensor | None
) -> Tensor:
    """Return k1, k2, k3 of `packed_norm_apply` and gradients of weight and bias, from batch norm's packed input.

    With `gate`, the handle of a ReLU's result, `grad` is the gradient of the ReLU.
    """
    out = torch.empty(5, weight.numel(), dtype=torch.float32, device=grad.device)
    norm_sums_into(grad, handle, mean, invstd, weight, gate, out=out)
    return out


def norm_sums_into(
    grad: Tensor, handle: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, gate: Tensor | None, *, out: Tensor
) -> None:
    """Write the result of `packed_norm_sums` into `out`."""
    packed = payload_of(handle)
    plan = norm_plan_for(packed, grad)
    grad, codes = through_gate(grad, gate, plan)
    if plan is None:
        norm_sums_from(grad, packed.decode_in(packed.layout).float(), mean, invstd, weight, out)
    else:
        backend = backend_for(grad.device.type)
        backend.norm_sums(grad, packed.buffers[0], mean, invstd, weight, plan, packed.seed, out, codes)


def packed_norm_apply(grad: Tensor, handle: Tensor, sums: Tensor, gate: Tensor | None) -> Tensor:
    """Return g * k1 + x * k2 + k3: the gradient of batch norm's input."""
    out = torch.empty_like(grad)
    norm_apply_into(grad, handle, sums, gate, out=out)
    return out


def norm_apply_into(grad: Tensor, handle: Tensor, sums: Tensor, gate: Tensor | None, *, out: Tensor) -> None:
    """Write the result of `packed_norm_apply` into `out`."""
    packed = payload_of(handle)
    plan = norm_plan_for(packed, grad) if out.stride() == grad.stride() else None
    grad, codes = through_gate(grad, gate, plan)
    if plan is None:
        norm_apply_from(grad, packed.decode_in(packed.layout).float(), sums, out)
    else:
        backend_for(grad.device.type).norm_apply(grad, packed.buffers[0], sums, plan, packed.seed, out, codes)


def _handle_fake(x: Tensor, graph: int, row: int) -> Tensor:
    return x.new_empty(1, dtype=torch.uint8)


def _moments_fake(x: Tensor, graph: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
    var, mean = (x.new_empty(channel_shape(x), dtype=torch.float32) for _ in range(2))
    return _handle_fake(x, graph, row), var, mean


def _restored_fake(handle: Tensor, size: Any, strides: Any, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=handle.device)


OPERATORS: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {
    site_pack: ("(Tensor x, int graph, int row) -> Tensor", _handle_fake),
    site_pack_moments: ("(Tensor x, int graph, int row) -> (Tensor, Tensor, Tensor)", _moments_fake),
    site_pack_norm_relu: (
        "(Tensor x, Tensor mean, Tensor invstd, Tensor weight, Tensor bias, int graph, int row) -> (Tensor, Tensor)",
        lambda x, *rest: (_handle_fake(x, *rest[-2:]), torch.empty_like(x)),
    ),
    packed_decode: ("(Tensor handle, SymInt[] size, SymInt[] strides, ScalarType dtype) -> Tensor", _restored_fake),
    packed_mask: ("(Tensor handle, SymInt[] size, SymInt[] strides) -> Tensor", _restored_fake),
    packed_gate: (
        "(Tensor grad, Tensor handle, Tensor? other) -> Tensor",
        lambda grad, handle, other: torch.empty_like(grad),
    ),
    packed_norm_sums: (
        "(Tensor grad, Tensor handle, Tensor mean, Tensor invstd, Tensor weight, Tensor? gate) -> Tensor",
        lambda grad, handle, mean, invstd, weight, gate: grad.new_empty((5, weight.numel()), dtype=torch.float32),
    ),
    packed_norm_apply: (
        "(Tensor grad, Tensor handle, Tensor sums, Tensor? gate) -> Tensor",
        lambda grad, *rest: torch.empty_like(grad),
    ),
}
"""Each operator's arguments and results, and its fake."""

for _function, (_schema, _fake) in OPERATORS.items():
    # They read state on the host that changes from step to step.
    _tags = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)
    register(_function.__name__ + _schema, _function, _fake, _tags)
