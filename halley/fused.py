"""Layers whose backward takes less memory for what was saved: batch norm and ReLU read it packed, convolutions drop it.

Half of what a convolutional network saves are inputs of batch norms. Plain hooks decode such an input to memory, where
batch norm's backward reads it twice; for ReLU they write a mask that is read once. Here a layer's call goes to an
autograd function that runs the same forward operation and saves the same tensor through the same hooks, and whose
backward decodes in registers (kernels/gpu_norm.py, gq_gate). A convolution has to decode its input to memory, but
computes the weight's gradient first and lets go of the input before its gradient, which is as large, needs memory.
Wherever that is not possible, it computes what plain autograd would.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _autograd
from torch.nn import functional

from halley.capture import Capture, Layer, unpack
from halley.cells import Saved
from halley.codecs import GroupQuant
from halley.codecs.groupquant import GroupQuantPacked
from halley.packed import Layout
from halley.sites import Site, signature

ENABLED = True
"""Read by `install`: False leaves every layer as it is, for comparison."""
SMALLEST = 1 << 20
"""Inputs of fewer bytes go the plain way."""
LARGE_CONV = 32 << 20
"""The same for the inputs of convolutions: for these it is a matter of memory alone."""
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class NormFunction(torch.autograd.Function):
    """Batch norm in training: input, weight, bias, running mean, running variance, momentum, eps, kind of device."""

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
        device: str,
    ) -> Tensor:
        out, mean, invstd, reserve, implementation = torch.ops.aten._batch_norm_impl_index(
            x, weight, bias, running_mean, running_var, True, momentum, eps, torch.backends.cudnn.enabled
        )
        # The input comes first, as in the plain operation: its place among what the layer saves stays the same.
        ctx.save_for_backward(x, *(() if weight is None else (weight,)))
        ctx.statistics = (mean, invstd, reserve)
        ctx.implementation, ctx.eps, ctx.device = implementation, eps, device
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = None if torch.is_grad_enabled() else packed_gradients(ctx, grad)
        return (*(plain_gradients(ctx, grad) if gradients is None else gradients), None, None, None, None, None)


class ReluFunction(torch.autograd.Function):
    """ReLU: input, whether in place, kind of device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inplace: bool, device: str) -> Tensor:
        if inplace:
            ctx.mark_dirty(x)
        y = torch.relu_(x) if inplace else torch.relu(x)
        ctx.save_for_backward(y)
        ctx.device = device
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
        ctx.settings = (stride, padding, dilation, False, (0,) * len(stride), groups)
        # What a collection step reads of the plain operation's node, under the same names.
        ctx.halley_slots = ("input", "weight")
        ctx._saved_stride, ctx._saved_padding, ctx._saved_dilation = stride, padding, dilation
        ctx._saved_transposed, ctx._saved_output_padding, ctx._saved_groups = ctx.settings[3:]
        ctx.bias_size = None if bias is None else bias.shape
        # In the order of the plain operation.
        ctx.save_for_backward(x, weight)
        return torch.ops.aten.convolution(x, weight, bias, *ctx.settings)

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
    return torch.ops.aten.convolution_backward(grad, x, weight, ctx.bias_size, *ctx.settings, needs)


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
    packed = packed_in(saved, grad, ctx.device)
    if packed is None or not dense_alike(grad, saved.layout):
        return None
    from halley.kernels import gpu

    codec = packed.codec
    return gpu.gq_gate(packed.parts[0], grad, codec.bits, codec.group, packed.stride, codec.signs)


def packed_in(saved: Any, grad: Tensor, device: str) -> GroupQuantPacked | None:
    """What was packed for a saving, if it is of the kind and where the kernels read it."""
    if not isinstance(saved, Saved) or saved.cell is None or saved.layout is None or saved.cell.held is not None:
        return None
    packed = saved.cell.packed
    if not isinstance(packed, GroupQuantPacked) or packed.parts[0].device.type != device:
        return None
    return packed if grad.dtype == packed.dtype else None


def dense_alike(grad: Tensor, layout: Layout) -> bool:
    """Whether a gradient lies in memory as the packed tensor did, without gaps."""
    return not layout.copied and grad.stride() == layout.stride and 0 not in layout.stride and is_dense(grad)


def is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()]))


_functions: dict[str, Any] = {}


def function_named(operation: str, kind: type[torch.autograd.Function] = NormFunction) -> Any:
    """The function under the name of the operation that it stands for: capture compares it when it reads."""
    if operation not in _functions:
        _functions[operation] = types.new_class(operation, (kind,))
    return _functions[operation]


def plain_gradients(ctx: Any, grad: Tensor) -> Gradients:
    """What plain autograd computes, from the restored input; differentiable where backward is recorded."""
    x, *rest = ctx.saved_tensors
    mean, invstd, reserve = ctx.statistics
    last = FORMATS.get(x.dim(), torch.contiguous_format)
    if x.is_contiguous() or not x.is_contiguous(memory_format=last):
        last = torch.contiguous_format
    return torch.ops.aten._batch_norm_impl_index_backward(
        ctx.implementation, x, grad.contiguous(memory_format=last), rest[0] if rest else None, None, None, mean, invstd,
        True, ctx.eps, ctx.needs_input_grad[:3], reserve.clone(),
    )  # fmt: skip


def packed_gradients(ctx: Any, grad: Tensor) -> Gradients | None:
    """The gradients from the input as it was packed; None where the kernels do not take it."""
    raw = [piece.data for piece in ctx._raw_saved_tensors]
    packed, layout = packed_in(raw[0], grad, ctx.device), raw[0].layout if isinstance(raw[0], Saved) else None
    if packed is None or layout is None or packed.codec.signs:
        return None
    from halley.kernels import gpu_norm

    last, bits = is_last(layout), packed.codec.bits
    if last is None:
        return None
    if not gpu_norm.supported(layout.size, packed.stride, last, bits, packed.codec.group, packed.dtype):
        return None
    weight = raw[1] if len(raw) > 1 else None
    if isinstance(weight, Saved | tuple):
        weight = unpack(weight)
    mean, invstd, _ = ctx.statistics
    grad = grad.contiguous(memory_format=FORMATS[grad.dim()] if last else torch.contiguous_format)
    want_x, want_weight, want_bias = ctx.needs_input_grad[:3]
    grad_x, grad_weight, grad_bias = gpu_norm.norm_backward(
        grad, packed.parts[0], mean, invstd, weight, bits, packed.seed, last, want_x
    )
    return grad_x, grad_weight if want_weight else None, grad_bias if want_bias else None


def is_last(layout: Layout) -> bool | None:
    """Whether a tensor lies in channels_last memory (True), contiguously (False), or otherwise (None)."""
    if layout.copied:
        return None
    size, stride = layout.size, layout.stride
    order = [*range(len(size))]
    for last, dims in ((False, order), (True, [0, *order[2:], 1])):
        step, good = 1, not last or len(size) in FORMATS
        for d in reversed(dims):
            good = good and (size[d] == 1 or stride[d] == step)
            step *= size[d]
        if good:
            return last
    return None


class Forward:
    """What an attached layer has as its `forward`: decides at each call which way it goes.

    It does not travel: copies and pickles of the layer get the class's own method in its place.
    """

    layers: tuple[type[nn.Module], ...]
    least = SMALLEST
    """Inputs of fewer bytes go the plain way, unless `install` is told otherwise."""
    slot: str
    """Where the plain operation saves the tensor that backward reads packed here."""

    def __init__(self, capture: Capture, layer: Layer, device: str, smallest: int) -> None:
        self.capture = capture
        self.layer = layer
        self.device = device
        self.smallest = smallest

    def __call__(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            owner: Any = self.layer.owner()
            return type(owner).forward(owner, input)
        # A replica or shallow copy of the layer brings its own weights, but has this very object as its forward.
        module: Any = sys._getframe(1).f_locals.get("self")
        if not isinstance(module, self.layers) or module.__dict__.get("forward") is not self:
            module = self.layer.owner()
        site = self.site(module, input)
        if site is None:
            return type(module).forward(module, input)
        return self.run(module, input, site.operation)

    def site(self, module: Any, x: Tensor) -> Site | None:
        """The place where this call saves that tensor, if it may go to the kernels; None sends it the plain way."""
        forward = self.capture.forward
        if not forward.frames or forward.frames[-1].layer is not self.layer:
            return None
        frame = forward.frames[-1]
        site = frame.sites[frame.index] if frame.index < len(frame.sites) else None
        # A class that was changed since, as parametrizations do, may compute its weight at every look at it.
        if (
            site is None
            or type(module) not in self.layers
            or site.slot != self.slot
            or not site.stable
            or type(x) is not Tensor
            or x.device.type != self.device
            or x.numel() * x.element_size() < self.smallest
        ):
            return None
        if not self.takes(module, x, site) or not torch.is_grad_enabled() or not self.hooked():
            return None
        return site

    def takes(self, module: Any, x: Tensor, site: Site) -> bool:
        """Whether this call of the layer is one for the kernels."""
        raise NotImplementedError

    def run(self, module: Any, x: Tensor, operation: str) -> Tensor:
        """The call itself, through the autograd function in the operation's place."""
        raise NotImplementedError

    def hooked(self) -> bool:
        """Whether what is saved now goes to our capture: not to a checkpoint's hooks, torch.func or a compiler."""
        top = _autograd._top_saved_tensors_default_hooks(True)
        if top is None or top[0] != self.capture.hooks[0] or torch.compiler.is_compiling():
            return False
        return torch._C._functorch.peek_interpreter_stack() is None

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
    slot = "input"

    def takes(self, module: Any, x: Tensor, site: Site) -> bool:
        if site.need != "lossy" or x.dim() < 3 or not site.operation.endswith("BatchNorm"):
            return False
        if not module.training and not (module.running_mean is None and module.running_var is None):
            return False
        codec = self.capture.policy.choose(site)
        return site.signature == signature(x) and isinstance(codec, GroupQuant) and not codec.signs

    def run(self, module: Any, x: Tensor, operation: str) -> Tensor:
        return norm(module, x, function_named(operation), self.device)


def norm(module: Any, x: Tensor, function: Any, device: str) -> Tensor:
    """What `forward` of a batch norm in training does, with another function at its end."""
    module._check_input_dim(x)
    momentum = 0.0 if module.momentum is None else module.momentum
    running = module.training and module.track_running_stats
    if running and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            momentum = 1.0 / float(module.num_batches_tracked)
    tracked = running or not module.training
    functional._verify_batch_size(x.size())  # type: ignore[attr-defined]
    return function.apply(
        x,
        module.weight,
        module.bias,
        module.running_mean if tracked else None,
        module.running_var if tracked else None,
        momentum,
        module.eps,
        device,
    )


class ReluForward(Forward):
    """Of a ReLU."""

    layers = (nn.ReLU,)
    slot = "result"

    def takes(self, module: Any, x: Tensor, site: Site) -> bool:
        return site.need == "mask" and x.requires_grad and not (module.inplace and x.is_leaf)

    def run(self, module: Any, x: Tensor, operation: str) -> Tensor:
        return function_named(operation, ReluFunction).apply(x, module.inplace, self.device)


class ConvForward(Forward):
    """Of a convolution."""

    layers = (nn.Conv2d, nn.Conv3d)
    least = LARGE_CONV
    slot = "input"

    def takes(self, module: Any, x: Tensor, site: Site) -> bool:
        if site.need != "lossy" or site.operation != "Convolution" or site.signature != signature(x):
            return False
        if module.padding_mode != "zeros" or isinstance(module.padding, str) or x.dim() != module.weight.dim():
            return False
        return x.requires_grad and module.weight.requires_grad and self.suits(module, x)

    def suits(self, module: Any, x: Tensor) -> bool:
        """Whether weight and bias are plain tensors of the input's dtype, or become that under autocast."""
        parameters = [module.weight] if module.bias is None else [module.weight, module.bias]
        dtypes: tuple[torch.dtype, ...] = (x.dtype,)
        if torch.is_autocast_enabled(self.device):
            dtypes = CASTS if x.dtype == torch.get_autocast_dtype(self.device) else ()
        return all(type(p) in PLAIN and p.dtype in dtypes for p in parameters)

    def run(self, module: Any, x: Tensor, operation: str) -> Tensor:
        weight, bias = module.weight, module.bias
        # Autocast would do this itself, but inside the function, where it is not recorded.
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        function = function_named(operation, ConvFunction)
        return function.apply(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)


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
