"""Division: dual precision for inputs of convolutions and batch norms, exact masks, everything else unchanged."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import encke
from encke.capture.sites import Site
from encke.codecs import Codec, DualPrecision
from encke.codecs.exact import Keep
from encke.policies import Division
from tests.models import resnet, transformer

DUAL = DualPrecision(8, 2)


@pytest.mark.parametrize(
    ("operation", "slot", "dimensions", "need", "expected"),
    [
        ("Convolution", "input", 4, "lossy", DUAL),
        ("Convolution", "input", 3, "lossy", DUAL),
        ("Convolution", "input", 5, "lossy", DUAL),
        ("BatchNorm", "input", 4, "lossy", DUAL),
        ("BatchNorm", "input", 2, "lossy", Keep()),
        ("NativeLayerNorm", "input", 3, "lossy", Keep()),
        ("NativeGroupNorm", "input", 4, "lossy", Keep()),
        ("Addmm", "mat1", 2, "lossy", Keep()),
        ("Gelu", "self", 4, "lossy", Keep()),
        ("Mul", "other", 4, "lossy", Keep()),
        ("ScaledDotProductAttention", "query", 4, "attention", Keep()),
        ("LogSoftmax", "result", 2, "logprob", Keep()),
    ],
)
def test_codec_for_each_site(operation: str, slot: str, dimensions: int, need: str, expected: Codec) -> None:
    site = Site("layer", operation, slot, need=need, dimensions=dimensions)
    assert Division().choose(site) == expected
    if expected == DUAL:
        assert Division(4, 8).choose(site) == DualPrecision(4, 8)


def convolutions(inplace: bool = False) -> nn.Module:
    """No gradient on the way to the input needs more than weights, masks, positions and shapes."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(inplace),
        nn.MaxPool2d(2), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(inplace), nn.Dropout(0.3), nn.AvgPool2d(2),
    )  # fmt: skip


def input_gradient(model: nn.Module, x: Tensor, seed: int, create_graph: bool = False) -> Tensor:
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)[0].detach()


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_masks_are_exact(inplace: bool, memory: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = convolutions(inplace).to(memory_format=memory)
    model, x = copy.deepcopy(plain), torch.randn(8, 3, 30, 37).contiguous(memory_format=memory)
    handle = encke.attach(model, Division())
    for seed in range(3):
        assert torch.equal(input_gradient(model, x, seed), input_gradient(plain, x, seed))
    (row,) = [row for row in handle.report().sites if row.layer == "1"]
    assert row.codec == "DualPrecision" and row.ratio > 8
    (row,) = [row for row in handle.report().sites if row.layer == "3"]  # only the pooling reads it, by its shape
    assert row.codec == "Mask"


def test_masks_are_exact_in_double_backward() -> None:
    torch.manual_seed(0)
    plain = convolutions()
    model, x = copy.deepcopy(plain), torch.randn(8, 3, 32, 32)
    encke.attach(model, Division())
    for seed in range(2):
        expected = input_gradient(plain, x, seed, create_graph=True)
        assert torch.equal(input_gradient(model, x, seed, create_graph=True), expected)


def test_inputs_of_convolutions_are_coarse_and_right_on_average() -> None:
    torch.manual_seed(0)
    model = convolutions()[:3]
    plain, x = copy.deepcopy(model), torch.randn(8, 3, 32, 32)
    encke.attach(model, Division())
    plain(x).square().mean().backward()
    exact = plain[2].weight.grad
    draws = []
    for _ in range(60):
        model.zero_grad()
        model(x).square().mean().backward()
        draws.append(model[2].weight.grad.clone())
    one, mean = (draws[-1] - exact).norm(), (sum(draws) / 60 - exact).norm()
    assert one > 1e-3 * exact.norm() and mean < 0.25 * one


def test_linear_layers_are_left_alone() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(512, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128))
    model, x = copy.deepcopy(plain), torch.randn(64, 512, requires_grad=True)
    handle = encke.attach(model, Division())
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(x).square().mean().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    report = handle.report()
    assert report.saved_bytes == report.packed_bytes and {row.codec for row in report.sites} == {"kept"}


def test_transformers_are_left_alone() -> None:
    torch.manual_seed(0)
    model, (tokens,) = transformer()
    handle = encke.attach(model, Division())
    for _ in range(2):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert not any(row.codec in ("DualPrecision", "ErrorBounded") for row in handle.report().sites)


def train(policy: Division | None, steps: int, autocast: bool = False) -> tuple[list[float], nn.Module]:
    """Return losses of a small residual network that learns to distinguish ten noisy patterns."""
    torch.manual_seed(0)
    model, _ = resnet()
    if policy is not None:
        encke.attach(model, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    patterns, losses = torch.randn(10, 3, 32, 32), []
    for _ in range(steps):
        target = torch.randint(0, 10, (32,))
        x = patterns[target] + torch.randn(32, 3, 32, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.slow
def test_a_residual_network_trains() -> None:
    plain, _ = train(None, 40)
    ours, _ = train(Division(), 40)
    assert ours[0] == plain[0] and ours[2:] != plain[2:]
    assert sum(ours[-5:]) < min(1.5 * sum(plain[-5:]), 5 * 0.4 * ours[0])


@pytest.mark.slow
def test_a_residual_network_trains_under_autocast() -> None:
    ours, model = train(Division(), 40, autocast=True)
    assert sum(ours[-5:]) < 5 * 0.4 * ours[0]
    assert all(p.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_memory_of_a_residual_network_shrinks_as_published() -> None:
    torch.manual_seed(0)
    model, (x,) = resnet()
    handle = encke.attach(model, Division())
    for _ in range(2):
        model(x).square().mean().backward()
    rows = handle.report().sites
    assert handle.report().ratio > 12
    inputs = [row for row in rows if row.operation in ("Convolution", "BatchNorm")]
    assert len(inputs) == 7 and all(row.codec == "DualPrecision" and row.ratio > 13 for row in inputs)


def test_weights_and_buffers_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model, (x,) = resnet()
    before = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(model).eval()(x)
    handle = encke.attach(model, Division())
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(model.eval()(x), expected)
    handle.detach()
    assert list(model.state_dict()) == list(before)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"block": 1}, "block must be at least 2, got 1"), ({"bits": 1}, "bits must be 2, 4 or 8, got 1")],
)
def test_wrong_settings_name_the_value(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Division(**arguments)


def test_prints_as_it_is_written_and_has_no_state() -> None:
    policy = Division(block=4)
    assert eval(repr(policy)) == policy and policy.state_dict() == {}
    policy.load_state_dict({})
    with pytest.raises(ValueError, match="Division has no state, got the keys"):
        policy.load_state_dict({"a": 1})
