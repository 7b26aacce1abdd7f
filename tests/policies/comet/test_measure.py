"""Measurement: errors of weight gradients from some of the rows, and weights used twice."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import encke
from encke.capture.readers import Readers
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.layout import flatten
from encke.policies import Comet
from encke.policies.comet.measure import ErrorProbe
from tests.policies.comet.trainings import (
    BATCHES,
    ROUNDINGS,
    net,
    sgd,
    weight_rows,
)


class LeftHanded(nn.Module):
    """The weight is the first factor, so that rows of the input are not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(96, 64) / 8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ torch.sin(x * self.scale)


class Tokens(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(64, 64, bias=False), nn.Parameter(torch.ones(()))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(torch.sin(x * self.scale))
        return x


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_part_of_a_large_input_tells_the_whole(rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encke.policies.comet.measure, "PROBE", 4096)
    for model, shape in ((Tokens(), (512, 64)), (LeftHanded(), (64, 512))):
        optimizer = sgd(model, 0.0)
        handle = encke.attach(model, Comet(every=2, rounding=rounding), optimizer)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        noise = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(1))
        for _ in range(6):
            model.zero_grad()
            (model(x) * (noise + 0.1)).mean().backward()
            optimizer.step()
        rows = [row for row in weight_rows(handle) if row["in_force_measured"] is not None]
        assert rows
        for row in rows:
            assert row["in_force_measured"] == pytest.approx(row["in_force_predicted"], rel=0.2), type(model)


@pytest.mark.parametrize("codec", [GroupQuant(bits=2), ErrorBounded(0.05, "rel")], ids=["rate", "bound"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_what_is_kept_of_an_error_is_small_and_tells_it(codec, memory) -> None:
    """And cuDNN does not try algorithms for it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 32, 16, 16, generator=generator).relu().contiguous(memory_format=memory)
    flat, layout = flatten(x)
    packed = codec.encode_flat(flat, layout, 3)
    probe = ErrorProbe(flat, layout, packed, 3, whole=True)
    assert probe.error.nbytes < 0.6 * x.numel()
    g = torch.randn(8, 24, 16, 16, generator=generator)
    settings = []

    def weight_gradient(g: Tensor, e: Tensor) -> Tensor:
        settings.append(torch.backends.cudnn.benchmark)
        return torch.einsum("nohw,nihw->oi", g, e)

    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        measured = probe.measure(g, weight_gradient)
        assert settings == [False] and torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before
    exact = weight_gradient(g, layout.restore(packed.decode_flat()) - x).square().mean()
    assert measured.item() == pytest.approx(exact.item(), rel=0.1)


def test_a_weight_used_twice_may_err_less_each_time() -> None:
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    for times in (1, 2):
        model = Tokens(times)
        optimizer = sgd(model, 0.0)
        handle = encke.attach(model, Comet(0.2, every=5), optimizer)
        for _ in range(5):
            model.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        rows = weight_rows(handle, 5)
        assert len(rows) == times
        for row in rows:
            assert row["tolerated"] == pytest.approx(0.2 * row["momentum"] / math.sqrt(times))


class Waits(TorchDispatchMode):
    """Counts operations for which the host would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("formula", ["exact", "paper"])
def test_nothing_waits_for_the_gpu_before_the_optimizer_has_stepped(
    formula: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture looks for values that are not finite: on a CPU always."""
    monkeypatch.setattr(Readers, "intact", lambda *arguments: True)
    model = net()
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(every=2, formula=formula), optimizer)
    for step in range(1, 5):
        x, y = BATCHES[step % 4]
        model.zero_grad()
        with Waits() as waits:
            nn.functional.cross_entropy(model(x), y).backward()
        assert waits.count == 0, step
        optimizer.step()
    assert {row["step"] for row in handle.history} == {1, 2, 4}
