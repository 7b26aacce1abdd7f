"""Trainings as they are measured: loss in chunks, whole or with a compiled body."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from encke.bench.steps import Gauge, Task, Training
from encke.integrations.logits import DeferringLinear
from encke.tools import process

TASK = {"model": "llama_small", "precision": "fp32", "batch": 4, "size": 128, "steps": 1, "device": "cpu"}


def losses(method: str, **options: bool) -> tuple[Training, list[float]]:
    training = Training(Task(method=method, **TASK, **options))
    found = []
    for _ in range(2):
        training.step()
        found.append(training.loss.item())
    return training, found


def test_memory_that_is_free_does_not_count_as_in_use(monkeypatch):
    released: list[bool] = []
    monkeypatch.setattr(process, "release_freed_memory", lambda: released.append(True))
    Gauge("cpu").settle()
    assert released == [True]


def test_a_loss_in_chunks_is_the_loss():
    whole, expected = losses("plain")
    chunked, found = losses("plain", chunked=True)
    assert found == pytest.approx(expected, rel=1e-5) and expected[1] < expected[0]
    assert type(chunked.model.lm_head) is DeferringLinear and type(whole.model.lm_head) is nn.Linear


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "default"])
def test_a_compiled_model_is_compiled_up_to_its_logits(monkeypatch, method):
    original = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **given: original(module, backend="aot_eager"))
    training, found = losses(method, chunked=True, compile=True)
    assert training.model.base_model._compiled_call_impl is not None and training.model._compiled_call_impl is None
    assert type(training.model.lm_head) is DeferringLinear
    assert found == pytest.approx(losses("plain")[1], rel=1e-4)
    if training.handle is not None:
        report = training.handle.report()
        assert report.packed_bytes < report.saved_bytes / 2
        training.handle.detach()
    torch.compiler.reset()
