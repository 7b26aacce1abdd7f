"""One measuring process: whole training steps of one model with one method, their time and memory.

`python -m encke.bench.steps '<task as JSON>'` reads requests from stdin, one JSON line each, and answers each with one
line on stdout: `{"measure": true}`, with `"keep": true` if the next request measures the same training again,
`{"warm": true}` for the warm-up before that, `{"curve": true}` for the memory during one step, `{"trial": 64}` to test
whether a batch of 64 fits into memory, `{"first": 50}` for each of the first 50 steps, or `{"accuracy": {...}}` to
train until an accuracy is reached.
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
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO, cast

import torch
from torch import nn

import encke
from encke.bench import accuracy
from encke.bench.compilations import Compilations
from encke.bench.methods import METHODS
from encke.bench.models import MODELS, build, loss_of, optimizer_for, synthetic_batch
from encke.codecs import GroupQuant
from encke.integrations.logits import chunk_loss
from encke.kernels import wait_for_kernels
from encke.policies import Fixed
from encke.policies.comet.allocate import BITS
from encke.tools import process
from encke.tools.errors import out_of_memory
from encke.tools.files import finite_json
from encke.tools.step_memory import StepMemory, StepRecorder

WARM = 13
"""Warm-up steps. The default policy collects in the 10th, and settles in the next ones."""
MEASURED = 3
"""Steps in which memory is measured, unless fewer are timed. They come first, because reading memory takes time."""
TRIED = 2
"""Ordinary steps of a trial before a collection step; one more follows it."""
HOUR = 1000
"""Steps over which the cost of the first steps and of collection is reported."""


@dataclass(frozen=True)
class Task:
    """One measurement. `size`: pixels along an image's side, or tokens in a sequence."""

    model: str
    method: str
    precision: str
    batch: int
    size: int
    steps: int
    device: str
    compile: bool = False
    cap: int | None = None
    """Bytes that may be allocated; on the CPU in addition to interpreter and libraries."""
    graphs: bool = False
    """Whether the compiled model runs as CUDA graphs."""
    warm: int = WARM
    """Warm-up steps."""
    chunked: bool = False
    """Whether a language model's logits and loss are computed in chunks."""

    @property
    def units(self) -> int:
        """Number of images or tokens in a step."""
        return self.batch * (self.size if MODELS[self.model].data == "tokens" else 1)


@dataclass
class Result:
    """Figures of one measurement, in bytes and milliseconds; None: not measured here."""

    step_ms: float | None = None
    """Median time of a whole step, including the wait for its end."""
    host_ms: float | None = None
    """Median time until the host has launched a whole step."""
    pipelined_ms: float | None = None
    """Time of a step among several with a single wait at the end, as in a training."""
    collection_ms: float | None = None
    """Time of a collection step."""
    first_ms: float | None = None
    """Time of the very first step: kernels compile, cuDNN tries its algorithms, sites are learnt."""
    second_ms: float | None = None
    """Time of the second step."""
    per_second: float | None = None
    """Images or tokens per second, from `pipelined_ms`."""
    held_bytes: float | None = None
    """Memory after the forward pass less that before it: the papers' activation memory."""
    peak_bytes: float | None = None
    """The largest memory during ordinary steps."""
    peak_with_collection_bytes: float | None = None
    """The largest memory with collection steps."""
    peak_run_bytes: float | None = None
    """The largest memory with the very first steps."""
    peak_above_bytes: float | None = None
    """`peak_bytes` less the memory before the first step, which has model and data."""
    peak_added_bytes: float | None = None
    """`peak_with_collection_bytes` less the memory before model and data were made: the least cap."""
    reserved_bytes: float | None = None
    """Memory that the allocator reserved on the GPU for ordinary steps."""
    papers_total_bytes: float | None = None
    """Memory before backward plus what backward leaves: 'total' in older papers. The peak is higher."""
    saved_bytes: int | None = None
    """Bytes that autograd saved, as Encke counts them."""
    packed_bytes: int | None = None
    """Bytes that Encke kept instead."""
    loss: float | None = None
    """Loss of the last step: equal for methods that compute the same."""


class Gauge:
    """Memory of the GPU's allocator or of this process. NaN if the system does not report it.

    Replaying a CUDA graph allocates no memory: with `graphs` it is the memory reserved on the GPU.
    """

    def __init__(self, device: str, graphs: bool = False) -> None:
        self.cuda, self.graphs = device == "cuda", graphs

    def now(self) -> float:
        """Return the memory in use."""
        if self.cuda:
            return torch.cuda.memory_reserved() if self.graphs else torch.cuda.memory_allocated()
        return process.memory("VmRSS") or math.nan

    def peak(self) -> float:
        """Return the peak since `reset_peak`."""
        if self.cuda:
            return torch.cuda.max_memory_reserved() if self.graphs else torch.cuda.max_memory_allocated()
        return process.memory("VmHWM") or math.nan

    def reset_peak(self) -> None:
        """Let the peak start again from the memory in use."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            process.release_freed_memory()
            process.forget_peak()

    def settle(self) -> None:
        """Release unused memory."""
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        else:
            process.release_freed_memory()


class Training:
    """A model, its data and its optimizer, with one method applied."""

    def __init__(self, task: Task, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.device = task.device
        info, method = MODELS[task.model], METHODS[task.method]
        model = build(task.model, task.size).to(task.device).train()
        self.data = synthetic_batch(info, task.batch, task.size, task.device)
        self.half = task.precision == "bf16"
        if self.half and info.data == "images":  # volumes are trained in torch's own order
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.data = (self.data[0].to(memory_format=torch.channels_last), *self.data[1:])
        if method.wrap is not None:
            method.wrap(model)
        self.optimizer = optimizer_for(model, info)
        self.model: nn.Module = model
        part = self.model
        if task.chunked:
            chunk_loss(model)
        mode = "reduce-overhead" if task.graphs else None
        if task.compile and task.chunked:  # compiled logits would be computed as a whole
            part = cast(nn.Module, model.base_model)
            part.compile(mode=mode)
        elif task.compile:
            part = self.model = cast(nn.Module, torch.compile(model, mode=mode))
        self.handle = method.attach(part, self.optimizer)
        self.around = method.around()
        self.collected = 0
        self.loss = torch.zeros(())
        one_thread = task.device == "cpu" and torch.get_num_threads() == 1
        self.clock = time.process_time if one_thread else time.perf_counter
        """Processor time where one thread computes, so that other programs on the machine do not count."""

    def forward(self) -> torch.Tensor:
        """Run the forward pass and return the loss."""
        precision = torch.autocast(self.device, torch.bfloat16) if self.half else nullcontext()
        with self.around, precision:
            return loss_of(self.model, self.data)

    def finish(self) -> None:
        """Run the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Run one whole training step."""
        loss = self.forward()
        loss.backward()
        self.finish()
        self.loss = loss.detach()

    def wait(self) -> None:
        """Wait until the GPU has finished."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def has_collected(self) -> bool:
        """Return whether the policy has collected since the last call."""
        before, self.collected = self.collected, len(self.handle.history) if self.handle is not None else 0
        return self.collected > before

    def is_due(self, step: int) -> bool:
        """Return whether a later step will be a collection step."""
        due = getattr(getattr(getattr(self.handle, "policy", None), "schedule", None), "due", None)
        return due is not None and due(step)

    def collect_next(self) -> bool:
        """Make the next step a collection step; return False where the policy does not collect."""
        return self.handle is not None and self.handle.collect_now()

    def timed(self, steps: int = 1) -> tuple[float, float]:
        """Return the milliseconds of a step, for the host and until its end; several steps share one wait."""
        start = self.seconds()
        for _ in range(steps):
            self.step()
        host = self.clock() - start
        return 1e3 * host / steps, 1e3 * (self.seconds() - start) / steps

    def seconds(self) -> float:
        """Wait for the GPU and return the time; only differences of two calls are meaningful."""
        self.wait()
        return self.clock()


class Measurement:
    """A training after its warm-up, measured once or several times."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.gauge = Gauge(task.device, task.graphs)
        self.gauge.settle()
        self.empty = self.gauge.now()
        self.training = Training(task)
        self.gauge.settle()
        self.before = self.gauge.now()
        self.first_ms: list[float] = []
        self.ordinary_peaks: list[float] = []
        self.collection_peaks: list[float] = []
        self.warm_up()
        self.gauge.settle()

    def warm_up(self) -> None:
        """Run the first steps.

        The very first counts as an ordinary one even if the policy collects in it: cuDNN tries its algorithms there.
        """
        for step in range(self.task.warm):
            self.gauge.reset_peak()
            if step < 2:
                self.first_ms.append(self.training.timed()[1])
            else:
                self.training.step()
            collected = self.training.has_collected() and step > 0
            (self.collection_peaks if collected else self.ordinary_peaks).append(self.gauge.peak())

    def measure(self) -> Result:
        """Measure memory, then time, then a collection step."""
        training, gauge, task = self.training, self.gauge, self.task
        result = Result()
        result.first_ms, result.second_ms = (*self.first_ms, None, None)[:2]
        measure_memory(training, gauge, min(MEASURED, task.steps), result)
        if not gauge.cuda and task.cap is None:  # under a cap, memory that is kept would count
            process.keep_freed_memory()
            training.step()
        measure_time(training, task, result)
        if training.collect_next():
            gauge.reset_peak()
            result.collection_ms = training.timed()[1]
            training.has_collected()
            if gauge.cuda:
                self.collection_peaks.append(gauge.peak())
        peak = result.peak_bytes or math.nan
        result.peak_above_bytes = peak - self.before
        result.peak_with_collection_bytes = max([peak, *self.collection_peaks])
        result.peak_added_bytes = result.peak_with_collection_bytes - self.empty
        result.peak_run_bytes = max([peak, *self.ordinary_peaks, *self.collection_peaks])
        result.loss = training.loss.item()
        if training.handle is not None:
            report = training.handle.report()
            result.saved_bytes, result.packed_bytes = report.saved_bytes, report.packed_bytes
        return result


def measure_memory(training: Training, gauge: Gauge, steps: int, result: Result) -> None:
    """Measure the memory of ordinary steps."""
    held, totals, peaks = [], [], []
    for _ in range(steps):
        training.wait()
        gauge.reset_peak()
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


def measure_time(training: Training, task: Task, result: Result) -> None:
    """Measure the time of ordinary steps after all compilation, without collection steps."""
    times: list[tuple[float, float]] = []
    wait_for_kernels()
    training.has_collected()
    while len(times) < task.steps:
        taken = training.timed()
        if not training.has_collected():
            times.append(taken)
    result.host_ms, result.step_ms = (statistics.median(each) for each in zip(*times, strict=True))
    result.pipelined_ms = result.step_ms
    if task.device == "cuda":
        result.pipelined_ms = training.timed(task.steps)[1]
        if training.has_collected():
            result.pipelined_ms = training.timed(task.steps)[1]
    result.per_second = 1e3 * task.units / result.pipelined_ms


def step_memory(training: Training) -> StepMemory:
    """Record the memory through one ordinary step."""
    with StepRecorder(training.model, training.optimizer, training.data) as recorder:
        loss = training.forward()
        recorder.forward_ended()
        loss.backward()
        training.finish()
    return recorder.memory


def first_steps(task: Task, count: int) -> dict[str, Any]:
    """Time each of the first steps, from the creation of the model on, and count the kernels compiled in it."""
    with Compilations() as compilations:
        training, gauge = Training(task), Gauge(task.device, task.graphs)
        steps = []
        for number in range(1, count + 1):
            gauge.reset_peak()
            before = compilations.total
            taken = training.timed()[1]
            compiled = compilations.total - before
            row = {"step": number, "ms": taken, "collection": training.has_collected(), "peak_bytes": gauge.peak()}
            steps.append(row | compiled.figures())
        collects = [number for number in range(count + 1, HOUR + 1) if training.is_due(number)]
    loss = training.loss.item()
    return finite_json(
        {"steps": steps, "later_collections": len(collects), "kernels": compilations.kernels, "loss": loss}
    )


def trial(task: Task) -> dict[str, Any]:
    """Try a batch: ordinary steps, a collection step, and an ordinary one, which is timed.

    cuDNN tries no algorithms here, which takes longer than the steps do.
    """
    torch.backends.cudnn.benchmark = False
    gauge = Gauge(task.device, graphs=True)
    gauge.reset_peak()
    training = Training(task)
    for _ in range(TRIED):
        training.step()
    if training.collect_next():
        training.step()
    return {"fits": True, "step_ms": training.timed()[1], "peak_bytes": gauge.peak() if gauge.cuda else None}


def load_kernels() -> None:
    """Load the kernels for every number of bits: a policy's choice among them depends on the batch."""
    x = torch.randn(16, 3, 24, 24)
    for bits in BITS:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        with encke.attach(model, Fixed(GroupQuant(bits=bits))):
            for _ in range(2):
                model(x).square().mean().backward()


def prepare(task: Task, rehearsed: bool = True) -> None:
    """Apply the settings that all methods share, and the cap on memory; without a GPU after a rehearsal."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    if task.device == "cuda" and task.cap is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, task.cap / total))
    elif task.device == "cpu" and rehearsed:
        # A rehearsal loads threads, libraries and compiled kernels, which are not the training's own memory.
        trial(replace(task, batch=2))
        if METHODS[task.method].policy is not None:
            load_kernels()
        gc.collect()
        if task.cap is not None:
            process.cap_memory(task.cap)


def failure(error: BaseException) -> dict[str, Any]:
    """Return an error as text, and release the objects of its frames."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    words = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    if out_of_memory(error):
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


class Server:
    """Answers the requests of the parent process."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.kept: Measurement | None = None
        """The training that the next request measures again."""
        self.data: accuracy.ImageData | None = None
        """Real images; read before the cap on memory, because the search for the batch does not have them."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, or the reason why it failed."""
        try:
            answer = self.work(request)
        except Exception as error:
            self.kept = None
            answer = failure(error)
        gc.collect()
        if self.kept is None:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if "torch._dynamo" in sys.modules:
                torch.compiler.reset()
        return answer

    def work(self, request: dict[str, Any]) -> dict[str, Any]:
        """Execute a request; the caller handles every error."""
        if "prepare" in request:
            if "accuracy" in request:
                self.data = accuracy.load(request["accuracy"]["data"], self.task.device)
            prepare(self.task, rehearsed="first" not in request)
            return {}
        if "accuracy" in request:
            assert self.data is not None
            goal = accuracy.Goal(**request["accuracy"])
            return finite_json(accuracy.train(Training(self.task, goal.seed), self.task.batch, goal, self.data))
        if "first" in request:
            return first_steps(self.task, request["first"])
        if "trial" in request:
            return trial(replace(self.task, batch=request["trial"]))
        if "warm" in request:
            self.kept = Measurement(self.task)
            self.kept.first_ms.clear()  # others warmed up at the same time
            return {}
        measurement = self.kept or Measurement(self.task)
        self.kept = measurement if request.get("keep") else None
        if "curve" in request:
            return asdict(step_memory(measurement.training))
        return finite_json(asdict(measurement.measure()))

    def serve(self, requests: TextIO, answers: TextIO) -> None:
        """Answer requests, one JSON line each, until there are no more."""
        failed: dict[str, Any] | None = None
        for line in requests:
            request = json.loads(line)
            if failed is None:  # not before the first request: processes that start together would disturb each other
                failed = self.answer({"prepare": True} | request)
            print(json.dumps(failed or self.answer(request)), file=answers, flush=True)


if __name__ == "__main__":
    process.die_with_parent()
    # Output of libraries must not mix with the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Server(Task(**json.loads(sys.argv[1]))).serve(sys.stdin, replies)
