"""Capture: right gradients or a clear error, whatever the training loop does."""

from __future__ import annotations

import copy
import gc
import io
import math
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import encke
from encke.capture import encoding, hooks, ledger
from encke.capture.hooks import SMALL
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.exact import Between, Mask
from encke.policies import Fixed
from tests.integration.test_end_to_end import saved_in
from tests.models import MODELS, resnet

EXACT = Fixed(ErrorBounded(0))
N = SMALL // 4


def hooks_are_clear() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed))


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y)


def twins() -> tuple[nn.Module, nn.Module, encke.Handle]:
    plain, model = net(), net()
    return plain, model, encke.attach(model, EXACT)


def test_retain_graph_reads_twice_and_in_any_order() -> None:
    plain, model, _ = twins()
    for m in (plain, model):
        x = batch().requires_grad_()
        y = m(x)
        a, b = y[:64].sum(), y[64:].square().sum()
        b.backward(retain_graph=True)
        a.backward(retain_graph=True)
        b.backward()
    assert_same(grads_of(plain), grads_of(model))


def test_double_backward() -> None:
    results = []
    for m in twins()[:2]:
        for _ in range(2):
            m.zero_grad()
            x = batch().requires_grad_()
            (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
            g.square().sum().backward()
        results.append(grads_of(m))
    assert_same(*results)


def test_accumulation_and_several_forwards_before_one_backward() -> None:
    plain, model, _ = twins()
    for m in (plain, model):
        losses = [m(batch(i)).square().mean() for i in range(3)]
        (losses[0] + losses[2]).backward()
        losses[1].backward()
        m(batch(7)).sum().backward()
    assert_same(grads_of(plain), grads_of(model))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_the_model(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = net(), net(), net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.a(x)
            x = checkpoint(self.b, x, use_reentrant=reentrant)
            return self.c(x)

    torch.manual_seed(3)
    plain = Checkpointed()
    for policy in (EXACT, Fixed(ErrorBounded(0.01, "rel"))):
        model = copy.deepcopy(plain)
        encke.attach(model, policy)
        for _ in range(3):
            for m in (plain, model):
                m.zero_grad()
                m(batch()).square().mean().backward()
            if policy is EXACT:
                assert_same(grads_of(plain), grads_of(model))
            else:
                for x, y in zip(grads_of(plain), grads_of(model), strict=True):
                    assert (x - y).norm() < 0.1 * x.norm()
        assert hooks_are_clear()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_the_model(reentrant: bool) -> None:
    plain, model, _ = twins()
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            x = batch().requires_grad_()
            checkpoint(m, x, use_reentrant=reentrant).square().mean().backward()
        assert_same(grads_of(plain), grads_of(model))
    assert hooks_are_clear()


def test_never_above_somebody_elses_hooks() -> None:
    _, model, handle = twins()
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
        model(batch()).sum().backward()
    assert seen and handle.report().forwards == 0


def test_hooks_that_somebody_keeps_on_pass_everything_through() -> None:
    class Pushes(nn.Module):
        """Pushes hooks of its own and forgets to take them off."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
            return y

    model = Pushes()
    encke.attach(model, EXACT)
    model(batch())
    torch._C._autograd._pop_saved_tensors_default_hooks()
    x = batch().requires_grad_()
    y = x.sin().sum()
    y.backward()
    assert torch.equal(x.grad, x.detach().cos())
    torch._C._autograd._pop_saved_tensors_default_hooks()
    assert hooks_are_clear()


def test_in_place_change_of_a_tensor_that_was_passed_through_raises() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.w

    model = Scale()
    encke.attach(model)
    x = torch.randn(4, 8)
    y = model(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_in_place_change_of_a_packed_tensor_gives_the_gradient_of_what_was_saved() -> None:
    model = nn.Conv2d(4, 4, 3, padding=1)
    plain = copy.deepcopy(model)
    encke.attach(model, EXACT)
    x = torch.randn(8, 4, 32, 32)
    for _ in range(2):
        model.zero_grad()
        mine = x.clone()
        y = model(mine).relu()
        mine.zero_()
        y.sum().backward()
    plain(x).relu().sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)


def test_in_place_change_while_the_reader_is_still_unknown_raises() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.w
            z = y.sigmoid() * y
            y.add_(1)
            return z + y

    model = Changing()
    encke.attach(model, EXACT)
    with pytest.raises(RuntimeError, match="inplace"):
        model(batch()).sum().backward()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        lambda x: x[:, ::2],
        lambda x: x[:, :, 3:, 1:],
        lambda x: x[:1].expand(8, -1, -1, -1),
        lambda x: x[:, :, :, :1].expand(-1, -1, -1, 32),
        lambda x: x.unfold(2, 8, 4).flatten(2, 3),
        lambda x: x.transpose(2, 3),
    ],
)
def test_size_and_stride_come_back_exactly(view) -> None:
    x = view(torch.randn(8, 4, 32, 32)).requires_grad_()
    with encke.compress(EXACT):
        y = x.sin()
    saved = y.grad_fn._saved_self
    assert torch.equal(saved, x) and saved.size() == x.size() and saved.stride() == x.stride()
    z = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(z, x.detach().cos())


def test_views_of_the_same_memory_are_packed_once() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    context = encke.compress(EXACT)
    for _ in range(2):
        with context as handle:
            y = x * 2
            z = y.sin().sum() + y.t().cos().sum() + y.view(-1).square().sum()
        z.backward()
    packed = [row for row in handle.report().sites if row.packed_bytes]
    assert [row.operation for row in packed] == ["Sin"]
    assert handle.report().saved_bytes == x.nbytes


def test_the_strictest_reader_decides_from_the_first_pass_on() -> None:
    class Two(nn.Module):
        """ReLU needs a mask, the convolution a bounded error, the power exactness: all of one tensor."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(self.conv(x))
            return self.out(y).sum() + y.pow(5).sum()

    model = Two()
    plain = copy.deepcopy(model)
    x = torch.randn(8, 4, 32, 32)
    encke.attach(model, Fixed(ErrorBounded(0.3, "rel")))
    for _ in range(3):
        out = model(x)
        cells = {saved.cell for _, _, saved in saved_in(out) if saved.site and saved.site.operation == "Relu"}
        assert [cell.packed.codec for cell in cells] == [ErrorBounded(0)]
        del out
    plain(x).backward()
    model(x).backward()
    assert torch.equal(plain.out.weight.grad, model.out.weight.grad)


def test_one_decoded_copy_serves_all_who_read_at_the_same_time() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            return (self.left(y) + self.right(y)).sum()

    model = Fork()
    encke.attach(model, Fixed(GroupQuant()))
    x = torch.randn(8, 4, 32, 32)
    model(x)
    (cell,) = {saved.cell for _, _, saved in saved_in(model(x)) if saved.cell is not None}
    assert cell.readers == 2
    first, second = cell.flat(False), cell.flat(False)
    assert first.data_ptr() == second.data_ptr() and torch.equal(first, second)
    reference = StorageWeakRef(first.untyped_storage())
    del first, second
    assert reference.expired()
    assert cell.flat(False).numel() == x.numel()


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
            return F.leaky_relu(y, 0.1).sum() + (y.sin().sum() * 0 if shared else 0)

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
            # A NaN shows in its whole group, where groups are what the other reader is content with.
            clean = codec.group if shared and isinstance(codec, GroupQuant) else 3
            assert torch.equal(plain.scale.grad[clean:], model.scale.grad[clean:])
            assert clean == 3 or model.scale.grad[:clean].isnan().all()
        (row,) = [row for row in handle.report().sites if row.operation == "LeakyRelu"]
        assert shared or row.packed_bytes == 64 * 1024 // 8


class Gated(nn.Module):
    """An activation between two layers; the first bias sees its gates, and nothing that is lossy."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.activation, self.last = nn.Linear(64, 64), activation, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(x)))


def gates_agree(activation: nn.Module, policy=None, between=None, dtype: torch.dtype = torch.float32) -> list:
    """Rows of the activation, after steps in which the first bias had the gradient that plain autograd gives it."""
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


def test_limits_that_nobody_can_be_asked_for_or_no_float_has_leave_the_choice_to_the_policy() -> None:
    def move(model: Gated, step: int) -> None:
        model.activation.cap = (1.0, 0.5, 2.0)[step]

    (row,) = gates_agree(Capped(), EXACT, move)
    assert row.codec == "ErrorBounded"
    for activation in (nn.Hardtanh(-0.3, 0.7), nn.Hardtanh(-math.inf, 1.0)):
        (row,) = gates_agree(activation, EXACT)
        assert row.codec == "ErrorBounded"


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
    with encke.compress():
        y = got.relu().sum()
    y.backward()
    assert torch.equal(expected.grad, got.grad)


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
        with encke.compress() as handle:
            y = pool(x * 1)
        y.square().sum().backward()
        pool(plain * 1).square().sum().backward()
        assert torch.equal(x.grad, plain.grad)
        assert handle.report().packed_bytes < x.nbytes / 8


@pytest.mark.parametrize("shape", [(2048, 32), (4, 16, 24, 24)])
def test_a_negative_log_likelihood_keeps_no_probabilities(shape: tuple[int, ...]) -> None:
    """Only log-softmax's backward reads them, and labels stay as they are: to look at them means to wait for a GPU."""

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
        (name,) = (name for name in rows if name.startswith("NllLoss"))
        assert name.endswith(".self") and rows[name].packed_bytes == 0
        assert handle.report().packed_bytes == pytest.approx(labels.nbytes, abs=64)


@pytest.mark.parametrize(
    ("power", "codec"),
    [(2, "GroupQuant"), (3.0, "GroupQuant"), (4, "kept"), (0.5, "kept"), (-1, "kept"), (1.5, "kept"), (None, "kept")],
)
def test_only_small_whole_powers_may_be_lossy(power: float | None, codec: str) -> None:
    """Derivatives of others divide, or have no value at what came back below zero."""

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
    """Packing them again would be a copy, and on a GPU one that is waited for. What does shrink stays packed."""

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
    assert [found.get("Div.other") for found in codecs] == ["Lossless", None, None]
    assert [found["Mul.other"] for found in codecs] == ["Lossless"] * 3


def test_frozen_convolutions_keep_no_input() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
    model[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    handle = encke.attach(model, EXACT)
    x = torch.randn(8, 4, 32, 32)
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(x).square().mean().backward()
        assert torch.equal(plain[0].weight.grad, model[0].weight.grad)
    rows = {row.layer: row for row in handle.report().sites}
    assert rows["1"].codec == "shape" and rows["1"].packed_bytes == 0 and rows["0"].packed_bytes > 0


@pytest.mark.parametrize("functional", [False, True])
def test_a_convolution_that_is_thawed_gets_its_gradient_or_an_error(functional: bool) -> None:
    class Convs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return F.conv2d(x, self.second.weight).sin() if functional else self.second(x).sin()

    model = Convs()
    model.second.requires_grad_(False)
    plain = copy.deepcopy(model)
    encke.attach(model, EXACT)
    x = torch.randn(8, 4, 32, 32)
    for step in range(4):
        if step == 2:
            plain.second.requires_grad_(True)
            model.second.requires_grad_(True)
            if functional:
                with pytest.raises(RuntimeError, match="what is frozen"):
                    model(x).sum().backward()
        for m in (plain, model):
            m.zero_grad()
            m(x).sum().backward()
        assert torch.equal(plain.first.weight.grad, model.first.weight.grad)
    assert torch.equal(plain.second.weight.grad, model.second.weight.grad)


def test_exception_in_forward_leaves_no_hooks() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.fail = net(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.net(x)
            if self.fail:
                raise ValueError("no")
            return y

    model = Fails()
    handle = encke.attach(model, EXACT)
    with pytest.raises(ValueError, match="no"):
        model(batch())
    assert hooks_are_clear()
    model.fail = False
    model(batch()).sum().backward()
    assert handle.report().packed_bytes > 0


def test_ctrl_c_in_forward_is_cleared_by_the_next_call_or_detach() -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.stop = net(), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if self.stop:
                raise KeyboardInterrupt
            return y

    model = Interrupted()
    plain = copy.deepcopy(model)
    handle = encke.attach(model, EXACT)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    model.stop = plain.stop = False
    for m in (plain, model):
        m(batch()).sum().backward()
    assert_same(grads_of(plain), grads_of(model))
    assert hooks_are_clear()
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.detach()
    assert hooks_are_clear()


def test_calling_a_part_of_the_model_is_compressed_too() -> None:
    _, model, handle = twins()
    model[2](batch()).sum().backward()
    assert [row.layer for row in handle.report().sites] == ["2"]


def test_what_the_last_operation_saved_is_found_in_any_output() -> None:
    class Result:
        def __init__(self, value: torch.Tensor) -> None:
            self.value, self.me = [{"deep": value}], self

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> Result:
            return Result(self.linear(x).softmax(-1))

    model = Wrapped()
    handle = encke.attach(model)
    model(batch()).value[0]["deep"].square().sum().backward()
    assert {row.operation for row in handle.report().sites} == {"Addmm", "Softmax"}


def test_two_threads_train_at_once() -> None:
    torch.manual_seed(0)
    plain, inputs = resnet()
    model = copy.deepcopy(plain)
    encke.attach(model, EXACT)
    expected = []
    for i in range(2):
        x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i))
        expected.append(torch.autograd.grad(plain(x).square().mean(), list(plain.parameters())))
    failures: list[object] = []

    def work(i: int) -> None:
        try:
            x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(i))
            for _ in range(6):
                got = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
                assert all(torch.equal(a, b) for a, b in zip(expected[i], got, strict=True))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_deepcopy_and_save_give_unattached_models() -> None:
    _, model, handle = twins()
    model(batch()).sum().backward()
    before = handle.report().forwards
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        other(batch()).sum().backward()
        assert handle.report().forwards == before
        second = encke.attach(other, EXACT)
        other(batch()).sum().backward()
        assert second.report().forwards == 1 and len(other._forward_hooks) == 1
        second.detach()
        assert not other._forward_hooks and not other._forward_pre_hooks


def test_a_model_that_changes_its_order_is_learnt_anew() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.first = nn.Parameter(torch.randn(128, 128)), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.w * 1
            return (x @ w if self.first else w @ x).tanh()

    plain, model = Changing(), Changing()
    plain.load_state_dict(model.state_dict())
    encke.attach(model, EXACT)
    x = torch.randn(128, 128)
    for first in (True, False, True, False):
        for m in (plain, model):
            m.first = first
            m.zero_grad()
            m(x).sum().backward()
        assert torch.equal(plain.w.grad, model.w.grad)


def test_another_reader_of_what_was_kept_as_a_shape_is_an_error_once_and_then_right() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.pool = nn.Parameter(torch.randn(4, 4, 3, 3)), True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.relu(x * 1)
            return F.max_pool2d(y, 2).sin() if self.pool else F.conv2d(y, self.w).sin()

    model = Branch()
    plain = copy.deepcopy(model)
    encke.attach(model, EXACT)
    x = torch.randn(4, 4, 32, 32, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    model.pool = plain.pool = False
    with pytest.raises(RuntimeError, match="order of operations"):
        model(x).sum().backward()
    for pool in (False, True, False):
        model.pool = plain.pool = pool
        for m in (plain, model):
            m.zero_grad()
            m(x).sum().backward()
        if not pool:
            assert torch.equal(plain.w.grad, model.w.grad)


def test_custom_functions_and_torch_func() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.detach() * 2)
            return x**3

        @staticmethod
        def backward(ctx, g):
            x, twice = ctx.saved_tensors
            return g * 3 * x * twice / 2

    x = batch().requires_grad_()
    with encke.compress(Fixed(ErrorBounded(0.1))) as handle:
        y = Cube.apply(x * 1).sin().sum()
    y.backward()
    rows = {row.slot: row for row in handle.report().sites if row.operation == "Cube"}
    assert rows["tensors0"].codec == "ErrorBounded" and rows["tensors0"].bound == "0.1 abs"
    assert rows["tensors1"].bound == "" or rows["tensors1"].codec != "ErrorBounded"
    model = net()
    encke.attach(model)
    params = dict(model.named_parameters())
    loss = lambda p: torch.func.functional_call(model, p, (batch(),)).sum()  # noqa: E731
    got = torch.func.grad(loss)(params)
    assert set(got) == set(params)


def run_chain(steps: int, model: nn.Module) -> list[torch.Tensor]:
    grads = []
    for step in range(steps):
        model.zero_grad()
        model(batch(step)).square().mean().backward()
        grads.append(model[0].weight.grad.clone())
    return grads


def chain(layers: int) -> nn.Sequential:
    torch.manual_seed(5)
    parts = [m for _ in range(layers) for m in (nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))]
    return nn.Sequential(*parts)


class Reuse:
    """Counts saved tensors at an address where another one, freed since, was saved in the same forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.seen, self.step = 0, {}, -1
        original = encoding.shared_cell

        def counting(site, t, layout, length, forward):
            if forward.step != self.step:
                self.seen, self.step = {}, forward.step
            known = self.seen.get(t.data_ptr())
            self.count += known is not None and known.expired()
            self.seen[t.data_ptr()] = StorageWeakRef(t.untyped_storage())
            return original(site, t, layout, length, forward)

        monkeypatch.setattr(hooks, "shared_cell", counting)


def test_a_thousand_reused_addresses_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = chain(20), chain(20)
    expected = run_chain(80, plain)
    reuse = Reuse(monkeypatch)
    encke.attach(model, EXACT)
    got = run_chain(80, model)
    assert reuse.count >= 1000
    assert_same(expected, got)


def test_without_the_storage_guard_gradients_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice: this is what it looks like."""

    plain, model = chain(20), chain(20)
    expected = run_chain(5, plain)
    for module in (encoding, ledger):
        monkeypatch.setattr(module, "storage_ref", lambda storage: lambda: "alive")
    encke.attach(model, EXACT)
    got = run_chain(5, model)
    assert not all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_nothing_stays_alive_after_backward() -> None:
    _, model, _ = twins()
    y = model(batch())
    cells = [saved.cell for _, _, saved in saved_in(y) if saved.cell is not None]
    import weakref

    references = [weakref.ref(cell) for cell in cells]
    del cells
    y.sum().backward()
    del y
    gc.collect()
    assert references and all(reference() is None for reference in references)


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_agree_with_what_plain_autograd_holds(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    held: dict[int, int] = {}
    keep = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        keep.append(t.untyped_storage())
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*inputs)
    for tensor in (*model.parameters(), *model.buffers()):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    handle = encke.attach(model)
    for _ in range(3):
        out = model(*inputs)
        assert handle.report().saved_bytes == pytest.approx(sum(held.values()), rel=0.01)
        del out


def test_the_mask_codec_gives_booleans() -> None:
    assert Mask().encode(torch.tensor([0.0, 2.0, -1.0])).decode().tolist() == [False, True, True]


def test_a_function_may_call_an_attribute_as_we_like() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.slots = 3
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Square.apply(self.conv(x)).sum()

    model = Net()
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 32, 32)
    encke.attach(model, Fixed(ErrorBounded(0)))
    for m in (plain, model, model):
        m.zero_grad()
        m(x).backward()
    assert torch.equal(plain.conv.weight.grad, model.conv.weight.grad)
