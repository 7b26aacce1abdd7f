"""Forwards of our own in the place of a layer's: how they are installed, and which way a call goes."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from encke.capture.facts import SiteFacts, SiteState
from encke.capture.hooks import Capture
from encke.capture.modules import ERROR_ATTACHED_BEFORE_COMPILE, Layer, inside_compile
from encke.capture.passes import ForwardPass, Frame
from encke.capture.saved import Saved
from encke.capture.thresholds import FUSE_MIN_BYTES
from encke.codecs import Packed
from encke.codecs.groupquant import GroupQuantPacked
from encke.torch_internals import apply_as, functorch_interpreter, is_functorch_tensor, top_saved_tensors_hooks


class Slot:
    """A tensor with its version, or a saving, kept by a node past the hooks, where capture looks for what was saved."""

    __slots__ = ("data",)

    def __init__(self, data: tuple[Tensor, int] | Saved) -> None:
        self.data = data


class InstalledForward:
    """An object that an attached layer has as its `forward`, in its `__dict__`.

    It does not travel: copies and pickles of the layer get the class's own method in its place.
    """

    def __init__(self, capture: Capture, layer: Layer) -> None:
        self.capture = capture
        self.layer = layer

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether this kind of forward can take the place of the module's."""
        raise NotImplementedError

    def traced(self, *inputs: Any, **named: Any) -> Tensor:
        """Run the plain forward under a compiler; raise where it would train, since nothing would be packed."""
        module: Any = self.layer.owner()
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(ERROR_ATTACHED_BEFORE_COMPILE)
        return type(module).forward(module, *inputs, **named)

    def captured(self, x: Tensor) -> bool:
        """Return whether what is saved now goes to our capture: not to a checkpoint's hooks or to torch.func."""
        top = top_saved_tensors_hooks()
        if top is None or top[0] is not self.capture.passes.hooks[0]:
            return False
        return functorch_interpreter() is None and not is_functorch_tensor(x)

    def remove(self) -> None:
        """Give the layer its class's forward again."""
        module = self.layer.owner()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self.layer.owner()
        return types.MethodType(type(module).forward, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        # While the layer is being loaded it has no such attribute of its own yet, so this finds its class's method.
        return (getattr, (self.layer.owner(), "forward"))


class TrackedForward(InstalledForward):
    """Forward that tells capture of its calls, and computes them itself where it can."""

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        """Return the result of a call in a captured forward pass; None to run the class's own forward."""
        raise NotImplementedError

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        capture, layer = self.capture, self.layer
        if is_dynamo_compiling():
            return self.traced(*inputs, **named)
        # The module whose call this is: the layer, or a replica or shallow copy of it. Those share this object but
        # bring weights of their own, and an attribute of an instance is called without a `self`. `Module._call_impl`,
        # the caller of this, has the module as its own `self`.
        module: Any = sys._getframe(1).f_locals.get("self")
        if not isinstance(module, nn.Module) or module.__dict__.get("forward") is not self:
            module = layer.owner()
        forward = capture.threads.forward
        frames = forward.frames
        # `enter` and `leave` for the usual case: the layer around this one is the innermost call.
        if frames and frames[-1].layer is layer.parent:
            frame = Frame(layer, forward, inputs)
            frames.append(frame)
        elif inside_compile() if layer.parent is None else is_compiling():
            return self.traced(*inputs, **named)
        else:
            entered = capture.passes.enter(layer, inputs)
            if entered is None:
                return type(module).forward(module, *inputs, **named)
            frame = entered
        output = None
        try:
            if not named:
                output = self.attempt(module, inputs, frame, forward)
            if output is None:
                output = type(module).forward(module, *inputs, **named)
            return output
        finally:
            forward.deferred = None
            if len(frames) > 1 and frames[-1] is frame:
                frames.pop()
            else:
                capture.passes.leave(layer, output)


class LayerForward(TrackedForward):
    """Forward of a layer with one input, which runs an autograd function of ours where the kernels take the call.

    The function stands in the place of the operation that saves first. It saves the same tensor through the same hooks,
    so the first forward pass runs the plain layer: capture learns from that which operation it is.
    """

    layers: tuple[type[nn.Module], ...]
    """Classes of layers that this forward serves; derived classes are left alone."""
    min_bytes = FUSE_MIN_BYTES
    """Smaller inputs go the plain way."""
    device_type = "cuda"
    """Kind of device that the kernels run on."""

    def __init__(self, capture: Capture, layer: Layer) -> None:
        super().__init__(capture, layer)
        self.device_seen: torch.device | None = None
        """Device of the last call, if of the right kind: quicker to compare than the kind's name."""

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether the module is of one of our classes and the GPU kernels can be imported."""
        return type(module) in cls.layers and has_triton()

    def function(self, facts: SiteFacts) -> Any:
        """Return what runs in the place of the operation that saves at a site; None if nothing does."""
        raise NotImplementedError

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call through the function, and tell the forward pass what it saves; None to go the plain way."""
        raise NotImplementedError

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        facts = frame.sites[0] if frame.sites else None
        # The quick questions first: most calls of a small model end here.
        if facts is None or len(inputs) != 1:
            return None
        x = inputs[0]
        if type(x) is not Tensor or x.numel() * x.element_size() < self.min_bytes or not self.suits(module, x, facts):
            return None
        return self.run(module, x, facts, forward)

    def suits(self, module: Any, x: Tensor, facts: SiteFacts) -> bool:
        """Return whether this call, which saves first at that site, may go to the kernels."""
        if facts.function is None:
            facts.function = self.function(facts) or False
        if facts.function is False or facts.state is not SiteState.KNOWN:
            return False
        # A class that was changed since, as parametrizations do, may compute its weight at every look at it.
        if type(module) not in self.layers or x.layout is not torch.strided or x.is_neg():
            return False
        if x.device != self.device_seen:
            if x.device.type != self.device_type:
                return False
            self.device_seen = x.device
        # What `captured` returns, without one more call for each layer.
        top = top_saved_tensors_hooks()
        if top is None or top[0] is not self.capture.passes.hooks[0] or not torch.is_grad_enabled():
            return False
        return functorch_interpreter() is None and not is_functorch_tensor(x)


def hand_over(grad: Tensor) -> Tensor:
    """Return a stand-in for a gradient, of its size and full of NaN, from which the one node behind takes it.

    Autograd holds what it passes to a node until that node's backward has ended. A block would hold the gradient of its
    result, which is large, during all of its steps.
    """
    if torch.is_anomaly_enabled():
        return grad
    stand_in: Any = _nan(grad.dtype, grad.device).expand(grad.shape)
    stand_in.encke_gradient = grad
    return stand_in


def take_over(grad: Any) -> Tensor:
    """Return the gradient that a stand-in stands for, and take it from there; any other tensor as it is."""
    found: Tensor | None = grad.__dict__.pop("encke_gradient", None)
    return grad if found is None else found


@functools.cache
def _nan(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=dtype, device=device)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton, which the GPU kernels are written in, is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def in_place_of(operation: str, function: type[torch.autograd.Function]) -> Any:
    """Return what applies `function` under the name of the operation whose place it takes.

    Its nodes also have what is read of the plain operation's nodes: the entries of `function.node`.
    """
    return apply_as(function, operation, getattr(function, "node", None))


def packed_in(saved: Any, grad: Tensor) -> Packed | None:
    """Return what was packed for a saving of the gradient's dtype; None if it is held as it is."""
    if not isinstance(saved, Saved):
        return None
    cell = saved.cell
    if cell is None or cell.held is not None or cell.packed is None or grad.dtype != cell.packed.dtype:
        return None
    return cell.packed


def packed_for(saved: Any, grad: Tensor) -> GroupQuantPacked | None:
    """Return what was packed for a saving, if the kernels can read its codes beside this gradient."""
    packed: Any = packed_in(saved, grad)
    # What is computed again has a codec, but no codes and no plan.
    return None if packed is None or packed.plan is None or not packed.codec.reads_packed else packed
