"""What a training says: lines of metrics, of layers, the result, and the words around them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from encke.report import Report
from encke.tools.units import duration, size
from encke.train.checkpoint import LAYERS, Folder
from encke.train.display import Display
from encke.train.metrics import Watch, memory_now
from encke.train.run import Run


def opening(run: Run) -> str:
    """The first line."""
    settings, total = run.settings, run.total
    count = sum(p.numel() for p in run.raw.parameters()) / 1e6
    processes = f"{run.world.size} processes, " if run.world.size > 1 else ""
    text = (
        f"{settings.model.name} ({count:.1f} M parameters) on {settings.data.kind}, {len(run.sets.train):,} samples: "
        f"{total / run.an_epoch:.4g} epochs, {total:,} steps of {settings.batch}, {processes}"
        f"policy {settings.policy.name}, into {settings.out}"
    )
    return text + (f"; goes on after step {run.progress.step}" if run.progress.step else "")


def facts(run: Run) -> dict[str, Any]:
    """What environment.json says about this training."""
    return {
        "cuda": run.world.cuda,
        "world": run.world.size,
        "parameters": sum(p.numel() for p in run.raw.parameters()),
        "train_samples": len(run.sets.train),
        "validation_samples": len(run.sets.validation),
        "kind": run.sets.kind,
        "classes": run.sets.classes,
    }


def step_line(run: Run, step_seconds: float, seconds: float) -> dict[str, Any]:
    """A line of metrics, without loss and accuracy, which are still on the device."""
    return {
        "event": "step",
        "step": run.progress.step,
        "epoch": run.epoch,
        "lr": run.optimizer.param_groups[0]["lr"],
        "per_second": run.units / step_seconds,
        "step_seconds": step_seconds,
        "memory_bytes": memory_now(run.world.device),
        "peak_bytes": run.progress.peak_bytes,
        **counted(run.handle.report() if run.handle is not None else None),
        "seconds": seconds,
    }


def epoch_line(run: Run, accuracy: float | None, seconds: float) -> dict[str, Any]:
    """The line at an epoch's end; `accuracy` is that of training."""
    progress = run.progress
    names = ("train_loss", "validation_loss", "validation_accuracy", "peak_bytes", "held_bytes", "memory_before_bytes")
    head = {"event": "epoch", "step": progress.step, "epoch": run.epoch, "seconds": seconds}
    return {**head, "train_accuracy": accuracy, **{name: getattr(progress, name) for name in names}}


def counted(report: Report | None) -> dict[str, Any]:
    """Bytes as Encke counts them."""
    if report is None:
        return {"saved_bytes": None, "packed_bytes": None, "ratio": None}
    return {"saved_bytes": report.saved_bytes, "packed_bytes": report.packed_bytes, "ratio": report.ratio}


def show_layers(run: Run, folder: Folder | None, display: Display) -> None:
    """Ratio and bound of every layer, to the folder and to the screen, if it is time."""
    step, settings = run.progress.step, run.settings
    written, shown = (each > 0 and step % each == 0 for each in (settings.sites, settings.table))
    written |= settings.sites > 0 and step == 1
    if run.handle is None or folder is None or not (written or shown):
        return
    report = run.handle.report()
    if written:
        folder.append(LAYERS, {"step": step, **counted(report), "sites": report.to_dict()["sites"]})
    if shown:
        display.say(str(report))


def summary(run: Run, watch: Watch, began: float, stopped: bool) -> dict[str, Any]:
    """What result.json holds."""
    report = run.handle.report() if run.handle is not None else None
    progress, peak, before = run.progress, run.progress.peak_bytes, run.progress.memory_before_bytes
    return {
        "finished": not stopped,
        "reason": "interrupted" if stopped else "done",
        "steps": progress.step,
        "epochs": run.epoch,
        **{name: value for name, value in asdict(progress).items() if name not in ("step", "seconds")},
        "seconds": time.perf_counter() - began,
        "step_seconds": watch.median,
        "per_second": run.units / watch.median if watch.median else None,
        "peak_above_bytes": peak - before if peak is not None and before is not None else None,
        **counted(report),
        "report": report.to_dict() if report is not None else None,
    }


def closing(result: dict[str, Any], out: str) -> str:
    """The last line."""
    if not result["finished"]:
        return f"interrupted after step {result['steps']}, and saved. Go on with: encke train {out} --resume"
    parts = [duration(result["seconds"])]
    if result["peak_bytes"] is not None:
        parts.append(f"peak {size(result['peak_bytes'])}")
    if result["validation_accuracy"] is not None:
        parts.insert(0, f"validation accuracy {100 * result['validation_accuracy']:.2f} %")
    elif result["validation_loss"] is not None:
        parts.insert(0, f"validation loss {result['validation_loss']:.4f}")
    if result["ratio"] is not None:
        parts.append(f"saved tensors {result['ratio']:.1f}x smaller")
    return f"done: {', '.join(parts)}. To see it: encke report {out}"


def diverged(loss: float, run: Run) -> str:
    """The error when the loss is not a number any more."""
    return (
        f"the loss is {loss} near step {run.progress.step}: this training has diverged. A smaller --optimizer.lr, "
        "--optimizer.clip 1 or --schedule.warmup 1 may help"
    )
