"""Fixtures of the tests of fused layers."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from encke.fused import batchnorm, instancenorm


@pytest.fixture(autouse=True)
def full_precision(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def deterministic(monkeypatch) -> None:
    """Where gradients are compared bit for bit: left to itself cuDNN adds those of weights in any order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Record of calls: `forward` for each fused call, `packed`, `values` or `plain` for each backward."""
    seen: list[str] = []

    def watch(name: str, function: str, module: ModuleType = batchnorm) -> None:
        original = getattr(module, function)

        def watched(*args):
            found = original(*args)
            seen.extend([] if found is None else [name])
            return found

        monkeypatch.setattr(module, function, watched)

    watch("forward", "apply_function")
    watch("forward", "apply_function", instancenorm)
    watch("packed", "gradients_from_codes")
    watch("values", "gradients_from_values")
    watch("plain", "plain_gradients")
    return seen
