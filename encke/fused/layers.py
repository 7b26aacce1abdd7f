"""Layers whose backward takes less memory for what was saved: batch norm and ReLU read it packed, convolutions drop it.

Half of what a convolutional network saves are inputs of batch norms. Plain hooks decode such an input to memory, where
batch norm's backward reads it twice; for ReLU they write a mask that is read once. Here a layer's call goes to an
autograd function that saves the same tensor through the same hooks, and whose backward decodes in registers
(kernels/gpu_norm.py, gq_gate). Forward runs the same operation, or, for 16-bit values in channels_last memory, is
computed while what it saves is packed (`DeferredForward`; kernels/gpu_norm_forward.py). A convolution has to decode its
input to memory, but computes the weight's gradient first and lets go of the input before its gradient, which is as
large, needs memory. Wherever that is not possible, it computes what plain autograd would.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd, _functorch
from torch.compiler import is_compiling
from torch.nn import functional

from encke.capture.deferred import DeferredForward
from encke.capture.hooks import Capture, unusual
from encke.capture.modules import ERROR_ATTACHED_BEFORE_COMPILE, Layer, inside_compile
from encke.capture.passes import ForwardPass, Frame
from encke.capture.readers import matches
from encke.capture.saved import Saved
from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant
from encke.codecs.base import Hint, mix
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.packed import FORMATS, Layout, Packed, check_version

ENABLED = True
"""Read by `install`: False leaves every layer as it is, for comparison."""
SMALLEST = 1 << 20
"""Inputs of fewer bytes go the plain way."""
LARGE_CONV = 32 << 20
"""The same for the inputs of convolutions: for these it is a matter of memory alone."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

convolution = torch.ops.aten.convolution.default
convolution_backward = torch.ops.aten.convolution_backward.default


class NormWork(DeferredForward):
    """Batch norm's result, its statistics and the packing of its input, in two passes over it instead of four."""

    __slots__ = ("bias", "eps", "kept", "momentum", "out", "plan", "running", "weight")

    def __init__(
        self, site: Site, codec: Codec, x: Tensor, plan: Any, weight: Tensor, bias: Tensor,
        running: tuple[Tensor, Tensor] | None, momentum: float, eps: float,
    ) -> None:  # fmt: skip
        self.site, self.codec, self.t = site, codec, x
        self.plan, self.weight, self.bias = plan, weight, bias
        self.running, self.momentum, self.eps = running, momentum, eps
        self.out = torch.empty_like(x)
        self.kept = torch.empty(4, plan.channels, dtype=torch.float32, device=plan.device)

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, hint: Hint) -> Packed:
        x = self.t
        stride, plan = codec.planned(x, layout, length, hint) if type(codec) is GroupQuant else (1, None)
        if plan is None or plan.statistics is None or codec.group != self.plan.GROUP:  # type: ignore[attr-defined]
            self.run_unfused()
            return codec.encode_run(x, layout, length, key, hint)
        assert isinstance(codec, GroupQuant)
        parts = torch.empty(self.plan.parts, dtype=torch.float32, device=plan.device)
        seed = mix(codec.seed, key)
        data = plan.encode_beside(plan.statistics, x, parts, seed)
        self.plan.normalise(
            x, parts, self.weight, self.bias, self.running, self.momentum, self.eps, self.kept, self.out
        )
        return GroupQuantPacked(codec, layout, x.dtype, length, data, seed, stride, plan)

    def run_unfused(self) -> None:
        mean, var = (None, None) if self.running is None else self.running
        with torch.no_grad():
            out, mean, invstd = torch.native_batch_norm(
                self.t, self.weight, self.bias, mean, var, True, self.momentum, self.eps
            )
            # Past autograd, for which these are results already.
            self.out.data.copy_(out)
            self.kept[0].copy_(mean)
            self.kept[1].copy_(invstd)


class ReluWork(DeferredForward):
    """ReLU's result, which is to be written to `t`, and its packing in one pass."""

    __slots__ = ("x",)
    x: Tensor

    def encode(self, codec: Codec, layout: Layout, length: int, key: int, hint: Hint) -> Packed:
        y = self.t
        stride, plan = codec.planned(y, layout, length, hint) if type(codec) is GroupQuant else (1, None)
        if plan is None or plan.relu is None:
            self.run_unfused()
            return codec.encode_run(y, layout, length, key, hint)
        assert isinstance(codec, GroupQuant)
        seed = mix(codec.seed, key)
        data = plan.encode_beside(plan.relu, self.x, y, seed)
        return GroupQuantPacked(codec, layout, y.dtype, length, data, seed, stride, plan)

    def run_unfused(self) -> None:
        with torch.no_grad():
            torch.clamp_min(self.x.data, 0, out=self.t.data)


class NormFunction(torch.autograd.Function):
    """Batch norm in training: input, weight, bias, running mean, running variance, momentum, eps, work or None.

    With work the result is written when the input is packed, which is right after `forward`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        work: NormWork | None,
    ) -> Tensor:
        if work is None:
            out, mean, invstd, reserve, implementation = torch._batch_norm_impl_index(
                x, weight, bias, running_mean, running_var, True, momentum, eps, torch._C._get_cudnn_enabled()
            )
        else:
            # Their rows are not taken apart before somebody asks for one.
            out, mean, invstd, reserve, implementation = work.out, work.kept, None, None, 0
        ctx.save_for_backward(x)
        # What is small or a parameter is not packed: here it does not go through the hooks at all.
        version = 0 if weight is None else weight._version
        ctx.kept = (mean, invstd, weight, version, reserve, implementation, eps)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = None if torch.is_grad_enabled() else packed_gradients(ctx, grad)
        return (*(plain_gradients(ctx, grad) if gradients is None else gradients), None, None, None, None, None)


class ReluFunction(torch.autograd.Function):
    """ReLU: input, whether in place, and the saving, with or without the work."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, work: DeferredForward) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        if type(work) is ReluWork:
            y = x if inplace else torch.empty_like(x)
            work.x = x
        else:
            y = torch.relu_(x) if inplace else torch.relu(x)
        work.t = y
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradient = None if torch.is_grad_enabled() else gated_gradient(ctx, grad)
        if gradient is None:
            gradient = torch.ops.aten.threshold_backward(grad, ctx.saved_tensors[0], 0)
        return gradient, None, None


class ConvFunction(torch.autograd.Function):
    """A convolution: input, weight, bias, stride, padding, dilation, groups."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        groups: int,
    ) -> Tensor:
        settings = ctx.settings = (stride, padding, dilation, False, (0,) * len(stride), groups)
        ctx.bias_size = None if bias is None else bias.shape
        # In the order of the plain operation.
        ctx.save_for_backward(x, weight)
        return convolution(x, weight, bias, *settings)

    # What is read of the plain operation's node, under the same names.
    node = {"encke_slots": ("input", "weight")} | {
        f"_saved_{name}": property(lambda ctx, i=i: ctx.settings[i])  # type: ignore[misc]
        for i, name in enumerate(("stride", "padding", "dilation", "transposed", "output_padding", "groups"))
    }

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or not all(needs[:2]):
            gradients = conv_gradients(ctx, needs, grad, *ctx.saved_tensors)
        else:
            gradients = parted_gradients(ctx, needs, grad)
        return (*gradients, None, None, None, None)


def conv_gradients(ctx: Any, needs: tuple[bool, ...], grad: Tensor, x: Tensor, weight: Tensor) -> Gradients:
    """What plain autograd computes, in one call; differentiable where backward is recorded."""
    return convolution_backward(grad, x, weight, ctx.bias_size, *ctx.settings, needs)


def parted_gradients(ctx: Any, needs: tuple[bool, ...], grad: Tensor) -> Gradients:
    """The same gradients in two calls, between which the restored input is let go of, where it may be."""
    x, weight = ctx.saved_tensors
    last = read_format(x, weight, ctx.settings)
    if last is None:
        return conv_gradients(ctx, needs, grad, x, weight)
    grad = grad.contiguous(memory_format=last)
    _, grad_weight, grad_bias = conv_gradients(ctx, (False, *needs[1:]), grad, x, weight)
    size, stride = x.shape, x.stride()
    del x
    grad_x = conv_gradients(ctx, (True, False, False), grad, hollow(size, stride, grad), weight)[0]
    return grad_x, grad_weight, grad_bias


def read_format(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> torch.memory_format | None:
    """The memory format in which backward reads its input; None if it might read it for its own gradient too.

    These backends do not: they ask the input for its size and format, and copy it only if it has another format.
    """
    backend = torch._C._select_conv_backend(x, weight, None, *settings)
    if backend.name not in ("Cudnn", "Mkldnn"):
        return None
    last = torch._C._conv_determine_backend_memory_format(x, weight, backend)
    return last if x.is_contiguous(memory_format=last) else None


def hollow(size: tuple[int, ...], stride: tuple[int, ...], like: Tensor) -> Tensor:
    """A tensor without memory, to be asked for its size and format only: no zero stride can stand for channels_last."""
    x = like.new_empty_strided(size, stride)
    x.untyped_storage().resize_(0)
    return x


def gated_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """ReLU's gradient from its packed result; None where the kernel does not take it."""
    saved = ctx._raw_saved_tensors[0].data
    packed = packed_in(saved, grad)
    if packed is None or not saved.layout.dense or grad.stride() != saved.layout.stride:
        return None
    codec = packed.codec
    if packed.plan is not None:
        return packed.plan.gate(packed.parts[0], grad)
    return kernels("gpu").gq_gate(packed.parts[0], grad, codec.bits, codec.group, packed.stride, codec.signs)


def packed_in(saved: Any, grad: Tensor) -> GroupQuantPacked | None:
    """What was packed for a saving, if it is of the kind that the kernels read."""
    if not isinstance(saved, Saved):
        return None
    cell = saved.cell
    if cell is None or cell.held is not None or not isinstance(cell.packed, GroupQuantPacked):
        return None
    return cell.packed if grad.dtype == cell.packed.dtype else None


@functools.cache
def kernels(name: str) -> Any:
    """A module of encke.kernels, imported when it is first needed."""
    from encke.kernels.gpu import launch, norm_backward, norm_forward

    return {"gpu": launch, "gpu_norm": norm_backward, "gpu_norm_forward": norm_forward}[name]


@functools.cache
def function_named(operation: str, kind: type[torch.autograd.Function] = NormFunction) -> Any:
    """The function under the name of the operation that it stands for: capture compares it when it reads.

    Called past what `Function.apply` does for torch.func, which is slow: nobody may call it there.
    """
    function: Any = types.new_class(operation, (kind,))
    # The same in backward: what autograd calls there would look for the function's own backward first.
    function._backward_cls.apply = kind.backward
    for name, value in getattr(kind, "node", {}).items():
        setattr(function._backward_cls, name, value)
    return super(torch.autograd.Function, function).apply


def plain_gradients(ctx: Any, grad: Tensor) -> Gradients:
    """What plain autograd computes, from the restored input; differentiable where backward is recorded."""
    (x,) = ctx.saved_tensors
    mean, invstd, weight, version, reserve, implementation, eps = ctx.kept
    if invstd is None:
        mean, invstd = mean[0], mean[1]
    if weight is not None:
        check_version(weight, version)
    last = FORMATS.get(x.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=last):
        last = torch.contiguous_format
    return torch.ops.aten._batch_norm_impl_index_backward(
        implementation, x, grad.contiguous(memory_format=last), weight, None, None, mean, invstd,
        True, eps, ctx.needs_input_grad[:3],
        torch.empty(0, dtype=torch.uint8, device=x.device) if reserve is None else reserve.clone(),
    )  # fmt: skip


def packed_gradients(ctx: Any, grad: Tensor) -> Gradients | None:
    """The gradients from the input as it was packed; None where the kernels do not take it."""
    saved = ctx._raw_saved_tensors[0].data
    packed = packed_in(saved, grad)
    if packed is None or packed.codec.signs:
        return None
    norms, layout, codec = kernels("gpu_norm"), saved.layout, packed.codec
    last, bits = layout.last, codec.bits
    if last is None or not norms.supported(layout.size, packed.stride, last, bits, codec.group, packed.dtype):
        return None
    mean, invstd, weight, version = ctx.kept[:4]
    if weight is not None and weight._version != version:
        check_version(weight, version)
    if grad.stride() != layout.stride:
        grad = grad.contiguous(memory_format=FORMATS[grad.dim()] if last else torch.contiguous_format)
    want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
    grad_x, grad_weight, grad_bias = norms.norm_backward(
        grad, packed.parts[0], mean, invstd, weight, bits, packed.seed, last, want_x
    )
    return grad_x, grad_weight if want_weight else None, grad_bias if want_bias else None


class Forward:
    """What an attached layer has as its `forward`: tells the capture of the call and decides which way it goes.

    It does not travel: copies and pickles of the layer get the class's own method in its place.
    """

    layers: tuple[type[nn.Module], ...]
    least = SMALLEST
    """Inputs of fewer bytes go the plain way, unless `install` is told otherwise."""

    def __init__(self, capture: Capture, layer: Layer, device: str, smallest: int) -> None:
        self.capture = capture
        self.layer = layer
        self.device = device
        self.smallest = smallest
        self.where: torch.device | None = None
        """A device of the right kind, where the last call was: quicker to compare than the kind's name."""

    def __call__(self, input: Tensor) -> Tensor:
        capture, layer = self.capture, self.layer
        # Below the outermost layer only tracing is of interest, and that is quicker to find out.
        if inside_compile() if layer.parent is None else is_compiling():
            return self.traced(input)
        # A replica or shallow copy of the layer brings its own weights, but has this very object as its forward.
        module: Any = sys._getframe(1).f_locals.get("self")
        if not isinstance(module, self.layers) or module.__dict__.get("forward") is not self:
            module = layer.owner()
        forward = capture.threads.forward
        frames = forward.frames
        # What `enter` and `leave` do where the layer around is the one that was called last.
        if frames and frames[-1].layer is layer.parent:
            frame = Frame(layer, forward)
            frames.append(frame)
        else:
            entered = capture.passes.enter(layer)
            if entered is None:
                return type(module).forward(module, input)
            frame = entered
        output, site = None, frame.sites[0] if frame.sites else None
        try:
            if site is not None and self.suits(module, input, site):
                output = self.run(module, input, site, forward)
            if output is None:
                output = type(module).forward(module, input)
            return output
        finally:
            forward.deferred = None
            if len(frames) > 1 and frames[-1] is frame:
                frames.pop()
            else:
                capture.passes.leave(layer, output)

    def traced(self, *inputs: Any, **named: Any) -> Tensor:
        """A compiler is at work on this call."""
        module: Any = self.layer.owner()
        if module.training and torch.is_grad_enabled():
            raise RuntimeError(ERROR_ATTACHED_BEFORE_COMPILE)
        return type(module).forward(module, *inputs, **named)

    def suits(self, module: Any, x: Tensor, site: Site) -> bool:
        """Whether this call, which saves first at that site, may go to the kernels."""
        if site.function is None:
            site.function = self.function(site) or False
        # A class that was changed since, as parametrizations do, may compute its weight at every look at it.
        if (
            site.function is False
            or not site.stable
            or type(x) is not Tensor
            or type(module) not in self.layers
            or x.numel() * x.element_size() < self.smallest
            or unusual(x)
        ):
            return False
        if x.device != self.where:
            if x.device.type != self.device:
                return False
            self.where = x.device
        return torch.is_grad_enabled() and self.hooked(x)

    def function(self, site: Site) -> Any:
        """What runs in the place of the operation that saves at a site; None if nothing does."""
        raise NotImplementedError

    def run(self, module: Any, x: Tensor, site: Site, forward: ForwardPass) -> Tensor | None:
        """The call itself, through the function in the operation's place; None where it is not one for the kernels.

        Tells the forward pass what it saves.
        """
        raise NotImplementedError

    def hooked(self, x: Tensor) -> bool:
        """Whether what is saved now goes to our capture: not to a checkpoint's hooks or torch.func."""
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] is not self.capture.passes.hooks[0]:
            return False
        return _functorch.peek_interpreter_stack() is None and not _functorch.is_functorch_wrapped_tensor(x)

    def remove(self) -> None:
        """The layer has its class's forward again."""
        module = self.layer.owner()
        if module is not None and module.__dict__.get("forward") is self:
            del module.__dict__["forward"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module: Any = self.layer.owner()
        return types.MethodType(type(module).forward, memo.get(id(module), module))

    def __reduce__(self) -> Any:
        # While the layer is being loaded it has no such attribute of its own yet, so this finds its class's method.
        return (getattr, (self.layer.owner(), "forward"))


class NormForward(Forward):
    """Of a batch norm."""

    layers = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    def function(self, site: Site) -> Any:
        known = site.slot == "input" and site.need == "lossy" and site.operation.endswith("BatchNorm")
        return function_named(site.operation) if known and site.signature[1] >= 3 else None

    def run(self, module: Any, x: Tensor, site: Site, forward: ForwardPass) -> Tensor | None:
        if not module.training and not (module.running_mean is None and module.running_var is None):
            return None
        codec = self.capture.policy.choose(site)
        if not isinstance(codec, GroupQuant) or codec.signs or not matches(site, x):
            return None
        return norm(module, x, site.function, site, codec, forward)


def norm(
    module: Any, x: Tensor, function: Any, site: Any = None, codec: Any = None, forward: ForwardPass | None = None
) -> Tensor:
    """What `forward` of a batch norm in training does, with another function at its end.

    `forward` is the forward pass whose packing, at that site, may do the work; None where nobody packs.
    """
    module._check_input_dim(x)
    # Past Module.__getattr__, which is slow; a replica has its parameters as plain attributes.
    parameters, buffers = module._parameters, module._buffers
    weight = parameters["weight"] if "weight" in parameters else module.weight
    bias = parameters["bias"] if "bias" in parameters else module.bias
    momentum, batches = module.momentum, buffers["num_batches_tracked"]
    running = module.training and module.track_running_stats
    if running and batches is not None:
        batches.add_(1)
    if momentum is None:
        momentum = 1.0 / float(batches) if running and batches is not None else 0.0
    if x.numel() == x.shape[1]:
        functional._verify_batch_size(x.size())  # type: ignore[attr-defined]
    mean, var = (buffers["running_mean"], buffers["running_var"]) if running or not module.training else (None, None)
    plan = work = None
    if forward is not None and x.dtype.itemsize == 2 and not x.data_ptr() & 3:
        plan = kernels("gpu_norm_forward").forward_plan(x.shape, x.stride(), x.dtype, x.device)
    if forward is None:
        return function(x, weight, bias, mean, var, momentum, module.eps, None)
    if plan is not None and all_fp32(weight, bias, mean, var):
        running = None if mean is None or var is None else (mean, var)
        work = NormWork(site, codec, x, plan, weight, bias, running, momentum, module.eps)
    forward.deferred = work or DeferredForward(site, codec, x)
    out = function(x, weight, bias, mean, var, momentum, module.eps, work)
    if forward.deferred is not None:
        forward.run_deferred()
    return out


def all_fp32(weight: Any, bias: Any, mean: Any, var: Any) -> bool:
    """Whether there are weight and bias, and running statistics or none, as the kernels read and write them."""
    if (mean is None) != (var is None):
        return False
    for t in (weight, bias) if mean is None else (weight, bias, mean, var):
        if t is None or t.dtype is not torch.float32 or not t.is_contiguous():
            return False
    return True


class ReluForward(Forward):
    """Of a ReLU."""

    layers = (nn.ReLU,)

    def function(self, site: Site) -> Any:
        known = site.slot == "result" and site.need == "mask"
        return function_named(site.operation, ReluFunction) if known else None

    def run(self, module: Any, x: Tensor, site: Site, forward: ForwardPass) -> Tensor | None:
        dtype, dimensions, *_ = site.signature
        inplace = module.inplace
        if not x.requires_grad or x.dtype is not dtype or x.dim() != dimensions or (inplace and x.is_leaf):
            return None
        together = dtype.itemsize == 2 and dimensions >= 4 and x.stride(1) == 1 and not x.data_ptr() & 3
        work = forward.deferred = (ReluWork if together else DeferredForward)(site, None, None)
        y = site.function(x, inplace, work)
        if forward.deferred is not None:
            forward.run_deferred()
        return y


class ConvForward(Forward):
    """Of a convolution."""

    layers = (nn.Conv2d, nn.Conv3d)
    least = LARGE_CONV

    def function(self, site: Site) -> Any:
        known = site.slot == "input" and site.need == "lossy" and site.operation == "Convolution"
        return function_named(site.operation, ConvFunction) if known else None

    def run(self, module: Any, x: Tensor, site: Site, forward: ForwardPass) -> Tensor | None:
        parameters, dtype = module._parameters, x.dtype
        weight = parameters["weight"] if "weight" in parameters else module.weight
        bias = parameters["bias"] if "bias" in parameters else module.bias
        if module.padding_mode != "zeros" or type(module.padding) is str or x.dim() != weight.dim():
            return None
        if not x.requires_grad or not weight.requires_grad or not matches(site, x):
            return None
        # Weight and bias have to be plain tensors of the input's dtype, or become that under autocast. Autocast would
        # do this itself, but inside the function, where it is not recorded.
        dtypes: tuple[torch.dtype, ...] = (dtype,)
        if torch.is_autocast_enabled(self.device):
            dtypes = CASTS if dtype == torch.get_autocast_dtype(self.device) else ()
        if type(weight) not in PLAIN or weight.dtype not in dtypes:
            return None
        if bias is not None and (type(bias) not in PLAIN or bias.dtype not in dtypes):
            return None
        if weight.dtype != dtype:
            weight = weight.to(dtype)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
        forward.deferred = DeferredForward(site, None, x)
        return site.function(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)


PLAIN = (Tensor, nn.Parameter)
CASTS = (torch.float32, torch.bfloat16, torch.float16)
"""What autocast casts."""

FORWARDS = {kind: forward for forward in (NormForward, ReluForward, ConvForward) for kind in forward.layers}


def install(
    layers: Iterable[Layer], capture: Capture, device: str = "cuda", smallest: int | None = None
) -> list[Forward]:
    """Gives the batch norms, ReLUs and convolutions among a model's layers such a forward; each has `remove()`.

    `smallest` stands in for the size that each kind has as its `least`. A layer with a forward of its own, or of a
    class derived from these, is left alone.
    """
    installed: list[Forward] = []
    if not ENABLED or importlib.util.find_spec("triton") is None:
        return installed
    for layer in layers:
        module = layer.owner()
        kind = FORWARDS.get(type(module))  # type: ignore[arg-type]
        if kind is None or not layer.compress:
            continue
        drop_copied(module)
        if module is not None and "forward" not in module.__dict__:
            installed.append(kind(capture, layer, device, kind.least if smallest is None else smallest))
            module.__dict__["forward"] = installed[-1]
    return installed


def drop_copied(module: Any) -> None:
    """Removes what a copied layer has left of another one's forward: its own method, as an attribute."""
    own, kind = module.__dict__.get("forward"), type(module)
    if isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is kind.forward:
        del module.__dict__["forward"]
