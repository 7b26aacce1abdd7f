"""Fixed: one codec, made finer only where a coarse one is known to break training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import encke
from encke.capture import scores
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant, LogProb
from encke.policies import Fixed, fixed
from tests.models import transformer


def site(need: str, slot: str = "?") -> Site:
    return Site("layer", "?", slot, need=need, dimensions=4)


@pytest.mark.parametrize(
    ("codec", "need", "expected"),
    [
        (GroupQuant(bits=2), "lossy", GroupQuant(bits=2)),
        (GroupQuant(bits=2, seed=3), "logprob", LogProb(seed=3)),
        (ErrorBounded(0.1), "lossy", ErrorBounded(0.1)),
        (ErrorBounded(0.1), "attention", ErrorBounded(0.1)),
        (ErrorBounded(0.1), "logprob", ErrorBounded(0.05)),
        (ErrorBounded(0.01), "logprob", ErrorBounded(0.01)),
        (ErrorBounded(0.01, rounding="dithered"), "logprob", ErrorBounded(0.01, rounding="dithered")),
        (ErrorBounded(0.01, "rel"), "logprob", ErrorBounded(0.05, "abs", limit=0.01)),
        (ErrorBounded(0), "attention", ErrorBounded(0)),
        (ErrorBounded(0, "rel"), "logprob", ErrorBounded(0, "rel")),
    ],
)
def test_codec_for_each_need(codec: Codec, need: str, expected: Codec) -> None:
    assert Fixed(codec).choose(site(need)) == expected


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, LogProb()), (torch.float16, LogProb()), (torch.float64, ErrorBounded(0.05))],
)
def test_log_probabilities_of_each_dtype(dtype: torch.dtype, expected: Codec) -> None:
    """Autocast on a GPU keeps the log-probabilities of a cross-entropy in 16 bits."""
    found = Fixed(GroupQuant(bits=2)).choose(
        Site("layer", "LogSoftmax", "result", need="logprob", dtype=dtype, dimensions=2)
    )
    assert found == expected


def test_gradients_of_a_loss_are_right_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to nearest makes the same error at every position with nearly the same prediction."""

    class Head(nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(x), labels)

    def error() -> tuple[float, float]:
        """Return the relative error of one step's gradient of a bias, and of the average of 16 steps."""
        torch.manual_seed(0)
        head = Head(32, 512)
        head.weight.data *= 0.05  # as early in training: positions differ little
        head.bias.data += 2 * torch.randn(512)
        batch = torch.randn(256, 32), torch.randint(0, 512, (256,))
        head(*batch).backward()
        exact, wrong = head.bias.grad.clone(), []
        encke.attach(head, Fixed(GroupQuant(bits=2)))
        for _ in range(17):
            head.zero_grad()
            head(*batch).backward()
            wrong.append((head.bias.grad - exact) / exact.norm())
        return float(wrong[1].norm()), float(sum(wrong[1:]).norm() / 16)

    once, often = error()
    monkeypatch.setattr(fixed, "at_logprob", lambda codec, site: ErrorBounded(0.05))
    nearest_once, nearest_often = error()
    assert often < once / 2 and nearest_often > 0.9 * nearest_once, (often, once, nearest_often, nearest_once)
    assert once < nearest_once / 3 and often < nearest_often / 8, (often, once, nearest_often, nearest_once)


def test_both_bounds_of_a_limited_codec_hold() -> None:
    x = torch.randn(5000)
    spread = float(x.max() - x.min())
    for codec in (ErrorBounded(0.5, limit=1e-3), ErrorBounded(1e-4, limit=1e-3), ErrorBounded(0.1, "rel", limit=1e-3)):
        error = (codec.encode(x).decode() - x).abs().max()
        assert error <= (min(1e-4, 1e-3 * spread) if codec.bound == 1e-4 else 1e-3 * spread)


def test_more_bits_for_attention_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bits for queries, keys and values corrupt their gradients."""

    def error() -> float:
        torch.manual_seed(0)
        model, (tokens,) = transformer()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if isinstance(module, nn.Linear):
                # Scores far from uniform, as in a trained model.
                module.weight.data *= 2
        plain = copy.deepcopy(model)
        two_bits = Fixed(GroupQuant(bits=2))
        encke.attach(model, two_bits, overrides={"*": None, "blocks.?": two_bits, "blocks.*.*": None})
        for _ in range(2):
            for m in (plain, model):
                m.zero_grad()
                F.cross_entropy(m(tokens).flatten(0, 1), tokens.flatten()).backward()
        a, b = plain.blocks[0].qkv.weight.grad, model.blocks[0].qkv.weight.grad
        return float((a - b).norm() / a.norm())

    with_rule = error()
    monkeypatch.setattr(scores, "SCORE_ERROR", 1e9)
    two = error()
    monkeypatch.setattr(scores, "MIN_BITS", {})
    without = error()
    assert with_rule < 0.18 < two < without, (with_rule, two, without)


def test_prints_as_it_is_written_and_has_no_state() -> None:
    policy = Fixed(GroupQuant(bits=4))
    assert repr(policy) == "Fixed(codec=GroupQuant(bits=4))" and policy.state_dict() == {}
