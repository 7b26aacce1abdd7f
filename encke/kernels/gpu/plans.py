"""Plans of the fixed rate on the GPU: sizes, grids and constants of launches for tensors of one size and format."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from encke.kernels.formats import GroupFormat, Seed
from encke.kernels.gpu.group import (
    gq_decode_channels_kernel,
    gq_decode_kernel,
    gq_encode_channels_kernel,
    gq_encode_kernel,
    gq_gate_channels_kernel,
    gq_gate_kernel,
)
from encke.kernels.gpu.launch import TYPES, Launch, power_of_two, seed_arguments
from encke.kernels.gpu.pairs import MOMENTS, PLAIN, RELU, gq_encode_channels_pairs_kernel, gq_encode_pairs_kernel
from encke.kernels.gpu.rows import gq_decode_rows_kernel, gq_encode_rows_kernel, gq_gate_rows_kernel
from encke.kernels.plans import GroupPlan
from encke.kernels.reference import group_plan as reference_plan

# Values that a program takes, with four warps: what was fastest on an H200.
ENCODED, DECODED, GATED = 8192, 4096, 2048
CHANNELS = 64  # channels that a program takes in channels_last memory
CHANNEL_PAIRS = (4, 0, 96)  # warps, specialised numbers and registers of an encoding program there, for 16-bit values
PAIRS_THREADS = 2  # threads that share a group of 16-bit values


class GpuPlan(GroupPlan):
    """Plan for Triton kernels. With `seed_table` it takes seeds that are on the device."""

    def __init__(self, format: GroupFormat, numel: int, device: torch.device, seed_table: bool) -> None:
        super().__init__(format, numel, device)
        self.limit = torch.finfo(format.dtype).max
        self.pairs: Launch | None = None
        """Encodes 16-bit values, two at a time, where their address allows it."""
        self.numbers: tuple[int, ...]
        self.relu: Launch | None = None
        self.moments: Launch | None = None
        """Encode the ReLU of values in channels_last memory, or write the moments of groups beside the codes."""
        if format.row or format.bits == 3:
            self._plan_rows(seed_table)
        elif format.stride > 1:
            self._plan_channels(seed_table)
        else:
            self._plan_run(seed_table)
        self.fuses_forward = self.relu is not None

    def _plan_channels(self, seed_table: bool) -> None:
        """Make the launches for groups of one channel each in channels_last memory."""
        bits, group, stride, dtype = self.format.bits, self.format.group, self.format.stride, self.format.dtype
        pixels, channels = self.numel // stride, min(power_of_two(stride), CHANNELS)
        length = group * bits // 8
        piece = min(length, DECODED * bits // 8 // channels)
        blocks, across = -(-pixels // group), -(-stride // channels)
        grid, pieces = (blocks, across), (blocks * (length // piece), across)
        constants = (TYPES[dtype], bits, group, self.format.signs, channels)
        self.numbers = (stride, pixels)
        if stride % 2 == 0 and stride * group < 1 << 30 and dtype.itemsize == 2:
            full = pixels % group == 0 and stride % channels == 0
            self.pairs, self.relu, self.moments = (
                Launch(
                    gq_encode_channels_pairs_kernel, grid, (*constants, beside.value, full, seed_table), *CHANNEL_PAIRS
                )
                for beside in (PLAIN, RELU, MOMENTS)
            )
        self.encoder = Launch(gq_encode_channels_kernel, grid, (*constants, seed_table), 4, 1)
        self.decoder, self.masker = (
            Launch(gq_decode_channels_kernel, pieces, (*constants, piece, mask, seed_table), 4, 1)
            for mask in (False, True)
        )
        self.gater = Launch(gq_gate_channels_kernel, pieces, (*constants, piece), 4, 1)

    def _plan_rows(self, seed_table: bool) -> None:
        """Make the launches for groups within rows of any width, and for 3-bit codes."""
        format, length = self.format, self.format.field_length
        groups, room, side = format.groups(self.numel), max(power_of_two(length), 2), format.stride > 1
        row = format.row or self.numel // format.stride
        self.numbers = (row, format.stride, length, format.groups_in_row(self.numel), groups)
        each = max(DECODED // (room * 8 // format.field), 1)
        grid, constants = -(-groups // each), (TYPES[format.dtype], format.bits, format.signs, each, room, side)
        self.encoder = Launch(gq_encode_rows_kernel, grid, (*constants, seed_table), 4, 3)
        self.decoder, self.masker = (
            Launch(gq_decode_rows_kernel, grid, (*constants, mask, seed_table), 4, 3) for mask in (False, True)
        )
        self.gater = Launch(gq_gate_rows_kernel, grid, constants, 4, 3)

    def _plan_run(self, seed_table: bool) -> None:
        """Make the launches for groups of neighbouring values."""
        groups = self.format.groups(self.numel)
        self.numbers = (self.numel, groups)
        grid, constants = self._rows(ENCODED, groups)
        if self.format.dtype.itemsize == 2:
            self.pairs = Launch(gq_encode_pairs_kernel, grid, (*constants[:-1], PAIRS_THREADS, seed_table), 4, 0)
        self.encoder = Launch(gq_encode_kernel, grid, (*constants, seed_table), 4, 0)
        grid, constants = self._rows(DECODED, groups)
        self.decoder, self.masker = (
            Launch(gq_decode_kernel, grid, (*constants, mask, seed_table), 4, 0) for mask in (False, True)
        )
        grid, constants = self._rows(GATED, groups)
        self.gater = Launch(gq_gate_kernel, grid, constants, 4, 0)

    def _rows(self, values: int, groups: int) -> tuple[int, tuple]:
        """Return the number of programs, and the constants, where a program takes so many values."""
        bits, group, dtype = self.format.bits, self.format.group, self.format.dtype
        rows = max(values // group, 1)
        lanes = 8 if dtype.itemsize == 2 else 4  # neighbouring values that a thread takes at a time: 16 bytes
        return -(-groups // rows), (TYPES[dtype], bits, group, rows, self.format.signs, lanes)

    def encode_into(self, x: Tensor, seed: Seed, data: Tensor) -> None:
        seeds, low, high = seed_arguments(seed, data)
        numbers = (*self.numbers, low, high)
        if self.pairs is None or x.data_ptr() & 3:
            self.encoder((x, data, seeds), numbers)
        elif self.relu is None:
            self.pairs((x, data, seeds), numbers)
        else:
            self.pairs((x, data, data, seeds), numbers)

    # The methods below that run for every saved tensor launch directly: small batches wait for the host.

    def encode_relu(self, x: Tensor, out: Tensor, seed: Seed) -> Tensor:
        assert self.relu is not None, "check fuses_forward first"
        data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        self.relu((x, data, out, seeds), (*self.numbers, low, high))
        return data

    def encode_moments(self, x: Tensor, workspace: Tensor, seed: Seed) -> Tensor:
        assert self.moments is not None, "check fuses_forward first"
        data = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        self.moments((x, data, workspace, seeds), (*self.numbers, low, high))
        return data

    def decode_into(self, data: Tensor, seed: Seed, out: Tensor) -> None:
        seeds, low, high = seed_arguments(seed, data)
        self.decoder((data, out, seeds), (*self.numbers, low, high, self.limit))

    def decode_strided(self, data: Tensor, seed: Seed, size: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        out = torch.empty_strided(size, stride, dtype=self.format.dtype, device=self.device)
        seeds, low, high = seed_arguments(seed, data)
        self.decoder((data, out, seeds), (*self.numbers, low, high, self.limit))
        return out

    def mask_into(self, data: Tensor, out: Tensor) -> None:
        self.masker((data, out, data), (*self.numbers, 0, 0, self.limit))

    def gate_into(self, data: Tensor, grad: Tensor, out: Tensor) -> None:
        self.gater((data, grad, out), self.numbers)

    def gate(self, data: Tensor, grad: Tensor) -> Tensor:
        out = torch.empty_like(grad)
        self.gater((data, grad, out), self.numbers)
        return out


@functools.lru_cache(maxsize=4096)
def group_plan(format: GroupFormat, numel: int, device: torch.device, seed_table: bool = False) -> GroupPlan:
    """Return the plan for tensors of `numel` values in that format; see `reference.group_plan`.

    The kernels take groups of a power of two that fill a row of words and a tile, and rows of any width. Other groups
    are left to the reference, and rows of 2^31 values or more.
    """
    group, few = format.group, max(format.groups(numel), format.row or numel // format.stride) < 1 << 31
    whole = not group & (group - 1) and 32 * 8 // format.bits <= group <= DECODED
    any_width = format.row or format.bits == 3
    if numel == 0 or numel % (format.stride * (format.row or 1)) or not (few if any_width else whole):
        return reference_plan(format, numel, device)
    return GpuPlan(format, numel, device, seed_table)
