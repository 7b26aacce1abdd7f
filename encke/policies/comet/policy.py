"""Comet: settings that follow the training (COMET's adaptive control, VLDB'22), corrected by measurement.

Four phases. *Parameter collection*: in a collection step saved tensors and output gradients are measured (measure.py).
*Gradient assessment* and *activation assessment*: how much error each weight's gradient may have, and how coarse its
input may be for that (assess.py, theory.py, momentum.py). *Adaptive compression*: the settings are in force until the
next collection step (schedule.py says when that is).
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Self

from torch import nn
from torch.optim import Optimizer

from encke.capture.modules import layer_name
from encke.capture.needs import MATMULS
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.codecs.algebra import satisfies
from encke.codecs.base import as_written
from encke.policies.base import AdaptivePolicy
from encke.policies.comet.allocate import BITS
from encke.policies.comet.assess import DEFAULT_SIGMA, PAPER_SIGMA, Assessment, StepFigures, figures_of, is_norm
from encke.policies.comet.measure import PROBE, CometCollector
from encke.policies.comet.schedule import CollectionSchedule, FinishedStep
from encke.policies.comet.settings import Learnt, Setting
from encke.policies.fixed import at_logprob

PROBED = 16 * PROBE
"""Largest number of input values whose errors are kept in one collection step."""


@dataclass(frozen=True, repr=False)
class Comet(AdaptivePolicy):
    """Keeps the error of every weight's gradient below `sigma` times the weight's mean absolute momentum.

    Args:
        sigma: Tolerated error; None means 0.1 for unbiased rounding and COMET's 0.01 for nearest.
        every: Steps between collection steps after the early ones (1, 10, 20, 40, ...).
        rounding: "stochastic" is unbiased, at 2, 3, 4 or 8 bits per value; "dithered" is unbiased at a variable rate,
            under an absolute bound: fewer bytes in convolutional networks, for more time; "nearest" is COMET as
            published, under an absolute bound.
        formula: "exact" predicts errors with the measured norms, "paper" with COMET's own formula.
        seed: Seed of random rounding.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A setting is out of range.

    Example:
        >>> import torch, encke
        >>> handle = encke.attach(torch.nn.Linear(64, 64), encke.policies.Comet(sigma=0.1))
        >>> handle.policy
        Comet(sigma=0.1)
    """

    sigma: float | None = None
    every: int = 1000
    rounding: Literal["stochastic", "dithered", "nearest"] = "stochastic"
    formula: Literal["exact", "paper"] = "exact"
    seed: int = 0
    tolerance: float = field(default=math.nan, init=False, compare=False)
    """Sigma, with its default."""
    _learnt: Learnt = field(default_factory=Learnt, init=False, compare=False)
    _schedule: CollectionSchedule | None = field(default=None, init=False, compare=False)
    _observed: StepFigures | None = field(default=None, init=False, compare=False)

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
        if self.rounding not in ("stochastic", "dithered", "nearest"):
            raise ValueError(f'rounding must be "stochastic", "dithered" or "nearest", got {self.rounding!r}')
        if self.formula not in ("exact", "paper"):
            raise ValueError(f'formula must be "exact" or "paper", got {self.formula!r}')
        usual = DEFAULT_SIGMA if self.allocates else PAPER_SIGMA
        object.__setattr__(self, "tolerance", usual if self.sigma is None else self.sigma)

    __repr__ = as_written

    @property
    def allocates(self) -> bool:
        """Whether bits are allocated to all saved tensors together: with rounding that is unbiased."""
        return self.rounding != "nearest"

    # -- one training --------------------------------------------------------------------------------------------------

    def bind(self, model: nn.Module | None, optimizer: Optimizer | None) -> Self:
        """Return a Comet with these settings, bound to one training; see `AdaptivePolicy.bind`."""
        bound = replace(self)
        object.__setattr__(bound, "_schedule", CollectionSchedule(bound, bound.every, model, optimizer))
        return bound

    @property
    def schedule(self) -> CollectionSchedule:
        """The schedule of collection steps, once the policy is bound."""
        if self._schedule is None:
            raise RuntimeError(f"{self!r} is not bound to a training: encke.attach does that, see handle.policy")
        return self._schedule

    @property
    def settings(self) -> dict[str, Setting]:
        """Settings in force, by place."""
        return self._learnt.settings

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each setting of each collection step; `encke.Handle.history` lists the keys."""
        return list(self._learnt.history)

    def choose(self, site: Site) -> Codec:
        """Return the codec in force for a site; a new place gets the strictest codec of its layer."""
        settings = self._learnt.settings
        setting = settings.get(site.place)
        if setting is None and site.place_v1 in settings:
            # A state of version 1 uses another key.
            setting = settings[site.place] = settings.pop(site.place_v1)
        if setting is not None:
            return setting.codec
        if site.need == "attention":
            # Capture uses more bits where scores need them, and 8 before its first measurement.
            return initial_codec(self.allocates, self.seed, BITS[0])
        initial = initial_codec(self.allocates, self.seed, initial_bits(site))
        if site.need == "logprob":
            return at_logprob(initial, site)
        return self._learnt.layers.get(site.layer) or initial

    def choose_lasting(self, site: Site) -> Codec:
        """Return a codec that also serves when gradients have become half as large."""
        codec, setting = self.choose(site), self._learnt.settings.get(site.place)
        lasting = None if setting is None else setting.lasting
        return lasting if lasting is not None and satisfies(lasting, codec) else codec

    # -- collection steps ----------------------------------------------------------------------------------------------

    def collector(self) -> CometCollector:
        """Return a new collector, which also measures the weight gradients' errors at some places, in turn."""
        learnt = self._learnt
        places = [(place, setting.values) for place, setting in learnt.settings.items() if setting.values]
        probed: set[str] = set()
        total = 0
        for i in range(len(places)):
            place, values = places[(learnt.turn + i) % len(places)]
            total += min(values, PROBE) if self.allocates else values
            if probed and total > PROBED:
                break
            probed.add(place)
        learnt.turn = (learnt.turn + len(probed)) % max(len(places), 1)
        trials = [GroupQuant(bits=bits, seed=self.seed) for bits in BITS] if self.allocates else []
        return CometCollector(trials, probed, whole=not self.allocates, absolute=self.formula == "paper")

    def observe(self, sample: FinishedStep) -> None:
        """Fetch the figures of a finished collection step."""
        object.__setattr__(self, "_observed", figures_of(sample, norms=self.allocates))

    def update(self) -> bool:
        """Set new codecs from the last figures; return False if the gradients were unusable."""
        figures, learnt = self._observed, self._learnt
        if figures is None:
            return True
        object.__setattr__(self, "_observed", None)
        usable = Assessment(self, learnt, self.choose, figures).assess()
        if figures.has_gradients and not usable and not learnt.warned:
            learnt.warned = True
            warnings.warn(
                f"encke: gradients of collection step {figures.number} are not finite; the last settings stay in force "
                "and the next step collects again (this warning is shown once)",
                RuntimeWarning,
                stacklevel=2,
            )
        return usable

    # -- state ---------------------------------------------------------------------------------------------------------

    def decisions(self) -> dict[str, Any]:
        """Return all decisions as plain data, for the other processes of a distributed training."""
        return self._learnt.to_dict()

    def adopt(self, decisions: dict[str, Any]) -> None:
        """Take over the `decisions()` of another process."""
        object.__setattr__(self, "_learnt", Learnt.from_dict(decisions, self.seed))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that choices depend on: settings, learnt facts, and the position in the schedule."""
        schedule = self.schedule.state_dict()  # may end a step, so it comes first
        return {"policy": repr(self), "rounding": self.rounding, "schedule": schedule} | self.decisions()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run. A state that does not fit changes nothing."""
        if "follower" in state:  # version 1, of release 0.1
            state = {**state, "schedule": state["follower"]}
        missing = {"settings", "history", "turn", "warned", "rounding", "schedule"} - set(state)
        if missing:
            raise ValueError(f"this is not a state of Comet: it lacks {sorted(missing)}")
        if state["rounding"] != self.rounding:
            raise ValueError(
                f"this state was saved with {state.get('policy')}, but this policy is {self!r}: "
                f"attach with rounding={state['rounding']!r}"
            )
        learnt = Learnt.from_dict(state, self.seed)
        check_layers(learnt, self.schedule.model)
        self.schedule.load_state_dict(state["schedule"])
        object.__setattr__(self, "_learnt", learnt)


def check_layers(learnt: Learnt, model: nn.Module | None) -> None:
    """Raise if the facts were learnt from another model: one with layers that this model lacks."""
    if model is None:
        return
    known = {layer_name(name) for name, _ in model.named_modules()}
    foreign = sorted(set(learnt.layers) - known)
    if foreign:
        raise ValueError(
            f"this state is of another model: it has settings for {', '.join(map(repr, foreign[:3]))}"
            f"{f' and {len(foreign) - 3} more layers' if len(foreign) > 3 else ''}, which this "
            f"{type(model).__name__} does not have. Load the state that was saved with this model"
        )


def initial_bits(site: Site) -> int:
    """Return the bits in force before the first measurement.

    Errors of products with weights and of normalisations average out, over a batch or over the normalised values.
    Errors of other readers, such as SiLU, propagate undiminished to the gradients of all preceding layers.
    """
    averaged = is_norm(site) or site.operation == "Convolution" or site.operation in MATMULS
    return 4 if averaged else 8


@cache
def initial_codec(allocates: bool, seed: int, bits: int) -> Codec:
    """Return the codec in force before the first measurement; 1 % of the range for rounding to nearest."""
    return GroupQuant(bits=bits, seed=seed) if allocates else ErrorBounded(1e-2, "rel", seed=seed, coarsens=True)
