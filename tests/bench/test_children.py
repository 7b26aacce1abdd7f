"""Measuring processes: how they are started, and what happens when they fail."""

from __future__ import annotations

import os
import signal

import pytest

from encke.bench import children
from encke.bench.children import Child
from encke.bench.steps import Task

TASK = Task("cnn", "plain", "fp32", batch=8, size=32, steps=1, device="cpu")


def test_a_killed_process_is_reported():
    with Child(TASK) as child:
        os.kill(child.process.pid, signal.SIGKILL)
        child.process.wait()
        assert child.ask(measure=True) == {"failed": "killed by SIGKILL (out of memory?)", "died": True}


def test_a_process_that_ends_by_itself_is_reported_with_its_last_line(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "nonsense")
    with Child(TASK) as child:
        answer = child.ask(measure=True)
    assert answer["died"] and answer["failed"].startswith("exit code 1: Python")


def test_an_interrupt_leaves_no_process_behind():
    with pytest.raises(KeyboardInterrupt), Child(TASK) as child:
        raise KeyboardInterrupt
    assert child.process.poll() is not None


def test_processes_without_a_gpu_share_one_allocator_setting():
    variables = children.environment(TASK)
    assert variables["MALLOC_MMAP_THRESHOLD_"] == "65536"
    capped = children.environment(Task("cnn", "plain", "fp32", 8, 32, 1, "cuda", cap=1))
    assert "expandable_segments:True" in capped["PYTORCH_CUDA_ALLOC_CONF"]
