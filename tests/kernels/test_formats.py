"""Formats travel through operators as numbers, and know their sizes."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from encke.kernels.formats import (
    FLOATS,
    BoundedFormat,
    DualFormat,
    Format,
    GroupFormat,
    LogFormat,
    channel_stride,
    mix,
    run_length,
)

FORMATS: list[Format] = [
    GroupFormat(2, 128, torch.bfloat16),
    GroupFormat(4, 64, torch.float64, 24, True),
    BoundedFormat(0.1, math.inf, 2, torch.float16),
    BoundedFormat(math.inf, 1e-3, 0, torch.float32),
    DualFormat(7, 9, 8, 2, True, torch.bfloat16),
    LogFormat(0.0925, 0.0615, 0.001, torch.bfloat16),
]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_numbers_give_the_format_back(format: Format) -> None:
    numbers = format.numbers()
    kind = float if isinstance(format, BoundedFormat | LogFormat) else int
    assert all(type(number) is kind for number in numbers)
    back = type(format).from_numbers(numbers)
    assert back == format and hash(back) == hash(format)
    # Kernels are specialised on the types of constants: True is not 1.
    for f in fields(format):  # type: ignore[arg-type]
        assert type(getattr(back, f.name)) is type(getattr(format, f.name))
    assert type(format).from_numbers(tuple(numbers)) is back


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    assert GroupFormat.from_numbers(GroupFormat(2, 128, dtype).numbers()).dtype is dtype


def test_formats_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        FORMATS[0].bits = 4  # type: ignore[attr-defined]


def test_sizes_of_groups() -> None:
    assert GroupFormat(2, 128, torch.float32).places(1000) == (8 * 32, 8 * 32 + 16, 8 * 32 + 32)
    assert GroupFormat(2, 128, torch.float64).places(1000) == (8 * 32, 8 * 32 + 64, 8 * 32 + 128)
    assert GroupFormat(4, 128, torch.float32, stride=10).groups(1000) == 10
    assert GroupFormat(4, 128, torch.float32).nbytes(0) == 0
    assert GroupFormat(3, 128, torch.float32).nbytes(1280) == 10 * (32 + 16 + 4)


@pytest.mark.parametrize(
    ("bits", "row", "length", "count"),
    [(2, 96, 24, 1), (2, 130, 17, 2), (2, 49, 13, 1), (4, 1, 1, 1), (8, 320, 107, 3), (3, 96, 36, 1), (3, 49, 20, 1)],
)
def test_sizes_of_rows(bits: int, row: int, length: int, count: int) -> None:
    format = GroupFormat(bits, 128, torch.float32, 5, row=row)
    assert (format.length, format.groups_in_row(10 * row)) == (length, count)
    # The scales begin at a multiple of eight bytes.
    codes = -(-10 * count * length // 8) * 8
    assert format.groups(10 * row) == 10 * count and format.nbytes(10 * row) == codes + 40 * count
    assert format.extent * count >= row > format.extent * (count - 1)


def test_whole_groups_have_no_rows() -> None:
    def row_of(numel: int, row: int, stride: int) -> int:
        return GroupFormat.in_rows(2, 128, torch.float32, False, numel, row, stride).row

    assert (
        row_of(256 * 10, 256, 1)
        == row_of(256 * 40, 256, 4)
        == row_of(100, 100, 1)
        == row_of(127 * 128 * 3, 127 * 128, 3)
        == 0
    )
    assert row_of(96 * 10, 96, 1) == 96 and row_of(130 * 3, 130, 3) == 130


def test_groups_follow_channels_in_channels_last_memory() -> None:
    x = torch.empty(4, 24, 32, 32)
    last = x.to(memory_format=torch.channels_last)
    assert channel_stride(tuple(last.shape), last.stride(), last.numel(), 128) == 24
    assert channel_stride(tuple(x.shape), x.stride(), x.numel(), 128) == 1
    few = torch.empty(1, 24, 5, 5).to(memory_format=torch.channels_last)  # groups would be mostly empty
    assert channel_stride(tuple(few.shape), few.stride(), few.numel(), 128) == 1


def test_a_run_has_no_gaps() -> None:
    x = torch.empty(4, 6, 8)
    assert run_length(x.shape, x.stride()) == run_length(x.mT.shape, x.mT.stride()) == x.numel()
    assert run_length((4, 6, 8), x[:1].expand(4, 6, 8).stride()) == 48
    assert run_length(x[:, ::2].shape, x[:, ::2].stride()) is None


def test_the_hash_depends_on_every_word() -> None:
    seeds = {mix(a, b, c) for a in (0, 1, -1) for b in (0, 1, 2**62) for c in (None, 0, 1)}
    assert len(seeds) == 27 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert mix(1, 2, 3) == mix(1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scales_are_aligned_whatever_the_width(dtype):
    # GPUs refuse to read a number at an address that is no multiple of its size.
    for row in range(1, 200):
        at_lo, at_step, end = GroupFormat(2, 128, dtype, row=row).places(7 * row)
        each = GroupFormat(2, 128, dtype).scale_dtype.itemsize
        assert at_lo % 8 == 0 and at_step % each == 0 and end == at_lo + 2 * (at_step - at_lo)
