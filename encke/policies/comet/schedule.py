"""Following a training: counting its steps, opening a collection when one is due, closing it with the optimizer's step.

What stands between the gradient that backward computes and the one that the optimizer sees does not fool it: loss scale
and clipping show as the ratio of the gradients' norms before and after, accumulated batches and averaged ranks add
variances.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from encke.policies.comet.measure import Collection
from encke.policies.comet.momentum import Averages, Momenta, gradient_norm

FIRST = 10
"""The first collection step; each next one comes after twice as many steps, until `every` takes over."""
RECORDED = 20
"""Steps before a collection step in which gradients are averaged, where the optimizer keeps no momentum."""


@dataclass
class Step:
    """A collection step that is over: what was collected, and what the optimizer made of the gradients."""

    number: int
    collection: Collection
    momentum: Callable[[Tensor], Tensor | None]
    after: Tensor | None
    """Norm of the gradients after backward."""
    at_step: Tensor | None
    """Norm of the gradients as the optimizer got them; None if nobody changes them in between."""
    ranks: int
    """Processes whose gradients were averaged."""

    @property
    def spread(self) -> float:
        """How much larger than one batch's error of one process the optimizer's may be, scaling aside."""
        return math.sqrt(self.collection.batches / self.ranks)


class Follower:
    """Tells a policy which forward passes to collect in, and hands it each collection step when it is over."""

    def __init__(
        self,
        every: int,
        collect: Callable[[], Collection],
        assess: Callable[[Step], bool],
        exchange: Callable[[Any], Any],
    ) -> None:
        self.every = every
        self.collect = collect
        self.assess = assess
        """Takes a step and says whether its gradients could be used; if not, the next step collects again."""
        self.exchange = exchange
        """Under DDP: gives what was decided, or takes what the first process decided."""
        self.updates = 0
        """Steps of the optimizer; without one, forward passes."""
        self.counted = True
        """False if the optimizer had made steps before it was attached."""
        self.again = False
        self.open: Collection | None = None
        self.averages = Averages()
        self.recording = False
        self.attached = False
        self._model: weakref.ref[nn.Module] | None = None
        self.optimizer: Optimizer | None = None
        self.ddp: Any = None
        self.at_step: Tensor | None = None
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()

    # -- attached and detached -----------------------------------------------------------------------------------------

    def start(self, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        """Attached to a model (None: a `compress` context), with the optimizer if it is known."""
        if self.attached:
            raise ValueError("this policy follows another training already: give each attach a policy of its own")
        self.attached = True
        self._model, self.optimizer = weakref.ref(model) if model is not None else None, optimizer
        if optimizer is not None:
            self.counted = self.updates > 0 or not optimizer.state
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        elif model is not None:
            self._record(p for p in model.parameters() if p.requires_grad and p.dim() > 1)

    @property
    def model(self) -> nn.Module | None:
        return self._model() if self._model is not None else None

    def stop(self) -> None:
        """Detached: every hook comes off; what was learnt stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hooked.clear()
        self.averages.clear()
        self._model = self.optimizer = self.open = self.ddp = None
        self.attached = False

    def state_dict(self) -> dict[str, Any]:
        """Where in the schedule the training is, and the averages kept so far by name."""
        if self.optimizer is None and self.ddp is None:
            # Nobody tells when a step is over; whoever saves a state thinks that it is.
            self._close(None)
        again = self.again or (self.open is not None and self.optimizer is None)
        state = {"updates": self.updates, "counted": self.counted, "again": again}
        return state | {"averages": self.averages.state_dict(self._names())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates, self.counted, self.again = state["updates"], state["counted"], state["again"]
        self.averages.load_state_dict(state["averages"], self._names())
        self.open = None

    def _names(self) -> dict[str, Tensor]:
        model = self.model
        return dict(model.named_parameters()) if model is not None else {}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin(self) -> Collection | None:
        """A forward pass of training begins; on a collection step, what it is to be shown to."""
        if self.optimizer is None:
            self._close(None)
            self.updates += 1
        self.recording = self.near(self.number)
        inside = getattr(DistributedDataParallel, "_active_ddp_module", None)
        model = self.model
        self.ddp = model if isinstance(model, DistributedDataParallel) else inside
        collection = self.open
        if collection is not None:
            if any(weight.grad is not None for weight in collection.weights()):
                collection.batches += 1
                return collection
            # The optimizer's step was left out, as a gradient scaler does after an overflow: begin anew.
        elif not (self.again or self.due(self.number)):
            return None
        self.open = self.collect()
        return self.open

    @property
    def number(self) -> int:
        """The step that is going on, from 1."""
        return self.updates + (self.optimizer is not None)

    def due(self, step: int) -> bool:
        """Whether a step is a collection step: 1, 10, 20, 40, ... and then every `every`."""
        doubled = step // FIRST
        early = step == 1 or (step < self.every and step % FIRST == 0 and doubled & (doubled - 1) == 0)
        return early or step % self.every == 0

    def near(self, step: int) -> bool:
        """Whether a collection step comes soon, from `step` on, so that gradients are averaged."""
        return self.again or any(self.due(step + ahead) for ahead in range(RECORDED))

    def _record(self, weights: Iterable[Tensor]) -> None:
        """Without an optimizer: averages these weights' gradients, as they come out of backward."""
        for weight in weights:
            if id(weight) not in self._hooked and weight.is_leaf:
                self._hooked.add(id(weight))
                self._hooks.append(weight.register_post_accumulate_grad_hook(self._average))

    def _average(self, weight: Tensor) -> None:
        if weight.grad is not None and self.recording:
            self.averages.add(weight, weight.grad)

    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        if self.recording:
            momenta = Momenta(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.dim() > 1 and not momenta.kept(p):
                        self.averages.add(p, p.grad if scale is None else p.grad / scale)
        self.at_step = gradient_norm(self.open.weights()) if self.open is not None else None
        # A fused optimizer undoes the loss scale inside its step.
        if self.at_step is not None and scale is not None:
            self.at_step = self.at_step / scale.to(self.at_step.device)

    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        self.updates += 1
        self._close(self.at_step)

    def _close(self, at_step: Tensor | None) -> None:
        """The step is over: a collection that was open is assessed, and its settings come into force."""
        collection, self.open = self.open, None
        if collection is None:
            return
        momenta = Momenta(self.optimizer) if self.optimizer is not None else None
        updates = self.updates if self.counted else None

        def momentum(weight: Tensor) -> Tensor | None:
            kept = momenta.of(weight, updates) if momenta is not None else None
            return kept if kept is not None else self.averages.momentum(weight)

        ranks = (
            dist.get_world_size(self.ddp.process_group) if self.ddp is not None and self.optimizer is not None else 1
        )
        step = Step(self.updates, collection, momentum, collection.after, at_step, ranks)
        self.again = not self.assess(step)
        if self.ddp is not None:
            self._share(self.ddp.process_group)
        if self.optimizer is None and self.model is None:
            self._record(collection.weights())
        if not self.near(self.updates + 1):
            self.averages.clear()

    def _share(self, group: Any) -> None:
        """All processes take what the first one decided."""
        first = dist.get_rank(group) == 0
        parcel = [(self.exchange(None), self.again) if first else None]
        dist.broadcast_object_list(parcel, group_src=0, group=group)
        if not first and parcel[0] is not None:
            decided, self.again = parcel[0]
            self.exchange(decided)
