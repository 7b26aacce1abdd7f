"""Max-pool indices in pieces: the same bytes whatever the size of a piece, and little memory on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from encke.codecs import exact
from encke.codecs.exact import Window

WINDOW = Window((3, 3), (2, 2), (1, 1), (1, 1), plane=(24, 20))


def indices(batch: int, channels: int = 4, last: bool = False) -> Tensor:
    x = torch.randn(batch, channels, 24, 20, generator=torch.Generator().manual_seed(batch))
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    return F.max_pool2d(x, 3, 2, 1, return_indices=True)[1]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 2, 7, 8])
def test_pieces_change_nothing(batch, last, monkeypatch) -> None:
    index = indices(batch, last=last)
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


@pytest.mark.parametrize("last", [False, True])
def test_memory_on_the_way_is_bounded(last, monkeypatch) -> None:
    index = indices(128, 16, last)
    packed = WINDOW.encode(index)
    assert peak(packed.decode) > 2 * 8 * index.numel(), "in one piece"
    monkeypatch.setattr(exact, "PIECE", index.numel() // 16)
    # The codes, a byte each and packed; two tensors of a piece, 8 bytes a value, and one of codes; tables.
    spare = index.numel() // 16 * 17 + 20_000
    assert peak(lambda: WINDOW.encode(index)) <= index.numel() + packed.nbytes + spare
    assert peak(packed.decode) <= (8 + 1) * index.numel() + spare
