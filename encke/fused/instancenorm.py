"""Instance norm that reads its packed input in backward. PyTorch computes it as a batch norm of one sample.

Its result is a view of the batch norm's result. If an in-place activation follows, autograd makes it part of a
`CopySlices` node, whose backward copies the gradient three times and hides the operation (capture/hidden.py).
Therefore, the layer returns a separate tensor in the memory of the view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.facts import SiteFacts
from encke.capture.passes import ForwardPass, Frame
from encke.capture.readers import matches
from encke.fused.base import LayerForward, in_place_of
from encke.fused.batchnorm import BatchNormForward, Settings, apply_function, planes_call
from encke.torch_internals import is_view


class AliasFunction(torch.autograd.Function):
    """Alias of a view: a tensor in the same memory that is not a view for autograd."""

    @staticmethod
    def forward(ctx: Any, view: Tensor) -> Tensor:
        """Return the tensor."""
        return view.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient as it is."""
        return grad


class InstanceNormForward(LayerForward):
    """Run `nn.InstanceNorm1d` to `3d` without running statistics, and read their packed input in backward."""

    layers = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    function = BatchNormForward.function

    def attempt(self, module: Any, inputs: tuple[Any, ...], frame: Frame, forward: ForwardPass) -> Tensor | None:
        """Return a result that is never a view, even from the plain forward: the next layer then always saves alike."""
        y = super().attempt(module, inputs, frame, forward)
        if y is None:
            x = inputs[0] if len(inputs) == 1 else None
            if type(x) is not Tensor or x.device.type != self.device_type or type(module) not in self.layers:
                return None
            if not torch.is_grad_enabled() or not self.captured(x):
                return None
            y = type(module).forward(module, x)
        return in_place_of("Alias", AliasFunction)(y) if y.requires_grad and is_view(y) else y

    def run(self, module: Any, x: Tensor, facts: SiteFacts, forward: ForwardPass) -> Tensor | None:
        """Run the call with batch norm's function; None if the layer may raise an error, or if the codec is exact."""
        size = x.shape
        dimensions = next(n for n, layer in enumerate(self.layers, 3) if isinstance(module, layer))
        if len(size) != dimensions:
            return None  # no batch, or the wrong number of dimensions
        if size[1] != module.num_features or size[2:].numel() < 2:
            return None
        if module.track_running_stats or module.running_mean is not None:
            return None
        # As `torch.instance_norm` does.
        planes = x.contiguous().view(1, size[0] * size[1], *size[2:])
        if not matches(facts, planes):
            return None
        codec = None
        if facts.steady is None or not forward.steady:
            codec = self.capture.policy.choose(facts.site)
            if codec.exact:
                return None
        weight, bias = (None if each is None else each.repeat(size[0]) for each in (module.weight, module.bias))
        settings: Settings = (None, None, 0.0, module.eps, planes_call(planes, weight, bias, None))
        return apply_function(facts.function, planes, weight, bias, settings, facts, codec, forward).view(size)
