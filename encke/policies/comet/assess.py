"""Assessment of a collection step: figures in, settings out.

*Gradient assessment*: gradients may have an error of sigma times the momentum. *Activation assessment*: the theory says
what error each saved tensor adds at each number of bits; where the true error was measured, it corrects the theory. The
input of a weight adds to that weight's gradient. The input of a normalisation or a function distorts the gradient that
is propagated to all weights before it. With stochastic rounding bits are allocated to all of them together
(allocate.py). With rounding to nearest each input has a bound of its own, as in COMET.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from encke.capture.needs import MATMULS, MIN_BITS, NORMS
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded
from encke.policies.comet.allocate import BITS, Memory, allocate
from encke.policies.comet.branches import Joint, share_of
from encke.policies.comet.measure import (
    CometCollector,
    NormFigures,
    WeightFigures,
    WeightGradientSample,
    norm_figures,
)
from encke.policies.comet.menu import Menu
from encke.policies.comet.schedule import FinishedStep
from encke.policies.comet.settings import Learnt, Setting
from encke.policies.comet.stats import TensorFigures
from encke.policies.comet.theory import error_std, paper_std

if TYPE_CHECKING:
    from encke.policies.comet.policy import Comet

PAPER_SIGMA = 0.01
"""COMET's sigma, the default for rounding to nearest."""
DEFAULT_SIGMA = 0.1
"""The default sigma for stochastic rounding."""
NEAREST_SPREAD = 0.25
"""Bound over standard deviation of normalisation and pointwise inputs at COMET's sigma; at most twice that."""
SHARE = 0.5
"""Squared error of all gradients together, in units of the square of what sigma tolerates for each of them."""
MOMENTUM = 3.35
"""Largest square of the momentum that counts, in units of the gradient's: that of independent gradients (decay 0.9,
mean absolute value). Gradients that agree give a larger momentum, but errors of their size would show."""
ROOM = 0.5
"""Part of sigma that codecs are chosen for which cannot change soon."""
CHEAP_SHARE = 0.01
"""Share of all bytes that is spent in any case where it removes most error. The last layer's input is such a place:
what all its samples have in common cancels in the gradient, and errors do not."""
FINEST = 1024
"""No bound is finer than the standard deviation over this, and none coarser than the standard deviation."""

UNMEASURED = 4
"""Fewest bits of the input of a weight whose gradient is not measured: weights that are computed from parameters."""
COHERENCE = 6.0
"""Factor by which the part of a batch norm's error that lies along its input counts in the layer in front, whose own
input that part is a linear function of. Measured: 5 for random images, 20 for smooth ones (docs/lab.md)."""


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepFigures:
    """Everything measured in one collection step, as numbers."""

    number: int
    spread: float
    norm: float
    """Norm of the gradients after backward, or as the optimizer got them where it left none; NaN if unknown."""
    scale: float
    """Norm of the gradients as the optimizer got them over that after backward."""
    collected: CometCollector
    weights: list[tuple[WeightGradientSample, WeightFigures]]
    """Those whose output gradient was measured and whose momentum is known."""
    has_gradients: bool
    """Whether any output gradient was measured."""
    norms: dict[str, NormFigures]
    """By place."""
    tensors: dict[int, TensorFigures]
    """By id of the `TensorStats`."""
    joints: dict[Joint, float]
    """Share of the gradient that comes through a branch."""
    scores: dict[str, float]
    """Share of the gradient behind attention that goes to queries and keys, by the place of its values."""


def figures_of(step: FinishedStep, norms: bool) -> StepFigures:
    """Fetch the figures of a collection step, with one transfer from each device; `norms`: also of batch norms."""
    collected = step.collected
    measured = [each for each in collected.weight_samples if each.tensors]
    weight_samples = [each for each in measured if id(each.weight) in step.momenta]
    norm_samples = [each for each in collected.norm_samples if norms and each.tensor is not None]
    stats = list({id(s): s for _, s in collected.sites.values()}.values())
    joints = list(dict.fromkeys(joint for each in collected.branches.values() for _, joint in each.sections))
    fetch = Fetch()
    after, at_step = fetch.add(collected.norm_after_backward), fetch.add(step.norm_at_step)
    weight_rows = [
        ([*map(fetch.add, each.tensors)], fetch.add(step.momenta[id(each.weight)])) for each in weight_samples
    ]
    norm_rows = [fetch.add(each.tensor) for each in norm_samples]
    tensor_rows = [[*map(fetch.add, each.tensors)] for each in stats]
    joint_rows = [fetch.add(each.tensor) for each in joints]
    score_rows = {place: fetch.add(each.tensor) for place, each in collected.scores.items()}
    numbers = fetch.numbers()
    found = norm_figures(norm_samples, [numbers[i] for i in norm_rows]) if norm_samples else []
    # At the end of a backward of torch.autograd.grad, or one that steps as it goes, weights have no gradients.
    left = collected.norm_after_backward is not None and numbers[after] != 0
    return StepFigures(
        number=step.number,
        spread=step.spread,
        norm=numbers[after] if left else numbers[at_step],
        scale=numbers[at_step] / numbers[after] if left and step.norm_at_step is not None else 1.0,
        collected=collected,
        weights=[
            (each, each.figures([numbers[i] for i in row], numbers[momentum]))
            for each, (row, momentum) in zip(weight_samples, weight_rows, strict=True)
        ],
        has_gradients=bool(measured),
        norms=dict(zip([each.site.place for each in norm_samples], found, strict=True)),
        tensors={
            id(each): each.figures([numbers[i] for i in row]) for each, row in zip(stats, tensor_rows, strict=True)
        },
        joints={joint: share_of(numbers[row]) for joint, row in zip(joints, joint_rows, strict=True)},
        scores={place: share_of(numbers[row]) for place, row in score_rows.items()},
    )


class Fetch:
    """Brings small tensors to the host, with one transfer from each device and of each dtype for all of them."""

    def __init__(self) -> None:
        self._tensors: list[Tensor | None] = []

    def add(self, tensor: Tensor | None) -> int:
        """Return the index that this tensor's number will have; NaN stands for None."""
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def numbers(self) -> list[Any]:
        """Return all tensors added: numbers, and tensors in fp64 on the host for those with dimensions."""
        result: list[Any] = [math.nan] * len(self._tensors)
        kinds: dict[Any, list[tuple[int, Tensor]]] = {}
        for i, tensor in enumerate(self._tensors):
            if tensor is not None:
                kinds.setdefault((tensor.device, tensor.dtype, tensor.dim() > 0), []).append((i, tensor))
        for (_, _, several), added in kinds.items():
            column = torch.cat([tensor.reshape(-1) for _, tensor in added]).to("cpu", torch.float64)
            values = column.split([tensor.numel() for _, tensor in added]) if several else column.tolist()
            for (i, tensor), value in zip(added, values, strict=True):
                result[i] = value.view(tensor.shape) if several else value
        return result


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WeightInput:
    """The input of a weight: predicted error of the weight's gradient, and the error tolerated."""

    sample: WeightGradientSample
    tensor: TensorFigures
    gradient: WeightFigures
    setting: Setting
    tolerated: float
    now: float
    """Standard deviation predicted for the codec in force, without the gain."""
    measured: float
    predicted: list[float] = field(default_factory=list)
    """Standard deviation expected at each fixed rate."""


class Assessment:
    """New settings from the figures of one collection step."""

    def __init__(self, comet: Comet, learnt: Learnt, choose: Callable[[Site], Codec], step: StepFigures) -> None:
        self.comet = comet
        self.learnt = learnt
        self.choose = choose
        """The codec in force so far."""
        self.step = step

    def assess(self) -> bool:
        """Change the settings; return False if the gradients were of no use, which changes nothing."""
        step, collected = self.step, self.step.collected
        inputs = [
            self._weight_input(each, step.tensors[id(each.stats)], gradient)
            for each, gradient in step.weights
            if id(each.stats) in step.tensors
        ]
        # Without samples there is nothing to wait for; samples without gradients: backward is yet to come.
        if None in inputs or (collected.weight_samples and not step.has_gradients):
            return False
        weights = [each for each in inputs if each is not None and each.gradient.power > 0]
        places = {each.sample.site.place for each in inputs if each is not None}
        others = [
            (site, step.tensors[id(stats)])
            for place, (site, stats) in collected.sites.items()
            if place not in places and 0 < step.tensors[id(stats)].std < math.inf
        ]
        if self.comet.allocates:
            self._allocate(weights, others)
        else:
            for each in weights:
                self._set_weight_bound(each)
            for site, tensor in others:
                self._set_spread_bound(site, tensor)
        self.learnt.find_strictest()
        return True

    def _weight_input(
        self, sample: WeightGradientSample, tensor: TensorFigures, gradient: WeightFigures
    ) -> WeightInput | None:
        """Predict the error of a weight's gradient; None if the figures are of no use."""
        step, comet = self.step, self.comet
        allowed = comet.tolerance / (step.spread * math.sqrt(sample.uses))
        tolerated = allowed * gradient.momentum / step.scale if step.scale > 0 else math.nan
        figures = (gradient.power, gradient.sums, tolerated, tensor.std, *tensor.in_force)
        if not all(math.isfinite(figure) for figure in figures):
            return None
        setting = self._setting(sample.site, tensor.values)
        now = predict(comet.formula, sample, gradient, *tensor.in_force)
        measured = math.sqrt(gradient.measured)
        if math.isfinite(measured) and now > 0:
            setting.gain.learn(0.0 if comet.allocates else tensor.bound, measured / now)
        found = WeightInput(sample, tensor, gradient, setting, tolerated, now, measured)
        found.predicted = [
            predict(comet.formula, sample, gradient, *error) * setting.gain.value for error in tensor.errors
        ]
        return found

    def _allocate(self, weights: list[WeightInput], others: list[tuple[Site, TensorFigures]]) -> None:
        """Set the codes of all inputs: the fewest bytes with which the error of all gradients is tolerated."""
        step, sigma = self.step, self.comet.tolerance
        # Squares of what is tolerated, over all values of a weight; its uses share it.
        squares = [each.sample.weight.numel() * each.tolerated**2 * each.sample.uses for each in weights]
        tolerated = {id(each.sample.weight): square for each, square in zip(weights, squares, strict=True)}
        total = sum(tolerated.values())
        # Where nobody knows the gradient, the momentum tells its size.
        gradient = total / (MOMENTUM * sigma**2) if weights else 1.0
        if weights and math.isfinite(step.norm):
            gradient = step.norm**2 / step.spread**2
        allowed = SHARE * min(total if weights else math.inf, MOMENTUM * sigma**2 * gradient)
        order = {id(tensor): i for i, tensor in enumerate(step.tensors.values())}
        """Saved tensors in the order of the forward pass."""
        before = [0.0] * len(order)
        """Squares of what is tolerated up to each of them."""
        for each, square in zip(weights, squares, strict=True):
            before[order[id(each.tensor)]] += square
        before = list(accumulate(before))
        distorted = {site.place: self._distortion(site, tensor) for site, tensor in others}
        others = [each for each in others if all(map(math.isfinite, distorted[each[0].place]))]

        shared, seed = {id(tensor) for _, tensor in others}, self.comet.seed
        menus: dict[int, Menu] = {}
        for tensor in (*(each.tensor for each in weights), *(tensor for _, tensor in others)):
            dithered = self.comet.rounding == "dithered" and not tensor.fixed and id(tensor) not in shared
            menus[id(tensor)] = Menu.of(tensor, dithered, seed)

        def choices(part: float) -> dict[int, int]:
            """Return the index in its menu for each tensor, where that part of sigma is tolerated."""
            memories: dict[int, Memory] = {}

            def add(tensor: TensorFigures, errors: list[float], least: int) -> None:
                bits = menus[id(tensor)].bits
                memory = memories.setdefault(id(tensor), Memory(tensor.values, [0.0] * len(bits), bits=bits))
                memory.errors = [a + b for a, b in zip(memory.errors, errors, strict=True)]
                memory.least = max(memory.least, least)

            for each in weights:
                squares = menus[id(each.tensor)].errors([error**2 for error in each.predicted])
                errors = [each.sample.weight.numel() * square for square in squares]
                add(each.tensor, errors, first_within(squares, (part * each.tolerated) ** 2))
            for site, tensor in others:
                share = self._reach(site, tolerated, before[order[id(tensor)]]) / before[-1] if before[-1] > 0 else 1.0
                product = site.operation == "Convolution" or site.operation in MATMULS
                floor = max(MIN_BITS.get((site.operation, site.slot), 0), UNMEASURED if product else 0)
                errors = [error * share * gradient for error in distorted[site.place]]
                add(tensor, errors, sum(bits < floor for bits in BITS))
            spare = CHEAP_SHARE * BITS[0] * sum(memory.values for memory in memories.values())
            return dict(zip(memories, allocate(list(memories.values()), part**2 * allowed, spare), strict=True))

        chosen, lasting = choices(1.0), choices(ROOM)

        def choose(setting: Setting, tensor: TensorFigures) -> int:
            choice, codecs = chosen[id(tensor)], menus[id(tensor)].codecs
            setting.codec, setting.lasting = codecs[choice], codecs[max(choice, lasting[id(tensor)])]
            return choice

        for each in weights:
            squares = menus[id(each.tensor)].errors([error**2 for error in each.predicted])
            self._note_weight(each, math.sqrt(squares[choose(each.setting, each.tensor)]))
        for site, tensor in others:
            setting = self._setting(site, 0)
            propagated = math.sqrt(distorted[site.place][choose(setting, tensor)])
            self.learnt.note(step.number, site, setting, tensor.share, tensor.std, propagated=propagated)

    def _reach(self, site: Site, squares: dict[int, float], before: float) -> float:
        """Return the sum of squares of the weights whose gradients an input's error reaches."""
        branch = self.step.collected.branches.get(site.place)
        return before if branch is None else branch.reach(squares, before, self.step.joints)

    def _distortion(self, site: Site, tensor: TensorFigures) -> list[float]:
        """Return the relative mean square error of the gradient that an input propagates, at each fixed rate."""
        errors = [power for power, _ in tensor.errors]
        norm = self.step.norms.get(site.place)
        if norm is not None and math.isfinite(norm.linear):
            linear = norm.linear + (COHERENCE - 1) * norm.coherent
            return [linear * error + norm.quadratic * error**2 for error in errors]
        if tensor.distortion:
            return tensor.distortion
        # Of attention's values alone: wrong values distort the gradients of queries and keys, not their own.
        scores = self.step.scores.get(site.place, 1.0)
        relative = [scores * error / tensor.std**2 for error in errors]
        # A normalisation propagates the part of the error that does not cancel over the values taken together.
        return [2 * error / tensor.row + error**2 / tensor.row for error in relative] if is_norm(site) else relative

    def _set_weight_bound(self, each: WeightInput) -> None:
        """Set the bound of a weight's input, for rounding to nearest."""
        tensor, gain = each.tensor, each.setting.gain
        now = predict(self.comet.formula, each.sample, each.gradient, tensor.share / 3, 0.0)
        unit = each.now / tensor.bound if each.now > 0 else now
        bound = clamp(gain.bound_for(each.tolerated, unit), tensor.std) if unit > 0 else tensor.std
        each.setting.codec = ErrorBounded(bound, seed=self.comet.seed, coarsens=True)
        self._note_weight(each, gain.expect(bound, unit))

    def _set_spread_bound(self, site: Site, tensor: TensorFigures) -> None:
        """Set the bound of another input relative to its own spread, for rounding to nearest."""
        setting = self._setting(site, 0)
        relative = min(NEAREST_SPREAD * math.sqrt(self.comet.tolerance / PAPER_SIGMA), 2 * NEAREST_SPREAD)
        bound = clamp(relative * tensor.std, tensor.std)
        setting.codec = ErrorBounded(bound, seed=self.comet.seed, coarsens=True)
        self.learnt.note(self.step.number, site, setting, tensor.share, tensor.std)

    def _note_weight(self, each: WeightInput, expected: float) -> None:
        self.learnt.note(
            self.step.number, each.sample.site, each.setting, each.tensor.share, each.tensor.std,
            momentum=each.gradient.momentum, tolerated=each.tolerated, predicted=expected,
            in_force_predicted=each.now, in_force_measured=each.measured,
        )  # fmt: skip

    def _setting(self, site: Site, values: int) -> Setting:
        setting = self.learnt.settings.setdefault(site.place, Setting(self.choose(site)))
        setting.values = values
        return setting


def predict(
    formula: str, weight_sample: WeightGradientSample, gradient: WeightFigures, power: float, mean: float
) -> float:
    """Return the standard deviation of a weight gradient's error, from mean square and mean of the input's error."""
    product = weight_sample.product
    if formula == "paper":
        return paper_std(power, gradient.absolute, product.positions)
    inside = product.terms / max(weight_sample.positions, 1)
    return error_std(power, math.sqrt(gradient.power), product.terms, gradient.sums * (mean * inside) ** 2)


def first_within(errors: list[float], tolerated: float) -> int:
    """Return the index of the first error that is tolerated; of the last one if none is."""
    return next((i for i, error in enumerate(errors) if error <= tolerated), len(errors) - 1)


def is_norm(site: Site) -> bool:
    """Return whether the reader at `site` is a normalisation."""
    return any(name in site.operation for name in NORMS)


def clamp(bound: float, std: float) -> float:
    """Return the bound, kept within what the theory was checked for."""
    return min(max(bound, std / FINEST), std)
