"""Models of the study, and a few plain training steps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encke.study.data import Data, images, text
from encke.tools.errors import UsageError
from encke.train.models.registry import build
from encke.train.settings import Model

Name = Literal["resnet18", "vgg16", "gpt", "cnn"]
RATES = {"resnet18": 0.005, "vgg16": 0.01, "gpt": 1e-3, "cnn": 0.05}
"""Learning rates with which the loss does not rise in the first steps, without a warm-up."""


def make(name: Name, path: Path | None, batch: int, device: str, seed: int) -> tuple[nn.Module, Data]:
    """Return the model called `name`, with fresh weights, and its data."""
    data = text(path) if name == "gpt" else images(path)
    if batch > len(data.inputs):
        raise UsageError(f"--batch {batch}: {data.name} has only {len(data.inputs)} samples")
    torch.manual_seed(seed)
    model = build(Model(name, "cifar" if name == "resnet18" else "imagenet"), data.classes, tokens=name == "gpt")
    return model.to(device).train(), data


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy, for images and for text."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def optimizer_of(model: nn.Module, name: Name, rate: float | None) -> torch.optim.Optimizer:
    """Return SGD with momentum for images, AdamW for text."""
    if name == "gpt":
        return torch.optim.AdamW(model.parameters(), lr=rate or RATES[name])
    return torch.optim.SGD(model.parameters(), lr=rate or RATES[name], momentum=0.9)


def train(
    model: nn.Module,
    name: Name,
    data: Data,
    batch: int,
    steps: Iterable[int],
    seed: int,
    device: str,
    rate: float | None = None,
) -> list[float]:
    """Run ordinary training steps and return the losses."""
    optimizer = optimizer_of(model, name, rate)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    losses = []
    for _ in steps:
        inputs, targets = data.batch(batch, generator)
        loss = loss_of(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
