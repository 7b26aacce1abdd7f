"""Backward of batch norm from a packed input, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.formats import Seed
from encke.kernels.plans import Gate, GroupPlan


def norm_sums(
    grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, plan: GroupPlan, seed: Seed, out: Tensor,
    gate: Gate | None = None,
) -> None:  # fmt: skip
    """Write [k1, k2, k3, grad_weight, grad_bias] of each channel; `norm_apply` reads the first three rows.

    `data` is batch norm's input, packed by `plan`, in the memory format of `grad`. `weight` is fp32. With `gate`, whose
    values have the same memory format, `grad` is the gradient of the result of a ReLU after the batch norm.
    """
    grad = gated(grad, gate)
    norm_sums_from(grad, decoded_like(grad, data, plan, seed), mean, invstd, weight, out)


def norm_sums_from(grad: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, out: Tensor) -> None:
    """Write the result of `norm_sums`, computed from batch norm's input `x` in fp32."""
    g = grad.float()
    axes, share = [0, *range(2, grad.dim())], weight.numel() / grad.numel()
    mean, invstd = mean.reshape(-1), invstd.reshape(-1)
    sum_g, sum_gx = g.sum(axes), (g * (x - per_channel(mean, x))).sum(axes)
    k1 = invstd * weight
    k2 = -k1 * invstd * invstd * (sum_gx * share)
    torch.stack((k1, k2, -k1 * (sum_g * share) - mean * k2, sum_gx * invstd, sum_g), out=out)


def norm_apply(
    grad: Tensor, data: Tensor, sums: Tensor, plan: GroupPlan, seed: Seed, out: Tensor, gate: Gate | None = None
) -> None:
    """Write the gradient of batch norm's input, g * k1 + x * k2 + k3, from the result of `norm_sums`."""
    grad = gated(grad, gate)
    norm_apply_from(grad, decoded_like(grad, data, plan, seed), sums, out)


def norm_apply_from(grad: Tensor, x: Tensor, sums: Tensor, out: Tensor) -> None:
    """Write the result of `norm_apply`, computed from batch norm's input `x` in fp32."""
    k1, k2, k3 = (per_channel(row, grad) for row in sums[:3])
    out.copy_(grad * k1 + (x * k2 + k3))


def gated(grad: Tensor, gate: Gate | None) -> Tensor:
    """Return the gradient, gated by a ReLU if given."""
    return grad if gate is None else gate[1].gate(gate[0], grad)


def decoded_like(like: Tensor, data: Tensor, plan: GroupPlan, seed: Seed) -> Tensor:
    return plan.decode_strided(data, seed, like.shape, like.stride()).float()


def per_channel(row: Tensor, like: Tensor) -> Tensor:
    """Reshape a vector with one number for each channel so that it broadcasts with `like`."""
    return row.view(-1, *[1] * (like.dim() - 2))
