"""Kernels run from any thread and after a fork."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading

import numpy as np
import pytest
import torch

from encke.kernels import BoundedFormat
from encke.kernels.formats import NEAREST
from encke.tools.allocations import Allocations

cpu = pytest.importorskip("encke.kernels.cpu", reason="needs numba")
launch = pytest.importorskip("encke.kernels.cpu.launch", reason="needs numba")

FORMAT = BoundedFormat(0.01, math.inf, NEAREST, torch.float32)


def test_threads_at_once() -> None:
    tensors = [torch.randn(400_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [cpu.bounded_encode(x, FORMAT, 0) for x in tensors]
    wrong: list[int] = []
    start = threading.Barrier(len(tensors))

    def work(i: int) -> None:
        start.wait()
        for _ in range(20):
            meta, payload = cpu.bounded_encode(tensors[i], FORMAT, 0)
            decoded = cpu.bounded_decode(meta, payload, FORMAT, tensors[i].numel(), False)
            same = torch.equal(meta, expected[i][0]) and torch.equal(payload, expected[i][1])
            if not same or float((decoded - tensors[i]).abs().max()) > 0.01:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


def test_threads_keep_no_array_after_a_call() -> None:
    """Memory is released by the thread that has made it, where torch's profiler sees that."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for _ in range(500):
            array = np.zeros(4)
            launch.run(lambda task, x: None, 4, array)
            assert sys.getrefcount(array) == 2
    finally:
        torch.set_num_threads(before)


def encode_in_child(connection: multiprocessing.connection.Connection, x: torch.Tensor) -> None:
    meta, payload = cpu.bounded_encode(x, FORMAT, 0)
    decoded = cpu.bounded_decode(meta, payload, FORMAT, x.numel(), False)
    connection.send([bytes(t.view(torch.uint8).numpy()) for t in (meta, payload, decoded)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork() -> None:
    x = torch.randn(400_000)
    meta, payload = cpu.bounded_encode(x, FORMAT, 0)  # the parent's threads are running
    decoded = cpu.bounded_decode(meta, payload, FORMAT, x.numel(), False)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=encode_in_child, args=(there, x))
    child.start()
    answered = here.poll(60)
    theirs = here.recv() if answered else None
    child.join(10)
    child.kill()
    assert theirs is not None, "the child hangs"
    assert theirs == [bytes(t.view(torch.uint8).numpy()) for t in (meta, payload, decoded)]


def test_decoded_tensors_are_memory_of_torch() -> None:
    """Whoever records torch's allocator sees them, as `encke.estimate` does; the larger ones ask for huge pages."""
    for numel in (0, 1000, 2_000_000):
        with Allocations() as allocations:
            out = launch.huge_empty(numel, torch.float32).fill_(1)
            assert out.shape == (numel,) and out.dtype == torch.float32
            del out
        assert allocations.alive == ([4 * numel, 0] if numel else [])
