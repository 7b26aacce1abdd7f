"""Figures of a sample from one launch, against those of PyTorch's operations."""

from __future__ import annotations

import math

import pytest
import torch

from encke.codecs import GroupQuant
from encke.codecs.layout import flatten, rows_for, with_rows
from encke.kernels.gpu.plans import group_plan
from encke.policies.comet import rates
from encke.policies.comet.rates import SampleFigures, Scales, units_of
from tests.kernels.gpu.common import DEVICE, in_pairs


def values(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return values with zeros, constant groups, a mean far from zero and channels of different spread."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 80, 16, 8, generator=generator) * torch.logspace(-2, 2, 80).view(-1, 1, 1)
    x[:, ::3] = x[:, ::3].relu()
    x[:, 5] = 0.25
    x[:, 7] += 3000.0
    if kind == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif kind == "tokens":
        x = x.permute(0, 2, 3, 1).reshape(-1, 80).contiguous()
    elif kind == "short":
        x = x.flatten()[:100]
    return x.to(DEVICE, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sample", "kind", "dtype"),
    [
        *in_pairs([rates.SAMPLE, 4096], ["planes", "channels last", "tokens", "rows", "short"]),
        (4096, "planes", torch.float64),
    ],
)
def test_figures_are_those_of_torch(
    kind: str, dtype: torch.dtype, sample: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "SAMPLE", sample)
    units_of.cache_clear()
    flat, layout = flatten(values("tokens" if kind == "rows" else kind, dtype))
    if kind == "rows":
        layout = with_rows(layout, rows_for(layout, flat.numel(), ("last", 1)))
    packed = GroupQuant(3).encode_flat(flat, layout, 1)
    plan = packed.plan
    assert plan is not None
    ours = group_plan(plan.format, plan.numel, flat.device)
    assert (ours.sample_sums is None) == (dtype == torch.float64)
    if ours.sample_sums is None:
        return
    sums = ours.sample_sums(flat, packed.buffers[0], units_of(plan.format, plan.numel))
    scales = Scales.of(flat, packed)
    found = SampleFigures.of(sums.cpu().double(), plan)
    expected = [*map(float, scales.powers())]
    expected.insert(1, float(scales.values.double().std(correction=0)))
    assert [*found] == pytest.approx(expected, rel=1e-4)
    assert (found.signed > 0) == (kind != "short") and (found.others > 0) == (
        kind in ("planes", "channels last", "short")
    )
    units_of.cache_clear()


def test_values_that_are_not_finite_show_in_the_spread() -> None:
    x = values("planes", torch.float32)
    x[1, 2, 3, 4] = math.inf
    packed = GroupQuant(3).encode(x)
    plan = packed.plan
    assert plan is not None
    sample_sums = group_plan(plan.format, plan.numel, x.device).sample_sums
    assert sample_sums is not None
    sums = sample_sums(x.flatten(), packed.buffers[0], units_of(plan.format, plan.numel))
    assert math.isnan(SampleFigures.of(sums.cpu().double(), plan).std)
