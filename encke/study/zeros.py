"""What exact zeros are worth: the same bound with them, and without them as in stock SZ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from torch import nn

import encke
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


class Alike(Fixed):
    """One codec for every input; where `Fixed` would use a finer one (attention), both sides keep exact values."""

    def choose(self, site: Site) -> Codec:
        return self.codec if site.need == "lossy" else ErrorBounded(0)


def not_a_norm(module: nn.Module, name: str) -> bool:
    """What COMET compresses: inputs of convolutions and linear layers, and what ReLU shares with them."""
    return "Norm" not in type(module).__name__


def gradients_by_layer(frozen: Frozen, layers: Iterable[Layer]) -> list[dict[str, object]]:
    """Error over plain gradient, layer by layer: with this input alone lossy, and with all that may be lossy."""
    together = {}
    for run, codec in CODECS.items():
        handle = encke.attach(frozen.model, Alike(codec(BOUND)), filter=not_a_norm)
        try:
            # The first pass learns who reads what; the second one is as in the middle of a training.
            frozen.gradients()
            found = frozen.gradients()
        finally:
            handle.detach()
        together[run] = {
            name: rms(g - frozen.plain[name]) / (rms(frozen.plain[name]) or 1) for name, g in found.items()
        }
    rows: list[dict[str, object]] = []
    for layer in layers:
        row: dict[str, object] = {"layer": layer.name, "zero_share": 1 - layer.share, "bound_of_range": BOUND}
        plain = rms(layer.gradient) or 1
        for run, codec in CODECS.items():
            wrong = codec(BOUND).encode(layer.x).decode() - layer.x
            row[f"alone_{run}"] = rms(layer.error_of(wrong)) / plain
        for run in CODECS:
            row[f"together_{run}"] = together[run][frozen.name_of(layer.weight)]
        rows.append(row)
    return rows


def trainings(
    seed: int, device: str, progress: Callable[[Sequence[int], str], Iterable[int]]
) -> dict[str, list[float]]:
    """The losses of a small CNN on the built-in digits: plain, and at coarse bounds with and without exact zeros."""
    runs: dict[str, Codec | None] = {"plain": None}
    runs |= {f"{run}_{bound:g}": codec(bound) for bound in TRAINING_BOUNDS for run, codec in CODECS.items()}
    losses = {}
    for run, codec in runs.items():
        model, data = make("cnn", None, BATCH, device, seed)
        if codec is not None:
            encke.attach(model, Alike(codec), filter=not_a_norm)
        steps = progress(range(STEPS), f"a small training, {run}")
        losses[run] = train(model, "cnn", data, BATCH, steps, seed, device)
    return losses


def last(losses: list[float]) -> float:
    """The mean of the last tenth of a training."""
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail) if all(map(math.isfinite, tail)) else math.nan
