"""Layers of the attached model, and module hooks that are not copied with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from encke.capture.facts import SiteFacts
from encke.torch_internals import eval_frame_callback

ERROR_ATTACHED_BEFORE_COMPILE = (
    "encke: this model was attached and then compiled. Compile it first, then attach: "
    "handle = encke.attach(torch.compile(model), ...)"
)


class Layer:
    """A module of the attached model: its name, and the sites of each of its calls within one forward pass."""

    __slots__ = ("calls", "compress", "module", "name", "parent")

    def __init__(self, name: str, module: nn.Module | None, parent: Layer | None, compress: bool) -> None:
        self.name = name
        self.module = weakref.ref(module) if module is not None else None
        self.parent = parent
        self.compress = compress
        self.calls: list[list[SiteFacts | None]] = []

    def owner(self) -> nn.Module | None:
        """Return the module, if it still exists."""
        return self.module() if self.module is not None else None


def inside_compile() -> bool:
    """Return whether torch.compile is tracing this call, or runs it piece by piece after a failed trace."""
    return torch.compiler.is_compiling() or callable(eval_frame_callback())


def inert(*args: Any) -> None:
    """Do nothing: replaces our hooks in copied and loaded models."""


class ModuleHook:
    """A module hook that is not copied: copies and pickles of the model get one that does nothing."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        """Handle the module's call."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return inert

    def __reduce__(self) -> Any:
        return (_inert, ())


def _inert() -> Callable[..., None]:
    return inert


class WatchHook(ModuleHook):
    """Hook that notices a compiler around the attached model, which calls the layers directly."""

    def __init__(self, function: Callable[[nn.Module], Any], layer: Layer) -> None:
        super().__init__(layer)
        self.function = function

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if torch.compiler.is_compiling():
            self.function(module)


def layers_of(model: nn.Module, left_alone: Collection[str] = ()) -> list[Layer]:
    """Return all modules of a model as layers; those with a name in `left_alone` are not compressed."""
    layers: dict[str, Layer] = {}
    for full_name, module in model.named_modules():
        name = layer_name(full_name)
        parent = layers.get(full_name.rpartition(".")[0]) if full_name else None
        layers[full_name] = Layer(name, module, parent, name not in left_alone)
    return list(layers.values())


def drop_inert(module: nn.Module) -> None:
    """Remove the inert hooks that a copied model still has."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook is inert]:
            del hooks[key]
    for key in [key for key in module._forward_hooks_always_called if key not in module._forward_hooks]:
        del module._forward_hooks_always_called[key]


def layer_name(name: str) -> str:
    """Return a layer's name without the prefixes that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))
