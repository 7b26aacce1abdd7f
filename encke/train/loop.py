"""The training loop, from the settings to a trained model, in the order in which things happen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import encke
from encke.tools.errors import UsageError, first_line
from encke.tools.progress import told_when_slow
from encke.tools.step_memory import StepRecorder
from encke.tools.terminal import note
from encke.train import tensorboard
from encke.train.checkpoint import RunFolder
from encke.train.data.order import Batch, Source
from encke.train.data.sources import batches
from encke.train.distributed import StopSignal, World
from encke.train.factories import lr_factor, policy_for
from encke.train.metrics import Log, Meter, facts, memory_held
from encke.train.models.weights import load_weights
from encke.train.run import Run
from encke.train.settings import Settings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PREPARING = "preparing; the first run on a machine compiles CPU kernels, a minute or more"


def train(settings: Settings, resume: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train as the settings say, into the folder `settings.out`; return the content of result.json."""
    if settings.log == "tensorboard":
        tensorboard.check()
    world = World(settings.device)
    folder = RunFolder(settings, resume, overwrite) if world.first else None
    try:
        return train_in(folder, settings, world, resume)
    finally:
        if folder is not None:
            folder.lock.close()


def train_in(folder: RunFolder | None, settings: Settings, world: World, resume: bool) -> dict[str, Any]:
    """Train in an open folder; only the first process has one."""
    if resume and (result := world.share(folder.finished() if folder is not None else None)) is not None:
        if world.first:
            note(f"{settings.out} has finished its {result['steps']} steps: nothing to resume, nothing changed")
        world.leave()
        return result
    run, factor = prepare(settings, world, folder, resume)
    progress, stopped = run.progress, False

    with Log(run, folder) as log, StopSignal() as stop:
        while progress.step < run.total_steps and not stopped:
            epoch, start = divmod(progress.step, run.steps_per_epoch)
            for inputs, targets in read(run, run.data.train, epoch=epoch, train=True, start=start):
                for group in run.optimizer.param_groups:
                    group["lr"] = settings.optimizer.lr * factor(progress.step)
                due = log.due(progress.step + 1)
                with log.recording((inputs, targets)) as recorder:
                    step(run, inputs, targets, due, recorder)
                progress.step += 1
                log.step()
                if due or world.size == 1:  # with several processes the question costs a message
                    stopped = world.any(stop.received)
                last = progress.step == run.total_steps
                if last or progress.step % run.steps_per_epoch == 0:
                    log.epoch(validate)
                log.save(stopped)
                if stopped or last:
                    break

    result = log.finish(stopped)
    if run.handle is not None:
        run.handle.detach()
    world.leave()
    return result


def prepare(
    settings: Settings, world: World, folder: RunFolder | None, resume: bool
) -> tuple[Run, Callable[[int], float]]:
    """Make the run, or restore it from its last checkpoint, and make the folder ready for it.

    Returns it with its schedule. The folder changes last, when nothing else can fail.
    """
    torch.backends.cudnn.benchmark = world.cuda
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        run = Run.make(settings, world)
        factor = lr_factor(settings.schedule, run.total_steps, run.steps_per_epoch)
        state = world.share(folder.load() if folder is not None else None) if resume else None
        if state is not None:
            restore(run, state, folder)
        if folder is not None and folder.is_lengthened:
            check_length(run, state, factor)
        if (
            state is None
            and settings.model.weights
            and (line := load_weights(run.model, settings.model.weights))
            and world.first
        ):
            note(line)
        if not world.cuda:
            with told_when_slow(PREPARING) if world.first else nullcontext():
                rehearse(run)
        if folder is not None:
            folder.check_disk(run.checkpoint_bytes if settings.save is not None else 0)
    except BaseException:
        if folder is not None:
            folder.abandon()
        raise
    if folder is not None:
        if resume and state is None:
            note(f"{folder.path} has no checkpoint: the run starts again at step 0")
        folder.begin(settings, facts(run), state)
    return run, factor


def restore(run: Run, state: dict[str, Any], folder: RunFolder | None) -> None:
    """Restore a checkpoint; raise a one-line error if it is incomplete or belongs to another run."""
    try:
        run.restore(state)
        dict(state["sizes"])
    except UsageError:
        raise
    except Exception as error:
        if folder is None:
            raise
        raise folder.unusable(f"is not of this run ({type(error).__name__}: {first_line(error)})") from None


def check_length(run: Run, state: dict[str, Any] | None, factor: Callable[[int], float]) -> None:
    """Raise an error if a run with changed epochs or steps has none left; print how its schedule continues.

    A schedule that depends on the number of steps uses the new number from here on.
    """
    settings, done, total = run.settings, run.progress.step, run.total_steps
    if state is None:
        raise UsageError(f"{settings.out} has no checkpoint to go on from: start it again with --overwrite")
    if done >= total:
        raise UsageError(
            f"{settings.out} has done {done} steps, and {total} are asked for: give more --epochs or --steps"
        )
    if settings.schedule.name in ("cosine", "one-cycle"):
        last, new = run.optimizer.param_groups[0]["lr"], settings.optimizer.lr * factor(done)
        note(
            f"the schedule {settings.schedule.name} now ends at step {total}: after step {done} the learning rate goes "
            f"from {last:.3g} to {new:.3g}"
        )


def read(run: Run, source: Source, **which: Any) -> Iterator[Batch]:
    """Yield batches on this process's device, in the memory format of the settings."""
    world, settings = run.world, run.settings
    where: dict[str, Any] = {"seed": settings.seed, "rank": world.rank, "world": world.size, "device": world.device}
    for inputs, targets in batches(source, settings.batch, **where, **which):
        if settings.channels_last and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        yield inputs, targets


def rehearse(run: Run) -> None:
    """Do a step on two samples with a copy: compiles kernels and loads libraries before memory is measured."""
    generator = torch.get_rng_state()
    model = copy.deepcopy(run.model)
    policy = policy_for(run.settings.policy, run.settings.seed)
    handle = encke.attach(model, policy) if policy is not None else None
    shape, dtype = (2, *run.data.shape), run.data.dtype
    inputs = torch.randn(shape) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    forward(run, model, inputs, torch.zeros(2, dtype=torch.long) if run.images else inputs)[1].backward()
    if handle is not None:
        handle.detach()
    torch.set_rng_state(generator)


def step(run: Run, inputs: Tensor, targets: Tensor, measured: bool, recorder: StepRecorder | None) -> None:
    """Run forward and backward for each micro-batch, then the optimizer; `measured` and `recorder` are for memory.

    The memory of a recorded step is not measured otherwise: the record itself takes memory of the process.
    """
    settings, count = run.settings, run.settings.accumulate
    if len(targets) % count:
        raise UsageError(f"the {len(targets)} samples of a process must be a multiple of accumulate ({count})")
    for index, (chunk, target) in enumerate(zip(inputs.chunk(count), targets.chunk(count), strict=True)):
        before = memory_held(run.world.device) if measured and recorder is None else None
        # The processes' gradients are averaged with the last micro-batch.
        with nullcontext() if index == count - 1 or run.world.size == 1 else run.wrapped.no_sync():  # type: ignore
            output, loss = forward(run, run.wrapped, chunk, target, settings.label_smoothing)
            if recorder is not None:
                recorder.forward_ended()
            if before is not None:
                run.progress.held_bytes = (memory_held(run.world.device) or before) - before
            run.scaler.scale(loss / count).backward()
        run.meter.add(loss.detach(), output.detach(), target)
        del output, loss
    if settings.optimizer.clip is not None:
        run.scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.model.parameters(), settings.optimizer.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.optimizer.zero_grad(set_to_none=True)


def forward(
    run: Run, model: nn.Module, inputs: Tensor, targets: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return output and loss; raise an error if the output is not logits of all classes."""
    with autocast(run):
        output, shape = model(inputs), tuple(targets.shape)
        got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if not isinstance(got, tuple) or got[:-1] != shape or got[-1] < run.data.classes:
            raise UsageError(
                f"model.name {run.settings.model.name} must return logits of shape {(*shape, run.data.classes)}, "
                f"got {got}"
            )
        return output, cross_entropy(output, targets, smoothing)


def autocast(run: Run) -> AbstractContextManager[Any]:
    """Return the autocast context of the settings' precision."""
    precision = run.settings.precision
    return torch.autocast(run.world.device.type, DTYPES[precision]) if precision in DTYPES else nullcontext()


def cross_entropy(output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Return the cross entropy of images, or of every token of a text."""
    if target.dim() > 1:
        output, target = output.flatten(0, 1), target.flatten()
    return F.cross_entropy(output, target, label_smoothing=smoothing)


@torch.no_grad()
def validate(run: Run) -> tuple[float | None, float | None]:
    """Return mean loss and accuracy over all validation samples."""
    if not len(run.data.validation):
        return None, None
    meter = Meter(run.world.device, run.images)
    run.model.eval()
    for inputs, targets in read(run, run.data.validation, epoch=0, train=False):
        output, loss = forward(run, run.model, inputs, targets)
        meter.add(loss, output, targets)
    run.model.train()
    return meter.mean(run.world.sum(meter.take()))
