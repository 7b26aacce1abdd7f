"""Networks of torchvision: the import, and changes that adapt them to the data."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import nn

from encke.tools.errors import UsageError

MISSING_OPERATOR = "operator torchvision::nms does not exist"
_schemas: list[torch.library.Library] = []


def torchvision_models() -> ModuleType:
    """Return `torchvision.models`, even if torchvision's compiled operators do not load.

    A torchvision built for CUDA beside a torch built for the CPU (the default of a package index) fails on import: it
    looks up operators that its compiled library would have declared. They are declared here instead.
    """
    try:
        return importlib.import_module("torchvision.models")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError("this model comes from torchvision: pip install 'encke[train]'") from error
    except RuntimeError as error:
        if MISSING_OPERATOR not in str(error):
            raise
    declare_operators()
    return importlib.import_module("torchvision.models")


def declare_operators() -> None:
    """Declare the two operators that torchvision looks up while it is imported; no model calls them."""
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _schemas.append(library)  # a schema lives as long as its Library


def small_stem(network: nn.Module, name: str) -> None:
    """Adapt a network to small images: a first convolution of 3 x 3 with stride 1, and no pooling after it."""
    if name.startswith(("resnet", "resnext", "wide_resnet")):
        network.conv1 = small_conv(network.conv1)
        network.maxpool = nn.Identity()
    elif name.startswith("densenet"):
        features = network.features
        assert isinstance(features, nn.Sequential)
        features.conv0 = small_conv(features.conv0)
        features.pool0 = nn.Identity()
    else:
        raise UsageError(f"model.stem cifar is for the networks called resnet and densenet, not {name}")


def small_conv(old: object) -> nn.Conv2d:
    """Return a 3 x 3 convolution with stride 1 that replaces a larger one."""
    assert isinstance(old, nn.Conv2d)
    conv = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def other_channels(network: nn.Module, channels: int) -> None:
    """Give the first convolution another number of input channels."""
    path, old = next((path, module) for path, module in network.named_modules() if isinstance(module, nn.Conv2d))
    same: dict[str, Any] = {name: getattr(old, name) for name in ("kernel_size", "stride", "padding")}
    parent, _, name = path.rpartition(".")
    conv = nn.Conv2d(channels, old.out_channels, bias=old.bias is not None, **same)
    setattr(network.get_submodule(parent), name, conv)
