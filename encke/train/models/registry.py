"""Models that commands know by name: how to build each, and its settings for training and measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from encke.tools.errors import UsageError
from encke.tools.suggest import suggestion
from encke.train import own_code
from encke.train.models.gpt import Gpt
from encke.train.models.repvgg import RepVgg
from encke.train.models.resnet164 import ResNet164
from encke.train.models.small import cnn, digits
from encke.train.models.unet import UNet
from encke.train.models.vision import other_channels, small_stem, torchvision_models
from encke.train.settings import Model, is_python_path

OURS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet164": ResNet164, "repvgg_a0": RepVgg, "digits": digits, "cnn": cnn,
}  # fmt: skip
"""Networks for images that torchvision lacks: functions of the number of classes and of channels."""
UNETS: dict[str, int] = {"unet2d": 2, "unet3d": 3}
"""Networks for segmentation, and their dimensions. They are measured; `encke train` has no data for them."""


@dataclass(frozen=True)
class ModelInfo:
    """A model as `encke bench` and `encke study` use it."""

    model: Model
    data: Literal["images", "volumes", "tokens"] = "images"
    classes: int = 1000
    """Number of classes of the images, or size of the vocabulary."""
    batch: int = 256
    """Images or sequences in a step on a GPU."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """The usual optimizer of such a model; sgd has momentum 0.9."""
    lr: float = 0.01
    """A learning rate with which the loss does not rise in the first steps, without a warm-up."""
    dense: bool = False
    """Whether each pixel has a label of its own."""
    channels: int = 3
    """Channels of the images or volumes."""


MODELS = {
    "cnn": ModelInfo(Model("cnn"), lr=0.05),
    "digits": ModelInfo(Model("digits"), classes=10, channels=1, lr=0.02),
    "resnet18": ModelInfo(Model("resnet18"), lr=0.005),
    "resnet18_cifar": ModelInfo(Model("resnet18", stem="cifar"), classes=10, lr=0.05),
    "resnet50": ModelInfo(Model("resnet50")),
    "wide_resnet50_2": ModelInfo(Model("wide_resnet50_2")),
    "vgg16": ModelInfo(Model("vgg16")),
    "densenet121": ModelInfo(Model("densenet121"), batch=128),
    "densenet161": ModelInfo(Model("densenet161"), batch=128),
    "efficientnet_b0": ModelInfo(Model("efficientnet_b0")),
    "mobilenet_v3_large": ModelInfo(Model("mobilenet_v3_large")),
    "regnet_y_1_6gf": ModelInfo(Model("regnet_y_1_6gf")),
    "convnext_tiny": ModelInfo(Model("convnext_tiny"), batch=128, optimizer="adamw", lr=1e-4),
    "swin_t": ModelInfo(Model("swin_t"), batch=128, optimizer="adamw", lr=1e-4),
    "unet2d": ModelInfo(Model("unet2d"), classes=2, batch=32, dense=True),
    "unet3d": ModelInfo(Model("unet3d"), "volumes", 2, 2, dense=True, channels=1),
    "vit_b_16": ModelInfo(Model("vit_b_16"), batch=128, optimizer="adamw", lr=1e-4),
    "gpt": ModelInfo(Model("gpt"), "tokens", 256, 64, "adamw", 1e-3),
    "gpt2": ModelInfo(
        Model("gpt", context=1024, layers=12, heads=12, width=768, dropout=0.0), "tokens", 50257, 16, "adamw", 1e-4
    ),
    "llama": ModelInfo(
        Model("gpt", context=4096, layers=12, heads=16, width=1024, dropout=0.0), "tokens", 32000, 4, "adamw", 1e-4
    ),
    "llama_small": ModelInfo(
        Model("gpt", context=128, layers=2, heads=2, width=64, dropout=0.0), "tokens", 8192, 4, "adamw", 1e-4
    ),
    "bert": ModelInfo(
        Model("gpt", context=512, layers=12, heads=12, width=768, dropout=0.0), "tokens", 30522, 32, "adamw", 1e-4
    ),
}
"""Models that are measured and studied. `encke train` builds any model of torchvision.models as well."""


def unet(name: str, classes: int) -> UNet:
    """Build a U-Net: images have three channels, volumes one."""
    dimensions = UNETS[name]
    return UNet(classes, 3 if dimensions == 2 else 1, dimensions)


def build(model: Model, classes: int, channels: int = 3, side: int | None = None, tokens: bool = False) -> nn.Module:
    """Build the network that the settings name, with fresh weights.

    Args:
        model: Name and shape of the network.
        classes: Outputs, or the size of the vocabulary.
        channels: Channels of the images.
        side: Pixels along a side of the images, for transformers that are built for one size.
        tokens: Whether the data are tokens.
    """
    if is_python_path(model.name):
        return own_network(model, classes)
    if tokens != (model.name == "gpt"):
        raise UsageError(
            f"model.name {model.name} is for images, and these data are tokens; gpt is for tokens"
            if tokens
            else "model.name gpt is for tokens: data.kind text, or synthetic with data.classes 0"
        )
    if model.stem == "cifar" and (tokens or model.name in OURS):
        raise UsageError(f"model.stem cifar is for networks of torchvision; {model.name} has a stem of its own")
    if tokens:
        if model.width % model.heads:
            raise UsageError(f"model.width ({model.width}) must be a multiple of model.heads ({model.heads})")
        dropout = 0.1 if model.dropout is None else model.dropout
        return Gpt(classes, model.context, model.layers, model.heads, model.width, dropout)
    if model.name not in OURS:
        return vision_network(model, classes, channels, side)
    if model.dropout is not None:
        raise UsageError(f"model.dropout: {model.name} has no dropout")
    return OURS[model.name](classes, channels)


def own_network(model: Model, classes: int) -> nn.Module:
    """Build a network with the user's own function or class."""
    where = f"model.name {model.name}"
    if model.stem == "cifar" or model.dropout is not None:
        name = "stem" if model.stem == "cifar" else "dropout"
        raise UsageError(f"{where}: model.{name} does not change a model of your own; do that where it is built")
    network = own_code.call(own_code.load(model.name, where), where, classes=classes, num_classes=classes)
    if not isinstance(network, nn.Module):
        raise UsageError(f"{where} must return a torch.nn.Module, got {type(network).__name__}")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise UsageError(f"{where}: the model has no parameters to train")
    return network


def vision_network(model: Model, classes: int, channels: int, side: int | None) -> nn.Module:
    """Build a network of torchvision, with the requested stem and channels."""
    try:
        library = torchvision_models()
    except ImportError as error:
        raise UsageError(f"model.name {model.name}: {error}") from None
    known = [name for name in library.list_models(module=library) if not name.startswith("inception")]
    if model.name not in known:
        hint = suggestion(model.name, [*known, *OURS, "gpt"]) or "choose one of torchvision.models, such as resnet18"
        if model.name.endswith(".py"):
            hint = f"name a function in the file, such as {model.name}:build"
        raise UsageError(f"there is no model {model.name!r}; {hint}")
    options: dict[str, Any] = {} if model.dropout is None else {"dropout": model.dropout}
    if side is not None and model.name.startswith("vit_"):
        options["image_size"] = side
    try:
        network = library.get_model(model.name, num_classes=classes, weights=None, **options)
    except TypeError:
        raise UsageError(f"model.dropout: {model.name} has no dropout that can be set") from None
    except AssertionError as error:
        raise UsageError(f"model.name {model.name} takes no images of {side} pixels ({error}): set data.size") from None
    if model.stem == "cifar":
        small_stem(network, model.name)
    if channels != 3:
        other_channels(network, channels)
    return network


BLOCKS = (
    "BasicBlock",
    "Bottleneck",
    "_DenseLayer",
    "MBConv",
    "InvertedResidual",
    "ResBottleneckBlock",
    "CNBlock",
    "SwinTransformerBlock",
    "EncoderBlock",
    "GPT2Block",
    "LlamaDecoderLayer",
    "BertLayer",
    "Block",
)
"""Class names of the blocks that activation checkpointing is applied to."""


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the natural blocks of a model.

    VGG has none: its layers are grouped, in place, from pooling to pooling. A small network is one block.
    """
    found = [module for module in model.modules() if type(module).__name__ in BLOCKS]
    features = getattr(model, "features", None)
    if found or features is None:
        return found or [model]
    groups: list[list[nn.Module]] = [[]]
    for layer in features:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    model.features = nn.Sequential(*(nn.Sequential(*group) for group in groups if group))
    return list(model.features)
