"""Nothing is read that was recomputed from lossy values, whatever the operations between the two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from tests.compiled.common import EIGHT, as_inductor_gets_it, compile, error, gradients, same

BACKENDS = ["aot_eager", as_inductor_gets_it]


class Two(nn.Module):
    """Two linear layers, a function of their results, and a third layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.function(self.a(x), self.b(x)))


def routed(a: Tensor, shares: Tensor) -> Tensor:
    """Weigh by the largest shares, whose indices backward alone reads."""
    top = shares.topk(2, 1).values.t()[:, :, None]
    return (a * top).sum(0) * shares.max(1, keepdim=True).values


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": lambda a, b: torch.maximum(a.tanh(), b.sigmoid()) * a * b,
    "amax": lambda a, b: (a - a.amax(1, keepdim=True)) * a.tanh().amax(1, keepdim=True) + b,
    "routed": lambda a, b: routed(a, b[:, :8].softmax(1)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_comparisons_and_single_results_are_those_of_exact_values(name: str, backend: Any) -> None:
    model = Two(FUNCTIONS[name])
    compiled, x = compile(model, backend=backend), torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    plain = gradients(compiled, x)
    with encke.attach(compiled, Fixed(ErrorBounded(0)), min_bytes=1):
        assert same(plain, gradients(compiled, x))
    with encke.attach(compiled, EIGHT, min_bytes=1) as handle:
        assert error(plain, gradients(compiled, x)) < 0.1
        assert handle.report().ratio > 1.2
