"""Models, inputs and comparisons that the tests of fused layers share.

Without a GPU the kernels run on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.fused.base import LayerForward
from encke.policies import Fixed

TWO_BITS = Fixed(GroupQuant(bits=2))

EXACT = Fixed(ErrorBounded(0))

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

NEAR = 1e-4 if torch.cuda.is_available() else 1e-5

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def attach(model: nn.Module, policy=TWO_BITS, device: str = DEVICE) -> encke.Handle:
    """An attached model whose layers are fused on that device, whatever their size; nowhere on `none`."""
    handle = encke.attach(model, policy)
    for forward in [hook for hook in handle._hooks if isinstance(hook, LayerForward)]:
        forward.device_type, forward.device_seen, forward.min_bytes = device, None, 1
    return handle


def net(norm: nn.Module | None = None, channels: int = 8) -> nn.Sequential:
    """Convolution, batch norm, ReLU, convolution: planes of 18 x 18 are no multiple of a group."""
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(channels) if norm is None else norm
    with torch.no_grad():
        for p in norm.parameters():
            p.uniform_(0.5, 1.5)
    first = nn.Conv2d(3, channels, 3, padding=1, bias=False)  # a bias there would have a gradient of rounding errors
    return nn.Sequential(first, norm, nn.ReLU(inplace=True), nn.Conv2d(channels, 4, 1)).to(DEVICE)


def data(last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(2, 3, 18, 18, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def gradients(model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Output, gradients and buffers after a few steps: from the second one on the sites are known."""
    for _ in range(steps):
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), *grads, *(b.float() for b in model.buffers())]


def near(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all((x - y).abs().max() <= tolerance * y.abs().max() for x, y in pairs)


def second_order(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):
        x = x.detach().requires_grad_()
        first = torch.autograd.grad(model(x).tanh().square().mean(), x, create_graph=True)[0]
        grads = torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)
    return [g for g in grads if g is not None]


def copies(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
