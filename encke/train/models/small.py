"""Small convolutional networks that train in seconds on a CPU."""

from __future__ import annotations

from torch import nn


def block(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    """A 3 x 3 convolution with batch norm and ReLU."""
    return [nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def digits(classes: int, channels: int = 1) -> nn.Sequential:
    """Five convolutions, two poolings and one linear layer, for digits of 28 x 28."""
    return nn.Sequential(
        *block(channels, 32),
        *block(32, 32),
        nn.MaxPool2d(2),
        *block(32, 96),
        *block(96, 96),
        *block(96, 96),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Linear(96 * 7 * 7, classes),
    )


def cnn(classes: int, channels: int = 3) -> nn.Sequential:
    """Four convolutions without pooling between them, for studies that take seconds."""
    features = [*block(channels, 16), *block(16, 16, 2), *block(16, 32, 2), *block(32, 32)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 4 * 4, classes))
