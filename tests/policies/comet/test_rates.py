"""Errors of the fixed rates, computed from the scales of packed data, against measured errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.capture.expressions import Recomputed
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.codecs.layout import flatten, rows_for, with_rows
from encke.policies import Comet
from encke.policies.comet import rates, stats
from encke.policies.comet.rates import Scales, power_at, units_of
from encke.policies.comet.stats import TRIED, TensorFigures, TensorStats, round_trip
from tests.policies.comet.trainings import BATCHES, net, sgd

RATES = (2, 3, 4, 8)
LAST = torch.channels_last


def tensor(kind: str) -> Tensor:
    torch.manual_seed(0)
    x = torch.randn(8, 32, 14, 14)
    if kind.startswith("sparse"):
        # Channels of different spread and sparsity: the size of a step and the number of zeros are correlated.
        x = (x * torch.logspace(-1, 1, 32).view(-1, 1, 1) - torch.linspace(-1, 2, 32).view(-1, 1, 1)).relu()
    if kind.endswith("channels last"):
        x = x.contiguous(memory_format=LAST)
    if kind == "tokens":
        x = torch.randn(512, 96) * torch.rand(512, 1)
        x[::7] = 0.3  # constant groups have no error
    return x[:1, :3, :7, :7].clone() if kind == "less than a group" else x


KINDS = ["plain", "sparse", "channels last", "sparse channels last", "tokens", "less than a group"]
NORMS = {"plain": ("channels", 0), "channels last": ("channels", 0), "tokens": ("last", 1)}


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (False, torch.float32),
        (True, torch.float32),
        *(pytest.param(False, dtype, marks=pytest.mark.slow) for dtype in (torch.bfloat16, torch.float64)),
        # Kernels for rows of other dtypes take a second each to compile.
        *(pytest.param(True, dtype, marks=pytest.mark.soak) for dtype in (torch.bfloat16, torch.float64)),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_scales_tell_the_error_of_every_rate(kind: str, rows: bool, dtype: torch.dtype) -> None:
    flat, layout = flatten(tensor(kind).to(dtype))
    if rows:
        layout = with_rows(layout, rows_for(layout, flat.numel(), NORMS[kind])) if kind in NORMS else layout
    few = flat.numel() < 1000
    keys = range(20 if few else 2)
    measured = {
        rate: sum(
            float((round_trip(GroupQuant(rate), flat, layout, key).double() - flat.double()).square().mean())
            for key in keys
        )
        / len(keys)
        for rate in RATES
    }
    for bits in (2, 4, 8):
        scales = Scales.of(flat, GroupQuant(bits).encode_flat(flat, layout, 1))
        share, *squares = map(float, scales.powers())
        assert share == pytest.approx(float((flat != 0).double().mean()), abs=0.01 if not few else 0.05)
        for rate in RATES:
            # At 8 bits the rounding of decoded values to 16 bits adds a tenth.
            off = 0.15 if few or (rate == 8 and dtype == torch.bfloat16) else 0.04
            assert power_at(bits, rate, *squares) == pytest.approx(measured[rate], rel=off), (bits, rate)


@pytest.mark.parametrize("wrong", ["zeros have an error", "one kind of group"])
def test_a_wrong_law_shows(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, layout = flatten(tensor("sparse"))
    flat = torch.where(exact == 0, 1e-30, exact) if wrong == "zeros have an error" else exact
    scales = Scales.of(flat, GroupQuant(4).encode_flat(flat, layout, 1))
    _, *squares = map(float, scales.powers())
    measured = float((round_trip(GroupQuant(2), exact, layout, 2) - exact).square().mean())
    if wrong == "one kind of group":
        monkeypatch.setattr(rates, "steps_of_range", lambda bits, signed: 2**bits - 1)
        monkeypatch.setattr(rates, "power_factors", rates.power_factors.__wrapped__)
    assert power_at(4, 2, *squares) != pytest.approx(measured, rel=0.2)


def test_constant_groups_have_no_error() -> None:
    """Their step holds bits of the constant after a sign bit."""
    x = torch.full((64, 128), 0.3)
    scales = Scales.of(x.flatten(), GroupQuant(4).encode(x))
    assert [float(t) for t in scales.powers()] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("stride", [1, 64])
def test_what_is_measured_is_spread_over_places_and_channels(stride: int) -> None:
    """98 groups of 128 values are one plane, or one image, of 112 x 112."""
    plan = GroupQuant(2).encode(torch.zeros(64, 64, 2, 2)).plan
    assert plan is not None
    format = type(plan.format)(2, 128, torch.float32, stride)
    (size, strides), _ = units_of(format, 64 * 64 * 112 * 112)
    places = {strides[0] * i // (128 * stride) % 98 for i in range(size[0])}
    assert len(places) > min(90, size[0] - 1)
    assert rates.SAMPLE <= math.prod(size) < 1.1 * rates.SAMPLE


@pytest.mark.parametrize("codec", [GroupQuant(4, signs=True), GroupQuant(2, group=256), ErrorBounded(0.1)], ids=repr)
def test_other_codes_are_tried_on_a_sample(codec: Codec) -> None:
    flat, layout = flatten(tensor("plain"))
    trials = [GroupQuant(bits) for bits in RATES]
    found = TensorStats(flat, layout, codec.encode_flat(flat, layout, 1), trials, 1)
    assert not found.bits
    figures = figures_of(found)
    for each, (power, _) in zip((*trials, codec), (*figures.errors, figures.in_force), strict=True):
        error = round_trip(each, flat, layout, 2) - flat
        assert power == pytest.approx(float(error.square().mean()), rel=0.05)


def figures_of(found: TensorStats) -> TensorFigures:
    return found.figures([math.nan if t is None else t.item() if t.dim() == 0 else t for t in found.tensors])


@pytest.mark.parametrize("function", ["Gelu", "Silu", "Tanh"])
@pytest.mark.parametrize("memory", [torch.contiguous_format, LAST])
def test_distortion_of_a_function_is_the_tried_one(
    function: str, memory: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = (2 * torch.randn(8, 64, 16, 16) - 1).contiguous(memory_format=memory)
    x[:, :8] = x[:, :8].relu()
    flat, layout = flatten(x.tanh() if function == "Tanh" else x)
    trials = [GroupQuant(bits) for bits in RATES]
    packed = GroupQuant(4).encode_flat(flat, layout, 1)
    law = figures_of(TensorStats(flat, layout, packed, trials, 1, function))
    monkeypatch.setattr(stats, "follow_from_scales", lambda *arguments: False)
    tried = figures_of(TensorStats(flat, layout, packed, trials, 1, function))
    assert law.distortion == pytest.approx(tried.distortion, rel=0.05)


@pytest.mark.parametrize("bits", RATES)
def test_what_is_computed_again_is_measured_on_codes_of_a_sample(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    flat, layout = flatten((torch.randn(16, 64, 40, 40) + 1).contiguous(memory_format=LAST))
    assert flat.numel() > TRIED
    codec, trials = GroupQuant(bits), [GroupQuant(each) for each in RATES]
    again = Recomputed(codec, layout, flat.dtype, flat.numel(), None)  # type: ignore[arg-type]
    found = figures_of(TensorStats(flat, layout, again, trials, 1, "Silu"))
    monkeypatch.setattr(stats, "follow_from_scales", lambda *arguments: False)
    tried = figures_of(TensorStats(flat, layout, again, trials, 1, "Silu"))
    assert found.errors == [pytest.approx(pair, rel=0.02, abs=1e-3) for pair in tried.errors]
    assert found.in_force == found.errors[RATES.index(bits)] and found.codec is codec
    assert found.distortion == pytest.approx(tried.distortion, rel=0.05)
    assert (found.share, found.std) == pytest.approx((tried.share, tried.std), rel=0.01)


class Block(nn.Module):
    """A layer of a small transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mixed(self.first(x)).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


def decisions(kind: str, sigma: float) -> dict[str, int]:
    """Train a small model with constant weights, and return the final bits of each place."""
    torch.manual_seed(0)
    if kind == "cnn":
        model, data = net(), BATCHES[0]
    else:
        model = nn.Sequential(nn.Linear(16, 64), Block(), Block(), nn.Flatten(), nn.Linear(64 * 32, 10))
        data = torch.randn(16, 32, 16), torch.randint(10, (16,))
    optimizer = sgd(model, 0.0)
    handle = encke.attach(model, Comet(sigma, every=2), optimizer)
    for _ in range(4):
        model.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    found = {row["place"]: row["bits"] for row in handle.history}
    handle.detach()
    return found


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_decisions_are_those_of_trials(kind: str, sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    by_scales = decisions(kind, sigma)
    monkeypatch.setattr(stats, "follow_from_scales", lambda *arguments: False)
    by_trials = decisions(kind, sigma)
    assert by_scales.keys() == by_trials.keys() and len(set(by_trials.values())) > (sigma < 0.4)
    different = [place for place, bits in by_trials.items() if by_scales[place] != bits]
    assert len(different) <= len(by_trials) // 10, different


@pytest.mark.parametrize("bits", RATES)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("kind", ["plain", "sparse channels last", "channels last", "tokens"])
def test_first_values_decode_without_the_others(kind: str, rows: bool, bits: int) -> None:
    flat, layout = flatten(tensor(kind))
    if rows and kind in NORMS:
        layout = with_rows(layout, rows_for(layout, flat.numel(), NORMS[kind]))
    packed = GroupQuant(bits).encode_flat(flat, layout, 1)
    for count in (1, 96 * 7, 3 * 32 * 14 * 14, flat.numel()):
        first = rates.decode_first(packed, count)
        assert first is not None and torch.equal(first, packed.decode_flat()[:count])
