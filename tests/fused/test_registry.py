"""Which layers get a forward of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import encke
from encke.capture.modules import Layer
from encke.capture.thresholds import FUSE_MIN_BYTES, SPLIT_CONV_MIN_BYTES
from encke.fused import registry
from encke.fused.base import InstalledForward, LayerForward
from tests.fused.common import TWO_BITS, attach, net

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_who_is_left_alone():
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm2d(8), Own(8), nn.SyncBatchNorm(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    mine = model[3].forward = lambda x: x
    handle = encke.attach(model, TWO_BITS, overrides={"4": None})
    handle.detach()
    layers = [Layer(name, m, None, name != "4") for name, m in model.named_modules()]
    installed = registry.install(layers, handle._capture)
    assert [name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), LayerForward)] == ["0"]
    assert model[3].forward is mine and len(installed) == 1


def test_switched_off(monkeypatch):
    monkeypatch.setattr(registry, "ENABLED", False)
    model = net()
    attach(model)
    assert "forward" not in model[1].__dict__


def test_convolutions_are_fused_from_a_larger_size_on_than_batch_norms():
    model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12))
    encke.attach(model, TWO_BITS)
    assert [m.__dict__["forward"].min_bytes for m in model] == [SPLIT_CONV_MIN_BYTES, FUSE_MIN_BYTES]


def test_a_new_fused_layer_is_one_class_and_one_line(monkeypatch):
    class TanhForward(InstalledForward):
        @classmethod
        def serves(cls, module):
            return type(module) is nn.Tanh

        def __call__(self, x):
            return torch.zeros_like(x)

    monkeypatch.setattr(registry, "FORWARDS", (*registry.FORWARDS, TanhForward))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    handle = encke.attach(model, TWO_BITS)
    assert isinstance(model[1].forward, TanhForward) and not model(torch.ones(2, 4)).any()
    handle.detach()
    assert "forward" not in model[1].__dict__ and model(torch.ones(2, 4)).any()
