"""Forward passes of each thread: when our saved-tensor hooks are active.

Module hooks notice the calls of layers; fused layers report their calls themselves.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from encke.capture.deferred import DeferredForward
from encke.capture.ledger import Tally
from encke.capture.modules import ERROR_ATTACHED_BEFORE_COMPILE, Layer, ModuleHook, inside_compile
from encke.capture.nodes import Origin
from encke.capture.saved import Saved, SharedCell
from encke.capture.sites import Need, Site
from encke.policies.base import Collector
from encke.torch_internals import (
    functorch_interpreter,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_allowed,
    top_saved_tensors_hooks,
)

ACCUMULATE = 0xFFFFFFFFFFFFFFFF
"""Sequence number of every AccumulateGrad node; these nodes save no tensors."""


class Frame:
    """A layer's call in progress."""

    __slots__ = ("index", "input", "layer", "lossy", "number", "sites", "sizes")

    def __init__(self, layer: Layer, forward: ForwardPass, inputs: tuple[Any, ...] = ()) -> None:
        calls = layer.calls
        number = forward.calls[layer] = forward.calls.get(layer, -1) + 1
        if len(calls) <= number:
            calls.append([])
        self.layer = layer
        self.number = number
        """Number of this call of the layer within the forward pass."""
        self.sites = calls[number]
        """Facts about the sites of this call, by index; None where none were learnt."""
        self.sizes: dict[int, tuple[int, ...]] | None = None
        """Shapes saved so far in this call, by index; max-pool indices look up their input's shape here."""
        self.lossy: set[int] = set()
        """Indices of the inputs of attention that this call has packed lossily."""
        self.index = 0
        """Tensors saved so far in this call."""
        self.input = weakref.ref(inputs[0]) if inputs and type(inputs[0]) is Tensor else None
        """First input of the call, if it is a tensor."""

    def new_site(self, index: int, operation: str, slot: str, need: Need, dtype: torch.dtype, dimensions: int) -> Site:
        """Return the key of the `index`-th tensor that this call saves."""
        taken = {
            known.site.occurrence
            for i, known in enumerate(self.sites)
            if known is not None and i != index and (known.site.operation, known.site.slot) == (operation, slot)
        }
        occurrence = next(i for i in range(len(taken) + 1) if i not in taken)
        layer, call = self.layer.name, self.number
        return Site(layer, operation, slot, call, occurrence, need, dtype, dimensions, f"{layer}/{call}/{index}")


class ForwardPass:
    """One thread's forward pass in progress."""

    __slots__ = (
        "calls",
        "casts",
        "cells",
        "collection",
        "deferred",
        "frames",
        "measuring",
        "nodes",
        "origins",
        "outer",
        "pending",
        "rank",
        "read_once",
        "recomputations",
        "steady",
        "step",
        "tally",
        "visited",
        "weights",
    )

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything: the next pass starts from here."""
        self.frames.clear()
        self.calls: dict[Layer, int] = {}
        self.cells: dict[tuple[Any, ...], tuple[weakref.ref[SharedCell], weakref.ref[torch.UntypedStorage]]] = {}
        self.casts: dict[tuple[Any, ...], tuple[weakref.ref[SharedCell], weakref.ref[torch.UntypedStorage]]] = {}
        """Cells of cast copies, by `recompute.cast_origin`."""
        self.pending: set[Saved] = set()
        """Saved tensors whose reader is not known yet."""
        self.visited: set[int] = {ACCUMULATE}
        """Sequence numbers of the autograd nodes that were visited already."""
        self.tally = Tally()
        self.weights: set[int] | None = None
        """Storages of the model's parameters and buffers, once they have been needed."""
        self.collection: Collector | None = None
        self.measuring = False
        """Whether queries and keys of attention are measured in this pass."""
        self.nodes: list[Any] = []
        self.origins: dict[int, Origin] = {}
        """Origins of results, by the sequence number of the autograd node."""
        self.outer: Any = None
        """Python frame of the call that switched the hooks on."""
        self.deferred: DeferredForward | None = None
        """Deferred forward of the fused layer that saves next."""
        self.read_once: Tensor | None = None
        """Result of a block that only the layer called now reads."""
        self.step = 0
        self.rank = 0
        self.steady = False
        """Whether sites may save as they did in the last pass: nothing is collected or measured."""
        self.recomputations: Any = None
        """Decisions about tensors that backward recomputes (`recompute.Recomputations`); None if it must not."""

    def run_deferred(self) -> None:
        """Run the deferred forward now, without packing the tensor that it saves."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            deferred.run_unfused()

    def layer_input(self) -> Tensor | None:
        """Return the first input of the call in progress, if it is a tensor."""
        reference = self.frames[-1].input if self.frames else None
        return None if reference is None else reference()

    def push(self, layer: Layer, inputs: tuple[Any, ...] = ()) -> Frame:
        """Begin a call of a layer."""
        frame = Frame(layer, self, inputs)
        self.frames.append(frame)
        return frame


class Threads(threading.local):
    """One forward pass for each thread."""

    def __init__(self) -> None:
        self.forward = ForwardPass()


class Passes:
    """Switch the hooks on when a forward pass of a model begins and off when it ends."""

    def __init__(
        self,
        hooks: tuple[Callable[[Any], Any], Callable[[Any], Any]],
        at_begin: Callable[[ForwardPass], None],
        at_end: Callable[[ForwardPass, Any], None],
    ) -> None:
        """Store the hooks (pack, unpack) and the callbacks for the start of a pass and for its end, with its output."""
        self.hooks = hooks
        self.at_begin = at_begin
        self.at_end = at_end
        self.threads = Threads()
        self.detached = False

    def enter(self, layer: Layer, inputs: tuple[Any, ...] = ()) -> Frame | None:
        """Begin a layer's call, which owns the tensors saved next. The outermost call switches the hooks on if it may.

        Called by a module hook: the call of the module itself is two Python frames up.
        """
        forward = self.threads.forward
        frames = forward.frames
        if frames:
            if layer.parent is frames[-1].layer or not self._stale():
                return forward.push(layer, inputs)
            self.abandon()
        module = layer.owner()
        if self.detached or (module is not None and not module.training):
            return None
        if not torch.is_grad_enabled() or not may_push():
            return None
        return self.begin(layer, sys._getframe(2))

    def begin(self, layer: Layer, outer: Any = None) -> Frame:
        """Switch the hooks on for this thread, until the call `outer` (a Python frame) ends."""
        forward = self.threads.forward
        forward.clear()
        forward.outer = outer
        self.at_begin(forward)
        frame = forward.push(layer)
        push_saved_tensors_hooks(*self.hooks)
        return frame

    def leave(self, layer: Layer, output: Any) -> None:
        """End a layer's call, by return or by exception (`output` is None then)."""
        frames = self.threads.forward.frames
        if not frames or frames[-1].layer is not layer:
            return
        if len(frames) > 1:
            frames.pop()
        else:
            self.finish(output)

    def finish(self, output: Any) -> None:
        """End the forward pass: switch the hooks off and settle what is still pending."""
        forward = self.threads.forward
        self._unhook()
        self.at_end(forward, output)
        forward.clear()

    def abandon(self) -> None:
        """Forget a forward pass that was interrupted, and take its hooks off this thread."""
        forward = self.threads.forward
        if forward.frames:
            self._unhook()
            forward.clear()

    def _unhook(self) -> None:
        top = top_saved_tensors_hooks()
        if top is not None and top[0] == self.hooks[0]:
            pop_saved_tensors_hooks()

    def _stale(self) -> bool:
        """Return whether the call that switched the hooks on has ended unnoticed: Ctrl-C runs no forward hooks."""
        frame: Any = sys._getframe(1)
        outer = self.threads.forward.outer
        while frame is not None and outer is not None:
            if frame is outer:
                return False
            frame = frame.f_back
        return outer is not None


def may_push() -> bool:
    """Return whether hooks may be pushed now: not on top of another library's, nor where torch.func refuses them."""
    if top_saved_tensors_hooks() is not None or not saved_tensors_hooks_allowed():
        return False
    return functorch_interpreter() is None


class CallHook(ModuleHook):
    """A hook that reports calls of a layer."""

    def __init__(self, passes: Passes, layer: Layer) -> None:
        super().__init__(layer)
        self.passes = passes


class EnterHook(CallHook):
    """Hook that runs before a module's forward."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        layer = self.layer
        # The work of `enter` inside the call of the parent layer, inlined: the usual case must be the fastest.
        if layer.parent is not None and not is_dynamo_compiling():
            forward = self.passes.threads.forward
            frames = forward.frames
            if frames and frames[-1].layer is layer.parent:
                frames.append(Frame(layer, forward, args))
                return
        # Below the outermost layer only tracing matters, and a check for tracing alone is faster.
        if inside_compile() if layer.parent is None else is_compiling():
            if module.training and torch.is_grad_enabled():
                raise RuntimeError(ERROR_ATTACHED_BEFORE_COMPILE)
            return
        self.passes.enter(layer, args)


class LeaveHook(CallHook):
    """Hook that runs after a module's forward, even after an exception."""

    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        layer = self.layer
        if layer.parent is not None and not is_dynamo_compiling():
            frames = self.passes.threads.forward.frames
            if len(frames) > 1 and frames[-1].layer is layer:
                frames.pop()
                return
        if not (inside_compile() if layer.parent is None else is_compiling()):
            self.passes.leave(layer, output)


def hook_layers(layers: list[Layer], passes: Passes) -> list[Any]:
    """Register hooks that report calls of these layers; fused layers report their calls themselves."""
    hooks: list[Any] = []
    for layer in layers:
        module = layer.owner()
        assert module is not None
        hooks.append(module.register_forward_pre_hook(EnterHook(passes, layer)))
        hooks.append(module.register_forward_hook(LeaveHook(passes, layer), always_call=True))
    return hooks
