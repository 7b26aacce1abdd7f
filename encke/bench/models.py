"""Models of the registry as `encke bench` measures them: built for a size, with synthetic data, loss and optimizer."""

from __future__ import annotations

import importlib
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

from encke.tools.errors import UsageError
from encke.tools.extras import install_hint, installed
from encke.train.models import registry
from encke.train.models.registry import MODELS, OURS, UNETS, ModelInfo
from encke.train.models.vision import torchvision_models

LLAMAS = ("llama", "llama_small")


class WithLoss(nn.Module):
    """A GPT that computes its loss in its forward pass, as transformers' models do when they are given labels."""

    def __init__(self, gpt: nn.Module) -> None:
        super().__init__()
        self.gpt = gpt

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next token."""
        targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


def source(name: str) -> str:
    """Return the package that a model comes from."""
    if name in (*LLAMAS, "bert") or (name == "gpt2" and installed("transformers")):
        return "transformers"
    return "encke" if MODELS[name].data == "tokens" or name in OURS or name in UNETS else "torchvision"


def check_installed(name: str) -> None:
    """Raise an error if the package that the model comes from is not installed."""
    package = source(name)
    if package != "encke" and not installed(package):
        raise UsageError(f"--models {name} comes from {package}: {install_hint(package)}")


def build(name: str, size: int) -> nn.Module:
    """Build a model with random weights for images of `size` pixels or sequences of `size` tokens, without dropout."""
    if source(name) == "transformers":
        return transformers_model(name, size)
    info = MODELS[name]
    if name in UNETS:
        return registry.unet(name, info.classes)
    if info.data == "images":
        return registry.build(info.model, info.classes, info.channels, size)
    shape = replace(info.model, context=max(size, info.model.context), dropout=0.0)
    return WithLoss(registry.build(shape, info.classes, tokens=True))


def transformers_model(name: str, tokens: int) -> nn.Module:
    """Build a language model of transformers: GPT-2 small, a Llama, or BERT base for masked tokens."""
    if installed("torchvision"):
        torchvision_models()  # transformers imports it as well, and fails where its operators do not load
    transformers = importlib.import_module("transformers")
    shape, length = MODELS[name].model, max(tokens, MODELS[name].model.context)
    sizes = {
        "vocab_size": MODELS[name].classes,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
    }
    if name == "bert":
        sizes |= {"intermediate_size": 4 * shape.width, "max_position_embeddings": length}
        config = transformers.BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        kind = transformers.BertForMaskedLM
    elif name in LLAMAS:
        sizes |= {"intermediate_size": 11 * shape.width // 4, "max_position_embeddings": length}
        config, kind = transformers.LlamaConfig(**sizes, use_cache=False), transformers.LlamaForCausalLM
    else:
        off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config = transformers.GPT2Config(n_positions=length, **off, use_cache=False)
        kind = transformers.GPT2LMHeadModel
    config._attn_implementation = "sdpa"
    return kind(config)


def synthetic_batch(info: ModelInfo, batch: int, size: int, device: str) -> tuple[Tensor, ...]:
    """Return a synthetic batch, the same in every process: images or volumes with labels, or tokens."""
    generator = torch.Generator(device).manual_seed(0)
    if info.data == "tokens":
        return (torch.randint(info.classes, (batch, size), generator=generator, device=device),)
    sides = (size,) * (2 if info.data == "images" else 3)
    images = torch.randn(batch, info.channels, *sides, generator=generator, device=device)
    labelled = (batch, *sides) if info.dense else (batch,)
    return images, torch.randint(info.classes, labelled, generator=generator, device=device)


def loss_of(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    """Run one forward pass and return the loss for images and labels, or for tokens that predict their successors.

    BERT predicts the tokens themselves; the choice of masked tokens does not affect time and memory.
    """
    if len(data) == 2:
        return F.cross_entropy(model(data[0]), data[1])
    if hasattr(getattr(model, "_orig_mod", model), "config"):
        return model(input_ids=data[0], labels=data[0]).loss
    return model(data[0])


def optimizer_for(model: nn.Module, info: ModelInfo) -> Optimizer:
    """Return the usual optimizer for such a model."""
    if info.optimizer == "adamw":
        return AdamW(model.parameters(), lr=info.lr)
    return SGD(model.parameters(), lr=info.lr, momentum=0.9)
