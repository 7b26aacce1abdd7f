"""Results of the study: one layer at one bound, and the real runs that confirm them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from encke.study.distributions import ks_normal, kurtosis
from encke.study.frozen import Frozen, Layer, rms
from encke.study.predict import Loop, Measured, Predicted, Rounding, close_loop, codec_error, measure, predict

ROUNDINGS: tuple[Rounding, ...] = ("stochastic", "nearest")
AGREEMENT = 1e-2
"""Largest relative difference between the errors of a real run and of the product, which fp32 rounds."""


@dataclass(frozen=True)
class Result:
    """One layer at one bound with one rounding."""

    layer: Layer
    multiple: float
    """The bound in units of the input's rms."""
    bound: float
    rounding: Rounding
    measured: Measured | None
    """None if the input is kept unpacked, or has no error to measure."""
    predicted: Predicted | None
    loop: Loop | None
    """The bound corrected as `Comet` does; only for nearest levels."""

    @property
    def status(self) -> str:
        return "lossy" if self.measured else "kept (small)" if self.layer.small else "all zeros"

    def ratio(self, column: str) -> float | None:
        """Return the measured error over the predicted one."""
        predicted = getattr(self.predicted, column, None)
        return self.measured.rms / predicted if self.measured and predicted else None

    def row(self) -> dict[str, object]:
        """Return the columns of gradients.csv."""
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
    """Difference between its weight gradient's error and the one through the product, relative to the error."""
    equal: int
    """Number of gradients of other parameters that were bit-equal to the plain ones."""
    others: int


def study_layer(layer: Layer, bounds: Sequence[float], seed: int) -> list[Result]:
    """Study one layer at every bound with both roundings; the product of the weight's gradient maps the errors."""
    results = []
    scale = rms(layer.x)
    for rounding in ROUNDINGS:
        for multiple in bounds:
            bound = multiple * scale
            if layer.small or scale == 0:
                results.append(Result(layer, multiple, bound, rounding, None, None, None))
                continue
            input_error = codec_error(layer, bound, rounding, seed)
            predicted = predict(layer, bound, rounding, input_error)
            measured = measure(layer, bound, rounding, input_error, seed)
            loop = None
            if rounding == "nearest":
                loop = close_loop(layer, bound, predicted.plain, measured.rms, predicted.exact / bound)
            results.append(Result(layer, multiple, bound, rounding, measured, predicted, loop))
    return results


def confirm(frozen: Frozen, result: Result) -> Confirmation:
    """Run the attached model with only this layer's input lossy, and compare the error with the product's."""
    layer = result.layer
    codec = ErrorBounded(result.bound, rounding=result.rounding)
    handle = encke.attach(frozen.model, Fixed(codec), overrides={"*": None, layer.name: codec})
    try:
        gradients = frozen.gradients()
        packed = any(row.layer == layer.name and row.codec == "ErrorBounded" for row in handle.report().sites)
    finally:
        handle.detach()
    if not packed:
        raise RuntimeError(f"the input of {layer.name} was not packed, so nothing can be said about it")
    own = frozen.name_of(layer.weight)
    equal = {name for name, g in gradients.items() if name != own and torch.equal(g, frozen.plain[name])}
    if changed := sorted(frozen.repeatable - equal - {own}):
        raise RuntimeError(f"only the input of {layer.name} was lossy, yet the gradient of {changed[0]} changed")
    expected = layer.gradient_error(codec_error(layer, result.bound, result.rounding))
    disagreement = rms(gradients[own] - layer.gradient - expected) / (rms(expected) or 1)
    if not disagreement < AGREEMENT:
        raise RuntimeError(f"{layer.name}: a real run and its product disagree by {disagreement:.2g} of the error")
    return Confirmation(disagreement, len(equal), len(gradients) - 1)
