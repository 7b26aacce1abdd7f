"""Models and comparisons shared by the tests of capture."""

from __future__ import annotations

import torch
from torch import nn

import encke
from encke.capture.hooks import SMALL
from encke.codecs import ErrorBounded
from encke.policies import Fixed

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
