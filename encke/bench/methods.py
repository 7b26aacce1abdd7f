"""The ways to train in less memory that are measured side by side."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import encke
from encke.api import Handle
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Comet, Division, Fixed
from encke.train.models.registry import blocks

OFFLOADERS = {"torchtune": "torchtune.training", "trl": "trl.models.activation_offloading"}
"""Packages with a streamed offload, and the module that has their `OffloadActivations`."""


@dataclass(frozen=True)
class Method:
    """What is done to a plain training: before it is compiled, once it is, and around its forward passes."""

    label: str
    kind: Literal["plain", "encke", "other"] = "other"
    wrap: Callable[[nn.Module], None] | None = None
    attach: Callable[[nn.Module, Optimizer], Handle] | None = None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    needs: Literal["", "GPU", "compile", "offloader"] = ""

    def missing(self, device: str, compiled: bool) -> str:
        """Why it cannot be measured here, in words; empty if it can."""
        if self.needs in ("GPU", "offloader") and device != "cuda":
            return "only on a GPU"
        if self.needs == "compile" and not compiled:
            return "only with --compile"
        if self.needs == "offloader" and offloader() is None:
            return f"not installed: {' or '.join(OFFLOADERS)}"
        return ""


def policy(chosen: Any) -> Callable[[nn.Module, Optimizer], Handle]:
    return lambda model, optimizer: encke.attach(model, chosen, optimizer=optimizer)


def default(model: nn.Module, optimizer: Optimizer) -> Handle:
    """Exactly what users write."""
    return encke.attach(model, optimizer=optimizer)


def checkpointed(model: nn.Module, **options: Any) -> None:
    """Puts a checkpoint around the forward pass of each block: only its input is saved, the rest computed again."""
    for block in blocks(model):
        block.forward = partial(checkpointed_call, block.forward, options)


def checkpointed_call(function: Callable[..., Any], options: dict[str, Any], *args: Any, **named: Any) -> Any:
    """Calls a block under a checkpoint. A list is copied: DenseNet makes it longer before it is computed again."""
    fixed = [list(arg) if isinstance(arg, list) else arg for arg in args]
    return checkpoint(function, *fixed, use_reentrant=False, **options, **named)


def selective(model: nn.Module) -> None:
    """Checkpoints that keep what is expensive to compute: results of convolutions, matrix products, attention."""
    aten = torch.ops.aten
    kept = [
        aten.convolution.default,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    ]
    for module in model.modules():
        if getattr(module, "inplace", False):
            # What is kept must not be changed: it is not computed again.
            module.inplace = False  # type: ignore[assignment]
    checkpointed(model, context_fn=partial(create_selective_checkpoint_contexts, kept))


def on_cpu() -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def offloader() -> str | None:
    """The installed package with a streamed offload."""
    return next((name for name in OFFLOADERS if importlib.util.find_spec(name)), None)


def streamed() -> AbstractContextManager[Any]:
    module = importlib.import_module(OFFLOADERS[str(offloader())])
    return module.OffloadActivations(use_pin_memory=True, use_streams=True)


def budget(share: float) -> Callable[[nn.Module], None]:
    """Lets the compiler save so much of what it would save; the rest is computed again."""

    def set_budget(model: nn.Module) -> None:
        from torch._functorch import config

        config.activation_memory_budget = share

    return set_budget


METHODS = {
    "plain": Method("plain", "plain"),
    "default": Method("default: Comet()", "encke", attach=default),
    "comet-nearest": Method("Comet nearest", "encke", attach=policy(Comet(rounding="nearest"))),
    "division": Method("Division", "encke", attach=policy(Division())),
    "group2": Method("GroupQuant 2 bits", "encke", attach=policy(Fixed(GroupQuant(bits=2)))),
    "group4": Method("GroupQuant 4 bits", "encke", attach=policy(Fixed(GroupQuant(bits=4)))),
    "bounded": Method("ErrorBounded 1 % rel", "encke", attach=policy(Fixed(ErrorBounded(0.01, "rel")))),
    "checkpoint": Method("checkpoint per block", wrap=checkpointed),
    "selective": Method("selective checkpoint", wrap=selective),
    "save-on-cpu": Method("save_on_cpu", around=on_cpu, needs="GPU"),
    "offload": Method("streamed offload", around=streamed, needs="offloader"),
    "budget50": Method("memory budget 0.5", wrap=budget(0.5), needs="compile"),
    "budget20": Method("memory budget 0.2", wrap=budget(0.2), needs="compile"),
}


def compiled_as(graphs: bool) -> str:
    """How a model is compiled, in words."""
    return "compiled, CUDA graphs" if graphs else "compiled"


def usual(compiled: bool) -> list[str]:
    """What is measured if nothing else is asked for."""
    return [name for name, method in METHODS.items() if compiled or method.needs != "compile"]
