"""Requests for kernels: made once, in the first pass, for the dtype and memory format at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from encke.codecs import ErrorBounded, GroupQuant
from encke.fused import requests
from encke.kernels import UsualUse
from encke.policies import Comet, Fixed, Policy
from tests.fused.common import DEVICE, attach

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


class Squeezed(nn.Module):
    """Activation of squeezed planes, whose memory format is that of contiguous and channels_last tensors."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.activation(x.mean((2, 3), keepdim=True))


MODELS = {
    "batch norm": lambda: [nn.BatchNorm2d(8), nn.ReLU()],
    "no norm": lambda: [nn.ReLU()],
    "instance norm": lambda: [nn.InstanceNorm2d(8), nn.LeakyReLU(0.1, inplace=True)],
    "squeezed": lambda: [Squeezed(nn.ReLU()), nn.ReLU()],
}


def asked(layers: list[nn.Module], last: bool, policy: Policy, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Return what a model requests in three steps."""
    found: list[Any] = []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 4, 1)).to(DEVICE, dtype)
    x = torch.randn(4, 3, 8, 8).to(DEVICE, dtype)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "compile_ahead", lambda **wanted: found.append(wanted))
        handle = attach(model, policy)
        for forward in handle._hooks:
            if hasattr(forward, "min_bytes"):
                forward.min_bytes = 1024
        for _ in range(3):
            model(x).float().square().mean().backward()
    return found


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_cnn_asks_once_for_its_dtype_and_memory_format(name, dtype, last):
    # The result of an instance norm is contiguous, whatever its input.
    formats = [True, False] if name == "instance norm" and last else [last]
    expected = [{"usual": [UsualUse(dtype, True, each)], "rates": (2,)} for each in formats]
    assert asked(MODELS[name](), last, Fixed(GroupQuant(bits=2)), dtype) == expected


def test_under_autocast_the_dtype_of_the_image_does_not_count():
    with torch.autocast(DEVICE, torch.bfloat16):
        found = asked(MODELS["batch norm"](), True, Fixed(GroupQuant(bits=2)))
    assert [each["usual"][0].dtype for each in found] == [torch.bfloat16]


def test_an_adaptive_policy_may_need_every_number_of_bits_and_the_first_one_at_once():
    ((wanted,), (other,)) = (asked(MODELS["batch norm"](), True, policy) for policy in (Comet(), Fixed(GroupQuant(8))))
    assert sorted(wanted["rates"]) == [2, 3, 4, 8] and other["rates"] == (8,)


def test_codecs_whose_codes_no_kernel_reads_need_no_kernels():
    assert asked(MODELS["batch norm"](), True, Fixed(ErrorBounded(0.01))) == []
