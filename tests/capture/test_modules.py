"""Module hooks: copies of a model get none."""

from __future__ import annotations

import copy
import io

import torch

import encke
from tests.capture.common import EXACT, batch, twins


def test_deepcopy_and_save_give_unattached_models() -> None:
    _, model, handle = twins()
    model(batch()).sum().backward()
    before = handle.report().forwards
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (twin, loaded):
        other(batch()).sum().backward()
        assert handle.report().forwards == before
        second = encke.attach(other, EXACT)
        other(batch()).sum().backward()
        assert second.report().forwards == 1 and len(other._forward_hooks) == 1
        second.detach()
        assert not other._forward_hooks and not other._forward_pre_hooks
