"""Encoding: each need gets its codec and takes the expected number of bytes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import encke
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant
from encke.codecs.exact import Between, Mask
from encke.policies import Fixed
from tests.capture.common import EXACT, assert_same, batch, grads_of
from tests.codecs.common import SOME_SLOW, Rounded


def test_a_relu_nobody_else_reads_costs_one_bit() -> None:
    x = torch.randn(64, 1024, requires_grad=True)
    context = encke.compress(Fixed(GroupQuant(bits=8)))
    for _ in range(2):
        x.grad = None
        with context as handle:
            y = (x.relu() + 1).sum()
        y.backward()
        assert torch.equal(x.grad, (x > 0).float())
    (row,) = [row for row in handle.report().sites if row.operation == "Relu"]
    assert row.packed_bytes == 64 * 1024 // 8


@pytest.mark.parametrize("codec", [GroupQuant(bits=2), ErrorBounded(0.3, "rel")], ids=repr)
def test_a_leaky_relu_gets_exact_signs_and_costs_one_bit(codec) -> None:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1024))

        def forward(self, x: torch.Tensor, shared: bool) -> torch.Tensor:
            y = x + self.scale
            return F.leaky_relu(y, 0.1).sum() + (F.silu(y).sum() * 0 if shared else 0)

    x = torch.randn(64, 1024)
    x[0, :3] = torch.tensor([-1.0, math.nan, -0.5])
    for shared in (False, True):
        model = Leaky()
        plain = copy.deepcopy(model)
        handle = encke.attach(model, Fixed(codec))
        for _ in range(2):
            for m in (plain, model):
                m.zero_grad()
                m(x, shared).backward()
            assert torch.equal(plain.scale.grad.nan_to_num(7), model.scale.grad.nan_to_num(7))
        (row,) = [row for row in handle.report().sites if row.operation == "LeakyRelu"]
        assert shared or row.packed_bytes == 64 * 1024 // 8


class Gated(nn.Module):
    """An activation between two layers; the first bias depends on its gates and on no lossy tensor."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.activation, self.last = nn.Linear(64, 64), activation, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(x)))


def gates_agree(activation: nn.Module, policy=None, between=None, dtype: torch.dtype = torch.float32) -> list:
    """Return rows of the activation, after checking in several steps that the first bias has the plain gradient."""
    model = Gated(activation).to(dtype)
    plain = copy.deepcopy(model)
    handle = encke.attach(model, policy or Fixed(GroupQuant(bits=2)))
    for step in range(3):
        x = 3 * torch.randn(512, 64, generator=torch.Generator().manual_seed(step)).to(dtype)
        for m in (plain, model):
            if between is not None:
                between(m, step)
            m.zero_grad()
            m(x).square().mean().backward()
        assert torch.equal(plain.first.bias.grad, model.first.bias.grad), step
    return [row for row in handle.report().sites if row.operation.startswith("Hard")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "activation", [nn.ReLU6(), nn.ReLU6(inplace=True), nn.Hardtanh(-0.5, 0.25), nn.Hardsigmoid()], ids=str
)
def test_relu6_and_its_kin_get_exact_gates_and_cost_one_bit(activation, dtype) -> None:
    (row,) = gates_agree(activation, dtype=dtype)
    assert row.codec == "Between" and row.packed_bytes == 512 * 64 // 8


def test_limits_may_move_from_step_to_step() -> None:
    def move(model: Gated, step: int) -> None:
        model.activation.max_val = (1.0, 0.5, 2.0)[step]

    (row,) = gates_agree(nn.Hardtanh(0.0, 1.0), between=move)
    assert row.codec == "Between"


class Capped(nn.Module):
    cap = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.hardtanh(x, 0.0, self.cap)


def test_limits_that_nobody_can_be_asked_for_or_no_float_has_keep_the_values_exact() -> None:
    def move(model: Gated, step: int) -> None:
        model.activation.cap = (1.0, 0.5, 2.0)[step]

    for activation in (Capped(), nn.Hardtanh(-0.3, 0.7), nn.Hardtanh(-math.inf, 1.0)):
        rows = gates_agree(activation, between=move if isinstance(activation, Capped) else None)
        assert all(row.codec in ("Lossless", "kept") for row in rows)


def test_what_lies_between_limits() -> None:
    codec = Between(-1.0, 2.0)
    x = torch.tensor([-math.inf, -2.0, -1.0, -0.5, 0.0, 1.9, 2.0, 9.0, math.inf, math.nan])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert codec.takes(dtype)
        got = codec.encode(x.to(dtype)).decode()
        assert got.dtype == dtype and got.tolist() == [-1.0] * 3 + [0.5] * 3 + [-1.0] * 3 + [0.5]
    assert not codec.takes(torch.int64) and not Between(0.0, 0.1).takes(torch.float32)
    assert not Between(1.0, 1.0 + 2**-7).takes(torch.bfloat16)  # the type has nothing between them
    assert Between(0.0, 6.0).covers(Between(0.0, 6.0)) and not Between(0.0, 6.0).covers(codec)
    assert codec.encode(torch.empty(0, 3)).decode().shape == (0, 3)


def test_what_nobody_could_be_asked_about_keeps_its_values() -> None:
    """The last operation's input was packed as a mask for the one before: its own reader is known only in backward."""
    x, w = torch.randn(128, 128, requires_grad=True), torch.randn(128, 128, requires_grad=True)
    expected = torch.autograd.grad((x.relu() @ w).sum(), (x, w))
    context = encke.compress(EXACT)
    for _ in range(3):
        with context:
            y = x.relu() @ w
        got = torch.autograd.grad(y.sum(), (x, w))
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])


def test_relu_of_nan_lets_the_gradient_pass_as_autograd_does() -> None:
    x = torch.randn(64, 128)
    x[0, 0] = float("nan")
    expected, got = (x.clone().requires_grad_() for _ in range(2))
    expected.relu().sum().backward()
    context = encke.compress()
    # The reader is known from the first backward on: in the second pass the mask alone is kept.
    for _ in range(2):
        got.grad = None
        with context as handle:
            y = got.relu().sum()
        y.backward()
        assert torch.equal(expected.grad, got.grad)
    assert handle.report().packed_bytes == x.numel() // 8


def test_readers_of_a_shape_cost_nothing() -> None:
    x = torch.randn(8, 4, 32, 32, requires_grad=True)
    plain = x.detach().clone().requires_grad_()
    for pool in (
        lambda t: F.avg_pool2d(t, 3, 2, 1),
        lambda t: F.adaptive_avg_pool2d(t, 5),
        lambda t: F.max_pool2d(t, 3, 2, 1),
        lambda t: F.adaptive_max_pool2d(t, 5),
        lambda t: F.max_pool2d(t.to(memory_format=torch.channels_last), 2),
    ):
        with encke.compress(min_bytes=1) as handle:
            loss = pool(x * 1).square().sum()
        loss.backward()
        pool(plain * 1).square().sum().backward()
        assert (x.grad - plain.grad).norm() < 0.02 * plain.grad.norm()
        rows = [row for row in handle.report().sites if "Pool" in row.operation]
        assert rows and sum(row.packed_bytes for row in rows) < x.nbytes / 8


@pytest.mark.parametrize("shape", [(2048, 32), (4, 16, 24, 24)])
def test_a_negative_log_likelihood_keeps_no_probabilities(shape: tuple[int, ...]) -> None:
    """Only log-softmax's backward reads them. Labels stay unpacked: finding their range would wait for a GPU."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(shape[1:]))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.nll_loss(x + self.bias, labels)

    x, labels = torch.randn(shape), torch.randint(0, shape[1], (shape[0], *shape[2:]))
    labels.flatten()[::7] = -100
    plain, model = Loss(), Loss()
    handle = encke.attach(model, EXACT)
    for _ in range(3):
        for m in (plain, model):
            m.zero_grad()
            m(x, labels).backward()
        assert_same(grads_of(plain), grads_of(model))
        rows = {f"{row.operation}.{row.slot}": row for row in handle.report().sites}
        (name,) = (name for name in rows if name.startswith("NllLoss") and name.endswith(".self"))
        assert rows[name].packed_bytes == 0
        assert handle.report().packed_bytes == pytest.approx(labels.nbytes, abs=64)


@pytest.mark.parametrize(
    ("power", "codec"),
    [(2, "GroupQuant"), (3.0, "GroupQuant"), (4, "kept"), (0.5, "kept"), (-1, "kept"), (1.5, "kept"), (None, "kept")],
)
def test_only_small_whole_powers_may_be_lossy(power: float | None, codec: str) -> None:
    """Derivatives of other powers divide, or have no value where a value is decoded below zero."""

    class Power(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))
            self.exponent = nn.Parameter(torch.full((64,), 2.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.weight).abs().add(1) ** (self.exponent if power is None else power)

    model = Power()
    handle = encke.attach(model, Fixed(GroupQuant(bits=2)))
    for _ in range(2):
        model(batch()).sum().backward()
    found = [row.codec for row in handle.report().sites if row.operation == "Pow" and row.slot == "self"]
    assert (found or ["kept"]) == [codec]


def test_exact_floats_that_do_not_shrink_are_kept_as_they_are() -> None:
    """Packing them again would be a copy, for which the host would wait for a GPU. Tensors that shrink stay packed."""

    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return (y / (y.detach() * 2 + 9)) * mask

    plain = Divided()
    model = copy.deepcopy(plain)
    handle = encke.attach(model, EXACT)
    mask = torch.randn(128, 64)
    mask[16:] = 0
    codecs = []
    for _ in range(3):
        for m in (plain, model):
            m.zero_grad()
            m(batch(), mask).square().mean().backward()
        assert_same(grads_of(plain), grads_of(model))
        codecs.append({f"{row.operation}.{row.slot}": row.codec for row in handle.report().sites})
    assert [found.get("Div.other") for found in codecs] == ["Lossless", "kept", "kept"]
    assert [found["Mul.other"] for found in codecs] == ["Lossless"] * 3


def test_the_mask_codec_gives_booleans() -> None:
    assert Mask().encode(torch.tensor([0.0, 2.0, -1.0])).decode().tolist() == [False, True, True]


class Product(nn.Module):
    """A product with a tensor that may hold infinities: plain training has one gradient for each column."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1024))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 0 * self.w[0]) * self.w


def columns_not_finite(model: Product, x: torch.Tensor) -> list[int]:
    """Run a step; return the columns whose gradient is not finite."""
    model.zero_grad()
    model(x).sum().backward()
    assert model.w.grad is not None
    return (~model.w.grad.isfinite()).nonzero().flatten().tolist()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", [Fixed(GroupQuant(2)), "default"], ids=repr)
def test_values_that_are_not_finite_do_not_spread(policy, value: float) -> None:
    model = Product()
    handle = encke.attach(model, policy)
    x = torch.randn(64, 1024)
    x[::2, 5] = value
    for _ in range(3):
        assert columns_not_finite(model, x) == [5]
    assert "GroupQuant" not in codecs_of_products(handle)


@pytest.mark.parametrize("dtype", SOME_SLOW, ids=str)
@pytest.mark.parametrize("codec", [GroupQuant(2), DualPrecision(), ErrorBounded(0.1), Rounded()], ids=repr)
def test_infinities_that_come_later_do_not_spread(codec: Codec, dtype: torch.dtype) -> None:
    model = Product().to(dtype)
    handle = encke.attach(model, Fixed(codec))
    x = torch.randn(2, 3, 8, 1024, dtype=dtype)
    y = x.clone()
    y[0, 1, 3, 5] = math.inf
    for number, values in enumerate((x, x, y, x)):
        assert columns_not_finite(model, values) == [5] * (number == 2)
        kept = number < 2 or isinstance(codec, ErrorBounded)  # ErrorBounded has no groups that an infinity corrupts
        assert (type(codec).__name__ in codecs_of_products(handle)) == kept, number


@pytest.mark.parametrize("codec", [GroupQuant(2), DualPrecision()], ids=repr)
def test_a_row_of_a_softmax_that_is_masked_as_a_whole_spoils_no_other(codec: Codec) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(96))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.scale * x).masked_fill(mask, -math.inf).softmax(-1)[:, :, 1:].square().sum()

    model, x, mask = Attention(), torch.randn(2, 2, 64, 96), torch.zeros(2, 2, 64, 96, dtype=torch.bool)
    plain = copy.deepcopy(model)
    encke.attach(model, Fixed(codec))
    for step in range(4):
        mask[1, 1, 0] = step == 2
        for each in (plain, model):
            each.zero_grad()
            each(x, mask).backward()
        assert torch.equal(plain.scale.grad.isfinite(), model.scale.grad.isfinite()), step


def codecs_of_products(handle: encke.Handle) -> set[str]:
    """Return the codecs of the tensors that products saved in the last pass."""
    return {row.codec for row in handle.report().sites if row.operation == "Mul"}
