"""Small trainings shared by the tests of Comet."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import encke
from encke.policies import Comet

ROUNDINGS = ["stochastic", "nearest"]


def batches(count: int = 4, size: int = 32) -> list[tuple[Tensor, Tensor]]:
    """Return smooth images of ten kinds with noise, half of the labels wrong: random, but always the same.

    Labels that can be learnt at once would leave gradients in few samples only, which are no statistics.
    """
    generator = torch.Generator().manual_seed(7)
    kinds = F.interpolate(torch.randn(10, 3, 4, 4, generator=generator), size=(16, 16), mode="bilinear")
    found = []
    for _ in range(count):
        labels = torch.randint(0, 10, (size,), generator=generator)
        images = kinds[labels] + 0.5 * torch.randn(size, 3, 16, 16, generator=generator)
        wrong = torch.rand(size, generator=generator) < 0.5
        found.append((images, torch.where(wrong, torch.randint(0, 10, (size,), generator=generator), labels)))
    return found


BATCHES = batches()


def net(norm: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(24, 8, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


WEIGHTS = ["0", "3", "5", "8"]


def sgd(model: nn.Module, lr: float = 0.005, momentum: float = 0.9) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=momentum)


def train(model: nn.Module, optimizer: Optimizer | None, steps: int, first: int = 1, lr: float = 0.02) -> None:
    """Run steps with the same batches in the same order; without an optimizer, with a plain update by hand."""
    for step in range(first, first + steps):
        x, y = BATCHES[step % len(BATCHES)]
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if optimizer is not None:
            optimizer.step()
        else:
            with torch.no_grad():
                for p in model.parameters():
                    p -= lr * p.grad


def run(policy: Comet, steps: int = 15, norm: bool = True, lr: float = 0.005) -> encke.api.Handle:
    model = net(norm)
    optimizer = sgd(model, lr)
    handle = encke.attach(model, policy, optimizer)
    train(model, optimizer, steps)
    # The model would otherwise be gone, and the handle with it.
    handle.model = model  # type: ignore[attr-defined]
    return handle


def weight_rows(handle: encke.api.Handle, step: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of the history that have a weight's gradient."""
    return [row for row in handle.history if "predicted" in row and step in (None, row["step"])]


def last(handle: encke.api.Handle) -> dict[str, dict[str, Any]]:
    """Return the last collection step's rows of weights, by layer."""
    return {row["layer"]: row for row in weight_rows(handle)}


def steps_of(handle: encke.api.Handle) -> list[int]:
    return sorted({row["step"] for row in weight_rows(handle)})


def off(handle: encke.api.Handle) -> float:
    """Return the largest log ratio, in absolute value, of predicted to measured errors of the settings in force."""
    rows = [row for row in weight_rows(handle) if row["in_force_measured"] is not None]
    assert {row["layer"] for row in rows} == set(WEIGHTS)
    return max(abs(math.log(row["in_force_predicted"] / row["in_force_measured"])) for row in rows)


def hooks(model: nn.Module, optimizer: Any) -> Iterator[int]:
    yield len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    for p in model.parameters():
        yield len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ())


def hooks_left(model: nn.Module, optimizer: Any) -> int:
    return sum(hooks(model, optimizer))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)
