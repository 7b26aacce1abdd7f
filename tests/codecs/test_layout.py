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
    rows_inside,
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


@pytest.mark.parametrize("size", [(2, 3, 5), (2, 1, 5), (1, 1, 1)])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rows_are_found_in_memory_whose_outer_dimensions_are_rotated(size, order):
    memory = torch.arange(math.prod(size) * 7).view(*(size[d] for d in order), 7)
    x = memory.permute(*(order.index(d) for d in range(3)), 3)
    inner = rows_inside(layout_of(x.shape, x.stride())[0], 7)
    used = [d for d in order if size[d] > 1]
    first = used.index(min(used)) if used else 0
    if used[first:] + used[:first] != sorted(used):
        assert inner is None
        return
    rows = math.prod(size)
    logical, found = x.reshape(rows, 7), torch.empty(rows, 7, dtype=torch.long)
    for m, row in enumerate(memory.view(rows, 7)):
        found[(m % inner) * (rows // inner) + m // inner] = row
    assert torch.equal(found, logical) and (inner == rows) == x.is_contiguous()


def test_rows_with_gaps_or_of_other_widths_are_not_found():
    x = torch.zeros(4, 6, 8)
    for view in (x[:, ::2], x[..., :4], x[:1].expand(3, 6, 8), x.transpose(1, 2), x[:0]):
        assert rows_inside(layout_of(view.shape, view.stride())[0], view.shape[-1]) is None
    layout = layout_of(x.shape, x.stride())[0]
    assert [rows_inside(layout, width) for width in (1, 8, 48, 192, 4, 16, 384)] == [192, 24, 4, 1, None, None, None]
