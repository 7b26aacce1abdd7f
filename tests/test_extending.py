"""The example codec of docs/extending.md: written in one file, it works wherever a codec does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.capture.scores import Scores
from encke.capture.sites import Site
from encke.codecs import Codec
from encke.codecs.exact import Keep
from encke.policies import Fixed

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def codec() -> Codec:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    source = next(block for block in blocks if "(Codec)" in block)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, str(PAGE), "exec"), names)
    return names["RowInt8"]()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_it_trains(codec: Codec, backend: str | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Tanh())
    called = torch.compile(model, backend=backend) if backend else model
    batches = [torch.randn(8, 3, 32, 32) for _ in range(3)]

    def gradients(called: nn.Module) -> list[Tensor]:
        for x in batches:
            model.zero_grad()
            called(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients(model)
    handle = encke.attach(called, Fixed(codec))
    found = gradients(called)
    # A bias before batch norm has no gradient but noise.
    for i in (0, 2, 3, 4, 5):
        assert (found[i] - plain[i]).norm() < 0.02 * plain[i].norm(), i
    assert any(not torch.equal(a, b) for a, b in zip(found, plain, strict=True))
    report = handle.report()
    packed = [row for row in report.sites if row.codec == "RowInt8"]
    assert packed and all(row.saved_bytes > 3 * row.packed_bytes for row in packed)


def test_it_says_what_it_is(codec: Codec) -> None:
    assert codec.describe() == "8 bits, row by row" and Codec.from_dict(codec.to_dict()) == codec
    attention, logprob = (Site("layer", "?", "?", need=n, dimensions=4) for n in ("attention", "logprob"))
    scores = Scores(Fixed(codec))
    assert scores.codec(attention) == codec and scores.codec(logprob) == Keep()
