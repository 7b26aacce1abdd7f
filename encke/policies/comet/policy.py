"""Comet: settings that follow the training (COMET's adaptive control, VLDB'22), checked by measurement.

Four phases. *Parameter collection*: on a collection step saved tensors and output gradients are measured
(measure.py). *Gradient assessment*: a weight's gradient may have an error of sigma times the weight's mean
absolute momentum (momentum.py). *Activation assessment*: the theory (theory.py) says how coarse the input
may be for that; where the gradient's true error was measured, it corrects the theory, layer by layer. *Adaptive
compression*: the setting is in force until the next collection step.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from encke.capture.needs import NORMS
from encke.capture.saved import strictest
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.codecs.base import as_written
from encke.policies.comet.measure import PROBE, PRODUCTS, Collection, Reading, Stats, fetch
from encke.policies.comet.schedule import Follower, Step
from encke.policies.comet.theory import Gain, error_std, paper_std
from encke.policies.fixed import at_attention, at_logprob

STRICT = 0.01
"""COMET's sigma."""
COARSE = 0.2
"""The default sigma of stochastic rounding."""
SPREAD = 0.25
"""Bound over standard deviation of normalisation and pointwise inputs at COMET's sigma; at most twice that."""
NORM_ERROR = 0.9
"""Stochastic error over standard deviation of a normalisation's input at the default sigma. What it gives on as a
gradient hardly depends on its input, but with depth that adds up:"""
NORM_PASSED = 0.12
"""Error over gradient that all batch norms together may add to what they give on, at the default sigma."""
POINT_ERROR = 0.25
"""The same for other inputs, such as SiLU's: a function's slope at a wrong place is wrong on average, too."""
BITS = (2, 4, 8)
SPARE = 0.01
"""By how much of all bytes the smallest inputs of weights may grow together to have the most bits. The last layer's is
one of them: what it has in common for all samples cancels in the gradient, and errors do not."""
FINEST = 1024
"""No bound is finer than the standard deviation over this, and none coarser than the standard deviation."""
PROBED = 16 * PROBE
"""Values of inputs whose errors are kept in one collection step."""


@dataclass(frozen=True, repr=False)
class Comet:
    """Keeps the error of every weight's gradient below `sigma` times the weight's mean absolute momentum.

    `rounding="stochastic"` rounds up or down by chance, right on average, at 2, 4 or 8 bits; `"nearest"` is COMET as
    published, under an absolute bound. `sigma=None` is 0.2 for stochastic rounding, which tolerates more, and COMET's
    0.01 for nearest. `every`: steps between collections (more frequent at the start). `formula="paper"` is COMET's own.
    """

    sigma: float | None = None
    every: int = 1000
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    formula: Literal["exact", "paper"] = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sigma is not None:
            if isinstance(self.sigma, bool) or not isinstance(self.sigma, int | float):
                raise TypeError(f"sigma must be a number, got {self.sigma!r}")
            if not 0 < self.sigma < math.inf:
                raise ValueError(f"sigma must be positive and finite, got {self.sigma}")
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"every must be a whole number of steps, got {self.every!r}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}")
        if self.rounding not in ("stochastic", "nearest"):
            raise ValueError(f'rounding must be "stochastic" or "nearest", got {self.rounding!r}')
        if self.formula not in ("exact", "paper"):
            raise ValueError(f'formula must be "exact" or "paper", got {self.formula!r}')

    __repr__ = as_written

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def tolerance(self) -> float:
        """sigma, with its default."""
        return self.sigma if self.sigma is not None else COARSE if self.stochastic else STRICT

    @property
    def initial(self) -> Codec:
        """In force before the first collection: the fewest bits that may be chosen later, or 1 % of the range."""
        if self.stochastic:
            return GroupQuant(bits=BITS[0], seed=self.seed)
        return ErrorBounded(1e-2, "rel", seed=self.seed)

    def follow(self, model: nn.Module | None, optimizer: Optimizer | None) -> Following:
        """The policy at work in one training; `attach` calls this."""
        following = Following(self)
        following.follower.start(model, optimizer)
        return following


@dataclass(slots=True)
class Setting:
    """What is in force at one place."""

    codec: Codec
    gain: Gain = field(default_factory=Gain)
    values: int = 0
    """Values saved here last, if a weight's gradient is computed from them."""


class Following:
    """Comet at work: what it has learnt from one training, and the settings in force."""

    def __init__(self, comet: Comet) -> None:
        self.comet = comet
        self.settings: dict[str, Setting] = {}
        """What is in force, by place."""
        self.history: list[dict[str, Any]] = []
        """Every setting of every collection step, with the figures that led to it."""
        self.follower = Follower(comet.every, self.collect, self.assess, self.exchange)
        self._layers: dict[str, Codec] = {}
        self._initial = comet.initial
        self._turn = 0
        self._warned = False

    def __repr__(self) -> str:
        return repr(self.comet)

    # -- adaptive compression ------------------------------------------------------------------------------------------

    def choose(self, site: Site) -> Codec:
        """The codec in force for what `site` saves; a place not seen before gets the strictest of its layer."""
        setting = self.settings.get(site.place)
        if setting is not None:
            return setting.codec
        if site.need == "attention":
            return at_attention(self._initial, site)
        if site.need == "logprob":
            return at_logprob(self._initial, site)
        return self._layers.get(site.layer) or self._unseen(site)

    def _unseen(self, site: Site) -> Codec:
        """In force before the first collection; slopes of functions take more bits than sums that errors cancel in."""
        sums = site.operation in PRODUCTS or is_norm(site)
        return self._initial if sums or not isinstance(self._initial, GroupQuant) else replace(self._initial, bits=4)

    # -- parameter collection ------------------------------------------------------------------------------------------

    def collect(self) -> Collection:
        """A collection step begins: what is to be measured in it."""
        comet = self.comet
        trials = [GroupQuant(bits=bits, seed=comet.seed) for bits in BITS] if comet.stochastic else []
        return Collection(trials, self._probes(), whole=not comet.stochastic)

    def _probes(self) -> set[str]:
        """The places whose weight gradient's error is measured this time: in turn, as many as memory allows."""
        places = [(place, setting.values) for place, setting in self.settings.items() if setting.values]
        chosen: set[str] = set()
        total = 0
        for i in range(len(places)):
            place, values = places[(self._turn + i) % len(places)]
            total += min(values, PROBE) if self.comet.stochastic else values
            if chosen and total > PROBED:
                break
            chosen.add(place)
        self._turn = (self._turn + len(chosen)) % max(len(places), 1)
        return chosen

    # -- gradient assessment -------------------------------------------------------------------------------------------

    def assess(self, step: Step) -> bool:
        """A collection step is over: new settings from what was collected. False if its gradients were of no use."""
        # What needs no momentum does not wait for the tenth step: coarse inputs of batch norms can spoil the first.
        early = step.number == 1 and self.comet.every > 1
        small = self._small(step.collection) if self.comet.stochastic else set()
        readings = [r for r in step.collection.readings if r.power is not None and not early]
        momenta = [step.momentum(r.weight) for r in readings]
        passings = step.collection.passings if self.comet.stochastic else []
        stats = list({id(s): s for _, s in step.collection.sites.values()}.values())
        numbers = fetch(
            [
                [step.after, step.at_step],
                *([r.power, r.absolute, r.sums, r.measured, m] for r, m in zip(readings, momenta, strict=True)),
                *([s.share, s.std, *(n for pair in s.errors.values() for n in pair)] for s in stats),
                *([p.ratio, p.square] for p in passings),
            ]
        )
        after, at_step = numbers[0]
        scale = at_step / after if step.at_step is not None and after else 1.0
        seen = {id(s): Seen(s, row) for s, row in zip(stats, numbers[1 + len(readings) :], strict=False)}
        # Without readings there is nothing to wait for; with readings but without gradients backward is yet to come.
        usable = bool(readings) or not step.collection.readings
        passed = numbers[len(numbers) - len(passings) :]
        by_weight: set[str] = set()
        if early:
            usable = math.isfinite(after) or not step.collection.readings
            for r in step.collection.readings:
                by_weight.add(r.site.place)
                codec = r.stats.trials[-1] if r.site.place in small else self.choose(r.site)
                self.settings.setdefault(r.site.place, Setting(codec))
        for r, m, row in zip(readings, momenta, numbers[1:], strict=False):
            if m is not None and id(r.stats) in seen:
                by_weight.add(r.site.place)
                allowed = self.comet.tolerance / (step.spread * math.sqrt(r.uses))
                fewest = len(BITS) - 1 if r.site.place in small else 0
                usable &= self._assess_weight(step.number, r, seen[id(r.stats)], Gradient(*row), allowed, scale, fewest)
        least = self._least(
            (p.site.place, seen[id(p.stats)], ratio, square)
            for p, (ratio, square) in zip(passings, passed, strict=True)
        )
        for place, (site, s) in step.collection.sites.items():
            if place not in by_weight:
                self._assess_spread(step.number, site, seen[id(s)], least.get(place, 0))
        if readings and not usable:
            self._warn(step.number)
        self._know_layers()
        return usable

    def _small(self, collection: Collection) -> set[str]:
        """The places of the smallest inputs of weights, as many as may have the most bits."""
        sizes = {id(stats): stats.values for _, stats in collection.sites.values()}
        left = SPARE * BITS[0] * sum(sizes.values())
        found: set[str] = set()
        for values, place in sorted({(r.stats.values, r.site.place) for r in collection.readings}):
            left -= (BITS[-1] - BITS[0]) * values
            if left < 0:
                break
            found.add(place)
        return found

    def _assess_weight(
        self, step: int, r: Reading, seen: Seen, gradient: Gradient, allowed: float, scale: float, fewest: int
    ) -> bool:
        """The setting of an input that a weight's gradient is computed from. False if the figures are of no use.

        `fewest`: the first of the numbers of bits that may be chosen.
        """
        tolerated = allowed * gradient.momentum / scale if scale > 0 else math.nan
        figures = (gradient.power, gradient.sums, tolerated, seen.std, *seen.errors[seen.codec])
        if not all(math.isfinite(figure) for figure in figures):
            return False
        setting = self.settings.setdefault(r.site.place, Setting(self.choose(r.site)))
        setting.values = seen.values
        if gradient.power == 0:
            return True
        now = self.predict(r, gradient, *seen.errors[seen.codec])
        measured = math.sqrt(gradient.measured)
        if math.isfinite(measured) and now > 0:
            setting.gain.learn(0.0 if self.comet.stochastic else seen.bound, measured / now)
        if self.comet.stochastic:
            found = [self.predict(r, gradient, *seen.errors[codec]) for codec in seen.trials]
            predicted = [std * setting.gain.value for std in found]
            choice = next((i for i, std in enumerate(predicted) if std <= tolerated), len(BITS) - 1)
            choice = max(choice, fewest)
            setting.codec, expected = seen.trials[choice], predicted[choice]
        else:
            unit = now / seen.bound if now > 0 else self.predict(r, gradient, seen.share / 3, 0.0)
            bound = clamp(setting.gain.bound_for(tolerated, unit), seen.std) if unit > 0 else seen.std
            setting.codec, expected = ErrorBounded(bound, seed=self.comet.seed), setting.gain.expect(bound, unit)
        self._note(
            step, r.site, setting, seen, momentum=gradient.momentum, tolerated=tolerated, predicted=expected,
            in_force_predicted=now, in_force_measured=measured,
        )  # fmt: skip
        return True

    def predict(self, r: Reading, gradient: Gradient, power: float, mean: float) -> float:
        """The standard deviation of a weight gradient's error, from mean square and mean of the input's error."""
        product = r.product
        if self.comet.formula == "paper":
            return paper_std(power, gradient.absolute, product.positions)
        inside = product.terms / max(r.places, 1)
        return error_std(power, math.sqrt(gradient.power), product.terms, gradient.sums * (mean * inside) ** 2)

    def _assess_spread(self, step: int, site: Site, seen: Seen, least: int) -> None:
        """The setting of an input that no weight's gradient hangs on: relative to its own spread.

        `least`: how many of the fewest bits are too few in any case.
        """
        if not math.isfinite(seen.std) or seen.std <= 0:
            return
        setting = self.settings.setdefault(site.place, Setting(self.choose(site)))
        setting.values = 0
        if self.comet.stochastic:
            relative = (NORM_ERROR if is_norm(site) else POINT_ERROR) * math.sqrt(self.comet.tolerance / COARSE)
            tolerated = relative * seen.std
            errors = [math.sqrt(seen.errors[codec][0]) for codec in seen.trials]
            choice = next((i for i, error in enumerate(errors) if error <= tolerated), len(BITS) - 1)
            setting.codec = seen.trials[max(choice, least)]
        else:
            relative = SPREAD * math.sqrt(self.comet.tolerance / STRICT)
            setting.codec = ErrorBounded(clamp(min(relative, 2 * SPREAD) * seen.std, seen.std), seed=self.comet.seed)
        self._note(step, site, setting, seen)

    def _least(self, norms: Iterable[tuple[str, Seen, float, float]]) -> dict[str, int]:
        """How many of the fewest bits are too few for which batch norms: they come with the figures of `Passing`.

        More bits go to those that spoil most of what they give on for each byte, until it is little enough together.
        """
        least, total = {}, 0.0
        steps: list[tuple[float, float, int, str]] = []
        for place, seen, ratio, square in norms:
            spoilt = [ratio * error + square * error**2 for error in (seen.errors[codec][0] for codec in seen.trials)]
            if all(math.isfinite(error) for error in spoilt):
                least[place] = 0
                total += spoilt[0]
                for i, bits in enumerate(BITS[1:]):
                    less = max(spoilt[i] - spoilt[i + 1], 0.0)
                    steps.append((less / (seen.values * (bits - BITS[i])), less, i + 1, place))
        allowed = NORM_PASSED**2 * self.comet.tolerance / COARSE
        for _, less, i, place in sorted(steps, key=lambda step: -step[0]):
            if total <= allowed:
                break
            if i == least[place] + 1:
                least[place], total = i, total - less
        return least

    def _note(self, step: int, site: Site, setting: Setting, seen: Seen, **figures: float) -> None:
        codec = setting.codec
        row = {"step": step, "layer": site.layer, "operation": site.operation, "slot": site.slot, "place": site.place}
        row |= {"codec": type(codec).__name__, "bound": getattr(codec, "bound", None)}
        row |= {"bits": getattr(codec, "bits", None), "share": seen.share, "std": seen.std, "gain": setting.gain.value}
        self.history.append(row | {name: None if math.isnan(value) else value for name, value in figures.items()})

    def _know_layers(self) -> None:
        layers: dict[str, list[Codec]] = {}
        for place, setting in self.settings.items():
            layers.setdefault(place.rsplit("/", 2)[0], []).append(setting.codec)
        self._layers = {layer: strictest(codecs) for layer, codecs in layers.items()}

    def _warn(self, step: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"encke: gradients of collection step {step} are not finite; the last settings stay in force and "
                "the next step collects again (said once)",
                RuntimeWarning,
                stacklevel=2,
            )

    # -- state ---------------------------------------------------------------------------------------------------------

    def exchange(self, decided: dict[str, Any] | None) -> dict[str, Any] | None:
        """Gives what was decided (to the other processes), or takes it."""
        if decided is None:
            settings = {place: _as_dict(setting) for place, setting in self.settings.items()}
            return {"settings": settings, "history": self.history, "turn": self._turn, "warned": self._warned}
        self.settings = {place: self._as_setting(data) for place, data in decided["settings"].items()}
        self.history = list(decided["history"])
        self._turn, self._warned = decided["turn"], decided["warned"]
        self._know_layers()
        return None

    def state_dict(self) -> dict[str, Any]:
        """All that decisions depend on: settings, what was learnt, and where in the schedule the training is."""
        comet, follower = self.comet, self.follower
        state = {"policy": repr(comet), "rounding": comet.rounding, "follower": follower.state_dict()}
        return state | copy.deepcopy(self.exchange(None) or {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = {"settings", "history", "turn", "warned", "rounding", "follower"} - set(state)
        if missing:
            raise ValueError(f"this is not a state of Comet: it lacks {sorted(missing)}")
        if state["rounding"] != self.comet.rounding:
            raise ValueError(
                f"this state was saved with {state.get('policy')}, but this policy is {self.comet!r}: "
                f"attach with rounding={state['rounding']!r}"
            )
        self.exchange(state)
        self.follower.load_state_dict(state["follower"])

    def _as_setting(self, data: dict[str, Any]) -> Setting:
        seed = self.comet.seed
        codec: Codec = (
            GroupQuant(bits=data["bits"], seed=seed)
            if "bits" in data
            else ErrorBounded(data["bound"], data["mode"], seed=seed)
        )
        return Setting(codec, Gain(**data["gain"]), data["values"])


def _as_dict(setting: Setting) -> dict[str, Any]:
    codec = setting.codec
    kind: dict[str, Any] = {}
    if isinstance(codec, GroupQuant):
        kind = {"bits": codec.bits}
    elif isinstance(codec, ErrorBounded):
        kind = {"bound": codec.bound, "mode": codec.mode}
    return {**kind, "gain": asdict(setting.gain), "values": setting.values}


@dataclass(slots=True)
class Gradient:
    """What was measured of an output gradient, and of the weight it leads to."""

    power: float
    absolute: float
    sums: float
    measured: float
    """Mean square error of the weight's gradient; NaN if it was not measured."""
    momentum: float


class Seen:
    """The numbers of a piece of saved memory, fetched."""

    def __init__(self, stats: Stats, row: list[float]) -> None:
        self.share, self.std = row[:2]
        pairs = zip(row[2::2], row[3::2], strict=True)
        self.errors: dict[Codec, tuple[float, float]] = dict(zip(stats.errors, pairs, strict=True))
        self.codec = stats.codec
        self.trials = list(stats.trials)
        self.values = stats.values

    @property
    def bound(self) -> float:
        """The absolute bound in force; from the error itself where the codec has a relative one."""
        codec = self.codec
        if isinstance(codec, ErrorBounded) and codec.bounds()[1] == math.inf:
            return codec.bound
        return math.sqrt(3 * self.errors[codec][0] / self.share) if self.share else 0.0


def is_norm(site: Site) -> bool:
    return any(name in site.operation for name in NORMS)


def clamp(bound: float, std: float) -> float:
    """A bound within what the theory was checked for."""
    return min(max(bound, std / FINEST), std)
