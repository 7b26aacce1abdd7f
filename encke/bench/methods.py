"""Methods of training in less memory, measured side by side: policies of Encke and the alternatives."""

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
from encke.policies import Comet, Policy
from encke.policies.presets import FIXED, PRESETS
from encke.torch_internals import set_activation_memory_budget
from encke.train.models.registry import blocks

OFFLOADERS = {"torchtune": "torchtune.training", "trl": "trl.models.activation_offloading"}
"""Packages with a streamed offload, and the module that has their `OffloadActivations`."""
POLICIES = PRESETS | FIXED | {"dithered": Comet(rounding="dithered")}
"""Encke's policies by name: the presets, codecs with one setting for all sites, and the default at a variable rate."""


@dataclass(frozen=True)
class Method:
    """A change to a plain training: before the model is compiled, afterwards, or around its forward passes."""

    kind: Literal["plain", "encke", "other"] = "other"
    wrap: Callable[[nn.Module], None] | None = None
    """Changes the model before it is compiled."""
    policy: Policy | None = None
    """Policy to attach after it is compiled."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Context of every forward pass."""
    needs: Literal["", "GPU", "compile", "offloader"] = ""

    def missing(self, device: str) -> str:
        """Return the reason why the method cannot be measured here; empty if it can."""
        if self.needs in ("GPU", "offloader") and device != "cuda":
            return "only on a GPU"
        if self.needs == "offloader" and offloader() is None:
            return f"not installed: {' or '.join(OFFLOADERS)}"
        return ""

    def attach(self, model: nn.Module, optimizer: Optimizer) -> Handle | None:
        """Attach the policy, if the method has one."""
        return encke.attach(model, self.policy, optimizer=optimizer) if self.policy is not None else None


def checkpoint_blocks(model: nn.Module, **options: Any) -> None:
    """Checkpoint the forward pass of each block: only its input is saved, the rest is recomputed."""
    for block in blocks(model):
        block.forward = partial(call_checkpointed, block.forward, options)


def call_checkpointed(function: Callable[..., Any], options: dict[str, Any], *args: Any, **named: Any) -> Any:
    """Call a block under a checkpoint. Lists are copied, because DenseNet extends its list before the recomputation."""
    fixed = [list(arg) if isinstance(arg, list) else arg for arg in args]
    return checkpoint(function, *fixed, use_reentrant=False, **options, **named)


def checkpoint_selectively(model: nn.Module) -> None:
    """Checkpoint each block, but keep results that are expensive: convolutions, matrix products, attention."""
    attention = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    names = ["convolution", "mm", "addmm", "bmm", "baddbmm", *(f"_scaled_dot_product_{kind}" for kind in attention)]
    kept = [getattr(torch.ops.aten, name).default for name in names]
    for module in model.modules():
        if getattr(module, "inplace", False):
            # Results that are kept are not recomputed, so nothing may change them in place.
            module.inplace = False  # type: ignore[assignment]
    checkpoint_blocks(model, context_fn=partial(create_selective_checkpoint_contexts, kept))


def save_on_cpu() -> AbstractContextManager[Any]:
    """Keep saved tensors in pinned memory of the host."""
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def offloader() -> str | None:
    """Return the installed package with a streamed offload."""
    return next((name for name in OFFLOADERS if importlib.util.find_spec(name)), None)


def streamed_offload() -> AbstractContextManager[Any]:
    """Copy saved tensors to the host and back on a stream of their own."""
    module = importlib.import_module(OFFLOADERS[str(offloader())])
    return module.OffloadActivations(use_pin_memory=True, use_streams=True)


def checkpoint_and_pack(model: nn.Module) -> None:
    """Checkpoint each block, and let the policy pack the blocks' inputs, which it keeps exactly otherwise."""
    checkpoint_blocks(model)
    encke.register_reader("Checkpoint", "input", "smooth")


def set_activation_budget(model: nn.Module, share: float) -> None:
    """Make the compiler save only a share of the activations and recompute the rest."""
    set_activation_memory_budget(share)


METHODS = {
    "plain": Method("plain"),
    **{name: Method("encke", policy=policy) for name, policy in POLICIES.items()},
    "checkpoint": Method(wrap=checkpoint_blocks),
    "selective": Method(wrap=checkpoint_selectively),
    "checkpoint-packed": Method(wrap=checkpoint_and_pack, policy=POLICIES["default"]),
    "save-on-cpu": Method(around=save_on_cpu, needs="GPU"),
    "offload": Method(around=streamed_offload, needs="offloader"),
    "budget50": Method(wrap=partial(set_activation_budget, share=0.5), needs="compile"),
    "budget30": Method(wrap=partial(set_activation_budget, share=0.3), needs="compile"),
    "budget20": Method(wrap=partial(set_activation_budget, share=0.2), needs="compile"),
}
"""Every method by its name. docs/bench.md explains them."""
ON_REQUEST = ("careful", "aggressive", "group8", "dithered", "budget30", "checkpoint-packed")
"""Methods that are measured only if they are named: they differ little from others."""


def compiled_as(graphs: bool) -> str:
    """Describe how a model is compiled."""
    return "compiled, CUDA graphs" if graphs else "compiled"


def usual(compiled: bool) -> list[str]:
    """Return the methods that are measured if none is named."""
    names = (name for name in METHODS if name not in ON_REQUEST)
    return [name for name in names if compiled or METHODS[name].needs != "compile"]
