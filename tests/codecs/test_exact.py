"""Exact codecs: integers at the narrowest width; max-pool indices, in pieces that bound the memory on the way."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, Lossless, exact
from encke.codecs.base import EncoderState
from encke.codecs.exact import Window
from encke.codecs.layout import flatten
from encke.policies import Fixed

WINDOW = Window((3, 3), (2, 2), (1, 1), (1, 1), plane=(24, 20))


def indices(batch: int, channels: int = 4, channels_last: bool = False) -> Tensor:
    x = torch.randn(batch, channels, 24, 20, generator=torch.Generator().manual_seed(batch))
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    return F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 2, 7, 8])
def test_pieces_change_nothing(batch, channels_last, monkeypatch) -> None:
    index = indices(batch, channels_last=channels_last)
    whole = WINDOW.encode(index)
    for samples in (0, 1, 3):
        monkeypatch.setattr(exact, "PIECE", samples * 4 * 12 * 10 + 5)
        packed = WINDOW.encode(index)
        decoded = packed.decode()
        assert torch.equal(packed.buffers[0], whole.buffers[0])
        assert torch.equal(decoded, index) and decoded.stride() == index.stride()


def test_a_piece_is_no_larger_than_asked_for(monkeypatch) -> None:
    index = indices(7)
    assert len(exact.pieces(index)) == 1
    monkeypatch.setattr(exact, "PIECE", 3 * 4 * 12 * 10)
    assert [len(piece) for piece in exact.pieces(index)] == [3, 3, 1]


@pytest.mark.parametrize("view", [lambda i: i[:, ::2], lambda i: i.transpose(0, 1), lambda i: i[0]])
def test_indices_in_other_memory(view, monkeypatch) -> None:
    monkeypatch.setattr(exact, "PIECE", 300)
    index = view(indices(6, 6))
    decoded = WINDOW.encode(index).decode()
    assert torch.equal(decoded, index) and decoded.stride() == index.stride()


def peak(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at once while `run` ran."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_on_the_way_is_bounded(channels_last, monkeypatch) -> None:
    index = indices(128, 16, channels_last)
    packed = WINDOW.encode(index)
    assert peak(packed.decode) > 2 * 8 * index.numel(), "in one piece"
    monkeypatch.setattr(exact, "PIECE", index.numel() // 16)
    # The codes, a byte each and packed; two tensors of a piece, 8 bytes a value, and one of codes; tables.
    spare = index.numel() // 16 * 17 + 20_000
    assert peak(lambda: WINDOW.encode(index)) <= index.numel() + packed.nbytes + spare
    assert peak(packed.decode) <= (8 + 1) * index.numel() + spare


@pytest.mark.parametrize(
    ("make", "bits_each"),
    [
        (lambda g: torch.rand(3000, generator=g) < 0.5, 1),
        (lambda g: torch.randint(0, 2, (3000,), generator=g), 1),
        (lambda g: torch.randint(7, 11, (3000,), generator=g), 2),
        (lambda g: torch.randint(-8, 8, (3000,), generator=g), 4),
        (lambda g: torch.randint(1000, 1250, (3000,), generator=g), 8),
        (lambda g: torch.randint(-30000, 30000, (3000,), generator=g), 16),
        (lambda g: torch.randint(0, 2**31 - 1, (3000,), generator=g), 32),
        (lambda g: torch.randint(-(2**62), 2**62, (3000,), generator=g), 64),
        (lambda g: torch.randint(0, 100, (3000,), generator=g, dtype=torch.int32), 8),
        (lambda g: torch.randint(0, 255, (3000,), generator=g, dtype=torch.uint8), 8),
        (lambda g: torch.randint(-100, 100, (3000,), generator=g, dtype=torch.int8), 8),
    ],
)
def test_lossless_integers_take_the_narrowest_width(make, bits_each: int) -> None:
    x = make(torch.Generator().manual_seed(1)).view(30, 100)
    for view in (x, x.t(), x[:, ::3], x[0]):
        packed = Lossless().encode(view)
        y = packed.decode()
        assert torch.equal(y, view) and y.stride() == view.stride() and y.dtype == view.dtype
        assert packed.nbytes <= math.ceil(view.numel() * bits_each / 8) + 1


def test_lossless_float_that_is_zero_or_one_constant_takes_a_bit() -> None:
    x = torch.nn.functional.dropout(torch.ones(8000), 0.3)
    packed = Lossless().encode(x)
    assert torch.equal(packed.decode(), x) and packed.nbytes <= 1004
    x[5] = -0.0
    assert np.signbit(Lossless().encode(x).decode()[5].item())


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 2, False), (5, 3, 2, 1, True), ((1, 16), 4, 0, 1, False)],
)
def test_max_pool_indices_come_back_from_their_windows(kernel, stride, padding, dilation, ceil: bool, memory) -> None:
    x = torch.randn(3, 4, 13, 18).contiguous(memory_format=memory)
    _, index = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)
    pairs = [(v, v) if isinstance(v, int) else v for v in (kernel, stride, padding, dilation)]
    packed = Window(*pairs, plane=(13, 18)).encode(index)
    decoded = packed.decode()
    assert torch.equal(decoded, index) and decoded.stride() == index.stride() and decoded.dtype == index.dtype
    assert packed.nbytes <= index.numel()


def test_max_pool_indices_in_three_dimensions_and_in_planes_smaller_than_the_window() -> None:
    _, index = F.max_pool3d(torch.randn(2, 3, 6, 7, 8), 3, 2, 1, return_indices=True)
    packed = Window((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), plane=(6, 7, 8)).encode(index)
    assert torch.equal(packed.decode(), index) and packed.nbytes == index.numel()
    _, index = F.max_pool2d(torch.randn(2, 3, 2, 2), 3, 1, 1, return_indices=True)
    assert torch.equal(Window((3, 3), (1, 1), (1, 1), (1, 1), plane=(2, 2)).encode(index).decode(), index)


def test_windows_too_large_for_a_byte_fall_back_to_the_range() -> None:
    x, pool = torch.randn(4, 8, 40, 40, requires_grad=True), nn.Sequential(nn.Conv2d(8, 8, 1), nn.MaxPool2d(20, 1))
    expected = torch.autograd.grad(pool(x).square().sum(), x)[0]
    with encke.attach(pool, Fixed(ErrorBounded(0))) as handle:
        for _ in range(2):
            assert torch.equal(torch.autograd.grad(pool(x).square().sum(), x)[0], expected)
    (row,) = [row for row in handle.report().sites if row.slot == "result1"]
    assert row.codec == "Lossless" and row.ratio > 3.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_zeros_and_infinities_come_back(dtype: torch.dtype) -> None:
    x = torch.zeros(8192, dtype=dtype)
    x[::3] = math.inf
    packed = Lossless().encode(x)
    assert torch.equal(packed.decode(), x) and packed.nbytes < x.nbytes / 8


def test_integers_that_do_not_shrink_are_noted() -> None:
    state = EncoderState()
    x = torch.randint(256, (8192,), dtype=torch.uint8)
    x[:2] = torch.tensor([0, 255], dtype=torch.uint8)
    flat, layout = flatten(x)
    assert torch.equal(Lossless().encode_flat(flat, layout, 0, state).decode(), x) and state.share >= 1
