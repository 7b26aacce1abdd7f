"""What compiled graphs call: packing, restoring, and gradients that read a saved tensor packed.

Sizes are constants of a graph or symbols in it; step and rank are not. From these a forward pass makes the seeds of all
its sites, one small tensor on the device, which its backward pass reads too: kernels in a recorded CUDA graph round
every step in another way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.codecs.base import mix, operations
from encke.kernels import gq_sizes, of
from encke.torch_internals import storageless

if TYPE_CHECKING:
    from encke.compiled.model import CompiledModel
    from encke.kernels.gpu.launch import GqPlan

graph_owners: dict[int, weakref.ref[CompiledModel]] = {}
"""The compiled model that owns each forward graph, by graph id."""

SCHEMAS = {
    "forward_seeds": "(int graph, int[] sites, int[] salts, Device device, bool first) -> Tensor",
    "site_encode": "(Tensor x, Tensor seeds, int[] order, int row, int bits, int group, int stride, bool signs)"
    " -> Tensor",
    "site_encode_moments": "(Tensor x, Tensor seeds, int[] order, int row, int bits, int group, int stride,"
    " bool signs) -> (Tensor, Tensor, Tensor)",
    "site_decode": "(Tensor data, Tensor seeds, SymInt[] size, SymInt[] strides, ScalarType dtype, int[] order,"
    " int row, int bits, int group, int stride, bool signs) -> Tensor",
    "site_mask": "(Tensor data, SymInt[] size, SymInt[] strides, ScalarType dtype, int[] order, int bits, int group,"
    " int stride, bool signs) -> Tensor",
    "site_gate": "(Tensor grad, Tensor data, int bits, int group, int stride, bool signs) -> Tensor",
    "mask_encode": "(Tensor x, int[] order) -> Tensor",
    "mask_decode": "(Tensor data, SymInt[] size, SymInt[] strides, ScalarType dtype, int[] order) -> Tensor",
    "norm_sums": "(Tensor grad, Tensor data, Tensor seeds, Tensor mean, Tensor invstd, Tensor weight, int row,"
    " int bits, int stride) -> Tensor",
    "norm_apply": "(Tensor grad, Tensor data, Tensor seeds, Tensor sums, int row, int bits, int stride) -> Tensor",
    "conv_input_grad": "(Tensor grad, Tensor weight, SymInt[] size, SymInt[] strides, SymInt[] stride,"
    " SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor",
}
GROUP = 128
"""The only size of groups that batch norm's backward reads packed."""


def forward_seeds(graph: int, sites: list[int], salts: list[int], device: torch.device, first: bool) -> Tensor:
    """The seeds of all sites in the forward pass that begins, kept for its backward: the same hash as in eager mode.

    There is one for each device that it runs on; the `first` tells the owner that it runs.
    """
    owner = graph_owners[graph]()
    if owner is None:
        return torch.zeros(len(sites), dtype=torch.int64, device=device)
    if first:
        owner.ran.append(graph)
    step, rank = owner.capture.step, owner.capture.rank
    make = getattr(of("cuda"), "site_seeds", None) if device.type == "cuda" else None
    if make is not None:
        return make(*on_device(tuple(sites), tuple(salts), device), step, rank)
    seeds = [mix(salt, mix(step, site, rank)) for site, salt in zip(sites, salts, strict=True)]
    return torch.tensor(seeds, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=256)
def on_device(sites: tuple[int, ...], salts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """What does not change from step to step stays there: nobody waits for a copy."""
    found = torch.tensor((sites, salts), dtype=torch.int64, device=device)
    return found[0], found[1]


def seed_at(seeds: Tensor, row: int, bits: int, group: int) -> int:
    """One of the seeds, as a number, for who does not read it on the device: there is no kernel for that rate."""
    if seeds.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"encke: GroupQuant(bits={bits}, group={group}) has no kernel on the GPU, and without one nothing can be "
            "packed in a CUDA graph. Take group=128, or compile with another mode than 'reduce-overhead'."
        )
    return int(seeds[row])


def in_order(size: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether elements fill their memory without gaps, with the dimensions in this order."""
    return _in_order(tuple(size), tuple(strides), tuple(order))


@functools.lru_cache(maxsize=4096)
def _in_order(size: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]) -> bool:
    expected = 1
    for d in reversed(order):
        if strides[d] != expected and size[d] != 1:
            return False
        expected *= size[d]
    return True


def run_of(x: Tensor, order: list[int]) -> Tensor:
    """The elements of a tensor as a flat run, the dimensions in this order: its own memory where that is its order."""
    if in_order(x.shape, x.stride(), order):
        return x.as_strided((x.numel(),), (1,))
    return x.permute(order).contiguous().view(-1)


def laid_out(flat: Tensor, size: list[int], strides: list[int], order: list[int]) -> Tensor:
    """The tensor whose run `flat` is, with these strides."""
    if in_order(size, strides, order):
        return flat.as_strided(size, strides)
    x = flat.view([size[d] for d in order]).permute([order.index(d) for d in range(len(order))])
    return torch.empty_strided(size, strides, dtype=flat.dtype, device=flat.device).copy_(x)


def site_encode(
    x: Tensor, seeds: Tensor, order: list[int], row: int, bits: int, group: int, stride: int, signs: bool
) -> Tensor:
    """A saved tensor as GroupQuant keeps it."""
    return codes_of(run_of(x, order), seeds, row, bits, group, stride, signs)


def codes_of(x: Tensor, seeds: Tensor, row: int, bits: int, group: int, stride: int, signs: bool) -> Tensor:
    """The same for a tensor as it lies in memory."""
    plan = plan_of(x, x.dtype, bits, group, stride, signs, True)
    if plan is not None:
        return plan.codes(x, (seeds, row))
    return operations(x).gq_encode(flat_of(x), bits, group, seed_at(seeds, row, bits, group), stride, signs)


def site_encode_moments(
    x: Tensor, seeds: Tensor, order: list[int], row: int, bits: int, group: int, stride: int, signs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`site_encode`; variance and mean of x's channels, as `var_mean` in fp32 gives them."""
    if in_order(x.shape, x.stride(), order):
        return encode_moments(x, seeds, row, bits, group, stride, signs)
    return site_encode(x, seeds, order, row, bits, group, stride, signs), *moments(x)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Variance and mean of each channel."""
    over = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x.float(), over, correction=0)
    return var.view(line_of(x)), mean.view(line_of(x))


def line_of(x: Tensor) -> list[Any]:
    """The size of one number for each channel."""
    return [x.shape[d] if d == 1 else 1 for d in range(x.dim())]


def site_decode(
    data: Tensor, seeds: Tensor, size: list[int], strides: list[int], dtype: torch.dtype, order: list[int], row: int,
    bits: int, group: int, stride: int, signs: bool,
) -> Tensor:  # fmt: skip
    """What `site_encode` kept, with the size and strides it had."""
    if data.is_cuda:
        flat = torch.empty(product(size), dtype=dtype, device=data.device)
        decode_into(data, seeds, row, bits, group, stride, signs, out=flat)
    else:
        drawn = seed_at(seeds, row, bits, group)
        flat = operations(data).gq_decode(data, product(size), bits, group, dtype, False, drawn, stride, signs)
    return laid_out(flat, size, strides, order)


def site_mask(
    data: Tensor, size: list[int], strides: list[int], dtype: torch.dtype, order: list[int], bits: int, group: int,
    stride: int, signs: bool,
) -> Tensor:  # fmt: skip
    """What of the values that `site_encode` kept is not zero, read from the codes."""
    flat = operations(data).gq_decode(data, product(size), bits, group, dtype, True, 0, stride, signs)
    return laid_out(flat, size, strides, order)


def site_gate(grad: Tensor, data: Tensor, bits: int, group: int, stride: int, signs: bool) -> Tensor:
    """A gradient where the values that `site_encode` kept, in the same order in memory, are not zero; else zero."""
    out = torch.empty_like(grad)
    gate_into(grad, data, bits, group, stride, signs, out=out)
    return out


def mask_encode(x: Tensor, order: list[int]) -> Tensor:
    """A bit for each value: not (x <= 0), which is what ReLU's backward asks."""
    flat = run_of(x, order)
    flags = flat if flat.dtype == torch.bool else ~(flat <= 0)
    return operations(flat).bits_encode(flags.view(torch.uint8), 1)


def mask_decode(data: Tensor, size: list[int], strides: list[int], dtype: torch.dtype, order: list[int]) -> Tensor:
    """Zero and one, as `dtype`."""
    flat = operations(data).bits_decode(data, 1, product(size))
    flat = flat.view(torch.bool) if dtype == torch.bool else flat.to(dtype)
    return laid_out(flat, size, strides, order)


def product(size: Sequence[int]) -> int:
    numel = 1
    for extent in size:
        numel *= extent
    return numel


def norm_sums(
    grad: Tensor, data: Tensor, seeds: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, row: int, bits: int,
    stride: int,
) -> Tensor:  # fmt: skip
    """For each channel, from batch norm's packed input: k1, k2, k3 of `norm_apply`; gradients of weight, bias."""
    out = torch.empty(5, weight.numel(), dtype=torch.float32, device=grad.device)
    norm_sums_into(grad, data, seeds, mean, invstd, weight, row, bits, stride, out=out)
    return out


def norm_apply(grad: Tensor, data: Tensor, seeds: Tensor, sums: Tensor, row: int, bits: int, stride: int) -> Tensor:
    """g * k1 + x * k2 + k3: the gradient of batch norm's input."""
    out = torch.empty_like(grad)
    norm_apply_into(grad, data, seeds, sums, row, bits, stride, out=out)
    return out


def conv_input_grad(
    grad: Tensor, weight: Tensor, size: list[int], strides: list[int], stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, output_padding: list[int], groups: int,
) -> Tensor:  # fmt: skip
    """The gradient of a convolution's input, for which nothing of the input is needed but its size and strides."""
    settings = (stride, padding, dilation, transposed, output_padding, groups)
    x = storageless(tuple(size), tuple(strides), grad)
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [True, False, False])[0]


# -- the same into memory that is there already, without gaps between elements -----------------------------------------


def encode_into(
    x: Tensor, seeds: Tensor, row: int, bits: int, group: int, stride: int, signs: bool, *, out: Tensor
) -> None:
    """`site_encode`."""
    plan = plan_of(x, x.dtype, bits, group, stride, signs, True)
    if plan is not None:
        plan.encode(x, (seeds, row), out)
    else:
        out.copy_(operations(x).gq_encode(flat_of(x), bits, group, seed_at(seeds, row, bits, group), stride, signs))


def encode_moments(
    x: Tensor, seeds: Tensor, row: int, bits: int, group: int, stride: int, signs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`site_encode_moments`, in memory of its own: the codes outlive the graph."""
    plan = plan_of(x, x.dtype, bits, group, stride, signs, True)
    forward = None
    if plan is not None and plan.statistics is not None and group == GROUP and not x.data_ptr() & 3:
        from encke.kernels.gpu.norm_forward import forward_plan

        forward = forward_plan(tuple(x.shape), x.stride(), x.dtype, x.device)
    if plan is None or plan.statistics is None or forward is None:
        return codes_of(x, seeds, row, bits, group, stride, signs), *moments(x)
    parts = torch.empty(forward.parts, dtype=torch.float32, device=x.device)
    data = plan.encode_beside(plan.statistics, x, parts, (seeds, row))
    var, mean = (torch.empty(line_of(x), dtype=torch.float32, device=x.device) for _ in range(2))
    forward.measure(parts, mean, var)
    return data, var, mean


def decode_into(
    data: Tensor, seeds: Tensor, row: int, bits: int, group: int, stride: int, signs: bool, *, out: Tensor
) -> None:
    """`site_decode`."""
    plan = plan_of(out, out.dtype, bits, group, stride, signs, True)
    if plan is not None:
        plan.decode(data, (seeds, row), False, out)
    else:
        drawn = seed_at(seeds, row, bits, group)
        found = operations(data).gq_decode(data, out.numel(), bits, group, out.dtype, False, drawn, stride, signs)
        flat_of(out).copy_(found)


def mask_into(
    data: Tensor, dtype: torch.dtype, bits: int, group: int, stride: int, signs: bool, *, out: Tensor
) -> None:
    """`site_mask`."""
    plan = plan_of(out, dtype, bits, group, stride, signs)
    if plan is not None:
        plan.decode(data, 0, True, out)
    else:
        flat_of(out).copy_(operations(data).gq_decode(data, out.numel(), bits, group, dtype, True, 0, stride, signs))


def gate_into(grad: Tensor, data: Tensor, bits: int, group: int, stride: int, signs: bool, *, out: Tensor) -> None:
    """`site_gate`."""
    plan = plan_of(grad, grad.dtype, bits, group, stride, signs)
    if plan is not None:
        plan.gate_into(data, grad, out)
        return
    found = operations(data).gq_decode(data, grad.numel(), bits, group, grad.dtype, True, 0, stride, signs)
    out.copy_(torch.where(found.as_strided(grad.shape, grad.stride()), grad, 0))


def norm_sums_into(
    grad: Tensor, data: Tensor, seeds: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, row: int, bits: int,
    stride: int, *, out: Tensor,
) -> None:  # fmt: skip
    """`norm_sums`."""
    if grad.is_cuda:
        from encke.kernels.gpu import norm_backward

        norm_backward.norm_sums(grad, data, mean, invstd, weight, bits, (seeds, row), stride > 1, out)
        return
    g, x = grad.float(), _decoded(grad, data, seeds, row, bits, stride)
    axes, share = [0, *range(2, grad.dim())], weight.numel() / grad.numel()
    mean, invstd = mean.reshape(-1), invstd.reshape(-1)
    sum_g, sum_gx = g.sum(axes), (g * (x - channels_of(mean, x))).sum(axes)
    k1 = invstd * weight
    k2 = -k1 * invstd * invstd * (sum_gx * share)
    torch.stack((k1, k2, -k1 * (sum_g * share) - mean * k2, sum_gx * invstd, sum_g), out=out)


def norm_apply_into(
    grad: Tensor, data: Tensor, seeds: Tensor, sums: Tensor, row: int, bits: int, stride: int, *, out: Tensor
) -> None:
    """`norm_apply`."""
    if grad.is_cuda:
        from encke.kernels.gpu import norm_backward

        norm_backward.norm_apply(grad, data, sums, bits, (seeds, row), stride > 1, out)
        return
    k1, k2, k3 = (channels_of(line, grad) for line in sums[:3])
    out.copy_(grad * k1 + (_decoded(grad, data, seeds, row, bits, stride) * k2 + k3))


def _decoded(like: Tensor, data: Tensor, seeds: Tensor, row: int, bits: int, stride: int) -> Tensor:
    out = torch.empty_like(like)
    decode_into(data, seeds, row, bits, GROUP, stride, False, out=out)
    return out.float()


def channels_of(line: Tensor, like: Tensor) -> Tensor:
    """One number for each channel, to be combined with a tensor of that shape."""
    return line.view(-1, *[1] * (like.dim() - 2))


def flat_of(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,))


def plan_of(
    like: Tensor, dtype: torch.dtype, bits: int, group: int, stride: int, signs: bool, table: bool = False
) -> GqPlan | None:
    """What launches the kernels on a GPU for tensors of that size, which read seeds from a `table` if they need one.

    None where there are none.
    """
    if not like.is_cuda:
        return None
    found = gpu_plans()
    return None if found is None else found(like.numel(), bits, group, dtype, stride, signs, like.device, table)


@functools.cache
def gpu_plans() -> Callable[..., GqPlan | None] | None:
    return getattr(of("cuda"), "gq_plan", None)


# -- registration -----------------------------------------------------------------------------------------------------


def _restored(size: Any, strides: Any, dtype: torch.dtype, like: Tensor) -> Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device=like.device)


def _conv_input_grad_fake(grad: Tensor, weight: Tensor, size: Any, strides: Any, *settings: Any) -> Tensor:
    x = _restored(size, strides, grad.dtype, grad)
    return torch.ops.aten.convolution_backward(grad, x, weight, None, *settings, [True, False, False])[0]


def _encode_fake(
    x: Tensor, seeds: Tensor, order: Any, row: int, bits: int, group: int, stride: int, signs: bool
) -> Tensor:
    return x.new_empty(gq_sizes(x.numel(), bits, group, x.dtype, stride)[2], dtype=torch.uint8)


def _encode_moments_fake(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    var, mean = (x.new_empty(line_of(x), dtype=torch.float32) for _ in range(2))
    return _encode_fake(x, *settings), var, mean


_FAKES: dict[str, Callable[..., Any]] = {
    "forward_seeds": lambda graph, sites, salts, device, first: torch.empty(
        len(sites), dtype=torch.int64, device=device
    ),
    "site_encode": _encode_fake,
    "site_encode_moments": _encode_moments_fake,
    "site_decode": lambda data, seeds, size, strides, dtype, *rest: _restored(size, strides, dtype, data),
    "site_mask": lambda data, size, strides, *rest: _restored(size, strides, torch.bool, data),
    "site_gate": lambda grad, *rest: torch.empty_like(grad),
    "mask_encode": lambda x, order: x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8),
    "mask_decode": lambda data, size, strides, dtype, order: _restored(size, strides, dtype, data),
    "norm_sums": lambda grad, data, seeds, mean, invstd, weight, *rest: grad.new_empty(
        (5, weight.numel()), dtype=torch.float32
    ),
    "norm_apply": lambda grad, *rest: torch.empty_like(grad),
    "conv_input_grad": _conv_input_grad_fake,
}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_library = torch.library.Library("encke", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    # What the host knows anew in every step stays outside of CUDA graphs.
    _library.define(_name + _schema, tags=(*_TAGS, *[torch.Tag.cudagraph_unsafe] * (_name == "forward_seeds")))
    torch.library.register_fake(f"encke::{_name}", _FAKES[_name], lib=_library)
    _library.impl(_name, globals()[_name], "CompositeExplicitAutograd")
