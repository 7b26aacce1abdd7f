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


class Wrapped(Block):
    @functools.wraps(Block.forward)
    def forward(self, *args: Tensor) -> Tensor:
        return Block.forward(self, *args)


OTHERS = [
    Random, Training, Scaled, Functional, Remembers, Truth, Pair, Unused, WritesOver, WritesOverItsInput, Thrice,
    Constant, Calls, Wrapped,
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
