"""Memory through one step: what is recorded is what was allocated, in the order of the step."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import encke
from encke.tools import step_memory
from encke.tools.allocations import Allocations
from encke.tools.step_memory import StepMemory, StepRecorder, highest

ACTIVATIONS, BATCH, WIDTH = 6, 2048, 128
EACH = 4 * BATCH * WIDTH


def recorded(policy: str | None) -> StepMemory:
    """The second step of a model in which every activation saves its output, all of one size."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(ACTIVATIONS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = encke.attach(model, policy, optimizer) if policy else None
    x = torch.randn(BATCH, WIDTH)
    for _ in range(2):
        recorder = StepRecorder(model, optimizer, [x])
        with recorder:
            loss = model(x).square().mean()
            recorder.forward_ended()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
    if handle:
        handle.detach()
    return recorder.memory


def test_forward_rises_by_what_is_saved_and_backward_falls_to_the_beginning():
    found = recorded(None)
    weights = 4 * (WIDTH * WIDTH + WIDTH)
    assert found.resting_bytes == 2 * weights + EACH  # with momentum; and the batch
    assert len(found.bytes) == step_memory.POINTS and max(found.bytes) == found.peak_bytes
    # Every output is saved; temporary tensors of the loss come on top.
    assert ACTIVATIONS * EACH <= found.peak_bytes - found.resting_bytes <= (ACTIVATIONS + 5) * EACH
    assert 0 < found.forward_seconds < found.seconds
    assert found.bytes[0] < found.resting_bytes + 2 * EACH and found.bytes[-1] < found.resting_bytes + EACH
    at_the_turn = found.bytes[int(found.forward_seconds / found.seconds * step_memory.POINTS)]
    assert at_the_turn >= found.resting_bytes + ACTIVATIONS * EACH


def test_packed_tensors_lower_the_curve():
    plain, packed = recorded(None), recorded("default")
    assert plain.resting_bytes == packed.resting_bytes
    assert packed.peak_bytes - packed.resting_bytes < 0.75 * (plain.peak_bytes - plain.resting_bytes)


def test_each_part_has_its_largest_value_and_at_least_the_one_before(monkeypatch):
    monkeypatch.setattr(step_memory, "POINTS", 4)
    found = list(highest([0.1, 0.2, 0.6, 0.9, 1.0], [5, 2, 9, 1, 0], before=3, seconds=1.0))
    assert found == [5, 2, 9, 9]
    assert list(highest([], [], before=7, seconds=1.0)) == [7] * 4


def test_lines_of_others_on_standard_error_come_through(capfd):
    old = [torch.randn(300, 300) for _ in range(3)]
    with Allocations() as found:
        print("a warning", file=sys.stderr)
        old.clear()
        kept = torch.zeros(100)
    assert capfd.readouterr().err == "a warning\n"
    assert found.alive == [400] and len(kept) == 100


def test_a_profiler_at_work_is_an_error():
    with torch.autograd.profiler.profile(), pytest.raises(RuntimeError, match="one is at work already"):
        recorded(None)
