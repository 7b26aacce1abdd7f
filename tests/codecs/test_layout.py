"""Layouts: what size and strides tell about memory, and tensors that come back from their runs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from encke.codecs.layout import (
    Layout,
    fills_in_order,
    fills_memory,
    flatten,
    layout_of,
    overlaps,
    run_length,
)

VIEWS = {
    "scalar": lambda x: x.view(-1)[0],
    "empty": lambda x: x[:0],
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "gaps": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "broadcast inside": lambda x: x[:, :, :1].expand(-1, -1, 9, -1),
    "overlapping": lambda x: x.reshape(-1).unfold(0, 5, 2),
    "offset": lambda x: x.reshape(-1)[7:],
}


def places(size: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Where each element lies."""
    indices = itertools.product(*map(range, size))
    return [sum(i * st for i, st in zip(index, stride, strict=True)) for index in indices]


@pytest.mark.parametrize("size", [(1,), (4,), (2, 3), (1, 4), (3, 1), (2, 3, 2), (2, 2, 2)], ids=str)
def test_strides_against_the_places_of_all_elements(size: tuple[int, ...]) -> None:
    for stride in itertools.product([0, 1, 2, 3, 4, 6], repeat=len(size)):
        found = places(size, stride)
        distinct = len(set(found)) == len(found)
        assert fills_memory(size, stride) == (sorted(found) == list(range(math.prod(size)))), stride
        # Conservative: it may say yes of a tensor whose dimensions interleave.
        assert distinct or overlaps(size, stride), stride
        assert not (overlaps(size, stride) and fills_memory(size, stride)), stride
        length = run_length(size, stride)
        if length is not None:
            assert set(found) == set(range(length)), stride
        assert fills_in_order(size, stride, range(len(size))) == (found == list(range(math.prod(size)))), stride


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_tensor_comes_back_from_its_run(view) -> None:
    x = view(torch.randn(4, 6, 9, 10))
    flat, layout = flatten(x)
    assert flat.is_contiguous() and flat.dim() == 1 and flat.numel() == layout_of(x.shape, x.stride())[1]
    y = layout.restore(flat.clone())
    assert torch.equal(x, y) and x.stride() == y.stride()
    assert (flat.data_ptr() == x.data_ptr()) != layout.copied or x.numel() == 0


@pytest.mark.parametrize(
    ("view", "dense", "channels_last"),
    [
        ("contiguous", True, False),
        ("channels_last", True, True),
        ("permuted", True, None),
        ("gaps", False, None),
        ("expanded", False, None),
    ],
)
def test_order_of_dense_memory(view: str, dense: bool, channels_last: bool | None) -> None:
    layout = flatten(VIEWS[view](torch.randn(4, 6, 9, 10)))[1]
    assert layout.dense is dense and layout.channels_last is channels_last


def test_layouts_are_made_once() -> None:
    assert layout_of((2, 3), (3, 1))[0] is layout_of((2, 3), (3, 1))[0] and Layout((2,), (1,)) == Layout((2,), (1,))
