"""Error propagated by batch norms with coarse inputs: predicted, measured and limited."""

from __future__ import annotations

import copy
import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.capture import recompute
from encke.capture.saved import SharedCell
from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant, Packed
from encke.codecs.layout import flatten
from encke.policies import Comet
from encke.policies.comet.assess import COHERENCE, Assessment
from encke.policies.comet.measure import NormGradientSample, WeightGradientSample, mixed_share, norm_figures
from encke.policies.comet.stats import TensorStats
from encke.train.models.repvgg import RepVgg

pytestmark = pytest.mark.slow


def backward(x: Tensor, g: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.aten.native_batch_norm_backward(
        g, x, weight, None, None, mean, invstd, True, 1e-5, [True, True, True]
    )


def stats_of(x: Tensor) -> TensorStats:
    flat, layout = flatten(x)
    codec = GroupQuant(bits=2)
    return TensorStats(flat, layout, codec.encode_flat(flat, layout), [codec], 0)


def error_of(stats: TensorStats, codec: Codec) -> float:
    return stats.figures([math.nan if t is None else t.item() for t in stats.tensors]).errors[
        stats.trials.index(codec)
    ][0]


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("along", [0.0, 0.3, 2.0])
def test_the_prediction_is_the_measured_error(apart, along):
    """Errors in proportion to each channel's spread, or the same for all channels; gradients along the input or not."""
    torch.manual_seed(0)
    channels = 12
    spread = torch.logspace(-0.5, 0.5, channels).view(1, -1, 1, 1)
    x = torch.randn(8, channels, 8, 8) * spread + spread
    var, mean = torch.var_mean(x, [0, 2, 3], correction=0)
    invstd = (var + 1e-5).rsqrt()
    h = (x - mean.view(1, -1, 1, 1)) * invstd.view(1, -1, 1, 1)
    g = torch.randn_like(x) + along * h + 0.2
    weight = torch.rand(channels) + 0.5
    right = backward(x, g, mean, invstd, weight)
    sample = NormGradientSample(Site("layer", "BatchNorm", "input"), stats_of(x), 0.0 if apart else 1.0)
    sample.measure(invstd, right, g)
    (found,) = norm_figures([sample], [sample.tensor])
    small = 0.01 * (spread if apart else 1.0)
    errors = []
    for _ in range(100):
        e = small * torch.randn_like(x)
        wrong = backward(x + e, g, mean, invstd, weight)[0]
        errors.append((wrong - right[0]).square().sum() / right[0].square().sum())
    measured = torch.stack(errors).mean()
    size = (small * torch.ones_like(x)).square().mean()
    assert math.isclose(measured, found.linear * size, rel_tol=0.15)


@pytest.mark.parametrize("size", [24, 8])
def test_groups_that_reach_into_a_channel_of_little_spread(size):
    """24 x 24 values are four and a half groups: one group holds values of a quiet channel and its loud neighbour."""
    torch.manual_seed(0)
    x = torch.randn(8, 6, size, size) * torch.tensor([10, 10, 0.01, 10, 10, 10.0]).view(1, -1, 1, 1)
    var, mean = torch.var_mean(x, [0, 2, 3], correction=0)
    invstd = (var + 1e-5).rsqrt()
    g, weight = torch.randn_like(x), torch.ones(6)
    right = backward(x, g, mean, invstd, weight)
    flat, layout = flatten(x)
    codec = GroupQuant(bits=2)
    packed = [codec.encode_flat(flat, layout, key) for key in range(30)]
    stats = TensorStats(flat, layout, packed[0], [codec], 0)
    sample = NormGradientSample(Site("layer", "BatchNorm", "input"), stats, mixed_share(packed[0], layout))
    sample.measure(invstd, right, g)
    wrong = [backward(layout.restore(p.decode_flat()), g, mean, invstd, weight)[0] for p in packed]
    measured = torch.stack([(w - right[0]).square().sum() / right[0].square().sum() for w in wrong]).mean()
    error, (found,) = error_of(stats, codec), norm_figures([sample], [sample.tensor])
    predicted = found.linear * error + found.quadratic * error**2
    assert 0.5 < predicted / measured < 2


def test_the_share_of_values_in_mixed_groups():
    codec = GroupQuant(bits=2)

    def share(shape: tuple[int, ...], memory: torch.memory_format = torch.contiguous_format) -> float:
        flat, layout = flatten(torch.randn(shape).contiguous(memory_format=memory))
        return mixed_share(codec.encode_flat(flat, layout), layout)

    assert share((4, 16, 16, 16)) == 0.0 and share((4, 16, 8, 8)) == 1.0
    assert share((4, 16, 24, 24)) == pytest.approx(64 / 576)  # every second plane ends with a group
    assert share((4, 16, 8, 8), torch.channels_last) == 0.0 and share((1, 16, 2, 2), torch.channels_last) == 1.0


def test_frozen_norms_and_gradients_that_are_not_there_tell_nothing():
    x = torch.randn(4, 8, 16, 16)
    sample = NormGradientSample(Site("layer", "BatchNorm", "input"), stats_of(x), 0.0)
    sample.measure(torch.ones(8), (x, None, None), x)
    sample.measure(torch.ones(8), (None, torch.ones(8), torch.ones(8)), x)
    sample.measure(torch.ones(8), (x, torch.ones(8), torch.ones(8)), None)
    sample.measure(torch.empty(0), (x, torch.ones(8), torch.ones(8)), x)
    assert sample.tensor is None


class Straight(nn.Module):
    """A chain of batch norms, without anything that would make their gradients differ from their inputs."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(4):
            layers += [nn.BatchNorm2d(16), nn.ReLU() if relu else nn.Identity(), nn.Conv2d(16, 16, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def bits_of_norms(relu: bool, policy: Comet) -> list[int]:
    torch.manual_seed(0)
    model = Straight(relu)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    handle = encke.attach(model, policy, optimizer=optimizer)
    x, noise = torch.randn(8, 3, 16, 16), torch.randn(8, 16, 16, 16)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(x)
        loss = (out * noise).mean() if relu else out.square().mean()
        loss.backward()
        optimizer.step()
    last = max(row["step"] for row in handle.history)
    return [r["bits"] for r in handle.history if r["step"] == last and r["operation"] == "BatchNorm"]


def test_norms_that_distort_what_they_propagate_get_more_bits():
    often = Comet(every=1)
    assert bits_of_norms(True, often) == [2, 2, 2, 2]
    straight = bits_of_norms(False, often)
    assert len(straight) == 4 and max(straight) > 2
    assert bits_of_norms(False, Comet(every=1, sigma=1e-4)) == [8, 8, 8, 8]
    assert bits_of_norms(False, Comet(every=1, sigma=1e3)) == [2, 2, 2, 2]
    assert sum(bits_of_norms(False, Comet(every=1, sigma=0.02))) > sum(straight)


@pytest.mark.parametrize("kind", ["evaluation", "double", "flat", "frozen", "zero"])
def test_norms_of_other_kinds(kind):
    """In evaluation, in float64, on vectors, with a frozen weight, with a gradient that is zero: nothing breaks."""
    torch.manual_seed(0)
    flat = kind == "flat"
    norm = nn.BatchNorm1d(64) if flat else nn.BatchNorm2d(16)
    first = nn.Linear(32, 64) if flat else nn.Conv2d(3, 16, 3, padding=1)
    last = nn.Linear(64, 8) if flat else nn.Conv2d(16, 4, 1)
    model = nn.Sequential(first, norm, last)
    x = torch.randn(128, 32) if flat else torch.randn(4, 3, 16, 16)
    if kind == "double":
        model, x = model.double(), x.double()
    if kind == "frozen":
        norm.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    handle = encke.attach(model, Comet(every=1), optimizer=optimizer)
    model.train()
    if kind == "evaluation":
        norm.eval()
    for _ in range(3):
        model.zero_grad()
        (model(x).square().mean() * (kind != "zero")).backward()
        optimizer.step()
    rows = [row for row in handle.history if row["operation"].endswith("BatchNorm")]
    assert rows and all(row["bits"] in (2, 3, 4, 8) for row in rows)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def first_steps(overflow: str | None = None) -> tuple[list[dict], list[float]]:
    """Return the default policy's first decisions, and the error of the first weight's gradient in each step.

    With an overflow the first gradients are infinite: the optimizer's step is skipped, or made with zeros.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Straight(relu=False), Straight(relu=False).layers[1:])
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer)
    x = torch.randn(8, 3, 8, 8)
    plain(x).square().mean().backward()
    exact = next(plain.parameters()).grad
    errors = []
    for step in range(4 if overflow else 3):
        optimizer.zero_grad()
        if overflow and step == 0:
            (model(x).square().mean() * math.inf).backward()
            for p in model.parameters():
                p.grad.zero_()
        else:
            model(x).square().mean().backward()
            errors.append(float((next(model.parameters()).grad - exact).norm() / exact.norm()))
        if overflow != "skipped" or step > 0:
            optimizer.step()
    return handle.history, errors


@pytest.fixture
def nothing_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every tensor: a tensor that backward recomputes gives its source more bits from the second step on."""
    monkeypatch.setattr(recompute, "RULES", {})


@pytest.mark.parametrize("overflow", [None, "skipped"])
def test_first_step_sets_everything(overflow, nothing_recomputed):
    """Convolutions and norms start with 4 bits, so that the first step is not worse than later ones."""
    history, errors = first_steps(overflow)
    assert {(row["step"], row["operation"]) for row in history} == {(1, "BatchNorm"), (1, "Convolution")}
    assert len(history) == 16 and max(row["bits"] for row in history if row["operation"] == "BatchNorm") > 2
    assert errors[0] <= max(errors[1:]) < 0.3, errors


def test_a_first_step_of_no_use_is_made_up_for_in_the_next(nothing_recomputed):
    history, errors = first_steps("zeroed")
    assert {row["step"] for row in history if row["operation"] == "Convolution"} == {2}
    assert errors[0] <= max(errors[1:]) < 0.3, errors


def gradient_errors(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> list[float]:
    """Return the relative error of the whole gradient in each step of a training with the default policy."""
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer)
    errors = []

    def gradient(network: nn.Module) -> Tensor:
        network.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        return torch.cat([p.grad.flatten() for p in network.parameters()])

    for _ in range(steps):
        plain.load_state_dict(model.state_dict())
        exact, lossy = gradient(plain), gradient(model)
        errors.append(float((lossy - exact).norm() / exact.norm()))
        optimizer.step()
    handle.detach()
    return errors


@pytest.mark.parametrize("quiet", [False, True], ids=["as initialised", "with channels of little spread"])
def test_first_steps_of_a_deep_stack_of_batch_norms_are_not_spoiled(quiet):
    """Each norm adds to the errors propagated by later ones: with 2 bits they grew to many times the gradient."""
    torch.manual_seed(0)
    model = RepVgg(10, stages=((16, 2), (32, 6), (64, 1)))
    if quiet:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data[::4] = 1e-3
    errors = gradient_errors(model, torch.randn(8, 3, 64, 64), torch.arange(8), 10)
    assert errors[0] <= 2 * max(errors[1:]) and max(errors) < 0.2, errors


# Takes twice thirty steps. The stack of batch norms above has the same first steps.
@pytest.mark.soak
def test_first_steps_of_repvgg_are_not_worse_than_later_ones():
    torch.manual_seed(0)
    errors = gradient_errors(RepVgg(10), torch.randn(4, 3, 64, 64), torch.arange(4), 30)
    assert max(errors[:10]) <= 2 * sum(errors[20:]) / 10, errors


@pytest.mark.parametrize("every", [1, 1000])
def test_nothing_of_a_collection_step_outlives_it(every):
    """Not even until garbage is collected, which frees a graph that hangs on its own hooks one node at a time."""
    model = Straight(relu=True)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = encke.attach(model, Comet(every=every), optimizer)

    def alive() -> set[int]:
        kinds = (NormGradientSample, WeightGradientSample, TensorStats, Packed, SharedCell)
        return {id(o) for o in gc.get_objects() if issubclass(type(o), kinds)}

    gc.collect()
    gc.disable()
    try:
        before = alive()
        for _ in range(2):
            model(torch.randn(8, 3, 16, 16)).square().mean().backward()
            optimizer.step()
        assert handle.history and not alive() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("along", [0.0, 2.0])
def test_errors_along_the_input_count_more(along):
    """The part that adds up in the preceding layer is half of the error for random gradients, little for others."""
    torch.manual_seed(0)
    x = torch.randn(8, 12, 8, 8)
    mean, invstd = torch.zeros(12), torch.ones(12)
    g = torch.randn_like(x) + along * x
    sample = NormGradientSample(Site("layer", "BatchNorm", "input"), stats_of(x), 1.0)
    sample.measure(invstd, backward(x, g, mean, invstd, torch.ones(12)), g)
    (found,) = norm_figures([sample], [sample.tensor])
    share = found.coherent / found.linear
    assert abs(share - 0.5) < 0.15 if along == 0 else share < 0.05
    assessment = SimpleNamespace(step=SimpleNamespace(norms={sample.site.place: found}))
    figures = SimpleNamespace(errors=[(0.01, 0.0)])
    (distortion,) = Assessment._distortion(assessment, sample.site, figures)
    counted = found.linear + (COHERENCE - 1) * found.coherent
    assert distortion == pytest.approx(0.01 * counted + 0.01**2 * found.quadratic)
    assert distortion > 2 * 0.01 * found.linear or along
