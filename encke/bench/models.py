"""The models that memory and speed are measured with: what one is built from, trained on and cut into."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from encke.tools.errors import UsageError
from encke.train.models.gpt import Gpt
from encke.train.models.vision import torchvision_models

CLASSES = 1000
VOCABULARY = 50257
MINI_VOCABULARY = 256
OURS = "encke.train.models.gpt.Gpt"


@dataclass(frozen=True)
class Model:
    """A model by name: `build` takes the size of an image or the number of tokens."""

    build: Callable[[int], nn.Module]
    data: Literal["images", "tokens"] = "images"
    batch: int = 256
    """Images or sequences in a step on a GPU, if nothing else is asked for."""
    vocabulary: int = 0

    @property
    def source(self) -> str:
        """Whose model it is."""
        if self.data == "images":
            return "torchvision"
        return gpt2_source() if self.build is gpt2 else OURS


def vision(name: str) -> Callable[[int], nn.Module]:
    return lambda image: getattr(torchvision_models(), name)(num_classes=CLASSES)


def vit(image: int) -> nn.Module:
    return torchvision_models().vit_b_16(num_classes=CLASSES, image_size=image)


class WithLoss(nn.Module):
    """A GPT that computes its loss in its forward pass, as transformers' models do when they are given labels."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor) -> Tensor:
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


def gpt2_source() -> str:
    """Whose GPT-2 it is."""
    return "transformers" if importlib.util.find_spec("transformers") else OURS


def gpt2(tokens: int) -> nn.Module:
    """GPT-2 small with weights by chance and without dropout: transformers' where it is installed, or our own."""
    context = max(tokens, 1024)
    if gpt2_source() != "transformers":
        return WithLoss(Gpt(VOCABULARY, context, layers=12, heads=12, width=768, dropout=0.0))
    if importlib.util.find_spec("torchvision"):
        torchvision_models()  # transformers imports it, too, and would stumble where its operators do not load
    theirs = importlib.import_module("transformers")
    config = theirs.GPT2Config(n_positions=context, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False)
    config._attn_implementation = "sdpa"
    return theirs.GPT2LMHeadModel(config)


def gpt_mini(tokens: int) -> nn.Module:
    """The small GPT of the accuracy table: 6 layers, width 384; without dropout."""
    return WithLoss(Gpt(MINI_VOCABULARY, tokens, dropout=0.0))


MODELS = {
    "resnet18": Model(vision("resnet18")),
    "resnet50": Model(vision("resnet50")),
    "wide_resnet50_2": Model(vision("wide_resnet50_2")),
    "vgg16": Model(vision("vgg16")),
    "densenet161": Model(vision("densenet161"), batch=128),
    "efficientnet_b0": Model(vision("efficientnet_b0")),
    "vit_b_16": Model(vit, batch=128),
    "gpt2": Model(gpt2, "tokens", 16, VOCABULARY),
    "gpt_mini": Model(gpt_mini, "tokens", 64, MINI_VOCABULARY),
}


def check_installed(name: str) -> None:
    """An error if the package that the model comes from is not there."""
    if MODELS[name].data == "images" and importlib.util.find_spec("torchvision") is None:
        raise UsageError(f"--models {name} comes from torchvision: pip install 'encke[train]'")


def data_for(model: Model, batch: int, size: int, device: str) -> tuple[Tensor, ...]:
    """The same synthetic batch in every process."""
    seeded = torch.Generator(device).manual_seed(0)
    if model.data == "tokens":
        return (torch.randint(model.vocabulary, (batch, size), generator=seeded, device=device),)
    images = torch.randn(batch, 3, size, size, generator=seeded, device=device)
    return images, torch.randint(CLASSES, (batch,), generator=seeded, device=device)


def loss_of(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    """One forward pass: the loss for images and labels, or for tokens that predict the next ones."""
    if len(data) == 2:
        return F.cross_entropy(model(data[0]), data[1])
    if hasattr(getattr(model, "_orig_mod", model), "config"):
        return model(input_ids=data[0], labels=data[0]).loss
    return model(data[0])


def optimizer_for(model: nn.Module, kind: Model) -> Optimizer:
    """What such a model is usually trained with."""
    if kind.data == "tokens" or kind.build is vit:
        return AdamW(model.parameters(), lr=1e-4)
    return SGD(model.parameters(), lr=0.01, momentum=0.9)
