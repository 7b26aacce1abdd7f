"""Plans of the fixed-rate kernels: grids, numbers and constants of launches for tensors of one size and format."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from encke.kernels.formats import GroupFormat, Seed
from encke.kernels.gpu.channels import (
    gq_decode_channels_kernel,
    gq_encode_channels_kernel,
    gq_gate_channels_kernel,
    gq_normalise_channels_kernel,
)
from encke.kernels.gpu.codes import ADD, GATE, LEAK
from encke.kernels.gpu.group import gq_decode_kernel, gq_encode_kernel, gq_gate_kernel
from encke.kernels.gpu.launch import TYPES, Launch, power_of_two, seed_arguments
from encke.kernels.gpu.norm_relu import norm_relu_encode_kernel
from encke.kernels.gpu.pairs import MOMENTS, PLAIN, RELU, gq_encode_channels_pairs_kernel, gq_encode_pairs_kernel
from encke.kernels.gpu.places import Rows
from encke.kernels.gpu.samples import sample_sums
from encke.kernels.plans import GroupPlan, Norm
from encke.kernels.reference import group_plan as reference_plan

# Values that a program processes with four warps; these sizes were the fastest on an H200.
ENCODED, DECODED, GATED = 8192, 4096, 2048
CHANNELS = 64  # channels that a program processes in channels_last memory
CHANNEL_PAIRS = (4, 0, 96)  # warps, specialised numbers and registers of the encoder of 16-bit values there
CHANNEL_MOMENTS = (4, 0, 128)  # those of the encoder that also writes moments


class GpuPlan(GroupPlan):
    """Plan that launches Triton kernels. With `seed_table`, seeds are on the device."""

    def __init__(self, format: GroupFormat, numel: int, device: torch.device, seed_table: bool) -> None:
        super().__init__(format, numel, device)
        self.limit = torch.finfo(format.dtype).max
        self.pairs: Launch | None = None
        """Encodes 16-bit values two at a time, if their address is a multiple of 4 bytes."""
        self.numbers: tuple[int, ...]
        self.relu: Launch | None = None
        self.moments: Launch | None = None
        """Encode the ReLU of values in channels_last memory, or write the moments of groups beside the codes."""
        self.norm_relu: Launch | None = None
        self.norm_rows_relu: Launch | None = None
        self.normaliser: Launch | None = None
        """Decode the input of a batch norm in channels_last memory, and write its result."""
        if format.stride > 1:
            self._plan_channels(seed_table)
        else:
            self._plan_rows(seed_table)
        self.fuses_forward, self.fuses_norm_relu = self.relu is not None, self.norm_relu is not None
        self.sample_sums = None if format.scale_dtype == torch.float64 else sample_sums

    def _plan_channels(self, seed_table: bool) -> None:
        """Make the launches for interleaved rows: channels in channels_last memory."""
        format = self.format
        stride, length, dtype = format.stride, format.field_length, format.dtype
        pixels, room = format.row or self.numel // stride, max(power_of_two(length), 2)
        channels = min(power_of_two(stride), CHANNELS)
        blocks, across = format.groups(self.numel) // stride, -(-stride // channels)
        constants: tuple = (TYPES[dtype], format.bits, format.signs)
        whole = length == room and not format.row
        if whole and stride % 2 == 0 and stride * format.group < 1 << 30 and dtype.itemsize == 2:
            full = pixels % format.group == 0 and stride % channels == 0
            self.pairs, self.relu, self.moments = (
                Launch(
                    gq_encode_channels_pairs_kernel, (blocks, across),
                    (*constants, format.group, channels, beside.value, full, seed_table), *options,
                )
                for beside, options in ((PLAIN, CHANNEL_PAIRS), (RELU, CHANNEL_PAIRS), (MOMENTS, CHANNEL_MOMENTS))
            )  # fmt: skip
            if dtype == torch.bfloat16 and not format.signs:
                settings = (format.bits, format.group, channels, full, seed_table)
                self.norm_relu, self.norm_rows_relu = (
                    Launch(norm_relu_encode_kernel, (blocks, across), (*settings, rows), *CHANNEL_PAIRS)
                    for rows in (False, True)
                )
        self.numbers = (stride, pixels, format.groups_in_row(self.numel), blocks, length)
        constants = (*constants, room, room == length, channels)
        grid = blocks * across
        self.encoder = Launch(gq_encode_channels_kernel, grid, (*constants, seed_table), 4, 1)
        piece = min(room, DECODED * format.field // 8 // channels)
        # 3-bit codes take more instructions. A program with twice as many values shares a part of them.
        longer = min(room, 2 * piece) if format.bits == 3 else piece
        self.decoder, self.masker = (
            Launch(gq_decode_channels_kernel, grid * (room // longer), (*constants, longer, mask, seed_table), 4, 1)
            for mask in (False, True)
        )
        if dtype != torch.float64:
            constants_of_norm = (*constants, longer, seed_table)
            self.normaliser = Launch(gq_normalise_channels_kernel, grid * (room // longer), constants_of_norm, 4, 1)
        self.gater, self.adder, self.leaker = (
            Launch(gq_gate_channels_kernel, grid * (room // piece), (*constants, piece, kind), 4, 1)
            for kind in (GATE.value, ADD.value, LEAK.value)
        )

    def _plan_rows(self, seed_table: bool) -> None:
        """Make the launches for groups of adjacent values."""
        format, rows = self.format, Rows(self.format, self.numel, self.format.row or self.numel)
        self.numbers = rows.numbers
        lanes = 8 if format.dtype.itemsize == 2 else 4  # adjacent values that a thread loads at a time: 16 bytes
        rated = (TYPES[format.dtype], format.bits, format.signs)
        grid, shape = rows.tiles(ENCODED, lanes)
        self.encoder = Launch(gq_encode_kernel, grid, (*rated, *shape, seed_table), 4, 0, 128)
        if format.dtype.itemsize == 2 and rows.unit % (4 if format.bits == 3 else 2) == 0:
            half = 2 if format.bits == 8 else 1  # more values need more registers
            grid, (*tile, threads, lanes, unit) = rows.tiles(ENCODED // half, lanes)
            threads = min(16 * half // lanes, threads)  # each loads 32 bytes at a time
            constants = (*rated, *tile, threads, lanes, unit, seed_table)
            self.pairs = Launch(gq_encode_pairs_kernel, grid, constants, 4, 0, 96)
        grid, shape = rows.tiles(DECODED, lanes)
        self.decoder, self.masker = (
            Launch(gq_decode_kernel, grid, (*rated, *shape, mask, seed_table), 4, 0) for mask in (False, True)
        )
        grid, shape = rows.tiles(GATED, lanes)
        self.gater, self.adder, self.leaker = (
            Launch(gq_gate_kernel, grid, (*rated, *shape, kind), 4, 0) for kind in (GATE.value, ADD.value, LEAK.value)
        )

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        seeds, low, high = seed_arguments(seed, data)
        if self.pairs is None or x.data_ptr() & 3:
            self.encoder((x, data, seeds), (*self.numbers, low, high))
        elif self.relu is None:
            self.pairs((x, data, seeds), (*self.numbers, low, high))
        else:
            self.pairs((x, data, data, seeds), (*self.numbers[:2], low, high))

    # These methods run for every saved tensor and launch directly: with small batches the host is the bottleneck.

    def encode_relu(self, x: Tensor, out: Tensor, seed: Seed, data: Tensor | None = None) -> Tensor:
        assert self.relu is not None, "check fuses_forward first"
        if data is None:
            data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        self.relu((x, data, out, seeds), (*self.numbers[:2], low, high))
        return data

    def encode_moments(self, x: Tensor, workspace: Tensor, seed: Seed, data: Tensor | None = None) -> Tensor:
        assert self.moments is not None, "check fuses_forward first"
        if data is None:
            data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        self.moments((x, data, workspace, seeds), (*self.numbers[:2], low, high))
        return data

    def encode_norm_relu(
        self, x: Tensor, norm: Norm | Tensor, out: Tensor, seed: Seed, data: Tensor | None = None
    ) -> Tensor:
        assert self.norm_relu is not None and self.norm_rows_relu is not None, "check fuses_norm_relu first"
        if data is None:
            data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        numbers = (*self.numbers[:2], low, high)
        if isinstance(norm, tuple):
            self.norm_relu((x, *norm, out, data, seeds), numbers)
        else:
            self.norm_rows_relu((x, norm, norm, norm, norm, out, data, seeds), numbers)
        return data

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        seeds, low, high = seed_arguments(seed, data)
        self.decoder((data, out, seeds), (*self.numbers, low, high, self.limit))

    def decode_strided(
        self, data: Tensor, seed: Seed, size: tuple[int, ...], stride: tuple[int, ...], norm: Norm | None = None
    ) -> Tensor:
        if norm is not None and self.normaliser is None:
            return super().decode_strided(data, seed, size, stride, norm)
        out = torch.empty_strided(size, stride, dtype=self.format.dtype, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        numbers = (*self.numbers, low, high, self.limit)
        if norm is None:
            self.decoder((data, out, seeds), numbers)
        else:
            self.normaliser((data, *norm, out, seeds), numbers)  # type: ignore[misc]
        return out

    def mask_into(self, data: Tensor, out: Tensor) -> None:
        self.masker((data, out, data), (*self.numbers, 0, 0, self.limit))

    def gate_into(self, data: Tensor, grad: Tensor, out: Tensor, other: Tensor | None = None) -> None:
        if other is None:
            self.gater((data, grad, grad, out), (*self.numbers, 0.0))
        else:
            self.adder((data, grad, other, out), (*self.numbers, 0.0))

    def gate(self, data: Tensor, grad: Tensor, slope: float | None = None) -> Tensor:
        if slope is not None and self.format.dtype == torch.float64:
            return super().gate(data, grad, slope)
        out = torch.empty_like(grad)
        launch = self.gater if slope is None else self.leaker
        launch((data, grad, grad, out), (*self.numbers, slope or 0.0))
        return out


@functools.lru_cache(maxsize=4096)
def group_plan(format: GroupFormat, numel: int, device: torch.device, seed_table: bool = False) -> GroupPlan:
    """Return the plan for tensors of `numel` values in that format; see `reference.group_plan`.

    The kernels support groups of at most DECODED values if the last group of a row is not empty. For other formats, and
    for tensors of 2^30 groups or more, return the plan of the reference.
    """
    row = format.row or numel // format.stride
    count = format.groups_in_row(numel)
    fits = format.group <= DECODED and (count - 1) * format.extent < row and format.groups(numel) < 1 << 30
    if numel == 0 or numel % (format.stride * (format.row or 1)) or not fits:
        return reference_plan(format, numel, device)
    return GpuPlan(format, numel, device, seed_table)
