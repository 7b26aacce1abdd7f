"""Registry of the forwards that serve layers. A new fused layer needs a file in this folder and a line here."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from encke.capture.hooks import Capture
from encke.capture.modules import Layer
from encke.fused.base import InstalledForward, LayerForward
from encke.fused.batchnorm import BatchNormForward
from encke.fused.block import BlockForward
from encke.fused.conv import ConvForward
from encke.fused.gelu import GeluForward
from encke.fused.instancenorm import InstanceNormForward
from encke.fused.leaky import LeakyReluForward
from encke.fused.relu import ReluForward
from encke.fused.requests import BITS_IN_TURN, KernelRequests
from encke.fused.rownorm import RowNormForward
from encke.fused.smooth import SmoothForward
from encke.kernels import UsualUse, compile_ahead

FORWARDS: tuple[type[InstalledForward], ...] = (
    BatchNormForward, InstanceNormForward, ReluForward, LeakyReluForward, ConvForward, GeluForward, SmoothForward,
    RowNormForward, BlockForward,
)  # fmt: skip

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

ENABLED = True
"""Whether `install` does anything. Tests and benchmarks set it to False to compare with plain hooks."""


def install(layers: Iterable[Layer], capture: Capture) -> list[InstalledForward]:
    """Install and return forwards for all layers of a model that one of `FORWARDS` serves; undo each with `remove()`.

    A layer that has a `forward` in its `__dict__` keeps it.
    """
    installed: list[InstalledForward] = []
    requests = KernelRequests(capture)
    for layer in layers if ENABLED else ():
        module = layer.owner()
        if module is None or not layer.compress:
            continue
        kind = next((forward for forward in FORWARDS if forward.serves(module)), None)
        if kind is None:
            continue
        drop_copied_forward(module)
        if "forward" not in module.__dict__:
            installed.append(kind(capture, layer))
            module.__dict__["forward"] = installed[-1]
    for forward in installed:
        # The input of a convolution may have another dtype than the tensors after it.
        if isinstance(forward, RowNormForward | LayerForward) and not isinstance(forward, ConvForward):
            forward.requests = requests
        if isinstance(forward, RowNormForward):
            requests.norms.append((forward.kind, math.prod(forward.shape)))
    return installed


def prepare_kernels(model: nn.Module, compiled: bool) -> None:
    """Start to compile kernels for a model on a GPU, while the first batch is being prepared.

    Args:
        model: The model.
        compiled: Whether it is compiled. If not, its norms request their kernels in the first forward pass. Here an
            empty request starts the process that compiles them, unless this machine has had one before.
    """
    if any(parameter.is_cuda for parameter in model.parameters()):
        images = any(isinstance(module, BATCH_NORMS) for module in model.modules())
        dtypes = (torch.bfloat16, torch.float32) if compiled else ()
        compile_ahead(usual=[UsualUse(dtype, images, True, True) for dtype in dtypes], rates=BITS_IN_TURN)


def drop_copied_forward(module: Any) -> None:
    """Remove the `forward` attribute that a copy of an attached layer has: the bound method of its own class."""
    own, kind = module.__dict__.get("forward"), type(module)
    if isinstance(own, types.MethodType) and own.__self__ is module and own.__func__ is kind.forward:
        del module.__dict__["forward"]
