"""The network that the settings name: torchvision's, or one of the few that it lacks."""

from __future__ import annotations

import difflib
from typing import Any

from torch import nn

from encke.tools.errors import UsageError
from encke.train.models.builders import Gpt, torchvision_models
from encke.train.models.resnet164 import ResNet164
from encke.train.settings import Model

OURS = ("resnet164", "gpt", "digits")


def network(model: Model, classes: int, channels: int = 3, tokens: bool = False) -> nn.Module:
    """The network with `classes` outputs for images of `channels` channels; for tokens, `classes` kinds of them."""
    if tokens != (model.name == "gpt"):
        raise UsageError(
            f"model.name {model.name} is for images, and these data are tokens; gpt is for tokens"
            if tokens
            else "model.name gpt is for tokens: data.kind text, or synthetic with data.classes 0"
        )
    if model.stem == "cifar" and model.name in OURS:
        raise UsageError(f"model.stem cifar is for networks of torchvision; {model.name} has a stem of its own")
    if model.name == "gpt":
        if model.width % model.heads:
            raise UsageError(f"model.width ({model.width}) must be a multiple of model.heads ({model.heads})")
        dropout = 0.1 if model.dropout is None else model.dropout
        return Gpt(classes, model.context, model.layers, model.heads, model.width, dropout)
    if model.name in OURS and model.dropout is not None:
        raise UsageError(f"model.dropout: {model.name} has no dropout")
    if model.name == "resnet164":
        return ResNet164(classes, channels)
    if model.name == "digits":
        return digits(classes, channels)
    return vision(model, classes, channels)


def vision(model: Model, classes: int, channels: int) -> nn.Module:
    """A network of torchvision, made to fit."""
    try:
        theirs = torchvision_models()
    except ImportError as error:
        raise UsageError(f"model.name {model.name}: {error}") from None
    known = [name for name in theirs.list_models(module=theirs) if not name.startswith("inception")]
    if model.name not in known:
        close = difflib.get_close_matches(model.name, [*known, *OURS], 1, 0.5)
        hint = f"did you mean {close[0]}?" if close else "resnet18, vgg16, densenet121, ... of torchvision.models"
        raise UsageError(f"there is no model {model.name!r}; {hint}")
    more = {} if model.dropout is None else {"dropout": model.dropout}
    try:
        made = theirs.get_model(model.name, num_classes=classes, weights=None, **more)
    except TypeError:
        raise UsageError(f"model.dropout: {model.name} has no dropout that can be set") from None
    if model.stem == "cifar":
        small_stem(made, model.name)
    if channels != 3:
        other_channels(made, channels)
    return made


def small_stem(made: nn.Module, name: str) -> None:
    """For small images: the first convolution becomes 3 x 3 with stride 1, and the pooling behind it goes."""
    if name.startswith(("resnet", "resnext", "wide_resnet")):
        made.conv1 = small_conv(made.conv1)
        made.maxpool = nn.Identity()
    elif name.startswith("densenet"):
        features = made.features
        assert isinstance(features, nn.Sequential)
        features.conv0 = small_conv(features.conv0)
        features.pool0 = nn.Identity()
    else:
        raise UsageError(f"model.stem cifar is for the networks called resnet and densenet, not {name}")


def small_conv(old: nn.Module | object) -> nn.Conv2d:
    assert isinstance(old, nn.Conv2d)
    conv = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def other_channels(made: nn.Module, channels: int) -> None:
    """Gives the first convolution another number of input channels."""
    for name, old in made.named_modules():
        if isinstance(old, nn.Conv2d):
            same: dict[str, Any] = {name: getattr(old, name) for name in ("kernel_size", "stride", "padding")}
            conv = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **same)
            above, _, last = name.rpartition(".")
            setattr(made.get_submodule(above), last, conv)
            return


def digits(classes: int, channels: int = 1) -> nn.Sequential:
    """Five convolutions with batch norm and ReLU, two poolings, one linear layer: for digits of 28 x 28."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

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
