"""Theory against direct computation: positions counted one by one, gradient errors of real layers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from encke.capture.nodes import operation_name
from encke.capture.sites import Site
from encke.codecs import ErrorBounded
from encke.codecs.layout import flatten
from encke.policies.comet.assess import predict
from encke.policies.comet.measure import WeightGradientSample
from encke.policies.comet.products import PRODUCTS, WeightProduct, convolution
from encke.policies.comet.stats import TensorStats
from encke.policies.comet.theory import (
    PAPER_A,
    Gain,
    Product,
    error_std,
    nearest_power,
    paper_std,
    stochastic_power,
    taps_inside,
)

LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1x1": (lambda: nn.Conv2d(6, 8, 1), (4, 6, 9, 9)),
    "3x3": (lambda: nn.Conv2d(6, 8, 3, padding=1), (4, 6, 8, 8)),
    "small plane": (lambda: nn.Conv2d(16, 16, 3, padding=1), (32, 16, 2, 2)),
    "no padding": (lambda: nn.Conv2d(6, 8, 5), (4, 6, 12, 10)),
    "stride": (lambda: nn.Conv2d(6, 8, 3, stride=2, padding=1), (6, 6, 11, 12)),
    "stride above kernel": (lambda: nn.Conv2d(6, 8, 2, stride=3), (6, 6, 13, 13)),
    "uneven": (lambda: nn.Conv2d(6, 8, (3, 5), (2, 1), (0, 2), (1, 2)), (4, 6, 11, 14)),
    "dilation": (lambda: nn.Conv2d(6, 8, 3, padding=2, dilation=2), (4, 6, 9, 9)),
    "grouped": (lambda: nn.Conv2d(8, 16, 3, padding=1, groups=4), (8, 8, 8, 8)),
    "depthwise": (lambda: nn.Conv2d(32, 32, 3, padding=1, groups=32), (8, 32, 8, 8)),
    "1d": (lambda: nn.Conv1d(8, 12, 5, stride=2, padding=2), (8, 8, 41)),
    "3d": (lambda: nn.Conv3d(4, 8, 3, stride=(1, 2, 2), padding=1), (3, 4, 6, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 2, stride=2), (6, 8, 7, 7)),
    "transposed, padded": (lambda: nn.ConvTranspose2d(8, 6, 4, 2, padding=1, output_padding=1), (6, 8, 6, 6)),
    "transposed, grouped": (lambda: nn.ConvTranspose2d(8, 16, 3, 1, padding=1, groups=2, dilation=2), (6, 8, 9, 9)),
    "transposed, 1d": (lambda: nn.ConvTranspose1d(8, 6, 5, 3, padding=2), (8, 8, 30)),
    "linear": (lambda: nn.Linear(24, 32), (200, 24)),
    "linear on tokens": (lambda: nn.Linear(24, 32), (10, 20, 24)),
}


def parts(name: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    """Return a layer, its input and output, and the product found for it."""
    torch.manual_seed(len(name))
    make, shape = LAYERS[name]
    layer, x = make(), torch.randn(shape)
    y = layer(x)
    node = y.grad_fn
    while operation_name(node) not in PRODUCTS:
        node = node.next_functions[0][0]
    operation = operation_name(node)
    size = shape if operation == "Convolution" else (math.prod(shape[:-1]), shape[-1])
    slot = {"Convolution": "input", "Linear": "input", "Addmm": "mat1", "Mm": "self"}[operation]
    return layer, x, y, PRODUCTS[operation](node, slot, size)


def weight_gradient(layer: nn.Module, x: Tensor, g: Tensor) -> Tensor:
    return torch.autograd.grad(layer(x), layer.weight, g)[0]


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(1, 14),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    padding=st.integers(0, 6),
    dilation=st.integers(1, 3),
    out=st.integers(1, 16),
)
def test_taps_inside_is_what_counting_gives(
    size: int, kernel: int, stride: int, padding: int, dilation: int, out: int
) -> None:
    met = [
        sum(0 <= position * stride - padding + tap * dilation < size for position in range(out))
        for tap in range(kernel)
    ]
    assert taps_inside(size, out, kernel, stride, padding, dilation) == pytest.approx(sum(met) / kernel)


@pytest.mark.parametrize("name", LAYERS)
def test_terms_are_what_a_gradient_of_ones_sums_up(name: str) -> None:
    layer, x, y, (product, weight, channel, gradient) = parts(name)
    ones = torch.ones_like(x)
    assert weight is layer.weight and channel == 1
    assert product.terms == pytest.approx(float(weight_gradient(layer, ones, torch.ones_like(y)).mean()))
    # The gradient that a probe's error goes through is the layer's own.
    g = torch.randn_like(y)
    x2, g2 = (x, g) if "linear" not in name else (x.flatten(0, -2), g.flatten(0, -2))
    mine, real = gradient(g2, x2), weight_gradient(layer, x, g)
    assert torch.allclose(mine if mine.shape == real.shape else mine.t(), real, atol=1e-4)


def test_positions_count_padding_and_terms_do_not() -> None:
    product = Product(2, (4, 4), (4, 4), (3, 3), (1, 1), (1, 1), (1, 1))
    assert product.positions == 32 and product.terms == pytest.approx(2 * (10 / 3) ** 2)
    assert Product(7).positions == Product(7).terms == 7


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_predicted_error_is_that_of_a_real_layer(name: str, share: float) -> None:
    layer, x, y, (product, *_) = parts(name)
    bound, g = 0.03, torch.randn_like(y) * 0.2
    found = []
    for _ in range(40):
        error = (torch.rand_like(x) * 2 - 1) * bound * (torch.rand_like(x) < share)
        # The gradient is linear in the input: the gradient of the error is the error of the gradient.
        found.append(float(weight_gradient(layer, error, g).square().mean()))
    measured = math.sqrt(sum(found) / len(found))
    rms = float(g.square().mean().sqrt())
    assert error_std(nearest_power(bound, share), rms, product.terms) == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", LAYERS)
def test_an_error_that_does_not_cancel_is_predicted_too(name: str) -> None:
    layer, x, y, (product, weight, channel, _) = parts(name)
    # All errors alike, all output gradients alike: nothing cancels, and the sum is exactly known.
    mean, g = 0.01, torch.full_like(y, 0.2)
    measured = math.sqrt(float(weight_gradient(layer, torch.full_like(x, mean), g).square().mean()))
    site = Site("layer", "Convolution", "input")
    stats = TensorStats(*flatten(x), ErrorBounded(0.1).encode(x), [], 0)
    sample = WeightGradientSample(site, stats, WeightProduct(product, weight, channel, lambda g, x: g))
    flat = g if "linear" not in name else g.flatten(0, -2)
    sample.measure(flat)
    gradient = sample.figures([math.nan if t is None else float(t) for t in sample.tensors], 1.0)
    predicted = predict("exact", sample, gradient, mean**2, mean)
    # Taps are averaged, so that layers with much padding are not exact.
    assert predicted == pytest.approx(measured, rel=0.15), predicted / measured


def test_power_of_nearest_and_stochastic_levels() -> None:
    torch.manual_seed(0)
    x = torch.rand(200_000, dtype=torch.float64) * 100
    x[torch.rand_like(x) < 0.3] = 0
    share = float((x != 0).double().mean())
    nearest = (x / 0.2).round() * 0.2 - x
    assert nearest_power(0.1, share) == pytest.approx(float(nearest.square().mean()), rel=0.02)
    stochastic = torch.where(x != 0, ((x / 0.2).floor() + (torch.rand_like(x) < (x / 0.2).frac())) * 0.2 - x, 0.0)
    assert stochastic_power(0.2, share) == pytest.approx(float(stochastic.square().mean()), rel=0.02)


def test_the_papers_form_agrees_where_output_gradients_are_normal() -> None:
    g = torch.randn(1_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.3
    rms, absolute = float(g.square().mean().sqrt()), float(g.abs().mean())
    power = nearest_power(0.05, 0.5)
    assert paper_std(power, absolute, 900) == pytest.approx(error_std(power, rms, 900), rel=0.01)
    # As printed: a * bound * sqrt(share * positions) * mean absolute output gradient.
    assert paper_std(power, absolute, 900) == pytest.approx(PAPER_A * 0.05 * math.sqrt(0.5 * 900) * absolute)


def test_frozen_and_computed_weights_have_no_product() -> None:
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    conv = nn.Conv2d(3, 4, 3)
    assert convolution(conv(x).grad_fn, "weight", (4, 3, 3, 3)) is None
    conv.weight.requires_grad_(False)
    assert convolution(conv(x).grad_fn, "input", tuple(x.shape)) is None
    weight = nn.Parameter(torch.randn(4, 3, 3, 3))
    assert convolution(nn.functional.conv2d(x, weight * 2).grad_fn, "input", tuple(x.shape)) is None


@pytest.mark.parametrize("slope", [0.0, 0.5, 1.5])
def test_a_gain_that_grows_with_the_bound_is_learnt_from_two_measurements(slope: float) -> None:
    def error(bound: float, unit: float) -> float:
        return unit * bound * 0.7 * (bound / 0.1) ** slope

    gain = Gain()
    assert gain.bound_for(0.3, 2.0) == pytest.approx(0.15) and gain.expect(0.15, 2.0) == pytest.approx(0.3)
    for bound in (0.1, 0.25):
        gain.learn(bound, error(bound, 2.0) / (2.0 * bound))
    assert gain.slope == pytest.approx(slope)
    for bound in (0.05, 0.25, 0.9):
        # The unit is that of another step; the law is the same.
        assert gain.expect(bound, 3.0) == pytest.approx(error(bound, 3.0))
        assert gain.bound_for(error(bound, 3.0), 3.0) == pytest.approx(bound)


def test_a_gain_stays_within_reason() -> None:
    for ratio, expected in ((0.0, 0.1), (1e9, 10.0), (2.0, 2.0)):
        gain = Gain()
        gain.learn(0.1, ratio)
        assert gain.value == expected and gain.slope == 0.0
    gain.learn(0.2, 10.0)
    assert 0 < gain.slope <= 2
    gain.learn(0.4, 0.1)
    assert gain.slope == 0.0
