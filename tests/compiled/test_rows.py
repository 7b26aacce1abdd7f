"""Groups stay within the rows that a norm reads in compiled graphs too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.codecs import GroupQuant
from encke.kernels import GroupFormat
from encke.policies import Fixed
from tests.capture.test_rows import WIDTHS, tokens
from tests.compiled.common import TWO, as_inductor_gets_it, compile

BACKENDS = ("aot_eager", "aot_eager_decomp_partition")
"""Norms as one operation, and taken apart as inductor takes them."""


class Normed(nn.Module):
    """A norm behind a product, which no compiler recomputes; it changes no value."""

    def __init__(self, norm: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(width))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm((x.flatten(0, -2) @ self.mix).view(x.shape))


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> list[GroupFormat]:
    """The formats that tensors are packed in."""
    asked: list[GroupFormat] = []
    plan = GroupQuant._plan

    def noted(self: GroupQuant, *arguments: Any) -> Any:
        made = plan(self, *arguments)
        asked.append(made.format)
        return made

    monkeypatch.setattr(GroupQuant, "_plan", noted)
    return asked


def input_gradient(model: nn.Module, data: Tensor, gradient: Tensor) -> Tensor:
    x = data.detach().requires_grad_()
    (model(x) * gradient).sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_constant_tokens_before_a_layer_norm(backend: str, width: int, formats: list[GroupFormat]) -> None:
    data, gradient = tokens(width), torch.randn(4, 9, width, generator=torch.Generator().manual_seed(1))
    model = Normed(nn.LayerNorm(width), width)
    plain = input_gradient(model, data, gradient)
    compiled = compile(model, backend=backend)
    encke.attach(compiled, TWO, min_bytes=1024)
    packed = input_gradient(compiled, data, gradient)
    assert width in {format.row for format in formats}
    assert torch.allclose(packed[:, :2], plain[:, :2], rtol=1e-5, atol=1e-4)
    assert 0 < (packed - plain)[:, 2:].square().mean() < 0.2 * plain[:, 2:].square().mean()


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_bits_are_those_of_eager_mode(backend: str) -> None:
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    model, three = Normed(nn.LayerNorm(96), 96), Fixed(GroupQuant(bits=3))
    handle = encke.attach(model, three, min_bytes=1024)
    expected = [input_gradient(model, data, gradient) for _ in range(2)]
    handle.detach()
    compiled = compile(model, backend=backend)
    encke.attach(compiled, three, min_bytes=1024)
    found = [input_gradient(compiled, data, gradient) for _ in range(2)]
    assert torch.allclose(found[1], expected[1], rtol=1e-3, atol=1e-4)


def channels_first(x: Tensor) -> Tensor:
    """Normalise over the channels of NCHW memory, as ConvNeXt does."""
    return F.layer_norm(x.permute(0, 2, 3, 1), (12,)).permute(0, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("norm", "row", "stride"),
    [
        (nn.BatchNorm2d(12), 49, 1),
        (nn.GroupNorm(6, 12), 98, 1),
        (nn.InstanceNorm2d(12), 49, 1),
        (nn.LayerNorm((7, 7)), 49, 1),
        (channels_first, 12, 49),
    ],
    ids=["batch", "group", "instance", "layer", "channels"],
)
def test_rows_are_those_of_eager_mode(
    norm: Callable[[Tensor], Tensor], row: int, stride: int, backend: str, formats: list[GroupFormat]
) -> None:
    generator = torch.Generator().manual_seed(4)
    data, gradient = (torch.randn(8, 12, 7, 7, generator=generator) for _ in range(2))
    model = Normed(norm, 7)
    handle = encke.attach(model, TWO, min_bytes=1024)
    expected = [input_gradient(model, data, gradient) for _ in range(2)]
    handle.detach()
    compiled = compile(model, backend=backend)
    encke.attach(compiled, TWO, min_bytes=1024)
    formats.clear()
    found = [input_gradient(compiled, data, gradient) for _ in range(2)]
    assert (row, stride) in {(format.row, format.stride) for format in formats}
    assert torch.allclose(found[1], expected[1], rtol=1e-3, atol=1e-4)


def test_rows_whose_width_changes_are_left_alone(formats: list[GroupFormat]) -> None:
    """A format is made once for each graph: of a symbolic width nothing can be told."""
    model = Normed(lambda x: F.layer_norm(x.mT, x.shape[-2:-1]), 96)
    compiled = compile(model, dynamic=True)
    encke.attach(compiled, TWO, min_bytes=1024)
    for count in (9, 7):
        found = input_gradient(compiled, tokens(96)[:, :count], torch.ones(4, 96, count))
        assert found.isfinite().all()
    assert {format.row for format in formats} == {0}


def test_the_number_of_rows_may_change(formats: list[GroupFormat]) -> None:
    compiled = compile(Normed(nn.LayerNorm(96), 96))
    encke.attach(compiled, TWO, min_bytes=1024)
    for batch in (4, 3, 2):
        data = tokens(96)[:batch]
        torch._dynamo.maybe_mark_dynamic(data, 0)
        assert input_gradient(compiled, data, torch.ones(batch, 9, 96)).isfinite().all()
    assert 96 in {format.row for format in formats}


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_norms_of_one_tensor_have_groups_within_the_finer_rows(backend: str, formats: list[GroupFormat]) -> None:
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    model = Normed(lambda x: F.layer_norm(x, (9, 96)) + F.layer_norm(x, (96,)), 96)
    compiled = compile(model, backend=backend)
    encke.attach(compiled, TWO, min_bytes=1024)
    plain, packed = input_gradient(model, data, gradient), input_gradient(compiled, data, gradient)
    assert {format.row for format in formats} == {96}
    assert torch.allclose(packed[:, :2], plain[:, :2], rtol=1e-3, atol=1e-2)


def test_a_tensor_that_two_norms_read_across_each_other_is_kept() -> None:
    """Statistics are kept, too: each is a row by itself."""
    data, gradient = tokens(96), torch.randn(4, 9, 96, generator=torch.Generator().manual_seed(1))
    across = Normed(lambda x: F.layer_norm(x.mT, (9,)).mT + F.layer_norm(x, (96,)), 96)
    model = nn.Sequential(across, nn.Linear(96, 96))
    compiled = compile(model, backend="aot_eager_decomp_partition")
    handle = encke.attach(compiled, TWO, min_bytes=1024)
    plain, packed = input_gradient(model, data, gradient), input_gradient(compiled, data, gradient)
    assert torch.allclose(packed, plain, rtol=1e-5, atol=1e-5 * float(plain.abs().max()))
    assert [row.layer for row in handle.report().sites if row.codec != "kept"] == ["1"]


@pytest.mark.parametrize("norm", [nn.LayerNorm(32), nn.GroupNorm(3, 9), nn.RMSNorm(32)], ids=str)
def test_statistics_of_norms_are_exact(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are read through steps of the norm that are computed again, which have the input's size."""
    packed: set[int] = set()
    plan = GroupQuant._plan

    def noted(self: GroupQuant, x: Tensor, *arguments: Any) -> Any:
        packed.add(x.numel())
        return plan(self, x, *arguments)

    monkeypatch.setattr(GroupQuant, "_plan", noted)
    model = nn.Sequential(nn.Linear(32, 32), norm, nn.Linear(32, 32))
    compiled = compile(model, backend=as_inductor_gets_it)
    encke.attach(compiled, TWO, min_bytes=16)
    data = torch.randn(4, 9, 32)
    for _ in range(2):
        compiled(data).square().mean().backward()
    assert packed == {data.numel()}
