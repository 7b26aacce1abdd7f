"""Ledger: what is counted is what plain autograd would hold."""

from __future__ import annotations

import pytest
import torch

import encke
from tests.models import MODELS


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_agree_with_what_plain_autograd_holds(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    held: dict[int, int] = {}
    keep = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        keep.append(t.untyped_storage())
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*inputs)
    for tensor in (*model.parameters(), *model.buffers()):
        held.pop(tensor.untyped_storage().data_ptr(), None)
    del out
    handle = encke.attach(model)
    for _ in range(3):
        out = model(*inputs)
        assert handle.report().saved_bytes == pytest.approx(sum(held.values()), rel=0.01)
        del out
