"""What one measuring process does: whole training steps of one model with one method, and what they take.

`python -m encke.bench.steps '<task as JSON>'` reads requests from stdin, one JSON line each, and answers each with one
line on stdout: `{"measure": true}`, or `{"trial": 64}` to find out whether a batch of 64 fits into memory.
"""

from __future__ import annotations

import gc
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TextIO, cast

import torch
from torch import nn

from encke.bench.methods import METHODS
from encke.bench.models import MODELS, data_for, loss_of, optimizer_for
from encke.tools import process
from encke.tools.files import finite_json

WARM = 13
"""Steps before anything is measured. The default policy collects in the 10th, and settles in the next ones."""
MEASURED = 3
"""Steps in which memory is measured, before time is: asking for it takes time."""
TRIED = 2
"""Ordinary steps of a trial before a collection step; one more comes after it."""
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc", "cannot allocate memory", "could not create")


@dataclass(frozen=True)
class Task:
    """What a process measures. `size`: pixels along an image's side, or tokens in a sequence."""

    model: str
    method: str
    precision: str
    batch: int
    size: int
    steps: int
    device: str
    compile: bool = False
    cap: int | None = None
    """Bytes that may be allocated; on the CPU beyond what interpreter and libraries take."""
    graphs: bool = False
    """Whether the compiled model runs as CUDA graphs."""
    warm: int = WARM
    """Steps before anything is measured."""

    @property
    def units(self) -> int:
        """Images or tokens in a step."""
        return self.batch * (self.size if MODELS[self.model].data == "tokens" else 1)


@dataclass
class Result:
    """What was measured. Bytes and milliseconds; None: not measured here."""

    step_ms: float | None = None
    """Median time of a whole step, waiting for its end."""
    host_ms: float | None = None
    """Median time until the host has launched a whole step."""
    pipelined_ms: float | None = None
    """Time of a step among several that nobody waits for: what a training sees."""
    collection_ms: float | None = None
    """Time of a step in which the policy collects."""
    per_second: float | None = None
    """Images or tokens in a second, from `pipelined_ms`."""
    held_bytes: float | None = None
    """Memory after the forward pass less that before it. The papers call it activation."""
    peak_bytes: float | None = None
    """The largest memory during ordinary steps."""
    peak_with_collection_bytes: float | None = None
    """The same, with collection steps."""
    peak_run_bytes: float | None = None
    """The same, with the very first steps."""
    peak_above_bytes: float | None = None
    """`peak_bytes` less the memory before the first step, which has model and data."""
    peak_added_bytes: float | None = None
    """`peak_with_collection_bytes` less the memory before model and data were made: what a cap has to allow."""
    reserved_bytes: float | None = None
    """What the allocator took from the GPU for ordinary steps."""
    papers_total_bytes: float | None = None
    """Memory before backward and what backward leaves: 'total' in older papers. The peak is higher."""
    saved_bytes: int | None = None
    """Bytes that autograd saved, as Encke counts them."""
    packed_bytes: int | None = None
    """What was kept instead."""
    loss: float | None = None
    """At the end: methods that compute the same have the same."""


class Gauge:
    """The memory of the GPU's allocator or of this process. Not a number where the system does not tell.

    A CUDA graph that is replayed allocates nothing: with `graphs` it is what the allocator took from the GPU.
    """

    def __init__(self, device: str, graphs: bool = False) -> None:
        self.cuda, self.graphs = device == "cuda", graphs

    def now(self) -> float:
        if self.cuda:
            return torch.cuda.memory_reserved() if self.graphs else torch.cuda.memory_allocated()
        found = process.memory("VmRSS")
        return math.nan if found is None else found

    def peak(self) -> float:
        """The largest since `forget`."""
        if self.cuda:
            return torch.cuda.max_memory_reserved() if self.graphs else torch.cuda.max_memory_allocated()
        found = process.memory("VmHWM")
        return math.nan if found is None else found

    def forget(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            process.give_back()
            process.forget_peak()

    def settle(self) -> None:
        """Gives back what nobody uses."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Training:
    """A model, its data and its optimizer, with one method at work."""

    def __init__(self, task: Task) -> None:
        torch.manual_seed(0)
        self.device = task.device
        kind, method = MODELS[task.model], METHODS[task.method]
        model = kind.build(task.size).to(task.device).train()
        self.data = data_for(kind, task.batch, task.size, task.device)
        self.half = task.precision == "bf16"
        if self.half and kind.data == "images":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.data = (self.data[0].to(memory_format=torch.channels_last), *self.data[1:])
        if method.wrap is not None:
            method.wrap(model)
        self.optimizer = optimizer_for(model, kind)
        mode = "reduce-overhead" if task.graphs else None
        self.model: nn.Module = cast(nn.Module, torch.compile(model, mode=mode)) if task.compile else model
        self.handle = method.attach(self.model, self.optimizer) if method.attach is not None else None
        self.around = method.around()
        self.collected = 0
        self.loss = torch.zeros(())

    def forward(self) -> torch.Tensor:
        precision = torch.autocast(self.device, torch.bfloat16) if self.half else nullcontext()
        with self.around, precision:
            return loss_of(self.model, self.data)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """One whole training step."""
        loss = self.forward()
        loss.backward()
        self.finish()
        self.loss = loss.detach()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def has_collected(self) -> bool:
        """Whether the policy has collected since this was last asked."""
        before, self.collected = self.collected, len(self.handle.history) if self.handle is not None else 0
        return self.collected > before

    def collect_next(self) -> bool:
        """Makes the next step a collection step; False where the policy does not collect."""
        return self.handle is not None and self.handle.collect_now()

    def timed(self, steps: int = 1) -> tuple[float, float]:
        """Milliseconds of a step, for the host and until its end; of several, without waiting in between."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        host = time.perf_counter() - start
        self.wait()
        return 1e3 * host / steps, 1e3 * (time.perf_counter() - start) / steps


def measure(task: Task) -> Result:
    """All figures of one task."""
    gauge = Gauge(task.device, task.graphs)
    gauge.settle()
    empty = gauge.now()
    training = Training(task)
    gauge.settle()
    start = gauge.now()
    result = Result()
    ordinary, collecting = warm_up(training, gauge, task.warm)
    gauge.settle()
    memory_of(training, gauge, result)
    if not gauge.cuda and task.cap is None:  # what is kept would count
        process.keep_freed_memory()
        training.step()
    time_of(training, task, result)
    if training.collect_next():
        gauge.forget()
        result.collection_ms = training.timed()[1]
        if gauge.cuda:
            collecting.append(gauge.peak())
    peak = result.peak_bytes or math.nan
    result.peak_above_bytes = peak - start
    result.peak_with_collection_bytes = max([peak, *collecting])
    result.peak_added_bytes = result.peak_with_collection_bytes - empty
    result.peak_run_bytes = max([peak, *ordinary, *collecting])
    result.loss = training.loss.item()
    if training.handle is not None:
        report = training.handle.report()
        result.saved_bytes, result.packed_bytes = report.saved_bytes, report.packed_bytes
    return result


def warm_up(training: Training, gauge: Gauge, steps: int) -> tuple[list[float], list[float]]:
    """The first steps; the peaks of ordinary ones and of those in which the policy collected.

    The very first counts as ordinary, whoever collects: cuDNN tries its algorithms there.
    """
    ordinary: list[float] = []
    collecting: list[float] = []
    for step in range(steps):
        gauge.forget()
        training.step()
        (collecting if training.has_collected() and step else ordinary).append(gauge.peak())
    return ordinary, collecting


def memory_of(training: Training, gauge: Gauge, result: Result) -> None:
    """Measures the memory of ordinary steps."""
    held, totals, peaks = [], [], []
    for _ in range(MEASURED):
        training.wait()
        gauge.forget()
        before = gauge.now()
        loss = training.forward()
        after = gauge.now()
        loss.backward()
        left = gauge.now()
        training.finish()
        del loss
        held.append(after - before)
        totals.append(after + left - before)
        peaks.append(gauge.peak())
    if not gauge.graphs:
        result.held_bytes, result.papers_total_bytes = statistics.median(held), statistics.median(totals)
    result.peak_bytes = max(peaks)
    if gauge.cuda:
        result.reserved_bytes = torch.cuda.max_memory_reserved()


def time_of(training: Training, task: Task, result: Result) -> None:
    """Measures the time of ordinary steps: what falls together with a collection is left out."""
    times: list[tuple[float, float]] = []
    training.has_collected()
    while len(times) < task.steps:
        found = training.timed()
        if not training.has_collected():
            times.append(found)
    result.host_ms, result.step_ms = (statistics.median(each) for each in zip(*times, strict=True))
    result.pipelined_ms = result.step_ms
    if task.device == "cuda":
        result.pipelined_ms = training.timed(task.steps)[1]
        if training.has_collected():
            result.pipelined_ms = training.timed(task.steps)[1]
    result.per_second = 1e3 * task.units / result.pipelined_ms


def trial(task: Task) -> dict[str, Any]:
    """Whether the batch fits: ordinary steps, a collection step, an ordinary one, whose time is told."""
    training = Training(task)
    for _ in range(TRIED):
        training.step()
    if training.collect_next():
        training.step()
    return {"fits": True, "step_ms": training.timed()[1]}


def prepare(task: Task) -> None:
    """The settings that all methods share, and the cap on memory."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if task.device == "cuda" and task.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, task.cap / total))
    elif task.device == "cpu":
        # Threads, libraries and compiled kernels are not what training takes: a rehearsal brings them in before.
        trial(replace(task, batch=2))
        gc.collect()
        if task.cap is not None:
            process.cap_memory(task.cap)


def failure(error: BaseException) -> dict[str, Any]:
    """What went wrong, in words. Lets go of what the error's frames hold."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    words = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    exhausted = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if exhausted or any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY):
        answer = {"out_of_memory": True, "failed": "out of memory", "error": words}
    elif isinstance(error, ImportError):
        answer = {"failed": f"not installed: {words}"}
    elif isinstance(error, NotImplementedError):
        answer = {"failed": f"not supported: {words}"}
    else:
        answer = {"failed": words}
        traceback.print_exception(error)
    traceback.clear_frames(error.__traceback__)
    return answer


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of `work`, or why there is none; nothing of it stays in memory."""
    try:
        answer = work()
    except Exception as error:
        answer = failure(error)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    return answer


def answer_to(request: dict[str, Any], task: Task) -> dict[str, Any]:
    if "prepare" in request:
        prepare(task)
        return {}
    if "trial" in request:
        return trial(replace(task, batch=request["trial"]))
    return finite_json(asdict(measure(task)))


def serve(task: Task, requests: TextIO, answers: TextIO) -> None:
    """Answers requests until there are no more."""
    unable = attempt(partial(answer_to, {"prepare": True}, task))
    for line in requests:
        answer = unable or attempt(partial(answer_to, json.loads(line), task))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    process.die_with_parent()
    # What libraries print must not come between the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Task(**json.loads(sys.argv[1])), sys.stdin, replies)
