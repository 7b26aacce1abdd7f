"""Allocation: the fewest bits that keep the limit, most where they remove most error for each byte."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.codecs import GroupQuant
from encke.codecs.layout import flatten
from encke.policies import Comet
from encke.policies.comet.allocate import BITS, Memory, allocate
from encke.policies.comet.stats import TensorStats


def memory(values: int, error: float, least: int = 0) -> Memory:
    """Return a tensor whose error falls like that of uniform codes."""
    return Memory(values, [error / (2**bits - 1) ** 2 for bits in BITS], least)


def cost(memories: list[Memory], chosen: tuple[int, ...] | list[int]) -> int:
    return sum(each.values * BITS[i] for each, i in zip(memories, chosen, strict=True))


def error(memories: list[Memory], chosen: tuple[int, ...] | list[int]) -> float:
    return sum(each.errors[i] for each, i in zip(memories, chosen, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_near_the_best_of_all_choices(seed: int) -> None:
    random.seed(seed)
    memories = [memory(2 ** random.randint(8, 16), 10 ** random.uniform(-2, 2)) for _ in range(5)]
    everything = list(itertools.product(range(len(BITS)), repeat=len(memories)))
    allowed = error(memories, random.choice(everything))
    chosen = allocate(memories, allowed, 0)
    assert error(memories, chosen) <= allowed * (1 + 1e-9)
    best = min(cost(memories, each) for each in everything if error(memories, each) <= allowed * (1 + 1e-9))
    largest = max(each.values for each in memories)
    assert cost(memories, chosen) <= best + 4 * largest  # greedy is off by one step at most


def test_equal_tensors_are_treated_alike_and_small_ones_get_more_bits() -> None:
    alike = [memory(1024, 1.0) for _ in range(4)]
    assert allocate(alike, math.inf, 0) == [0, 0, 0, 0]
    assert allocate(alike, 4.001 * alike[0].errors[1], 0) == [1, 1, 1, 1]
    assert allocate(alike, 0.0, 0) == 4 * [len(BITS) - 1]
    small, large = memory(1024, 1.0), memory(1 << 20, 1.0)
    bits = allocate([small, large], 1.1 * large.errors[0], 0)
    assert bits[0] > bits[1] == 0


def test_error_that_falls_late_counts_by_all_bits_that_it_takes() -> None:
    late = Memory(1024, [1.0, 0.9, *[0.0] * (len(BITS) - 2)])
    assert allocate([late], 0.1, 0) == [2]
    # Step by step, 0.2 for the first bit would come before 0.1 and then 0.9.
    assert allocate([late, Memory(1024, [0.2, *[0.0] * (len(BITS) - 1)])], 0.2, 0) == [2, 0]
    assert allocate([Memory(1024, [1.0, 0.5, 0.6, 0.6])], 0.1, 0) == [1]  # more bits that make it worse are not taken


def test_least_bits_are_kept_and_spare_bits_are_spent() -> None:
    assert allocate([memory(1024, 1.0, least=1)], math.inf, 0) == [1]
    small, large = memory(1024, 1.0), memory(1 << 20, 1.0)
    assert allocate([small, large], math.inf, 6 * 1024) == [3, 0]
    assert allocate([small, large], math.inf, 6 * 1024 - 1) == [2, 0]
    assert allocate([small, large], math.inf, 1024) == [1, 0]
    assert allocate([], 1.0, 1.0) == []


class Wide(nn.Module):
    """Two weights: the first with a large input, the second with a small one."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Conv2d(3, 64, 3, padding=1), function, nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)).mean([2, 3]))


def rows(function: nn.Module, sigma: float) -> dict[str, dict]:
    torch.manual_seed(0)
    model = Wide(function)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    handle = encke.attach(model, Comet(sigma, every=1), optimizer)
    x = torch.randn(16, 3, 16, 16)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) * torch.randn(16, 10, generator=torch.Generator().manual_seed(0))).sum().backward()
        optimizer.step()
    found = {row["operation"]: row for row in handle.history if row["step"] == 3}
    handle.detach()
    return found


@pytest.mark.parametrize(
    "function", [nn.GELU(), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.Hardswish(), nn.Mish()], ids=repr
)
def test_function_is_judged_by_the_error_of_its_derivative(function: nn.Module) -> None:
    coarse, fine = (
        rows(function, sigma)[type(function).__name__.replace("GELU", "Gelu").replace("SiLU", "Silu")]
        for sigma in (1e3, 1e-3)
    )
    assert coarse["bits"] == 2 and fine["bits"] == 8
    assert 0 < fine["propagated"] < 0.05 < coarse["propagated"] < 2


def test_propagated_error_of_a_function_is_the_measured_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.GELU())
    x, codec = torch.randn(64, 64), GroupQuant(2)
    handle = encke.attach(model, encke.policies.Fixed(codec), overrides={"0": None})
    seen: list[Tensor] = []
    model[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    model(x).sum().backward()
    handle.detach()
    model(x).sum().backward()
    flat, layout = flatten(model[0](x).detach())
    stats = TensorStats(flat, layout, codec.encode_flat(flat, layout), [codec], 0, "Gelu")
    measured = (seen[0] - seen[1]).square().sum() / seen[1].square().sum()
    assert float(stats.tensors[2]) == pytest.approx(float(measured), rel=0.1)


class Products(nn.Module):
    """A batched product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.first(x), self.second(x))


def test_fewest_bits_of_a_reader_are_part_of_the_allocation() -> None:
    model = Products()
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    handle = encke.attach(model, Comet(1e3), optimizer)
    model(torch.randn(4, 64, 64)).square().sum().backward()
    optimizer.step()
    found = {(row["operation"], row["slot"]): row["bits"] for row in handle.history}
    handle.detach()
    assert found["Bmm", "self"] == found["Bmm", "mat2"] == 4
