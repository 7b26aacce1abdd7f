"""Convolution whose backward releases its restored input early, and which splits a batch of large volumes into parts.

A convolution has to decode its input to memory. It computes the weight's gradient first, and releases the input before
it allocates the input's gradient, which is as large. If tensors are contiguous, cuDNN copies them to its own memory
format meanwhile: input and result, or two gradients. If these are large volumes, the batch is split into parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.deferred import RestoredInput
from encke.capture.facts import SiteFacts
from encke.capture.passes import ForwardPass
from encke.capture.readers import matches
from encke.capture.sites import Site
from encke.capture.thresholds import CONV_PART_BYTES, SPLIT_CONV_MIN_BYTES
from encke.fused.base import LayerForward, in_place_of
from encke.policies.base import Policy
from encke.torch_internals import conv_memory_format, storageless

PLAIN = (Tensor, nn.Parameter)
AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that autocast casts to its own."""

PARTED = (5,)
"""Dimensions of tensors whose batch is split into parts. For images, the copies of results take too long."""

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of input, weight and bias."""

convolution_backward = torch.ops.aten.convolution_backward.default


class ConvFunction(torch.autograd.Function):
    """Convolution. Arguments: input, weight, bias, stride, padding, dilation, groups, and number of parts."""

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
        parts: int,
    ) -> Tensor:
        """Return the plain operation's result."""
        settings = ctx.settings = (stride, padding, dilation, False, (0,) * len(stride), groups)
        ctx.parts = parts
        ctx.bias_size = None if bias is None else bias.shape
        # In the order of the plain operation.
        ctx.save_for_backward(x, weight)
        return convolve(x, weight, bias, settings, parts)

    # Attributes of the plain operation's node that capture and policies read.
    node = {"encke_slots": ("input", "weight")} | {
        f"_saved_{name}": property(lambda ctx, i=i: ctx.settings[i])  # type: ignore[misc]
        for i, name in enumerate(("stride", "padding", "dilation", "transposed", "output_padding", "groups"))
    }

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Return the gradients of input, weight and bias."""
        needs, sizes = ctx.needs_input_grad[:3], ctx.bias_size
        if torch.is_grad_enabled() or not all(needs[:2]):
            gradients = convolution_backward(grad, *ctx.saved_tensors, sizes, *ctx.settings, needs)
        else:
            gradients = split_gradients(lambda: ctx.saved_tensors, grad, sizes, ctx.settings, needs, ctx.parts)
        return (*gradients, None, None, None, None, None)


def parts_of(x: Tensor, weight: Tensor, settings: tuple[Any, ...], site: Site, policy: Policy) -> int:
    """Return the number of parts into which a convolution splits its batch; 1 if its input is saved exactly.

    Parts and whole have the same results within rounding, since cuDNN may use different algorithms for them.
    """
    nbytes = x.numel() * x.element_size()
    if nbytes <= CONV_PART_BYTES or x.dim() not in PARTED or not x.is_contiguous() or policy.choose(site).exact:
        return 1
    samples = x.shape[0]
    parts = next((n for n in range(1, samples) if samples % n == 0 and nbytes <= n * CONV_PART_BYTES), samples)
    alike = all(copied_by_backend(each, weight, settings) for each in (x, x[: samples // parts]))
    return parts if alike else 1


def copied_by_backend(x: Tensor, weight: Tensor, settings: tuple[Any, ...]) -> bool:
    """Return whether the backend of a convolution copies contiguous tensors. This depends on their size, too."""
    return conv_memory_format(x, weight, settings) is torch.contiguous_format


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...], parts: int) -> Tensor:
    """Return the result of a convolution, computed part by part."""
    if parts == 1:
        return torch.convolution(x, weight, bias, *settings)
    y = None
    for number, part in enumerate(x.chunk(parts)):
        result = torch.convolution(part, weight, bias, *settings)
        if y is None:
            y = result.new_empty((x.shape[0], *result.shape[1:]))
        y.chunk(parts)[number].copy_(result)
        del result
    assert y is not None
    return y


def split_gradients(
    load: Callable[[], tuple[Tensor, Tensor]], grad: Tensor, sizes: Any, settings: tuple[Any, ...],
    needs: tuple[bool, ...], parts: int = 1,
) -> Gradients:  # fmt: skip
    """Compute the gradients in two calls, and release the restored input between them if the backend allows it.

    Args:
        load: Function that returns input and weight.
        grad: Gradient of the result.
        sizes: Size of the bias, or None.
        settings: Arguments of `aten.convolution` from stride on.
        needs: Which gradients are needed; those of input and weight always are.
        parts: Number of parts into which the batch is split.
    """
    x, weight = load()
    memory_format = conv_memory_format(x, weight, settings)
    if memory_format is None:
        return convolution_backward(grad, x, weight, sizes, *settings, needs)
    if parts > 1 and not copied_by_backend(x[: len(x) // parts], weight, settings):
        parts = 1
    grad = grad.contiguous(memory_format=memory_format)
    size, stride = x.shape, x.stride()
    if parts > 1:
        found = zip(grad.chunk(parts), x.chunk(parts), strict=True)
        each = [convolution_backward(g, part, weight, sizes, *settings, (False, *needs[1:]))[1:] for g, part in found]
        grad_weight, grad_bias = (added(gradients) for gradients in zip(*each, strict=True))
        del x, found
        grad_x = grad.new_empty(size)
        for part, g in zip(grad_x.chunk(parts), grad.chunk(parts), strict=True):
            like = storageless(part.shape, part.stride(), grad)
            part.copy_(convolution_backward(g, like, weight, sizes, *settings, (True, False, False))[0])
        return grad_x, grad_weight, grad_bias
    _, grad_weight, grad_bias = convolution_backward(grad, x, weight, sizes, *settings, (False, *needs[1:]))
    del x
    like = storageless(size, stride, grad)
    grad_x = convolution_backward(grad, like, weight, sizes, *settings, (True, False, False))[0]
    return grad_x, grad_weight, grad_bias


def added(gradients: tuple[Tensor | None, ...]) -> Tensor | None:
    """Return the sum of a parameter's gradients, rounded once; None if they are not needed."""
    first, *others = gradients
    if first is None:
        return None
    total = first.float() if first.element_size() == 2 else first
    for each in others:
        total.add_(each)  # type: ignore[arg-type]
    return total.to(first.dtype)


class ConvForward(LayerForward):
    """Run `nn.Conv2d` and `nn.Conv3d`, and split their backward in two."""

    layers = (nn.Conv2d, nn.Conv3d)
    min_bytes = SPLIT_CONV_MIN_BYTES

    def function(self, facts: SiteFacts) -> Any:
        """Return `ConvFunction` if the site saves the input of a convolution and may be lossy."""
        site = facts.site
        known = site.slot == "input" and site.need == "lossy" and site.operation == "Convolution"
        return in_place_of(facts.reader, ConvFunction) if known else None

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call with the function; None if the function does not support the call or would gain nothing."""
        if not x.requires_grad or not matches(facts, x):
            return None
        operands = operands_of(module, x.dtype, x.dim(), self.device_type)
        if operands is None:
            return None
        weight, bias = operands
        # Autocast would do this itself, but inside the function, where it is not recorded.
        if weight.dtype != x.dtype:
            weight = weight.to(x.dtype)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        forward.deferred = RestoredInput(facts, None, x)
        geometry = module.stride, module.padding, module.dilation, module.groups
        settings = (*geometry[:3], False, (0,) * len(module.stride), module.groups)
        return facts.function(
            x, weight, bias, *geometry, parts_of(x, weight, settings, facts.site, self.capture.policy)
        )


def operands_of(module: Any, dtype: torch.dtype, dimensions: int, device_type: str) -> tuple[Any, Any] | None:
    """Return weight and bias of a convolution; None if the function does not support the call.

    Both must be plain tensors, of the input's dtype or of a dtype that autocast casts to it.
    """
    parameters = module._parameters
    weight = parameters["weight"] if "weight" in parameters else module.weight
    bias = parameters["bias"] if "bias" in parameters else module.bias
    if module.padding_mode != "zeros" or type(module.padding) is str or dimensions != weight.dim():
        return None
    dtypes: tuple[torch.dtype, ...] = (dtype,)
    if torch.is_autocast_enabled(device_type):
        dtypes = AUTOCAST_DTYPES if dtype == torch.get_autocast_dtype(device_type) else ()
    if type(weight) not in PLAIN or weight.dtype not in dtypes or not weight.requires_grad:
        return None
    if bias is not None and (type(bias) not in PLAIN or bias.dtype not in dtypes):
        return None
    return weight, bias
