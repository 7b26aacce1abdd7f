"""The models of the study, and a few plain steps that bring their gradients to those of a training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from encke.study.data import Data, images, text
from encke.tools.errors import UsageError
from encke.train.models.builders import build

Name = Literal["resnet18", "vgg16", "gpt", "cnn"]
RATES = {"resnet18": 0.005, "vgg16": 0.01, "gpt": 1e-3, "cnn": 0.05}
"""Learning rates with which the loss does not rise in the first steps, without a warm-up."""


def cnn(classes: int) -> nn.Module:
    """Four convolutions with batch norm and ReLU, no pooling between them: enough to see what happens, in seconds."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    features = [*block(3, 16, 1), *block(16, 16, 2), *block(16, 32, 2), *block(32, 32, 1)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 4 * 4, classes))


def make(name: Name, path: Path | None, batch: int, device: str, seed: int) -> tuple[nn.Module, Data]:
    """The model called `name`, with fresh weights, and what it is trained on."""
    data = text(path) if name == "gpt" else images(path)
    if batch > len(data.inputs):
        raise UsageError(f"--batch {batch}: {data.name} has only {len(data.inputs)} samples")
    torch.manual_seed(seed)
    try:
        model = cnn(data.classes) if name == "cnn" else build(name, data.classes)
    except ImportError as error:
        raise UsageError(f"--model {name}: {error}") from error
    return model.to(device).train(), data


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy, for images and for text."""
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def optimizer_of(model: nn.Module, name: Name, rate: float | None) -> torch.optim.Optimizer:
    """SGD with momentum for images, AdamW for text."""
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
    """Ordinary training steps; gives the losses."""
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
