"""Forward of batch norm in training, fused with packing its input: channels_last memory, 16-bit values.

There are three steps, and the host waits for none of them. The encoder, which has the values in registers, writes mean
and squared deviation of each group beside the codes (pairs.py). Mean and variance of each channel are computed from
these, without the cancellation of E[x^2] - E[x]^2. The last step writes (x - mean) * scale + bias.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels.formats import NORM_GROUP, SMOOTH, channel_stride, run_length
from encke.kernels.gpu.common import narrow, widen
from encke.kernels.gpu.launch import TYPES, Launch
from encke.kernels.gpu.smooth import activated

MOMENTS = 4096  # moments of groups, of eight channels, that a program reads at a time
MANY = 2048  # largest number of groups of a channel for one program; more are first merged by many programs
VALUES = 4096  # values that a program normalises
UNIT = 8  # the number of channels is a multiple of this: 16 bytes


@triton.jit
def moments_of(
    workspace, c, here, start, end, blocks, channels, pixels, ROWS: tl.constexpr, CH: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Return mean and variance of the channels `c`, where `here`, over the blocks from `start` to `end`."""
    row = tl.arange(0, ROWS)[:, None]
    apart = blocks.to(tl.int64) * channels
    count = tl.zeros((ROWS, 1), tl.float32)
    mean = tl.zeros((ROWS, CH), tl.float32)
    square = tl.zeros((ROWS, CH), tl.float32)
    first = start
    while first < end:
        block = first + row
        at = workspace + block.to(tl.int64) * channels + c[None, :]
        there = (block < end) & here[None, :]
        group_mean = tl.load(at, mask=there, other=0.0)
        group_square = tl.load(at + apart, mask=there, other=0.0)
        left = tl.minimum(tl.maximum(pixels - block.to(tl.int64) * GROUP, 0), GROUP)
        left = tl.where(block < end, left, 0).to(tl.float32)
        together = count + left
        share = left / tl.maximum(together, 1.0)
        away = group_mean - mean
        mean += away * share
        square += group_square + away * away * (count * share)
        count = together
        first += ROWS
    one = 1.0 / tl.sum(tl.sum(count, 1), 0)
    middle = tl.sum(mean * (count * one), 0)
    away = mean - middle[None, :]
    return middle, (tl.sum(square, 0) + tl.sum(away * away * count, 0)) * one


@triton.jit(do_not_specialize=["blocks", "channels", "pixels"])
def merge_kernel(
    workspace, merged, blocks: tl.int32, channels: tl.int32, pixels: tl.int64,
    ROWS: tl.constexpr, CH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Merge the moments of every ROWS groups of a channel."""
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    here = c < channels
    n = tl.program_id(1)
    start, end = n * ROWS, tl.minimum(n * ROWS + ROWS, blocks)
    middle, spread = moments_of(workspace, c, here, start, end, blocks, channels, pixels, ROWS, CH, GROUP)
    count = tl.minimum(pixels - start.to(tl.int64) * GROUP, ROWS * GROUP).to(tl.float32)
    to = merged + n.to(tl.int64) * channels + c
    tl.store(to, middle, mask=here)
    tl.store(to + tl.cdiv(blocks, ROWS).to(tl.int64) * channels, spread * count, mask=here)


@triton.jit(do_not_specialize=["blocks", "channels", "pixels"])
def moments_kernel(
    workspace, mean, var, blocks: tl.int32, channels: tl.int32, pixels: tl.int64,
    ROWS: tl.constexpr, CH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write mean and variance of each channel."""
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    here = c < channels
    middle, spread = moments_of(workspace, c, here, 0, blocks, blocks, channels, pixels, ROWS, CH, GROUP)
    tl.store(mean + c, middle, mask=here)
    tl.store(var + c, spread, mask=here)


@triton.jit
def update_running(running_mean, running_var, batches, c, here, mean, var, count, momentum):
    """Update the running statistics of the channels `c`, where `here`, and the number of batches."""
    old_mean = tl.load(running_mean + c, mask=here, other=0.0)
    old_var = tl.load(running_var + c, mask=here, other=0.0)
    unbiased = var * (count / tl.maximum(count - 1.0, 1.0))
    tl.store(running_mean + c, old_mean * (1.0 - momentum) + mean * momentum, mask=here)
    tl.store(running_var + c, old_var * (1.0 - momentum) + unbiased * momentum, mask=here)
    if tl.program_id(0) == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["blocks", "channels", "pixels"])
def statistics_kernel(
    workspace, weight, bias, running_mean, running_var, batches, kept,
    blocks: tl.int32, channels: tl.int32, pixels: tl.int64, momentum: tl.float32, eps: tl.float32,
    RUNNING: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Write mean, 1 / deviation, scale and bias of each channel to `kept`; update the running statistics."""
    c = tl.program_id(0) * CH + tl.arange(0, CH)
    here = c < channels
    middle, var = moments_of(workspace, c, here, 0, blocks, blocks, channels, pixels, ROWS, CH, GROUP)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(var + eps))
    tl.store(kept + c, middle, mask=here)
    tl.store(kept + channels + c, inverse, mask=here)
    tl.store(kept + 2 * channels + c, inverse * tl.load(weight + c, mask=here, other=0.0), mask=here)
    tl.store(kept + 3 * channels + c, tl.load(bias + c, mask=here, other=0.0), mask=here)
    if RUNNING:
        update_running(running_mean, running_var, batches, c, here, middle, var, pixels.to(tl.float32), momentum)


@triton.jit(do_not_specialize=["units", "pixels"])
def normalise_kernel(
    x, kept, out, units: tl.int32, pixels: tl.int64,
    DTYPE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, CH: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) * scale + bias, or with ACT a smooth activation of that, for ROWS pixels of CH channels."""
    channels = units * UNIT
    c = tl.program_id(1) * CH + tl.arange(0, CH)
    here = c < channels
    mean = tl.load(kept + c, mask=here, other=0.0)
    scale = tl.load(kept + 2 * channels + c, mask=here, other=0.0)
    bias = tl.load(kept + 3 * channels + c, mask=here, other=0.0)
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    at = first * channels + (row * channels + c[None, :])
    if first + ROWS <= pixels:
        inside = here[None, :] & (row >= 0)
    else:
        inside = here[None, :] & (row < (pixels - first).to(tl.int32))
    v = widen(tl.load(x + at, mask=inside, other=0), DTYPE)
    y = tl.fma(v - mean[None, :], scale[None, :], bias[None, :])
    if ACT:
        # Round first, as batch norm's result would be in memory.
        y = activated(widen(narrow(y, DTYPE), DTYPE), ACT)
    tl.store(out + at, narrow(y, DTYPE), mask=inside)


class ForwardPlan:
    """Plan of batch norm's forward for tensors of one size."""

    def __init__(self, pixels: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        self.channels, self.device = channels, device
        blocks = -(-pixels // NORM_GROUP)
        self.workspace_numel = 2 * blocks * channels
        self.numbers = (blocks, channels, pixels), (channels // UNIT, pixels)
        most, programs, group = MOMENTS // UNIT, channels // UNIT, NORM_GROUP
        self.merge: tuple[Launch, tuple[int, int, int]] | None = None
        if blocks > MANY:
            fewer = -(-blocks // most)
            self.merge = Launch(merge_kernel, (programs, fewer), (most, UNIT, group), 8, 0), self.numbers[0]
            self.numbers = (fewer, channels, pixels), self.numbers[1]
            blocks, group = fewer, group * most
        self.merged = (2, blocks, channels)
        rows = min(most, max(triton.next_power_of_2(blocks), 16))
        self.statistics = [
            Launch(statistics_kernel, programs, (running, rows, UNIT, group), 8, 0) for running in (False, True)
        ]
        self.moments = Launch(moments_kernel, programs, (rows, UNIT, group), 8, 0)
        width = min(triton.next_power_of_2(channels), 256)
        rows = VALUES // width
        grid = (-(-pixels // rows), -(-channels // width))
        self.apply = {
            act: Launch(normalise_kernel, grid, (TYPES[dtype], UNIT, rows, width, act), 4, 0)
            for act in (0, *SMOOTH.values())
        }

    def gather(
        self, workspace: Tensor, weight: Tensor, bias: Tensor, running: tuple[Tensor, ...] | None, momentum: float,
        eps: float, kept: Tensor,
    ) -> None:  # fmt: skip
        """Write [mean, 1 / deviation, scale, bias] to `kept`, computed from the encoder's moments in `workspace`.

        `running` has running mean, running variance and number of batches, which are updated.
        """
        means = (weight, bias, bias) if running is None else running
        moments = workspace if self.merge is None else self._merged(workspace)
        self.statistics[running is not None]((moments, weight, bias, *means, kept), (*self.numbers[0], momentum, eps))

    def normalise(self, x: Tensor, kept: Tensor, out: Tensor, act: int = 0) -> None:
        """Write the result of batch norm, or a smooth activation of it, to `out`, which may be `x`."""
        self.apply[act]((x, kept, out), self.numbers[1])

    def measure(self, workspace: Tensor, mean: Tensor, var: Tensor) -> None:
        """Write mean and variance, computed from the encoder's moments in `workspace`."""
        self.moments((self._merged(workspace), mean, var), self.numbers[0])

    def _merged(self, workspace: Tensor) -> Tensor:
        """Merge moments until there are few enough for one program for each eight channels."""
        if self.merge is None:
            return workspace
        merged = torch.empty(self.merged, dtype=torch.float32, device=self.device)
        launch, numbers = self.merge
        launch((workspace, merged), numbers)
        return merged


@functools.lru_cache(maxsize=4096)
def forward_plan(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> ForwardPlan | None:
    """Return the plan for tensors of that size and stride; None if the kernels do not support them."""
    numel, channels = math.prod(size), size[1]
    if dtype.itemsize != 2 or channels % UNIT or run_length(size, stride) != numel:
        return None
    if channel_stride(tuple(size), tuple(stride), numel, NORM_GROUP) != channels:
        return None
    return ForwardPlan(numel // channels, channels, dtype, device)
