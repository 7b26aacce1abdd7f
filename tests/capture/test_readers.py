"""Readers: learnt from the graph, checked when they read, learnt again when they change."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import encke
from encke.capture.nodes import Origin, origin_of
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed
from tests.capture.common import EXACT, batch, grads_of, net
from tests.integration.test_end_to_end import saved_in


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


def test_the_strictest_reader_decides_from_the_first_pass_on() -> None:
    class Two(nn.Module):
        """One tensor with three readers: ReLU needs a mask, the convolution a bounded error, the power exact values."""

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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_a_frozen_batch_norm_in_evaluation_keeps_no_input(memory_format: torch.memory_format, affine: bool) -> None:
    """In training, or unfrozen, it reads its input again."""
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, affine=affine), nn.Conv2d(8, 8, 3))
    model.to(memory_format=memory_format)
    plain = copy.deepcopy(model)
    handle = encke.attach(model, EXACT)
    x = torch.randn(8, 4, 32, 32).to(memory_format=memory_format)
    codecs = []
    for state in ("frozen", "frozen", "unfrozen" if affine else "trains", "trains", "trains"):
        for m in (plain, model):
            m.zero_grad()
            m[1].train(state == "trains").requires_grad_(state != "frozen")
            m(x).square().mean().backward()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad) if p.grad is not None else q.grad is None
        codecs.append(next(row.codec for row in handle.report().sites if (row.layer, row.slot) == ("1", "input")))
    assert codecs == ["shape", "shape", "ErrorBounded", "ErrorBounded", "ErrorBounded"]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)], ids=repr)
def test_norms_with_frozen_parameters_propagate_the_gradient(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), copy.deepcopy(norm).requires_grad_(False), nn.Conv2d(8, 8, 3))
    plain = copy.deepcopy(model)
    encke.attach(model, EXACT)
    x = torch.randn(8, 4, 32, 32)
    for _ in range(2):
        for m in (plain, model):
            m.zero_grad()
            m(x).square().mean().backward()
        assert torch.equal(plain[0].weight.grad, model[0].weight.grad)
        assert all(p.grad is None for p in model[1].parameters())


def test_a_frozen_linear_layer_keeps_no_input() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64), nn.Linear(64, 64))
    model[1].requires_grad_(False)
    handle = encke.attach(model, EXACT)
    for _ in range(2):
        model(torch.randn(256, 64)).square().mean().backward()
    rows = {row.layer: row for row in handle.report().sites}
    assert "1" not in rows and rows["2"].packed_bytes > 0


@pytest.mark.parametrize("functional", [False, True])
def test_a_convolution_that_is_unfrozen_gets_its_gradient_or_an_error(functional: bool) -> None:
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
    assert all(row.codec == "Lossless" for row in rows.values())
    model = net()
    encke.attach(model)
    params = dict(model.named_parameters())
    loss = lambda p: torch.func.functional_call(model, p, (batch(),)).sum()  # noqa: E731
    got = torch.func.grad(loss)(params)
    assert set(got) == set(params)


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


def gradients(model: nn.Module, inputs, policy, steps: int) -> list[list[torch.Tensor]]:
    """Return the gradients of each step, with the model's counter `n` set to the number of the step."""
    model = copy.deepcopy(model)
    if policy is not None:
        encke.attach(model, policy)
    steps_gradients = []
    for model.n in range(steps):
        model.zero_grad()
        torch.manual_seed(model.n)
        model(inputs(model.n)).square().sum().backward()
        steps_gradients.append(grads_of(model))
    return steps_gradients


def assert_like_plain(model: nn.Module, inputs=batch, policy=EXACT, steps: int = 6) -> None:
    plain = gradients(model, inputs, None, steps)
    for step, (ours, expected) in enumerate(zip(gradients(model, inputs, policy, steps), plain, strict=True)):
        for x, y in zip(ours, expected, strict=True):
            assert torch.equal(x, y), step


class Applied(nn.Module):
    """A function of a linear layer's result and of the step."""

    def __init__(self, function, layer: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.act, self.function, self.n = layer or nn.Linear(64, 64), nn.ReLU(), function, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.layer(x))


def square_of_relu(model: Applied, y: torch.Tensor) -> torch.Tensor:
    return F.relu(y) * 1.0 if model.n < 2 else model.act(y) ** 2


def random_order(model: Applied, y: torch.Tensor) -> torch.Tensor:
    for i in range(6):
        y = y + torch.tanh(model.layer(y)) if (model.n * 7 + i * 3) % 5 < 3 else F.gelu(model.layer(y)) * y
    return y


@pytest.mark.parametrize("function", [square_of_relu, random_order], ids=lambda function: function.__name__)
def test_operations_that_change_from_step_to_step_are_right(function) -> None:
    assert_like_plain(Applied(function), steps=8)
    for step in gradients(Applied(function), batch, encke.policies.Comet(), 8):
        assert all(gradient.isfinite().all() for gradient in step)


def test_a_power_that_changes_is_exact_where_it_must_be() -> None:
    powers = (2, 2, -1.5, 2, 0.5, 3)
    model = Applied(lambda model, y: y.abs() ** powers[model.n])
    plain, ours = gradients(model, batch, None, 6), gradients(model, batch, encke.policies.Comet(), 6)
    for expected, found in zip(plain, ours, strict=True):
        # A few bits suffice for the linear layer's input; its bias depends on the power alone.
        assert (found[1] - expected[1]).norm() <= 0.2 * expected[1].norm()
    for step in (2, 4):
        assert torch.equal(plain[step][1], ours[step][1])


def test_pooling_windows_may_change_at_the_same_place() -> None:
    windows = [(2, 1), (2, 1), (3, 1), (2, 2)]

    def pool(model: Applied, y: torch.Tensor) -> torch.Tensor:
        kernel, dilation = windows[model.n % 4]
        return F.max_pool2d(y, kernel, 2, dilation=dilation)

    def pool_in_layer(model: Applied, y: torch.Tensor) -> torch.Tensor:
        model.act.kernel_size, model.act.dilation = windows[model.n % 4]
        return model.act(y)

    images = lambda step: torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(step))  # noqa: E731
    assert_like_plain(Applied(pool, nn.Conv2d(3, 8, 3)), images, steps=8)
    model = Applied(pool_in_layer, nn.Conv2d(3, 8, 3))
    model.act = nn.MaxPool2d(2, 2)
    assert_like_plain(model, images, steps=8)


@pytest.mark.parametrize("way", ["functional", "weight", "layer"])
def test_an_embedding_may_grow(way: str) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(256, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (F.embedding(x, self.table.weight) if way == "functional" else self.table(x)) * 2

    model = Table()
    encke.attach(model, EXACT)
    for step in range(4):
        if step == 2:
            if way == "layer":  # like `resize_token_embeddings` of transformers
                model.table = nn.Embedding(1000, 32)
            else:
                model.table.weight = nn.Parameter(torch.randn(1000, 32))
        model.zero_grad()
        model(torch.arange(16384).view(16, 1024) % len(model.table.weight)).sum().backward()
    assert (model.table.weight.grad != 0).all()


def test_noise_of_rrelu_is_kept_as_it_is() -> None:
    assert_like_plain(Applied(lambda model, y: F.rrelu(y - 1, training=True)))


def test_another_slot_than_the_one_learnt_is_an_error_once_and_then_right() -> None:
    model = Applied(lambda model, y: (y * 2) * (y * 3))
    encke.attach(model, Fixed(GroupQuant(4)))
    for _ in range(2):
        model(batch()).sum().backward()
    out = model(batch())
    learnt = [saved.facts for _, _, saved in saved_in(out) if saved.site.operation == "Mul"]
    first, second = learnt
    first.raw_slot, second.raw_slot = second.raw_slot, first.raw_slot
    with pytest.raises(RuntimeError, match=r"step 3: .*\(root\).*Mul\..*MulBackward0"):
        out.sum().backward()
    for _ in range(2):
        model(batch()).sum().backward()


@pytest.mark.parametrize("kind", ["mask", "noise", "straight-through", "scaled", "long"])
def test_computed_weights_are_not_packed(kind: str) -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(256, 256))
            self.register_buffer("mask", (torch.rand(256, 256) > 0.5).float())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.w
            if kind == "mask":
                w = w * self.mask
            elif kind == "noise":
                w = w + 0.1 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
            elif kind == "straight-through":
                w = w + (w.sign() - w).detach()
            elif kind == "long":
                for _ in range(40):
                    w = w * 0.999 + self.w * 1e-3
            else:
                w = w * 0.5
            return F.linear(x, w)

    model = Computed()
    plain = copy.deepcopy(model)
    encke.attach(model, Fixed(GroupQuant(2)))
    for step in range(3):
        x = torch.randn(64, 256, generator=torch.Generator().manual_seed(step))
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        model(mine).square().sum().backward()
        plain(theirs).square().sum().backward()
        assert torch.equal(mine.grad, theirs.grad)


def test_the_origin_of_a_result_is_found_once_for_each_node() -> None:
    w = nn.Parameter(torch.ones(4))
    leaf, data = torch.ones(4, requires_grad=True), torch.ones(4)
    known: dict[int, Origin] = {}
    weight = w * 2
    assert origin_of((weight + leaf).grad_fn, known) is Origin.LEAVES
    assert origin_of(weight.grad_fn, known) is Origin.PARAMETERS
    product = torch.dot(weight, data)
    assert origin_of((product + w).grad_fn, known) is Origin.DATA
    assert origin_of(None, known) is Origin.DATA
    branches = weight
    for _ in range(100):  # each node twice the paths
        branches = branches + branches
    assert origin_of(branches.grad_fn, known) is Origin.PARAMETERS
    assert len(known) == 103


def test_memory_written_through_data_between_two_savings_is_packed_twice() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(1024)), nn.Parameter(torch.ones(1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0 * self.a[0]
            first = (x * self.a).sum().sigmoid()
            x.data.mul_(-2)
            return first * 0 + (x * self.a).sum() + (x * self.b).sum()

    model = Writing()
    encke.attach(model, EXACT)
    x = torch.randn(64, 1024)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
        torch.testing.assert_close(model.b.grad, -2 * x.sum(0))
        torch.testing.assert_close(model.a.grad[1:], -2 * x.sum(0)[1:])
