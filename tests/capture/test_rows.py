"""Groups stay within the rows and channels that a norm reads: constant rows are restored exactly at any width."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.layout import finer, layout_of, rows_for
from encke.policies import Fixed

TWO = Fixed(GroupQuant(bits=2))
WIDTHS = (64, 96, 192, 320)


class Normed(nn.Module):
    """Model that applies any function to data."""

    def __init__(self, norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.shift)


def input_gradients(norm: Any, data: Tensor, gradient: Tensor, policy: Fixed = TWO) -> tuple[Tensor, Tensor]:
    """Return the gradient of a norm's input in the second step, plain and from the packed input."""
    model, found = Normed(norm), []
    for attached in (False, True):
        handle = encke.attach(model, policy, min_bytes=1024) if attached else None
        for _ in range(2):
            x = data.detach().requires_grad_()
            (model(x) * gradient).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
        if handle is not None:
            assert any(row.codec == type(policy.codec).__name__ for row in handle.report().sites)
            handle.detach()
    return found[0], found[1]


def written_out(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def tokens(width: int) -> Tensor:
    """Return tokens of which the first is zero and the second constant, like a newly initialised class token."""
    data = torch.randn(4, 9, width, generator=torch.Generator().manual_seed(width))
    data[:, 0], data[:, 1] = 0.0, -0.3
    return data


@pytest.mark.parametrize("width", WIDTHS)
def test_constant_tokens_before_a_layer_norm(width: int) -> None:
    data, gradient = tokens(width), torch.randn(4, 9, width, generator=torch.Generator().manual_seed(1))
    plain, packed = input_gradients(nn.LayerNorm(width), data, gradient)
    assert torch.allclose(packed[:, :2], plain[:, :2], rtol=1e-5, atol=1e-4)
    assert 0 < (packed - plain)[:, 2:].square().mean() < 0.2 * plain[:, 2:].square().mean()


@pytest.mark.parametrize("norm", [lambda x: F.rms_norm(x, (96,)), written_out], ids=["rms_norm", "written out"])
def test_zero_tokens_before_an_rms_norm(norm: Callable[[Tensor], Tensor]) -> None:
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    plain, packed = input_gradients(norm, data, gradient)
    assert torch.allclose(packed[:, 0], plain[:, 0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_errors_shrink_with_the_bits(bits: int) -> None:
    """The step of a group with negative values is its range over 2^bits - 1, and the error uniform within a step."""
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    plain, packed = input_gradients(nn.LayerNorm(96), data, gradient, Fixed(GroupQuant(bits=bits)))
    share = (packed - plain)[:, 2:].square().mean() / plain[:, 2:].square().mean()
    two, _ = input_gradients(nn.LayerNorm(96), data, gradient)
    assert 0 < share < 0.2 * (3 / (2**bits - 1)) ** 2 and torch.equal(two, plain)


SCALES = torch.logspace(-3, 3, 12)


@pytest.mark.parametrize(
    ("norm", "size", "memory_format"),
    [
        (nn.BatchNorm2d(12), (8, 12, 7, 7), torch.contiguous_format),
        (nn.BatchNorm2d(12), (8, 12, 7, 7), torch.channels_last),
        (nn.BatchNorm2d(12), (2, 12, 30, 30), torch.channels_last),
        (nn.BatchNorm1d(12), (300, 12), torch.contiguous_format),
        (nn.GroupNorm(12, 12), (8, 12, 7, 7), torch.contiguous_format),
        (nn.GroupNorm(12, 12), (8, 12, 7, 7), torch.channels_last),
        (nn.InstanceNorm2d(12), (8, 12, 7, 7), torch.contiguous_format),
    ],
    ids=["planes", "few pixels", "pixels", "no pixels", "groups", "groups channels_last", "instances"],
)
def test_the_error_of_a_channel_is_relative_to_its_own_scale(
    norm: nn.Module, size: tuple[int, ...], memory_format: torch.memory_format
) -> None:
    """A channel a million times smaller than another has the same relative error, and a constant one none."""
    generator = torch.Generator().manual_seed(3)
    scales = SCALES.view(1, -1, *[1] * (len(size) - 2))
    data = (torch.randn(size, generator=generator) * scales).to(memory_format=memory_format)
    data[:, 5] = -0.7
    gradient = torch.randn(size, generator=generator)
    plain, packed = input_gradients(norm, data, gradient)
    over = [0, *range(2, len(size))]
    error = (packed - plain).square().mean(over) / plain.square().mean(over)
    assert error[5] < 1e-8
    others = error[torch.arange(12) != 5]
    assert 0 < others.min() and others.max() < 0.2


def test_another_reader_of_the_same_memory_gets_the_rows_of_the_norm() -> None:
    """The norm reads second: the first pass packs the memory twice, the next one packs it once for both readers."""

    def both(x: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(x) + x, (96,)) + F.layer_norm(x, (96,))

    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    plain, packed = input_gradients(both, data, gradient)
    assert torch.allclose(packed[:, :2], plain[:, :2], rtol=1e-4, atol=1e-3)


def test_a_norm_over_other_dimensions_than_learnt_is_an_error() -> None:
    shapes = [(96,)]
    model = Normed(lambda x: F.layer_norm(x, shapes[0]))
    encke.attach(model, TWO, min_bytes=1024)
    x = tokens(96).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    shapes[0] = (9, 96)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="NativeLayerNorm"):
        model(x).sum().backward()
    model(x).sum().backward()


def test_codecs_without_groups_ignore_rows() -> None:
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    plain, packed = input_gradients(nn.LayerNorm(96), data, gradient, Fixed(ErrorBounded(0.05, "rel")))
    assert (packed - plain)[:, 2:].square().mean() < 0.2 * plain[:, 2:].square().mean()


@pytest.mark.parametrize(
    ("shape", "order", "norm", "rows"),
    [
        ((2, 7, 96), (0, 1, 2), ("last", 1), (96, 1)),
        ((2, 7, 96), (0, 1, 2), ("last", 2), (672, 1)),
        ((2, 96, 7, 5), (0, 2, 3, 1), ("last", 1), (96, 35)),  # ConvNeXt: a layer norm over the channels of NCHW memory
        ((2, 96, 7, 5), (0, 1, 2, 3), ("channels", 0), (35, 1)),
        ((2, 7, 5, 96), (0, 3, 1, 2), ("channels", 0), (70, 96)),
        ((64, 12, 7, 5), (0, 1, 2, 3), ("channels", 0), (35, 1)),  # planes, though the batch is larger
        ((64, 12, 2, 2), (0, 1, 2, 3), ("channels", 0), (64, 48)),
        ((300, 12), (0, 1), ("channels", 0), (300, 12)),
        ((1, 96, 7, 5), (0, 1, 2, 3), ("channels", 0), (35, 1)),
        ((2, 8, 3, 3), (0, 1, 2, 3), ("groups", 2), (36, 1)),
        ((2, 3, 3, 8), (0, 3, 1, 2), ("groups", 2), (9, 8)),
        ((2, 3, 3, 32), (0, 3, 1, 2), ("groups", 2), (16, 1)),
        ((6, 8), (0, 1), ("groups", 2), (4, 1)),
    ],
    ids=str,
)
def test_rows_of_a_layout(shape: Any, order: Any, norm: Any, rows: tuple[int, int]) -> None:
    x = torch.empty(shape).permute(order)
    layout, length = layout_of(x.shape, x.stride())
    assert rows_for(layout, length, norm) == rows


def test_rows_of_copies_and_repeated_memory() -> None:
    x = torch.empty(4, 10, 96)
    copied, length = layout_of(x[:, ::2].shape, x[:, ::2].stride())
    assert copied.copied and rows_for(copied, length, ("last", 1)) == (96, 1)
    x = x[:1].expand(4, 10, 96)
    assert rows_for(*layout_of(x.shape, x.stride()), ("last", 1)) == (96, 1)  # type: ignore[arg-type]
    x = torch.empty(99).as_strided((4, 96), (1, 1))
    assert rows_for(*layout_of(x.shape, x.stride()), ("last", 1)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ((96, 1), (96 * 9, 1), (96, 1)),
        ((64, 1), (96, 1), None),
        ((300, 12), (12, 1), None),
        ((8, 12), (8 * 12, 1), (8, 12)),
        ((4, 6), (8, 6), (4, 6)),
        ((4, 6), (8, 4), None),
        ((2, 12), (8, 6), (2, 12)),
    ],
    ids=str,
)
def test_finer_rows_lie_within_the_others(
    first: tuple[int, int], second: tuple[int, int], expected: tuple[int, int] | None
) -> None:
    length = math.lcm(first[0] * first[1], second[0] * second[1])

    def name_of_row(rows: tuple[int, int]) -> list[tuple[int, int]]:
        return [(i // (rows[0] * rows[1]), i % rows[1]) for i in range(length)]

    inner = {rows: len(set(zip(name_of_row(first), name_of_row(second), strict=True))) for rows in (first, second)}
    counts = {rows: len(set(name_of_row(rows))) for rows in (first, second)}
    assert finer(first, second) == finer(second, first) == expected
    assert [rows for rows in (first, second) if inner[rows] == counts[rows]] == ([expected] if expected else [])


@pytest.mark.parametrize("wide_first", [False, True])
def test_two_norms_of_one_tensor_have_groups_within_the_finer_rows(wide_first: bool) -> None:
    wide, narrow = (lambda x: F.layer_norm(x, (9, 96))), (lambda x: F.layer_norm(x, (96,)))
    norms = [wide, narrow] if wide_first else [narrow, wide]
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    plain, packed = input_gradients(lambda x: sum(norm(x) for norm in norms), data, gradient)
    # A constant token has a gradient of 1 / sqrt(eps) times its size there: any error in the token would show.
    assert torch.allclose(packed[:, :2], plain[:, :2], rtol=1e-3, atol=1e-2)
    assert not torch.equal(packed[:, 2:], plain[:, 2:])


def test_a_tensor_that_two_norms_read_across_each_other_is_exact() -> None:
    model = Normed(lambda x: nn.functional.batch_norm(x, None, None, training=True) + F.layer_norm(x, (96,)))
    x = torch.randn(256, 96, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(x).square().sum().backward()
    plain, x.grad = x.grad, None
    with encke.attach(model, TWO, min_bytes=1024) as handle:
        for _ in range(3):
            x.grad = None
            model(x).square().sum().backward()
            assert plain is not None and x.grad is not None and torch.equal(x.grad, plain)
            assert {row.codec for row in handle.report().sites if "Norm" in row.operation and row.slot == "input"} == {
                "ErrorBounded"
            }
