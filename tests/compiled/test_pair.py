"""Regions of `torch.utils.checkpoint` in a compiled model stay regions that are computed again from exact inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import encke
from encke.capture import needs
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from tests.compiled.common import EIGHT, TWO, as_inductor_gets_it, compile, error, gradients, same

pytestmark = pytest.mark.parametrize("backend", ["aot_eager", as_inductor_gets_it])


class Regions(nn.Module):
    """Checkpointed blocks with random numbers inside, between layers that are not checkpointed."""

    def __init__(self, around: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))  # noqa: E731
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.first, self.last = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))
        self.around = around

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) if self.around else x
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x) if self.around else x


X = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))


def test_inputs_of_regions_are_exact_and_nothing_inside_is_saved(backend: Any) -> None:
    compiled = compile(Regions(), backend=backend)
    plain = gradients(compiled, X)
    with encke.attach(compiled, Fixed(ErrorBounded(0)), min_bytes=1):
        assert same(plain, gradients(compiled, X))
    with encke.attach(compiled, EIGHT) as handle:
        assert error(plain, gradients(compiled, X)) < 0.03
        rows = {(row.operation, row.codec) for row in handle.report().sites if row.saved_bytes}
        assert ("Checkpoint", "kept") in rows and ("Gelu", "GroupQuant") in rows
        # 256 values for each row exist in the regions alone.
        assert max(row.saved_bytes for row in handle.report().sites) == X.nbytes


def test_a_model_of_regions_alone_has_the_gradients_of_plain(backend: Any) -> None:
    compiled = compile(Regions(around=False), backend=backend)
    plain = gradients(compiled, X)
    encke.attach(compiled, TWO)
    assert same(plain, gradients(compiled, X))


def test_inputs_of_regions_are_packed_where_the_user_says_so(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile(Regions(), backend=backend)
    plain = gradients(compiled, X)
    monkeypatch.setattr(needs, "_registered", dict(needs._registered))
    encke.register_reader("Checkpoint", "input", "smooth")
    try:
        handle = encke.attach(compiled, TWO)
        assert 0 < error(plain, gradients(compiled, X)) < 1
        rows = [row for row in handle.report().sites if row.operation == "Checkpoint"]
        assert {row.bound for row in rows if row.codec == "GroupQuant"} == {"8 bits"}
    finally:
        needs.listed_need.cache_clear()
