"""The training loop: from the settings to a trained model, in the order in which it happens."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import encke
from encke.tools.errors import UsageError
from encke.tools.files import write_json
from encke.train import lines
from encke.train.checkpoint import METRICS, RESULT, Folder
from encke.train.data.order import Batch, Source
from encke.train.data.sources import batches
from encke.train.display import Display
from encke.train.distributed import Stop, World
from encke.train.factories import lr_factor, policy_for
from encke.train.metrics import Later, Meter, Watch, forget_memory_peak, memory_held, memory_peak
from encke.train.run import Run, shared_state
from encke.train.settings import Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(settings: Settings, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Trains as the settings say, into the folder `settings.out`; returns what result.json holds."""
    world = World(settings.device)
    folder = Folder(settings, resume, overwrite) if world.first else None
    torch.backends.cudnn.benchmark = world.cuda
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    # What it consists of, and where it stands.
    run = Run.make(settings, world)
    state = shared_state(folder, world) if resume else None
    if state is not None:
        run.restore(state)
    if folder is not None:
        folder.check_disk(run.checkpoint_bytes if settings.save is not None else 0)
        folder.cut(state["sizes"] if state is not None else {})
        folder.note_start(lines.facts(run), run.progress.step)
    progress, an_epoch, total = run.progress, run.an_epoch, run.total
    factor = lr_factor(settings.schedule, total, an_epoch)
    save_every = max(1, round(settings.save * an_epoch)) if settings.save else total
    keeps = settings.save is not None
    display = Display(total, total / an_epoch, "images" if run.images else "tokens", quiet=not world.first)
    display.say(lines.opening(run))
    if not world.cuda:
        rehearse(run)
    later, watch, began = Later(), Watch(), time.perf_counter() - progress.seconds
    forget_memory_peak(world.device)
    if progress.memory_before_bytes is None:
        progress.memory_before_bytes = memory_held(world.device)

    try:
        with Stop() as stop:
            stopped = False
            while progress.step < total and not stopped:
                epoch, start = divmod(progress.step, an_epoch)
                for inputs, targets in read(run, run.sets.train, epoch=epoch, train=True, start=start):
                    for group in run.optimizer.param_groups:
                        group["lr"] = settings.optimizer.lr * factor(progress.step)
                    logged = (progress.step + 1) % settings.metrics == 0 or progress.step + 1 == total
                    step(run, inputs, targets, logged)
                    progress.step += 1
                    watch.steps += 1

                    if logged:
                        progress.note_peak(memory_peak(world.device))
                        line = lines.step_line(run, watch.lap(), time.perf_counter() - began)
                        later.put(world.sum(run.meter.take()), partial(emit, run, line, folder, display))
                    if logged or world.size == 1:
                        stopped = world.any(stop.asked)
                    lines.show_layers(run, folder, display)
                    if progress.step % an_epoch == 0 or progress.step == total:
                        later.flush()
                        end_epoch(run, folder, display, began)
                        watch.reset()
                    if keeps and (stopped or progress.step == total or progress.step % save_every == 0):
                        later.flush()
                        progress.seconds = time.perf_counter() - began
                        snapshot = run.snapshot()
                        if folder is not None:
                            folder.save({**snapshot, "sizes": folder.sizes()})
                        watch.reset()
                    if stopped or progress.step == total:
                        break
    finally:
        display.close()

    result = lines.summary(run, watch, began, stopped)
    if folder is not None:
        write_json(folder.path / RESULT, result)
    display.say(lines.closing(result, settings.out))
    if run.handle is not None:
        run.handle.detach()
    world.leave()
    return result


def read(run: Run, source: Source, **which: Any) -> Iterator[Batch]:
    """Batches on this process's device, in the memory format of the settings."""
    world, settings = run.world, run.settings
    where: dict[str, Any] = {"seed": settings.seed, "rank": world.rank, "world": world.size, "device": world.device}
    for inputs, targets in batches(source, settings.batch, **where, **which):
        if settings.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        yield inputs, targets


def rehearse(run: Run) -> None:
    """Lets a copy do a step on two samples: kernels are compiled and libraries loaded before memory is measured."""
    chance = torch.get_rng_state()
    copied = copy.deepcopy(run.raw)
    policy = policy_for(run.settings.policy, run.settings.seed)
    handle = encke.attach(copied, policy) if policy is not None else None
    inputs = torch.randn(2, *run.sets.shape) if run.images else torch.zeros(2, *run.sets.shape, dtype=torch.long)
    targets = torch.zeros(2, dtype=torch.long) if run.images else inputs
    with autocast(run):
        loss = loss_of(copied(inputs), targets)
    loss.backward()
    if handle is not None:
        handle.detach()
    torch.set_rng_state(chance)


def step(run: Run, inputs: Tensor, targets: Tensor, measured: bool) -> None:
    """Forward and backward for each part of the batch, then the optimizer."""
    settings, parts = run.settings, run.settings.accumulate
    if len(targets) % parts:
        raise UsageError(f"the {len(targets)} samples of a process must be a multiple of accumulate ({parts})")
    for number, (part, target) in enumerate(zip(inputs.chunk(parts), targets.chunk(parts), strict=True)):
        before = memory_held(run.world.device) if measured else None
        # The processes' gradients are averaged with the last part.
        with nullcontext() if number == parts - 1 or run.world.size == 1 else run.model.no_sync():  # type: ignore
            with autocast(run):
                output = run.model(part)
                loss = loss_of(output, target, settings.label_smoothing)
            if before is not None:
                run.progress.held_bytes = (memory_held(run.world.device) or before) - before
            run.scaler.scale(loss / parts).backward()
        run.meter.add(loss.detach(), output.detach(), target)
        del output, loss
    if settings.optimizer.clip is not None:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.raw.parameters(), settings.optimizer.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)


def autocast(run: Run) -> AbstractContextManager[Any]:
    precision = run.settings.precision
    return torch.autocast(run.world.device.type, DTYPES[precision]) if precision in DTYPES else nullcontext()


def loss_of(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Cross entropy: of images, or of every token of a text."""
    if target.dim() > 1:
        output, target = output.flatten(0, 1), target.flatten()
    return F.cross_entropy(output, target, label_smoothing=smoothing)


def emit(run: Run, line: dict[str, Any], folder: Folder | None, display: Display, sums: Tensor) -> None:
    """Writes and shows a line of metrics whose sums have arrived."""
    loss, accuracy = run.meter.mean(sums)
    if not math.isfinite(loss):
        raise UsageError(lines.diverged(loss, run))
    line = {**line, "loss": loss, "accuracy": accuracy}
    if folder is not None:
        folder.append(METRICS, line)
    display.step(line, line["step_seconds"] * (run.total - line["step"]))


def end_epoch(run: Run, folder: Folder | None, display: Display, began: float) -> None:
    """Validation, and the epoch's line."""
    progress, device = run.progress, run.world.device
    run.meter.take()
    loss, accuracy = run.meter.mean(run.world.sum(run.meter.epoch))
    if not math.isfinite(loss):
        raise UsageError(lines.diverged(loss, run))
    run.meter.epoch.zero_()
    progress.train_loss = loss
    progress.note_peak(memory_peak(device))
    progress.validation_loss, progress.validation_accuracy = validate(run)
    lowest, highest = progress.best_validation_loss, progress.best_validation_accuracy
    if progress.validation_loss is not None:
        progress.best_validation_loss = min(progress.validation_loss, lowest if lowest is not None else math.inf)
    if progress.validation_accuracy is not None:
        progress.best_validation_accuracy = max(progress.validation_accuracy, highest or 0.0)
    forget_memory_peak(device)  # validation is not what training takes
    line = lines.epoch_line(run, accuracy, time.perf_counter() - began)
    if folder is not None:
        folder.append(METRICS, line)
    display.epoch(line)


@torch.no_grad()
def validate(run: Run) -> tuple[float | None, float | None]:
    """Mean loss and accuracy over all validation samples."""
    if not len(run.sets.validation):
        return None, None
    meter = Meter(run.world.device, run.images)
    run.raw.eval()
    for inputs, targets in read(run, run.sets.validation, epoch=0, train=False):
        with autocast(run):
            output = run.raw(inputs)
            loss = loss_of(output, targets)
        meter.add(loss, output, targets)
    run.raw.train()
    return meter.mean(run.world.sum(meter.take()))
