"""Base classes of the forwards that replace those of layers, and the choice between these and the plain forward."""

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
from encke.codecs.layout import FORMATS
from encke.fused.requests import KernelRequests
from encke.torch_internals import apply_as, functorch_interpreter, is_functorch_tensor, top_saved_tensors_hooks


class Slot:
    """Tensor with its version, or a `Saved`, that a node keeps without the hooks. Capture looks for it there."""

    __slots__ = ("data",)

    def __init__(self, data: tuple[Tensor, int] | Saved) -> None:
        self.data = data


class InstalledForward:
    """Object that replaces the `forward` of an attached layer, in the layer's `__dict__`.

    It is not copied or pickled: copies and pickles of the layer get the method of their class instead.
    """

    def __init__(self, capture: Capture, layer: Layer) -> None:
        self.capture = capture
        self.layer = layer

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether this kind of forward can replace the module's."""
        raise NotImplementedError

    def traced(self, *inputs: Any, **named: Any) -> Tensor:
        """Run the plain forward under a compiler. Raise an error in training, since nothing would be packed."""
        module: Any = self.layer.owner()
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(ERROR_ATTACHED_BEFORE_COMPILE)
        return type(module).forward(module, *inputs, **named)

    def captured(self, x: Tensor) -> bool:
        """Return whether tensors saved now go to our capture, and not to the hooks of a checkpoint or to torch.func."""
        top = top_saved_tensors_hooks()
        if top is None or top[0] is not self.capture.passes.hooks[0]:
            return False
        return functorch_interpreter() is None and not is_functorch_tensor(x)

    def remove(self) -> None:
        """Restore the forward of the layer's class."""
        module = self.layer.owner()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self.layer.owner()
        return types.MethodType(type(module).forward, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        # While the layer is being loaded, it does not have this attribute yet, so this finds the method of its class.
        return (getattr, (self.layer.owner(), "forward"))


class TrackedForward(InstalledForward):
    """Forward that reports its calls to capture, and computes them itself if it can."""

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        """Return the result of a call in a captured forward pass; None to run the class's own forward."""
        raise NotImplementedError

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        capture, layer = self.capture, self.layer
        if is_dynamo_compiling():
            return self.traced(*inputs, **named)
        # The called module is the layer, or a replica or shallow copy of it. Those share this object but have their
        # own weights, and an attribute of an instance is called without `self`. The caller, `Module._call_impl`, has
        # the module as its own `self`.
        module: Any = sys._getframe(1).f_locals.get("self")
        if not isinstance(module, nn.Module) or module.__dict__.get("forward") is not self:
            module = layer.owner()
        forward = capture.threads.forward
        frames = forward.frames
        # `enter` and `leave`, inlined for the usual case: the parent layer is the innermost call.
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
    """Forward of a layer with one input, which runs our autograd function if the kernels support the call.

    The function replaces the operation that saves first, and saves the same tensor through the same hooks. The first
    forward pass runs the plain layer, from which capture learns which operation that is.
    """

    layers: tuple[type[nn.Module], ...]
    """Classes of layers that this forward serves. Subclasses keep their own forward."""
    min_bytes = FUSE_MIN_BYTES
    """Smaller inputs use the plain forward."""
    device_type = "cuda"
    """Type of device that the kernels run on."""

    def __init__(self, capture: Capture, layer: Layer) -> None:
        super().__init__(capture, layer)
        self.requests: KernelRequests | None = None
        """Requests of the model for kernels, until this layer has made its own."""
        self.device_seen: torch.device | None = None
        """Device of the last call, if of the right type. Comparing devices is faster than comparing type names."""

    @classmethod
    def serves(cls, module: nn.Module) -> bool:
        """Return whether the module is of one of our classes and the GPU kernels can be imported."""
        return type(module) in cls.layers and has_triton()

    def function(self, facts: SiteFacts) -> Any:
        """Return the function that replaces the operation that saves at a site; None if there is none."""
        raise NotImplementedError

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call with the function, and tell the forward pass what it saves; None to use the plain forward."""
        raise NotImplementedError

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        facts = frame.sites[0] if frame.sites else None
        # The cheap checks come first: most calls of a small model end here.
        if facts is None or len(inputs) != 1:
            if self.requests is not None and len(inputs) == 1:
                self.request_kernels(inputs[0])
            return None
        x = inputs[0]
        if type(x) is not Tensor or x.numel() * x.element_size() < self.min_bytes or not self.suits(module, x, facts):
            return None
        return self.run(module, x, facts, forward)

    def request_kernels(self, x: Any) -> None:
        """Request the usual kernels for tensors like the input, once."""
        requests, self.requests = self.requests, None
        if type(x) is Tensor and x.device.type == self.device_type and x.dim() in FORMATS:
            # The memory format of small tensors, as in squeeze-and-excite layers, may be either.
            if requests is not None and x.numel() * x.element_size() >= self.min_bytes:
                requests.ask_for_images(self.layer.name, x)

    def suits(self, module: Any, x: Tensor, facts: SiteFacts) -> bool:
        """Return whether the kernels may run this call, which saves first at the given site."""
        if facts.function is None:
            facts.function = self.function(facts) or False
        if facts.function is False or facts.state is not SiteState.KNOWN:
            return False
        # If the class has changed since, as parametrizations do, each access to the weight may compute it.
        if type(module) not in self.layers or x.layout is not torch.strided or x.is_neg():
            return False
        if x.device != self.device_seen:
            if x.device.type != self.device_type:
                return False
            self.device_seen = x.device
        # `captured`, inlined to avoid one more call for each layer.
        top = top_saved_tensors_hooks()
        if top is None or top[0] is not self.capture.passes.hooks[0] or not torch.is_grad_enabled():
            return False
        return functorch_interpreter() is None and not is_functorch_tensor(x)


def hand_over(grad: Tensor) -> Tensor:
    """Return a stand-in for a gradient: a tensor of its size, full of NaN, from which the only reading node takes it.

    Autograd holds each gradient that it passes to a node until that node's backward has ended. A block would hold the
    gradient of its result, which is large, during all of its steps.
    """
    if torch.is_anomaly_enabled():
        return grad
    stand_in: Any = _nan(grad.dtype, grad.device).expand(grad.shape)
    stand_in.encke_gradient = grad
    return stand_in


def take_over(grad: Any) -> Tensor:
    """Return the gradient that a stand-in carries, and remove it there. Return any other tensor as it is."""
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
    """Return a callable that applies `function` under the name of the operation that it replaces.

    Its nodes also have the attributes that are read from the plain operation's nodes: the entries of `function.node`.
    """
    return apply_as(function, operation, getattr(function, "node", None))


def packed_in(saved: Any, grad: Tensor) -> Packed | None:
    """Return the packed tensor of a `Saved`, if it has the gradient's dtype; None if the tensor is held unpacked."""
    if not isinstance(saved, Saved):
        return None
    cell = saved.cell
    if cell is None or cell.held is not None or cell.packed is None or grad.dtype != cell.packed.dtype:
        return None
    return cell.packed


def packed_for(saved: Any, grad: Tensor) -> GroupQuantPacked | None:
    """Return the packed tensor of a `Saved`, if the kernels can read its codes together with this gradient."""
    packed: Any = packed_in(saved, grad)
    # A recomputed tensor has a codec, but no codes and no plan.
    return None if packed is None or packed.plan is None or not packed.codec.reads_packed else packed
