"""Programs of containers: recognised where nothing but their layers decides what they compute."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from encke.fused.program import PRODUCT, SUM, program_of


class Block(nn.Module):
    """A convolution and a shortcut; derived classes have other forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu, self.again = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.ReLU(True)
        self.drop: nn.Module | None = None
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        if self.drop is not None:
            out = self.drop(out)
        out += x
        return self.relu(out)


def test_calls_of_a_block():
    block = Block()
    program = program_of(block)
    assert program is not None
    modules = program.current()
    assert modules is not None and modules[0] is block
    called = [(call.kind, modules[call.layer], call.inputs, call.in_place) for call in program.calls]
    assert called == [
        (nn.Conv2d, block.conv, (0,), False), (nn.BatchNorm2d, block.norm, (1,), True), (SUM, block, (2, 0), True)
    ]  # fmt: skip
    assert modules[program.last] is block.relu


def test_containers_inside_are_followed_and_calls_of_one_layer_are_numbered():
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Identity())
    twice = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU())
    program = program_of(nn.Sequential(inner, twice[1], twice, nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))
    assert program is not None and program.last == -1
    assert [call.inputs for call in program.calls] == [(n,) for n in range(7)]
    assert [call.number for call in program.calls] == [0, 0, 0, 0, 1, 0, 0]


def test_changed_children_end_a_program():
    block = Block()
    program = program_of(block)
    assert program is not None
    block.drop = nn.Identity()
    assert program.current() is None
    block = Block()
    program = program_of(block)
    block.relu = nn.ReLU()
    assert program is not None and program.current() is None
    program = program_of(block)
    assert program is not None and program.current() is not None
    del block
    assert program.current() is None


class Random(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x))) if random.random() < 2 else x


class Training(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x))) if self.training else x


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) * self.scale)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        return relu(self.norm(self.conv(x)))


class Remembers(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.conv = self.conv
        return self.relu(self.norm(self.conv(x)))


class Truth(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x))) if self.conv else x


class Pair(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, self.relu(self.norm(self.conv(x)))


class Unused(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.relu(self.norm(self.conv(x)))
        return self.relu(self.norm(self.conv(x)))


class WritesOver(Block):
    """The result of the norm is read after it was written over."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        return self.relu(self.again(out) + out)


class WritesOverItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(self.again(x))))


class Thrice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) + x + x)


class Constant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) + 1)


class Calls(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Function(Block):
    """A function that is made inside may name anything."""

    def forward(self, x: Tensor) -> Tensor:
        drawn = lambda: random.random() < 2  # noqa: E731
        out = self.norm(self.conv(x))
        return self.relu(out) if drawn() else out


class Hidden(Block):
    """The class's attribute, not the child, is what the forward reads."""

    drop = nn.Identity().forward  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self._modules["drop"] = nn.Identity()


class Called(nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return x

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class CallsOtherwise(Block):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Called()


again = True


class Method(Block):
    """Methods may not name more than the forward, nor a global with the name of a child."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.end(self.norm(self.conv(x))))

    def end(self, x: Tensor) -> Tensor:
        return self.again(x) if again else x


class StaticMethod(Method):
    @staticmethod
    def end(x: Tensor) -> Tensor:  # type: ignore[override]
        return x


class Wrapped(Block):
    @functools.wraps(Block.forward)
    def forward(self, *args: Tensor) -> Tensor:
        return Block.forward(self, *args)


class UnusedSum(Block):
    """The activation at the end takes another value than the last one."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out + x  # noqa: B018
        return self.relu(out)


OTHERS = [
    Random, Training, Scaled, Functional, Remembers, Truth, Pair, Unused, WritesOver, WritesOverItsInput, Thrice,
    Constant, Calls, Wrapped, Function, Hidden, CallsOtherwise, Method, StaticMethod, UnusedSum,
]  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS, ids=[kind.__name__ for kind in OTHERS])
def test_others_are_not_recognised(kind):
    assert program_of(Block()) is not None and program_of(kind()) is None


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Conv2d(8, 8, 1)],
        [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Dropout()],
        [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU()],
        [nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), nn.ReLU()],
        [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)],
        [nn.Conv2d(8, 8, 1), nn.SyncBatchNorm(8), nn.ReLU()],
        [layer for _ in range(5) for layer in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())],
    ],
    ids=["one layer", "dropout", "norm first", "two convolutions", "convolution last", "other norm", "long"],
)
def test_layers_that_a_block_does_not_run(layers):
    assert program_of(nn.Sequential(*layers)) is None


def test_a_program_computes_what_the_forward_does():
    """The stand-ins follow the same path as tensors do."""
    block = Block().eval()
    x = torch.randn(2, 8, 4, 4)
    program = program_of(block)
    assert program is not None
    modules, values = program.current(), [x]
    assert modules is not None
    for call in program.calls:
        taken = [values[number] for number in call.inputs]
        values.append(call.kind(*taken) if call.kind in (SUM, PRODUCT) else modules[call.layer](taken[0]))
    assert torch.equal(modules[program.last](values[-1]), block(x))


# -- squeeze-and-excite -----------------------------------------------------------------------------------------------


class Squeeze(nn.Module):
    """Squeeze-and-excite as in torchvision; derived classes have other forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Sigmoid()
        self.fc1, self.act, self.fc2 = nn.Conv2d(8, 2, 1), nn.SiLU(True), nn.Conv2d(2, 8, 1)

    def scale(self, x: Tensor) -> Tensor:
        return self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) * x


class OtherOrder(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        return x * scale


class Written(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        x *= scale
        return x


class Added(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) + x


class Squared(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale(x)
        return scale * scale * x


class Large(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Tripled(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) * x * 3


class Again(Squeeze):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) * x + x


class Gated(Squeeze):
    """The gate of a large value."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) * self.gate(x)


class Drawn(Squeeze):
    def scale(self, x: Tensor) -> Tensor:
        scale = self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))
        return scale if random.random() < 2 else self.gate(scale)


def squeezed(squeeze: nn.Module, act: nn.Module | None = None) -> nn.Sequential:
    """Return a container of convolutions with squeeze-and-excite between."""
    first = [nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), act or nn.SiLU(True)]
    return nn.Sequential(nn.Sequential(*first), squeeze, nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)))


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Hardswish, nn.ReLU])
@pytest.mark.parametrize("kind", [Squeeze, OtherOrder])
def test_calls_of_squeeze_and_excite(kind, activation):
    block = squeezed(kind(), activation())
    program = program_of(block)
    assert program is not None
    kinds = [nn.Conv2d, nn.BatchNorm2d, activation, nn.AdaptiveAvgPool2d, nn.Conv2d, nn.SiLU, nn.Conv2d, nn.Sigmoid]
    assert [call.kind for call in program.calls] == [*kinds, PRODUCT, nn.Conv2d, nn.BatchNorm2d]
    product = program.calls[8]
    assert product.inputs == ((8, 3) if kind is Squeeze else (3, 8))
    modules = program.current()
    assert modules is not None and modules[product.layer] is block[1]


@pytest.mark.parametrize("kind", [Written, Added, Squared, Large, Tripled, Again, Gated, Drawn])
def test_other_forwards_of_squeeze_and_excite(kind):
    assert program_of(squeezed(Squeeze())) is not None and program_of(squeezed(kind())) is None


class Short(Squeeze):
    def scale(self, x: Tensor) -> Tensor:
        return self.gate(self.pool(x))


def test_squeeze_and_excite_elsewhere():
    """Behind another activation, at the end, alone, or without one; called twice it saves two products."""
    squeeze = Short()
    others: list[nn.Module] = [squeezed(squeeze, nn.Sigmoid()), squeezed(squeeze)[:2], squeeze, squeezed(nn.Sigmoid())]
    assert [program_of(each) for each in others] == [None] * 4
    first, silu = squeezed(squeeze), nn.SiLU()
    assert program_of(nn.Sequential(first, silu, *squeezed(Short())[1:])) is not None
    assert program_of(nn.Sequential(first, silu, *squeezed(squeeze)[1:])) is None


def test_methods_that_change_end_a_program(monkeypatch):
    block = squeezed(Squeeze())
    program = program_of(block)
    assert program is not None and program.current() is not None
    with monkeypatch.context() as patch:
        patch.setattr(Squeeze, "scale", Drawn.scale)
        assert program.current() is None
    block[1].scale = nn.Identity()
    assert program.current() is None
    del block[1].scale
    assert program.current() is not None
    block[1].__dict__["scale"] = squeezed
    assert program.current() is None
