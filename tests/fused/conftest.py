"""Fixtures of the tests of fused layers."""

from __future__ import annotations

import pytest
import torch

from encke.fused import batchnorm


@pytest.fixture(autouse=True)
def full_precision(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def deterministic(monkeypatch) -> None:
    """Where gradients are compared bit for bit: left to itself cuDNN adds those of weights in any order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Record of calls: `forward` for each fused call, `packed` or `plain` for each backward."""
    seen: list[str] = []
    run, packed, plain = batchnorm.training_forward, batchnorm.gradients_from_codes, batchnorm.plain_gradients

    def watched(*args):
        found = packed(*args)
        seen.extend([] if found is None else ["packed"])
        return found

    monkeypatch.setattr(batchnorm, "training_forward", lambda *args: seen.append("forward") or run(*args))
    monkeypatch.setattr(batchnorm, "gradients_from_codes", watched)
    monkeypatch.setattr(batchnorm, "plain_gradients", lambda *args: seen.append("plain") or plain(*args))
    return seen
