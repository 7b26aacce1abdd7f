"""Assessment of a collection step: figures in, settings out.

*Gradient assessment*: a weight's gradient may have an error of sigma times the weight's mean absolute momentum.
*Activation assessment*: the theory says how coarse the input may be for that; where the true error was measured, it
corrects the theory, layer by layer. Inputs that no weight's gradient is computed from are judged by their own spread,
and batch norms by how much they distort the gradient that they propagate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.capture.needs import NORMS
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded
from encke.policies.comet.measure import CometCollector, NormGradientSample, TensorStats, WeightGradientSample
from encke.policies.comet.schedule import FinishedStep
from encke.policies.comet.settings import Learnt, Setting
from encke.policies.comet.theory import error_std, paper_std

if TYPE_CHECKING:
    from encke.policies.comet.policy import Comet

PAPER_SIGMA = 0.01
"""COMET's sigma, the default for rounding to nearest."""
DEFAULT_SIGMA = 0.2
"""The default sigma for stochastic rounding."""
NEAREST_SPREAD = 0.25
"""Bound over standard deviation of normalisation and pointwise inputs at COMET's sigma; at most twice that."""
NORM_ERROR = 0.9
"""Largest stochastic error of a normalisation's input at the default sigma, in units of its standard deviation."""
NORM_PROPAGATED = 0.12
"""Share of the gradient that all batch norms together may distort at the default sigma."""
POINTWISE_ERROR = 0.25
"""Largest stochastic error of other inputs, such as SiLU's: the slope of a function at a wrong place is biased."""
BITS = (2, 4, 8)
CHEAP_SHARE = 0.01
"""By how much of all bytes the smallest inputs of weights may grow together to have the most bits. The last layer's is
one of them: what all its samples have in common cancels in the gradient, and errors do not."""
FINEST = 1024
"""No bound is finer than the standard deviation over this, and none coarser than the standard deviation."""


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TensorFigures:
    """Statistics of one piece of saved memory, as numbers."""

    share: float
    std: float
    errors: dict[Codec, tuple[float, float]]
    """Mean square and mean of the error, for each codec tried and the one in force."""
    codec: Codec
    trials: tuple[Codec, ...]
    values: int

    @property
    def bound(self) -> float:
        """The absolute bound in force; from the error itself where the codec has a relative one."""
        codec = self.codec
        absolute, relative = codec.bounds()
        if absolute < math.inf and relative == math.inf:
            return absolute
        return math.sqrt(3 * self.errors[codec][0] / self.share) if self.share else 0.0


@dataclass(slots=True)
class WeightFigures:
    """An output gradient and the weight whose gradient is computed from it, as numbers."""

    power: float
    absolute: float
    sums: float
    measured: float
    """Mean square error of the weight's gradient; NaN if it was not measured."""
    momentum: float
    """Mean absolute momentum."""


@dataclass(slots=True)
class NormFigures:
    """Error that a batch norm propagates per error of its input, as numbers."""

    linear: float
    quadratic: float


@dataclass(slots=True)
class StepFigures:
    """Everything measured in one collection step, as numbers."""

    number: int
    spread: float
    scale: float
    """Norm of the gradients as the optimizer got them over that after backward."""
    collected: CometCollector
    weights: list[tuple[WeightGradientSample, WeightFigures]]
    """Those whose output gradient was measured and whose momentum is known."""
    has_gradients: bool
    """Whether any output gradient was measured."""
    norms: list[tuple[NormGradientSample, NormFigures]]
    tensors: dict[int, TensorFigures]
    """By id of the `TensorStats`."""


def figures_of(step: FinishedStep, norms: bool) -> StepFigures:
    """Fetch the figures of a collection step, with one transfer from each device; `norms`: also of batch norms."""
    collected = step.collected
    measured = [each for each in collected.weight_samples if each.power is not None]
    momenta = {id(each): step.momentum(each.weight) for each in measured}
    weight_samples = [each for each in measured if momenta[id(each)] is not None]
    norm_samples = collected.norm_samples if norms else []
    stats = list({id(s): s for _, s in collected.sites.values()}.values())
    fetch = Fetch()
    after, at_step = fetch.add(collected.norm_after_backward), fetch.add(step.norm_at_step)
    weight_rows = [
        [fetch.add(x) for x in (each.power, each.absolute, each.sums, each.measured, momenta[id(each)])]
        for each in weight_samples
    ]
    norm_rows = [[fetch.add(each.linear), fetch.add(each.quadratic)] for each in norm_samples]
    tensor_rows = [
        (fetch.add(s.share), fetch.add(s.std), {c: tuple(map(fetch.add, pair)) for c, pair in s.errors.items()})
        for s in stats
    ]
    numbers = fetch.numbers()

    def tensor_figures(s: TensorStats, share: int, std: int, errors: dict[Codec, Any]) -> TensorFigures:
        pairs = {codec: (numbers[power], numbers[mean]) for codec, (power, mean) in errors.items()}
        return TensorFigures(numbers[share], numbers[std], pairs, s.codec, s.trials, s.values)

    scaled = step.norm_at_step is not None and numbers[after]
    return StepFigures(
        number=step.number,
        spread=step.spread,
        scale=numbers[at_step] / numbers[after] if scaled else 1.0,
        collected=collected,
        weights=[
            (each, WeightFigures(*(numbers[i] for i in row)))
            for each, row in zip(weight_samples, weight_rows, strict=True)
        ],
        has_gradients=bool(measured),
        norms=[
            (each, NormFigures(*(numbers[i] for i in row))) for each, row in zip(norm_samples, norm_rows, strict=True)
        ],
        tensors={id(s): tensor_figures(s, *row) for s, row in zip(stats, tensor_rows, strict=True)},
    )


class Fetch:
    """Turns 0-dim tensors into numbers, with one transfer from each device for all of them."""

    def __init__(self) -> None:
        self._tensors: list[Tensor | None] = []

    def add(self, tensor: Tensor | None) -> int:
        """Return the index that this tensor's number will have; NaN stands for None."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def numbers(self) -> list[float]:
        """Return the numbers of all tensors added."""
        result = [math.nan] * len(self._tensors)
        devices: dict[torch.device, list[tuple[int, Tensor]]] = {}
        for i, tensor in enumerate(self._tensors):
            if tensor is not None:
                devices.setdefault(tensor.device, []).append((i, tensor))
        for added in devices.values():
            column = torch.stack([tensor.to(torch.float64).reshape(()) for _, tensor in added])
            for (i, _), value in zip(added, column.tolist(), strict=True):
                result[i] = value
        return result


# -- settings ----------------------------------------------------------------------------------------------------------


class Assessment:
    """New settings from the figures of one collection step."""

    def __init__(self, comet: Comet, learnt: Learnt, choose: Callable[[Site], Codec], step: StepFigures) -> None:
        self.comet = comet
        self.learnt = learnt
        self.choose = choose
        """The codec in force so far."""
        self.step = step
        self.assessed: set[str] = set()
        """Places that a weight's gradient is computed from."""

    def assess(self) -> bool:
        """Change the settings; return False if the gradients were of no use."""
        step, collected = self.step, self.step.collected
        refined = cheap_to_refine(collected) if self.comet.stochastic else set()
        # Without samples there is nothing to wait for; samples without gradients: backward is yet to come.
        usable = step.has_gradients or not collected.weight_samples
        for weight_sample, gradient in step.weights:
            figures = step.tensors.get(id(weight_sample.stats))
            if figures is not None:
                self.assessed.add(weight_sample.site.place)
                first = len(BITS) - 1 if weight_sample.site.place in refined else 0
                usable &= self._assess_weight(weight_sample, figures, gradient, first)
        floors = self._norm_floors()
        for place, (site, stats) in collected.sites.items():
            # Without gradients nobody knows what a norm propagates.
            if place not in self.assessed and usable:
                self._assess_spread(site, step.tensors[id(stats)], floors.get(place, 0))
        self.learnt.find_strictest()
        return usable

    def _assess_weight(
        self, weight_sample: WeightGradientSample, tensor: TensorFigures, gradient: WeightFigures, first: int
    ) -> bool:
        """Set an input that a weight's gradient is computed from; return False if the figures are of no use.

        `first` is the index in BITS of the fewest bits that may be chosen.
        """
        step, comet = self.step, self.comet
        allowed = comet.tolerance / (step.spread * math.sqrt(weight_sample.uses))
        tolerated = allowed * gradient.momentum / step.scale if step.scale > 0 else math.nan
        figures = (gradient.power, gradient.sums, tolerated, tensor.std, *tensor.errors[tensor.codec])
        if not all(math.isfinite(figure) for figure in figures):
            return False
        setting = self._setting(weight_sample.site, tensor.values)
        if gradient.power == 0:
            return True

        def std_of(power: float, mean: float) -> float:
            return predict(comet.formula, weight_sample, gradient, power, mean)

        now = std_of(*tensor.errors[tensor.codec])
        measured = math.sqrt(gradient.measured)
        if math.isfinite(measured) and now > 0:
            setting.gain.learn(0.0 if comet.stochastic else tensor.bound, measured / now)
        if comet.stochastic:
            predicted = [std_of(*tensor.errors[codec]) * setting.gain.value for codec in tensor.trials]
            choice = max(first_within(predicted, tolerated), first)
            setting.codec, expected = tensor.trials[choice], predicted[choice]
        else:
            unit = now / tensor.bound if now > 0 else std_of(tensor.share / 3, 0.0)
            bound = clamp(setting.gain.bound_for(tolerated, unit), tensor.std) if unit > 0 else tensor.std
            setting.codec, expected = ErrorBounded(bound, seed=comet.seed), setting.gain.expect(bound, unit)
        self.learnt.note(
            step.number, weight_sample.site, setting, tensor.share, tensor.std, momentum=gradient.momentum,
            tolerated=tolerated, predicted=expected, in_force_predicted=now, in_force_measured=measured,
        )  # fmt: skip
        return True

    def _assess_spread(self, site: Site, tensor: TensorFigures, first: int) -> None:
        """Set an input that no weight's gradient is computed from, relative to its own spread; `first` as above."""
        if not math.isfinite(tensor.std) or tensor.std <= 0:
            return
        comet, setting = self.comet, self._setting(site, 0)
        if comet.stochastic:
            relative = (NORM_ERROR if is_norm(site) else POINTWISE_ERROR) * math.sqrt(comet.tolerance / DEFAULT_SIGMA)
            errors = [math.sqrt(tensor.errors[codec][0]) for codec in tensor.trials]
            setting.codec = tensor.trials[max(first_within(errors, relative * tensor.std), first)]
        else:
            relative = min(NEAREST_SPREAD * math.sqrt(comet.tolerance / PAPER_SIGMA), 2 * NEAREST_SPREAD)
            setting.codec = ErrorBounded(clamp(relative * tensor.std, tensor.std), seed=comet.seed)
        self.learnt.note(self.step.number, site, setting, tensor.share, tensor.std)

    def _setting(self, site: Site, values: int) -> Setting:
        setting = self.learnt.settings.setdefault(site.place, Setting(self.choose(site)))
        setting.values = values
        return setting

    def _norm_floors(self) -> dict[str, int]:
        """Return the index in BITS of the fewest bits that the batch norms' inputs may have, by place."""
        tensors = self.step.tensors
        norms = [
            (each.site.place, tensors[id(each.stats)], figures.linear, figures.quadratic)
            for each, figures in self.step.norms
            if id(each.stats) in tensors
        ]
        return norm_floors(norms, NORM_PROPAGATED**2 * self.comet.tolerance / DEFAULT_SIGMA)


def predict(
    formula: str, weight_sample: WeightGradientSample, gradient: WeightFigures, power: float, mean: float
) -> float:
    """Return the standard deviation of a weight gradient's error, from mean square and mean of the input's error."""
    product = weight_sample.product
    if formula == "paper":
        return paper_std(power, gradient.absolute, product.positions)
    inside = product.terms / max(weight_sample.positions, 1)
    return error_std(power, math.sqrt(gradient.power), product.terms, gradient.sums * (mean * inside) ** 2)


def cheap_to_refine(collected: CometCollector) -> set[str]:
    """Return the places of the smallest inputs of weights, as many as may have the most bits."""
    sizes = {id(stats): stats.values for _, stats in collected.sites.values()}
    spare = CHEAP_SHARE * BITS[0] * sum(sizes.values())
    places: set[str] = set()
    for values, place in sorted({(each.stats.values, each.site.place) for each in collected.weight_samples}):
        spare -= (BITS[-1] - BITS[0]) * values
        if spare < 0:
            break
        places.add(place)
    return places


def norm_floors(norms: Sequence[tuple[str, TensorFigures, float, float]], allowed: float) -> dict[str, int]:
    """Return the index in BITS of the fewest bits that each batch norm's input may have.

    More bits go to those that distort the propagated gradient most for each byte, until all together are within
    `allowed`.

    Args:
        norms: Place, figures of the input, and the linear and quadratic figure of `NormGradientSample`.
        allowed: Relative mean square error that all norms together may add.
    """
    floors: dict[str, int] = {}
    total = 0.0
    steps: list[tuple[float, float, int, str]] = []
    for place, tensor, linear, quadratic in norms:
        powers = [tensor.errors[codec][0] for codec in tensor.trials]
        distortion = [linear * power + quadratic * power**2 for power in powers]
        if all(math.isfinite(error) for error in distortion):
            floors[place] = 0
            total += distortion[0]
            for i, bits in enumerate(BITS[1:]):
                gained = max(distortion[i] - distortion[i + 1], 0.0)
                steps.append((gained / (tensor.values * (bits - BITS[i])), gained, i + 1, place))
    for _, gained, i, place in sorted(steps, key=lambda step: -step[0]):
        if total <= allowed:
            break
        if i == floors[place] + 1:
            floors[place], total = i, total - gained
    return floors


def first_within(errors: list[float], tolerated: float) -> int:
    """Return the index of the first error that is tolerated; of the last one if none is."""
    return next((i for i, error in enumerate(errors) if error <= tolerated), len(errors) - 1)


def is_norm(site: Site) -> bool:
    """Return whether the reader at `site` is a normalisation."""
    return any(name in site.operation for name in NORMS)


def clamp(bound: float, std: float) -> float:
    """Return the bound, kept within what the theory was checked for."""
    return min(max(bound, std / FINEST), std)
