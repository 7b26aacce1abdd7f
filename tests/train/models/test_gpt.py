"""The small GPT."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from encke.train.models.gpt import Gpt


def tiny_gpt(**settings) -> Gpt:
    torch.manual_seed(0)
    return Gpt(11, **{"context": 8, "layers": 2, "heads": 2, "width": 16, **settings})


def test_gpt_gives_logits_near_uniform_at_the_start():
    tokens = torch.randint(11, (4, 8))
    logits = tiny_gpt()(tokens)
    assert logits.shape == (4, 8, 11)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())
    assert abs(loss.item() - math.log(11)) < 0.1


def test_gpt_does_not_look_ahead():
    model = tiny_gpt().eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_gpt_scales_residual_projections_and_drops_in_training_only():
    model = tiny_gpt(layers=8, width=64, dropout=0.5)
    assert model.blocks[0].narrow.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].widen.weight.std().item() == pytest.approx(0.02, rel=0.1)
    tokens = torch.randint(11, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="width 16 and heads 3"):
        tiny_gpt(heads=3)
    with pytest.raises(ValueError, match="8 tokens at once, got 9"):
        tiny_gpt()(torch.zeros(1, 9, dtype=torch.long))
