"""The value of exact zeros: the same bound with them, and without them as in stock SZ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from torch import nn

import encke
from encke.capture.needs import MIN_BITS
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded
from encke.policies import Fixed
from encke.study.codecs import Midpoint
from encke.study.frozen import Frozen, Layer, rms
from encke.study.models import make, train

BOUND = 0.1
"""Relative to each tensor's range: ten levels or fewer."""
TRAINING_BOUNDS = (0.1, 0.3)
STEPS = 100
BATCH = 32
CODECS: dict[str, Callable[[float], Codec]] = {
    "zeros": lambda bound: ErrorBounded(bound, "rel"),
    "no_zeros": Midpoint,
}


class SameCodec(Fixed):
    """One codec for every input. Where `Fixed` would use a finer one (attention), values are kept exactly."""

    def choose(self, site: Site) -> Codec:
        refined = (site.operation, site.slot) in MIN_BITS
        return self.codec if site.need == "lossy" and not refined else ErrorBounded(0)


def norms_left_alone(model: nn.Module) -> dict[str, None]:
    """Return overrides for COMET's scope: inputs of convolutions and linear layers, and ReLUs that share them."""
    return {name: None for name, module in model.named_modules() if "Norm" in type(module).__name__}


def gradients_by_layer(frozen: Frozen, layers: Iterable[Layer]) -> list[dict[str, object]]:
    """Return error over plain gradient, layer by layer: with only this input lossy, and with all inputs lossy."""
    together = {}
    for run, codec in CODECS.items():
        handle = encke.attach(frozen.model, SameCodec(codec(BOUND)), overrides=norms_left_alone(frozen.model))
        try:
            # The first pass learns the sites; the second one is like a pass in the middle of a training.
            frozen.gradients()
            gradients = frozen.gradients()
        finally:
            handle.detach()
        together[run] = {
            name: rms(g - frozen.plain[name]) / (rms(frozen.plain[name]) or 1) for name, g in gradients.items()
        }
    rows: list[dict[str, object]] = []
    for layer in layers:
        row: dict[str, object] = {"layer": layer.name, "zero_share": 1 - layer.share, "bound_of_range": BOUND}
        plain = rms(layer.gradient) or 1
        for run, codec in CODECS.items():
            input_error = codec(BOUND).encode(layer.x).decode() - layer.x
            row[f"alone_{run}"] = rms(layer.gradient_error(input_error)) / plain
        for run in CODECS:
            row[f"together_{run}"] = together[run][frozen.name_of(layer.weight)]
        rows.append(row)
    return rows


def trainings(
    seed: int, device: str, progress: Callable[[Sequence[int], str], Iterable[int]]
) -> dict[str, list[float]]:
    """Return the losses of a small CNN on digits: plain, and at coarse bounds with and without exact zeros."""
    runs: dict[str, Codec | None] = {"plain": None}
    runs |= {f"{run}_{bound:g}": codec(bound) for bound in TRAINING_BOUNDS for run, codec in CODECS.items()}
    losses = {}
    for run, codec in runs.items():
        model, data = make("cnn", None, BATCH, device, seed)
        if codec is not None:
            encke.attach(model, SameCodec(codec), overrides=norms_left_alone(model))
        steps = progress(range(STEPS), f"a small training, {run}")
        losses[run] = train(model, "cnn", data, BATCH, steps, seed, device)
    return losses


def final_loss(losses: list[float]) -> float:
    """Return the mean loss of the last tenth of a training."""
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail) if all(map(math.isfinite, tail)) else math.nan
