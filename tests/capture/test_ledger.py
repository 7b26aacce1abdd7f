"""Ledger: it counts the bytes that plain autograd would hold."""

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


def test_what_is_kept_stands_in_a_row_that_says_why() -> None:
    class Kept(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            self.table, self.scale = torch.nn.Parameter(torch.randn(64, 64)), torch.nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.other(torch.tanh(self.out(x))) @ (self.table * self.scale)
            return h * h[:, :1]

    model = Kept()
    handle = encke.attach(model, overrides={"out": None}, min_bytes=1024)
    x = torch.randn(128, 64, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    kept = {row.operation: row.saved_bytes for row in handle.report().sites if row.codec == "kept" and not row.layer}
    left_out, computed = kept["(layers left out)"], kept["(tensors computed from weights)"]
    assert left_out == 128 * 64 * 4 and computed == 64 * 64 * 4 and kept["(small tensors)"] == 128 * 4
