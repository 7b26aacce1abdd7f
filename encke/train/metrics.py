"""Metrics of a training: sums on the device, times, memory, and the log that writes and shows them."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.report import Report
from encke.tools.errors import UsageError
from encke.tools.process import ALLOCATOR, forget_peak, memory
from encke.tools.step_memory import StepRecorder
from encke.tools.units import duration, size
from encke.torch_internals import profiler_enabled
from encke.train.checkpoint import MEMORY, METRICS, RESULT, SITES, TENSORBOARD, RunFolder
from encke.train.display import Display, loss_text
from encke.train.settings import Settings, code_options
from encke.train.tensorboard import TensorBoard

if TYPE_CHECKING:
    from encke.train.run import Run

LESS = "A smaller --optimizer.lr, --optimizer.clip 1 or --schedule.warmup 1 may help"
RECORDED = 15
"""Step whose memory is recorded, or the last one: an ordinary step, after the default policy has set its bits."""
CONVOLUTION = " Convolution.input"
"""Suffix of the name of a site where a convolution saves its input."""
WORSE_THAN_GUESSING = 10
"""A training has diverged if the loss of its last epoch exceeds that of guessing, log(classes), by this factor."""


class Meter:
    """Sums of loss, correct answers and samples on the device: of the epoch, and since the last line of metrics."""

    def __init__(self, device: torch.device, images: bool) -> None:
        self.images = images
        self.epoch = torch.zeros(3, dtype=torch.float64, device=device)
        self.recent = torch.zeros(3, dtype=torch.float64, device=device)
        self.one = torch.ones((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, output: Tensor, target: Tensor) -> None:
        """Add one forward pass; `loss` is the mean over its samples."""
        count = len(target) if self.images else target.numel()
        right = (output.argmax(1) == target).sum() if self.images else self.one * 0
        self.recent += torch.stack([loss * count, right, self.one * count])

    def take(self) -> Tensor:
        """Return the sums since the last call, and add them to the epoch's sums."""
        sums = self.recent.clone()
        self.epoch += sums
        self.recent.zero_()
        return sums

    def mean(self, sums: Tensor) -> tuple[float, float | None]:
        """Return mean loss and accuracy."""
        loss, right, count = sums.tolist()
        if not count:
            return float("nan"), None
        return loss / count, right / count if self.images else None


class DeferredMetrics:
    """Sums being copied from the GPU: they are handled once the copy has arrived, without waiting for it."""

    def __init__(self) -> None:
        self.pending: tuple[Tensor, Any, Callable[[Tensor], None]] | None = None

    def put(self, sums: Tensor, handle: Callable[[Tensor], None]) -> None:
        """Start a copy to the host. The one before has arrived long ago and is handled now."""
        self.flush()
        if sums.device.type != "cuda":
            handle(sums)
            return
        copy = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        copy.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.pending = (copy, event, handle)

    def flush(self) -> None:
        """Wait for the pending copy and handle it."""
        if self.pending is not None:
            copy, event, handle = self.pending
            self.pending = None
            event.synchronize()
            handle(copy)


class StepTimer:
    """Times of steps, without validation and checkpoints between them."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.steps = 0
        self.means: list[float] = []

    def reset(self) -> None:
        """Start again, without the time since the last lap."""
        self.start, self.steps = time.perf_counter(), 0

    def lap(self) -> float:
        """Return the mean seconds of a step since the last lap."""
        now = time.perf_counter()
        mean = (now - self.start) / max(self.steps, 1)
        if self.steps:
            self.means.append(mean)
        self.start, self.steps = now, 0
        return mean

    @property
    def median(self) -> float | None:
        """Median seconds of a step."""
        return statistics.median(self.means) if self.means else None


def memory_is_exact(device: torch.device) -> bool:
    """Return whether freed memory goes back at once: on the CPU only with the allocator settings `ALLOCATOR`."""
    return device.type == "cuda" or all(name in os.environ for name in ALLOCATOR)


def memory_held(device: torch.device) -> int | None:
    """Return the bytes allocated on the GPU, or resident in this process if their differences are meaningful."""
    if not memory_is_exact(device):
        return None
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else memory("VmRSS")


def memory_peak(device: torch.device) -> int | None:
    """Return the largest memory since `reset_memory_peak`, where that means something."""
    if not memory_is_exact(device):
        return None
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory("VmHWM")


def reset_memory_peak(device: torch.device) -> None:
    """Let the peak start again from the memory in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        forget_peak()


class Log:
    """All output of a training: metrics, sites, checkpoints, the result.

    Every process has one; only the first process's log has a folder and a display that is not quiet.
    """

    def __init__(self, run: Run, folder: RunFolder | None) -> None:
        self.run, self.folder = run, folder
        self.display = Display(
            run.total_steps,
            run.total_steps / run.steps_per_epoch,
            "images" if run.images else "tokens",
            quiet=folder is None,
        )
        self.deferred, self.timer = DeferredMetrics(), StepTimer()
        self.board: TensorBoard | None = None
        self.started = time.perf_counter() - run.progress.seconds
        save = run.settings.save
        self.save_every = max(1, round(save * run.steps_per_epoch)) if save else run.total_steps
        self.display.say(opening(run))

    def __enter__(self) -> Log:
        device, progress = self.run.world.device, self.run.progress
        reset_memory_peak(device)
        if progress.memory_before_bytes is None:
            progress.memory_before_bytes = memory_held(device)
        if self.folder is not None and self.run.settings.log == "tensorboard":
            self.board = TensorBoard(self.folder.path / TENSORBOARD, progress.step)
        self.timer.reset()
        return self

    def __exit__(self, *error: object) -> None:
        self.display.close()
        if self.board is not None:
            self.board.close()

    @property
    def seconds(self) -> float:
        """Seconds of the training so far, including those of earlier processes."""
        return time.perf_counter() - self.started

    def due(self, step: int) -> bool:
        """Return whether a line of metrics is due at this step."""
        return step % self.run.settings.metrics == 0 or step == self.run.total_steps

    @contextmanager
    def recording(self, data: Iterable[Tensor]) -> Iterator[StepRecorder | None]:
        """Record the memory of the step in the block into memory.json if it is the step to record, else yield None."""
        run, number = self.run, self.run.progress.step + 1
        chosen = 1 < number == min(RECORDED, run.total_steps)
        if self.folder is None or not chosen or profiler_enabled():
            yield None
            return
        run.progress.note_peak(memory_peak(run.world.device))
        start = time.perf_counter()
        with StepRecorder(run.model, run.optimizer, data) as recorder:
            yield recorder
        run.progress.step_peak_bytes = peak = recorder.memory.peak_bytes
        self.folder.write(MEMORY, {"step": number, **asdict(recorder.memory)})
        if self.board is not None:
            self.board.write({"step": number, "step_peak_bytes": peak})
        # Recording takes memory and time of its own.
        reset_memory_peak(run.world.device)
        self.timer.start += time.perf_counter() - start - recorder.memory.seconds

    def step(self) -> None:
        """Write and show everything that is due after a step."""
        run = self.run
        self.timer.steps += 1
        if self.due(run.progress.step):
            run.progress.note_peak(memory_peak(run.world.device))
            line = step_line(run, self.timer.lap(), self.seconds)
            self.deferred.put(run.world.sum(run.meter.take()), partial(self._write_step, line))
        self._write_sites()

    def _write_step(self, line: dict[str, Any], sums: Tensor) -> None:
        loss, accuracy = self.run.meter.mean(sums)
        check_loss(loss, self.run)
        line = {**line, "loss": loss, "accuracy": accuracy}
        self._append(line)
        self.display.step(line, line["step_seconds"] * (self.run.total_steps - line["step"]))

    def _append(self, line: dict[str, Any]) -> None:
        """Append a line of metrics to the folder, and its figures to TensorBoard's."""
        if self.folder is not None:
            self.folder.append(METRICS, line)
        if self.board is not None:
            self.board.write(line)

    def _write_sites(self) -> None:
        """Write ratio and bound of every site to the folder and the screen, if due."""
        step, settings = self.run.progress.step, self.run.settings
        every = (settings.sites, settings.table, settings.ratios)
        written, shown, ratios = (steps > 0 and step % steps == 0 for steps in every)
        written |= settings.sites > 0 and step == 1
        if self.run.handle is None or self.folder is None or not (written or shown or ratios):
            return
        report = self.run.handle.report()
        if written:
            self.folder.append(SITES, {"step": step, **byte_counts(report), "sites": report.to_dict()["sites"]})
        if shown:
            self.display.say(str(report))
        if ratios:
            self.display.ratios(step, {**convolutions(report), "all": report.ratio})

    def epoch(self, validate: Callable[[Run], tuple[float | None, float | None]]) -> None:
        """Run validation, then write and show the line of an epoch."""
        run, progress, device = self.run, self.run.progress, self.run.world.device
        self.deferred.flush()
        run.meter.take()
        progress.train_loss, accuracy = run.meter.mean(run.world.sum(run.meter.epoch))
        check_loss(progress.train_loss, run)
        run.meter.epoch.zero_()
        progress.note_peak(memory_peak(device))
        progress.note_validation(*validate(run))
        reset_memory_peak(device)  # validation does not count
        line = epoch_line(run, accuracy, self.seconds)
        self._append(line)
        self.display.epoch(line)
        self.timer.reset()

    def save(self, stopped: bool) -> None:
        """Write a checkpoint if one is due after this step. A collective call."""
        run, step = self.run, self.run.progress.step
        if run.settings.save is None or not (stopped or step == run.total_steps or step % self.save_every == 0):
            return
        self.deferred.flush()
        check_weights(run)
        run.progress.seconds = self.seconds
        snapshot = run.snapshot()
        if self.folder is not None:
            self.folder.save({**snapshot, "sizes": self.folder.sizes()})
        self.timer.reset()

    def finish(self, stopped: bool) -> dict[str, Any]:
        """Write and return the result."""
        result = result_of(self.run, self.timer.median, self.seconds, stopped)
        if self.folder is not None:
            self.folder.write(RESULT, result)
        self.display.say(closing(result, self.run.settings))
        return result


def opening(run: Run) -> str:
    """Return the first line that a training shows."""
    settings, total = run.settings, run.total_steps
    count = sum(p.numel() for p in run.model.parameters())
    parameters = f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
    processes = f"{run.world.size} processes, " if run.world.size > 1 else ""
    epochs = f"{total / run.steps_per_epoch:.4g}"
    text = (
        f"{settings.model.name} ({parameters} parameters) on {settings.data.kind}, {len(run.data.train):,} samples: "
        f"{epochs} epoch{'' if epochs == '1' else 's'}, {total:,} steps of {settings.batch}, {processes}"
        f"policy {settings.policy.name}, into {settings.out}"
    )
    return text + (f"; goes on after step {run.progress.step}" if run.progress.step else "")


def facts(run: Run) -> dict[str, Any]:
    """Return the content of environment.json about the model and the data."""
    return {
        "cuda": run.world.cuda,
        "world": run.world.size,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "train_samples": len(run.data.train),
        "validation_samples": len(run.data.validation),
        "kind": run.data.kind,
        "classes": run.data.classes,
    }


def step_line(run: Run, step_seconds: float, seconds: float) -> dict[str, Any]:
    """Return a line of metrics without loss and accuracy, which are still on the device."""
    return {
        "event": "step",
        "step": run.progress.step,
        "epoch": run.epoch,
        "lr": run.optimizer.param_groups[0]["lr"],
        "per_second": run.items_per_step / step_seconds,
        "step_seconds": step_seconds,
        "memory_bytes": memory_held(run.world.device),
        "peak_bytes": run.progress.peak_bytes,
        **byte_counts(run.handle.report() if run.handle is not None else None),
        "seconds": seconds,
    }


def epoch_line(run: Run, train_accuracy: float | None, seconds: float) -> dict[str, Any]:
    """Return the line of an epoch."""
    names = ("train_loss", "validation_loss", "validation_accuracy", "peak_bytes", "held_bytes", "memory_before_bytes")
    head = {"event": "epoch", "step": run.progress.step, "epoch": run.epoch, "seconds": seconds}
    return {**head, "train_accuracy": train_accuracy, **{name: getattr(run.progress, name) for name in names}}


def byte_counts(report: Report | None) -> dict[str, Any]:
    """Return the bytes that Encke counts."""
    if report is None:
        return {"saved_bytes": None, "packed_bytes": None, "ratio": None}
    return {"saved_bytes": report.saved_bytes, "packed_bytes": report.packed_bytes, "ratio": report.ratio}


def convolutions(report: Report) -> dict[str, float]:
    """Return the ratio of every convolution's input by layer, even if another layer saved the same tensor first."""
    found: dict[str, float] = {}
    for row in report.sites:
        for name in (f"{row.layer} {row.operation}.{row.slot}", *row.shared):
            if name.endswith(CONVOLUTION):
                found[name.removesuffix(CONVOLUTION)] = row.ratio
    return found


def result_of(run: Run, step_seconds: float | None, seconds: float, stopped: bool) -> dict[str, Any]:
    """Return the content of result.json."""
    report = run.handle.report() if run.handle is not None else None
    progress, peak, before = run.progress, run.progress.peak_bytes, run.progress.memory_before_bytes
    return {
        "finished": not stopped,
        "reason": "interrupted" if stopped else "diverged" if has_diverged(run) else "done",
        "steps": progress.step,
        "epochs": run.epoch,
        **{name: value for name, value in asdict(progress).items() if name not in ("step", "seconds")},
        "seconds": seconds,
        "step_seconds": step_seconds,
        "per_second": run.items_per_step / step_seconds if step_seconds else None,
        "peak_above_bytes": peak - before if peak is not None and before is not None else None,
        **byte_counts(report),
        "report": report.to_dict() if report is not None else None,
    }


def closing(result: dict[str, Any], settings: Settings) -> str:
    """Return the last line that a training shows."""
    out = settings.out
    if result["reason"] == "interrupted":
        if settings.save is None:
            return f"interrupted after step {result['steps']}; nothing is saved, as the setting save is none"
        go_on = f"encke train {out} --resume {code_options(settings)}".rstrip()
        return f"interrupted after step {result['steps']}, and saved. Go on with: {go_on}"
    if result["reason"] == "diverged":
        losses = f"train loss {result['train_loss']:.4g}, validation loss {result['validation_loss']}"
        return f"diverged: {losses} after step {result['steps']}. {LESS}. To see it: encke report {out}"
    words = []
    if result["validation_accuracy"] is not None:
        words.append(f"validation accuracy {100 * result['validation_accuracy']:.2f} %")
    elif result["validation_loss"] is not None:
        words.append(f"validation loss {loss_text(result['validation_loss'])}")
    words.append(duration(result["seconds"]))
    if result["peak_bytes"] is not None:
        words.append(f"peak {size(result['peak_bytes'])}")
    elif result["step_peak_bytes"] is not None:
        words.append(f"peak of all tensors {size(result['step_peak_bytes'])}")
    if result["ratio"] is not None:
        words.append(f"saved tensors {result['ratio']:.1f}x smaller")
    return f"done: {', '.join(words)}. To see it: encke report {out}"


def check_loss(loss: float, run: Run) -> None:
    """Raise an error with the way out if the loss is not finite."""
    if not math.isfinite(loss):
        raise UsageError(f"the loss is {loss} near step {run.progress.step}: this training has diverged. {LESS}")


def check_weights(run: Run) -> None:
    """Raise an error if a weight is not finite, so that the last good checkpoint is kept."""
    names, weights = zip(*run.model.named_parameters(), strict=True)
    finite = torch.stack([weight.detach().isfinite().all() for weight in weights]).tolist()
    if not all(finite):
        raise UsageError(
            f"{names[finite.index(False)]} is not finite after step {run.progress.step}: this training has diverged, "
            f"and is not saved. {LESS}"
        )


def has_diverged(run: Run) -> bool:
    """Return whether the training has ended far worse than guessing, or its validation without a finite loss.

    Only the end counts: a loss may rise in an early epoch and fall again.
    """
    progress, guessing = run.progress, math.log(max(run.data.classes, 3))
    losses = [loss for loss in (progress.train_loss, progress.validation_loss) if loss is not None]
    return not all(map(math.isfinite, losses)) or (progress.train_loss or 0) > WORSE_THAN_GUESSING * guessing
