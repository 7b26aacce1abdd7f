"""Every test of compiled models starts with an empty compiler and leaves no hooks and no patch behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import guards
from torch._dynamo.utils import counters

from encke.compiled.ops import plan_of
from encke.kernels import backend_for
from encke.torch_internals import top_saved_tensors_hooks

# Dynamo times the guards of every graph after flushing the processor's caches, 40 ms each, for a line in a log.
guards.profile_guard_manager = lambda *args: 0.0


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    assert top_saved_tensors_hooks() is None


@pytest.fixture
def reference_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute without kernels: those of a setting that no other test has take seconds to compile."""
    with monkeypatch.context() as patch:
        patch.setenv("ENCKE_KERNELS", "reference")
        backend_for.cache_clear()
        plan_of.cache_clear()
        yield
    backend_for.cache_clear()
    plan_of.cache_clear()
