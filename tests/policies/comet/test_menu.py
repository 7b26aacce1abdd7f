"""Menus: fixed rates, and dithered levels for tensors that only weight gradients read."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.layout import flatten
from encke.policies import Comet
from encke.policies.comet.allocate import BITS
from encke.policies.comet.menu import Menu
from encke.policies.comet.stats import TensorFigures, TensorStats
from tests.policies.comet.trainings import BATCHES, net, sgd, train

TRIALS = [GroupQuant(bits) for bits in BITS]


def figures(x: torch.Tensor) -> TensorFigures:
    flat, layout = flatten(x)
    found = TensorStats(flat, layout, TRIALS[0].encode_flat(flat, layout, 1), TRIALS, 1)
    return found.figures([math.nan if t is None else t.item() for t in found.tensors])


def test_levels_that_keep_signs_have_at_most_the_error_that_is_announced() -> None:
    torch.manual_seed(0)
    x = F.leaky_relu(3 * torch.randn(64, 1024), 0.1)
    tensor = figures(x)
    tensor.signed = True
    menu = Menu.of(tensor, True, 0)
    sizes = []
    for codec, power in zip(menu.codecs, menu.errors([power for power, _ in tensor.errors]), strict=True):
        packed = codec.encode(x)
        y = packed.decode()
        assert torch.equal(y.sign(), x.sign())
        assert 0.5 * power < float((y - x).square().mean()) < 1.02 * power
        sizes.append(8 * packed.nbytes / x.numel())
    # Within half a bit, as many as announced more than the finest; the coarsest takes more.
    announced = [bits - menu.bits[-1] + sizes[-1] for bits in menu.bits]
    assert sizes[1:] == pytest.approx(announced[1:], abs=0.5)


@pytest.mark.parametrize("relu", [False, True])
def test_the_error_of_each_level_is_the_one_that_is_announced(relu: bool) -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(64, 1024)
    x = x.relu() if relu else x
    tensor = figures(x)
    menu = Menu.of(tensor, True, 0)
    announced = menu.errors([power for power, _ in tensor.errors])
    sizes = []
    for codec, power in zip(menu.codecs, announced, strict=True):
        packed = codec.encode(x)
        error = packed.decode() - x
        assert float(error.square().mean()) == pytest.approx(power, rel=0.02)
        assert isinstance(codec, ErrorBounded) and float(error.abs().max()) <= codec.bound
        sizes.append(packed.nbytes)
    assert sizes == sorted(sizes) and announced[-1] <= tensor.errors[-1][0] < announced[-2]
    assert menu.codecs[0].bound == pytest.approx(float(x.std()), rel=0.02)
    # A level with no more error than 2 bits takes fewer bytes.
    level = next(i for i, power in enumerate(announced) if power <= tensor.errors[0][0])
    assert sizes[level] < 0.92 * TRIALS[0].encode(x).nbytes


def test_fixed_rates_keep_what_was_tried() -> None:
    tensor = figures(torch.randn(16, 1024))
    menu = Menu.of(tensor, False, 0)
    assert list(menu.codecs) == TRIALS and tuple(menu.bits) == BITS
    assert menu.errors([4.0, 3.0, 2.0, 1.0]) == [4.0, 3.0, 2.0, 1.0]


def test_a_spread_that_is_not_finite_has_fixed_rates() -> None:
    tensor = figures(torch.randn(16, 1024))
    for std in (math.inf, math.nan):
        tensor.std = std
        assert list(Menu.of(tensor, True, 0).codecs) == TRIALS


@pytest.mark.parametrize("x", [torch.zeros(16, 1024), torch.full((16, 1024), 2.5)], ids=["zeros", "constant"])
def test_values_without_spread_have_fixed_rates(x: torch.Tensor) -> None:
    assert list(Menu.of(figures(x), True, 0).codecs) == TRIALS


def network(leaky: bool) -> nn.Sequential:
    """Return a CNN with batch norm, whose activations may be leaky."""
    return nn.Sequential(*[nn.LeakyReLU(0.1, inplace=True) if leaky and type(m) is nn.ReLU else m for m in net()])


def gradient_error(rounding: str, leaky: bool = False) -> tuple[float, int, encke.api.Handle]:
    """Return the relative error of the gradient after some steps, and the bytes held."""
    model = network(leaky)
    optimizer = sgd(model)
    handle = encke.attach(model, Comet(rounding=rounding, every=5), optimizer, min_bytes=1)
    train(model, optimizer, 12)
    errors = []
    for x, y in BATCHES:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        lossy = torch.cat([p.grad.flatten() for p in model.parameters()])
        size = handle.report().packed_bytes
        copy = network(leaky)
        copy.load_state_dict(model.state_dict())
        F.cross_entropy(copy(x), y).backward()
        exact = torch.cat([p.grad.flatten() for p in copy.parameters()])
        errors.append(float((lossy - exact).norm() / exact.norm()))
    return sum(errors) / len(errors), size, handle


def test_dithered_holds_fewer_bytes_at_the_same_error() -> None:
    error, size, _ = gradient_error("stochastic")
    dithered, fewer, handle = gradient_error("dithered")
    assert fewer < 0.95 * size and dithered < 1.1 * error
    codecs = {(row["operation"], row["slot"]): row["codec"] for row in handle.history}
    assert codecs["Convolution", "input"] == "ErrorBounded" and codecs["BatchNorm", "input"] == "GroupQuant"


def test_memory_whose_signs_are_read_has_a_variable_rate_that_keeps_them() -> None:
    error, size, _ = gradient_error("stochastic", leaky=True)
    dithered, fewer, handle = gradient_error("dithered", leaky=True)
    rows = {row.layer: row for row in handle.report().sites if row.operation == "LeakyRelu"}
    assert rows and all(row.codec == "ErrorBounded" and "with signs" in row.bound for row in rows.values()), rows
    # The policy knows of them, and what they take.
    assert sum(getattr(setting.codec, "signs", False) for setting in handle.policy.settings.values()) == len(rows)
    # Fixed rates keep signs from 4 bits on, which is finer than the error that is tolerated.
    tolerated, _, _ = gradient_error("stochastic")
    assert fewer < 0.5 * size and error < dithered < 1.1 * tolerated, (fewer / size, dithered, tolerated)


@pytest.mark.parametrize("leaky", [False, True])
def test_measured_errors_of_dithered_codes_are_the_predicted_ones(leaky: bool) -> None:
    _, _, handle = gradient_error("dithered", leaky)
    rows = [row for row in handle.history if row.get("in_force_measured") and row["codec"] == "ErrorBounded"][-4:]
    assert len(rows) == 4
    for row in rows:
        assert row["in_force_measured"] / row["in_force_predicted"] == pytest.approx(1, rel=0.25), row


def test_what_backward_computes_again_keeps_a_fixed_rate() -> None:
    packed = {}
    for rounding in ("stochastic", "dithered"):
        torch.manual_seed(0)
        layers = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 128)]
        model = nn.Sequential(*layers)
        optimizer = sgd(model)
        handle = encke.attach(model, Comet(rounding=rounding, every=5), optimizer, min_bytes=1)
        for _ in range(12):
            model.zero_grad()
            model(torch.randn(32, 16, 64)).square().mean().backward()
            optimizer.step()
        packed[rounding] = handle.report().packed_bytes
        assert {"recomputed"} <= {row.codec for row in handle.report().sites}
        handle.detach()
    assert packed["dithered"] == packed["stochastic"]


def test_a_state_of_another_rounding_is_refused() -> None:
    handle = encke.attach(net(), Comet(rounding="dithered"))
    state = handle.state_dict()
    handle.detach()
    other = encke.attach(net(), Comet())
    with pytest.raises(ValueError, match="attach with rounding='dithered'"):
        other.load_state_dict(state)


def test_a_resumed_training_has_the_same_codes() -> None:
    _, _, handle = gradient_error("dithered")
    settings = {place: setting.codec for place, setting in handle.policy.settings.items()}
    state = handle.state_dict()
    assert any(isinstance(codec, ErrorBounded) and codec.rounding == "dithered" for codec in settings.values())
    model = net()
    resumed = encke.attach(model, Comet(rounding="dithered", every=5), sgd(model), min_bytes=1)
    resumed.load_state_dict(state)
    assert {place: setting.codec for place, setting in resumed.policy.settings.items()} == settings
