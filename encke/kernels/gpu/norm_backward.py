"""Backward of batch norm from a packed input: plans and launches. The kernels are in norm_kernels.py.

There are four steps, and the host waits for none of them: sums of g and g * (x - mean) for parts of the tensor; for
planes in NCHW memory, the sums of each channel; the coefficients of each channel and the gradients of weight and bias;
and grad_x = g * k1 + x * k2 + k3.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
import triton.language as tl
from torch import Tensor

from encke.kernels import reference
from encke.kernels.formats import NORM_GROUP, SMALLEST_PLANE, GroupFormat, Seed
from encke.kernels.gpu.launch import TYPES, Launch, power_of_two, seed_arguments
from encke.kernels.gpu.norm_kernels import (
    RELU,
    finish_kernel,
    gather_kernel,
    last_apply_kernel,
    last_reduce_kernel,
    plane_apply_kernel,
    plane_reduce_kernel,
)
from encke.kernels.gpu.places import Rows, reciprocal
from encke.kernels.plans import Gate, GroupPlan

WARPS = 1  # of a program in channels_last memory; eight threads load 16 bytes each of a pixel
PROGRAMS = 132 * 16  # programs that sum, if there is enough work
REGISTERS = (128, 96, 112, 128)  # of programs that sum, and write: no activation, ReLU, smooth; few spills
REDUCED = 1024  # values that a program sums in NCHW memory, with one warp
WRITTEN = 512  # 16-byte accesses of a program that writes the gradient there
GATHER = 1024  # sums that a program of `gather_kernel` reads at a time
ROUND = False
"""Whether decoded values are rounded to the tensor's dtype before use, as when they are decoded to memory."""


class NormPlan:
    """Plan of batch norm's backward for gradients of one size: grids, numbers and constants of its launches."""

    gate_bits = 0
    """Bits of the ReLU codes that gate the gradients; 0 if there are none."""
    act = 0
    """Number of the smooth activation after the norm whose gradient is propagated too; 0 if there is none."""

    def __init__(
        self, numel: int, channels: int, splits: int, weight_dtype: torch.dtype | None, device: torch.device
    ) -> None:
        self.channels, self.device = channels, device
        self.sums_numel = splits * 2 * channels
        """Number of partial sums: [splits, 2, channels]."""
        self.rest = (splits, channels, channels / numel)
        weight = tl.float32 if weight_dtype is None else TYPES[weight_dtype]
        constants = (weight_dtype is not None, weight, min(256, power_of_two(splits)), 8)
        self.finish, self.finish_below, self.finish_together = (
            Launch(finish_kernel, -(-channels // 8), (*constants, together, below), 4, 0)
            for together, below in ((False, False), (False, True), (True, False))
        )

    def sum_up(
        self, grad: Tensor, data: Tensor, mean: Tensor, seed: tuple[Tensor, int, int], gate: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return sum(g) and sum(g * (x - mean)) of each channel, as a few partial sums."""
        raise NotImplementedError

    def apply(
        self, grad: Tensor, data: Tensor, line: Tensor, out: Tensor, seed: tuple[Tensor, int, int],
        gate: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Write g * k1 + x * k2 + k3."""
        raise NotImplementedError


class CodesPlan(NormPlan):
    """Plan of batch norm's backward from codes, in `format`."""

    def __init__(
        self, size: tuple[int, ...], format: GroupFormat, channels_last: bool, weight_dtype: torch.dtype | None,
        device: torch.device, seed_table: bool, gate_bits: int = 0, act: int = 0,
    ) -> None:  # fmt: skip
        numel, self.gate_bits, self.act = math.prod(size), gate_bits, act
        self.format, self.channels_last, self.channels = format, channels_last, size[1]
        plan = self._plan_channels_last if channels_last else self._plan_planes
        splits = plan(numel, size[0], seed_table)
        super().__init__(numel, size[1], splits, weight_dtype, device)

    def _plan_channels_last(self, numel: int, samples: int, seed_table: bool) -> int:
        """Make the launches for channels_last memory; return the number of partial sums."""
        channels, dtype = self.channels, self.format.dtype
        pixels = numel // channels
        unit, vector = 8 if channels % 8 == 0 else 1, 16 // dtype.itemsize
        columns = 8 * vector
        blocks, tiles = -(-pixels // NORM_GROUP), -(-channels // columns)
        splits = -(-blocks // -(-blocks // max(PROGRAMS // tiles, 1)))
        bits, gate = self.gate_bits, self.act or RELU.value * (self.gate_bits > 0)
        constants = (TYPES[dtype], self.format.bits, unit, vector, 4 * WARPS, columns, ROUND, seed_table, gate)
        self.workspace_numel = 0
        self.numbers: tuple[tuple, ...] = (
            (channels // unit, pixels, tiles, splits, bits), (channels // unit, pixels, tiles, bits),
        )  # fmt: skip
        self.reduce = Launch(last_reduce_kernel, tiles * splits, constants, WARPS, 2, REGISTERS[0])
        self.write = Launch(last_apply_kernel, blocks * tiles, constants, WARPS, 2, REGISTERS[1 + min(gate, 2)])
        return splits

    def _plan_planes(self, numel: int, samples: int, seed_table: bool) -> int:
        """Make the launches for NCHW memory; return the number of partial sums."""
        channels, format, vector = self.channels, self.format, 16 // self.format.dtype.itemsize
        rows = Rows(format, numel, numel // (samples * channels))
        count = format.groups(numel) // (samples * channels)
        each = min(power_of_two(samples), GATHER // min(power_of_two(count), 32))
        width = min(power_of_two(count), GATHER // each)
        splits = min(-(-samples // each), -(-PROGRAMS // channels))
        self.workspace_numel = 2 * format.groups(numel)
        numbers = (*rows.numbers, channels, *reciprocal(channels))
        self.numbers = (numbers, numbers, (samples, channels, count, format.groups(numel), splits))
        self.gather = Launch(gather_kernel, channels * splits, (each, width), 4, 0)
        self.reduce, self.write = (
            Launch(kernel, grid, (TYPES[format.dtype], format.bits, *shape, ROUND, seed_table), warps, 0)
            for kernel, warps, (grid, shape) in (
                (plane_reduce_kernel, 1, rows.tiles(REDUCED, 8, 32 if rows.unit == 1 else 16)),
                (plane_apply_kernel, 4, rows.tiles(WRITTEN * vector, vector)),
            )
        )  # fmt: skip
        return splits

    def sum_up(
        self, grad: Tensor, data: Tensor, mean: Tensor, seed: tuple[Tensor, int, int], gate: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if sums is None:
            sums = torch.empty(self.sums_numel, dtype=torch.float32, device=self.device)
        if self.channels_last:
            beside = data if gate is None else gate
            self.reduce((grad, data, beside, mean, sums, seed[0]), (*self.numbers[0], *seed[1:]))
        else:
            workspace = torch.empty(self.workspace_numel, dtype=torch.float32, device=self.device)
            self.reduce((grad, data, mean, workspace, seed[0]), (*self.numbers[0], *seed[1:]))
            self.gather((workspace, sums), self.numbers[2])
        return sums

    def apply(
        self, grad: Tensor, data: Tensor, line: Tensor, out: Tensor, seed: tuple[Tensor, int, int],
        gate: Tensor | None = None,
    ) -> None:  # fmt: skip
        read = (grad, data, data if gate is None else gate) if self.channels_last else (grad, data)
        self.write((*read, line, out, seed[0]), (*self.numbers[1], *seed[1:]))


@functools.lru_cache(maxsize=4096)
def norm_plan(
    size: tuple[int, ...], format: GroupFormat, channels_last: bool, weight_dtype: torch.dtype | None,
    device: torch.device, seed_table: bool = False, gate: GroupFormat | None = None, act: int = 0,
) -> CodesPlan | None:  # fmt: skip
    """Return the plan for gradients of that size; None if the kernels do not support them.

    The packed input, in `format`, has the size and the memory format of the gradient: channels_last or contiguous. With
    `seed_table`, seeds are given as a tensor and a row. `gate` is the format of a ReLU's codes; if the kernels cannot
    read it, `gate_bits` of the plan is 0. With `act`, the number of a smooth activation after the norm, the plan takes
    gradients of the activation's result, in channels_last memory only.
    """
    numel, channels = math.prod(size), size[1]
    if format.bits not in (2, 3, 4, 8) or format.group != NORM_GROUP or format.signs or not numel:
        return None
    if format.dtype == torch.float64 or format.dtype not in TYPES or channels == 1:
        return None
    if format.stride != (channels if channels_last else 1):
        return None
    if format.groups(numel) >= 1 << 30 or (act and not channels_last):
        return None
    plane = numel // (size[0] * channels)
    if format.row if channels_last else plane < SMALLEST_PLANE or format.row != (plane if plane % NORM_GROUP else 0):
        return None
    bits = gate.bits if gate is not None and channels_last and replace(gate, bits=format.bits) == format else 0
    return CodesPlan(size, format, channels_last, weight_dtype, device, seed_table, bits, act)


def norm_backward(
    grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor | None, weight: Tensor | None, plan: NormPlan, seed: Seed,
    apply: bool = True, gate: Tensor | None = None, out: Tensor | None = None,
    scratch: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of input (if `apply`), weight and bias of batch norm in training.

    Args:
        grad: Gradient of the norm's result, with the dtype and memory format of the input.
        data: The packed input; for a plan of values, the values.
        mean: Mean of each channel.
        invstd: 1 / deviation of each channel; None if it is the second row of `mean`.
        weight: Weight of each channel, if there is one.
        plan: The plan.
        seed: Seed of the packed input.
        apply: Whether the input's gradient is needed.
        gate: For a plan with `gate_bits`, the codes of the ReLU's result: `grad` is the gradient of that result, and
            passes where the codes are not zero. For a plan with `act`: mean, 1 / deviation, scale and bias of each
            channel.
        out: Memory for the input's gradient; may be `grad` or the values.
        scratch: Memory for `sums_numel` sums and for three coefficients of each channel, in fp32.
    """
    seed_args = seed_arguments(seed, data)
    sums = plan.sum_up(grad, data, mean, seed_args, gate, scratch[0])
    coefficients = scratch[1]
    if coefficients is None:
        coefficients = torch.empty(3 * plan.channels, dtype=torch.float32, device=plan.device)
    finish = plan.finish_below if invstd is None else plan.finish
    spread = mean if invstd is None else invstd
    if weight is None:
        grad_weight = grad_bias = None
        finish((sums, mean, spread, mean, mean, mean, coefficients), plan.rest)
    else:
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(weight)
        finish((sums, mean, spread, weight, grad_weight, grad_bias, coefficients), plan.rest)
    if not apply:
        return None, grad_weight, grad_bias
    if out is None:
        out = torch.empty_like(grad)
    plan.apply(grad, data, coefficients, out, seed_args, gate)
    return out, grad_weight, grad_bias


def norm_sums(
    grad: Tensor, data: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, plan: GroupPlan, seed: Seed, out: Tensor,
    gate: Gate | None = None,
) -> None:  # fmt: skip
    """Write [k1, k2, k3, grad_weight, grad_bias] of each channel; see `reference.norm_sums`."""
    grad, codes, norm = _plan_of(grad, plan, weight.dtype, seed, gate)
    if norm is None:
        reference.norm_sums(grad, data, mean, invstd, weight, plan, seed, out)
        return
    sums = norm.sum_up(grad, data, mean, seed_arguments(seed, data), codes)
    norm.finish_together((sums, mean, invstd, weight, out, out, out), norm.rest)


def norm_apply(
    grad: Tensor, data: Tensor, sums: Tensor, plan: GroupPlan, seed: Seed, out: Tensor, gate: Gate | None = None
) -> None:
    """Write the gradient of batch norm's input from the result of `norm_sums`; see `reference.norm_apply`."""
    grad, codes, norm = _plan_of(grad, plan, torch.float32, seed, gate)
    if norm is None:
        reference.norm_apply(grad, data, sums, plan, seed, out)
        return
    norm.apply(grad, data, sums, out, seed_arguments(seed, data), codes)


def _plan_of(
    grad: Tensor, plan: GroupPlan, weight_dtype: torch.dtype, seed: Seed, gate: Gate | None
) -> tuple[Tensor, Tensor | None, CodesPlan | None]:
    """Return the gradient, the ReLU codes that still have to gate it (None if there are none), and the plan."""
    format, table = plan.format, type(seed) is tuple
    gate_format = None if gate is None else gate[1].format
    norm = norm_plan(grad.shape, format, format.stride > 1, weight_dtype, grad.device, table, gate_format)
    if gate is None:
        return grad, None, norm
    if norm is None or not norm.gate_bits:
        return gate[1].gate(gate[0], grad), None, norm
    return grad, gate[0], norm
