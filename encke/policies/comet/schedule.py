"""Schedule of collection steps: count the training's steps, open a collection when one is due, close it at the end.

A collection step ends with the optimizer's step. Between backward and that step gradients may change: loss scale and
clipping show as the ratio of the gradients' norms before and after, and accumulated batches and averaged processes
add variances.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from encke.policies.comet.measure import CometCollector
from encke.policies.comet.momentum import DECAY, Averages, Momenta, gradient_norm, mean_abs
from encke.policies.comet.shards import Shards, local_part
from encke.torch_internals import active_ddp_module, current_graph_task

FIRST = 10
"""The second collection step, after step 1; each next one comes after twice as many steps, until `every` takes over."""
IN_VAIN = 20
"""Collections in a row that no step of the optimizer has ended, after which there is a warning."""
AVERAGED_STEPS = 20
"""Steps before a collection step in which gradients are averaged, where the optimizer keeps no momentum."""


@dataclass
class FinishedStep:
    """A collection step that is over: what was collected, and what the optimizer got of the gradients."""

    number: int
    collected: CometCollector
    momenta: dict[int, Tensor]
    """Mean absolute momenta of weights, by id; those that are known."""
    norm_at_step: Tensor | None
    """Norm of the gradients as the optimizer got them; None without an optimizer."""
    ranks: int
    """Processes whose gradients were averaged."""

    @property
    def spread(self) -> float:
        """Error of the optimizer's gradient over that of one batch of one process, scaling aside."""
        return math.sqrt(self.collected.batches / self.ranks)


class MeasuringPolicy(Protocol):
    """Policy as the schedule sees it."""

    def collector(self) -> CometCollector: ...
    def observe(self, sample: FinishedStep) -> None: ...
    def update(self) -> bool: ...
    def decisions(self) -> dict[str, Any]: ...
    def adopt(self, decisions: dict[str, Any]) -> None: ...


class CollectionSchedule:
    """Tells capture which forward passes to collect in, and hands each finished collection step to its policy."""

    def __init__(
        self, policy: MeasuringPolicy, every: int, model: nn.Module | None, optimizer: Optimizer | None
    ) -> None:
        self.policy = policy
        self.every = every
        self.updates = 0
        """Steps of the optimizer; without one, forward passes."""
        self.counts_all_steps = optimizer is None or not optimizer.state
        """Whether `updates` counts all steps that the optimizer's momentum has seen."""
        self.requested = False
        """Whether the next step collects, due or not."""
        self.open: CometCollector | None = None
        self._outside = False
        """Whether a forward pass of the step that is going on began outside of backward."""
        self._in_vain = 0
        """Collections in a row that no step of the optimizer has ended."""
        self.averages = Averages()
        self.averaging = False
        self.optimizer = optimizer
        self.optimizer_name = name_of(optimizer)
        """Kind of the optimizer, which states are checked by; also known after `stop`."""
        self.ddp: Any = None
        self.shards: Shards | None = None
        """The model's sharded parameters (FSDP2), looked up in collection steps."""
        self._model = weakref.ref(model) if model is not None else None
        self._norm_at_step: Tensor | None = None
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()
        if optimizer is not None:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
        elif model is not None:
            self._average_gradients(p for p in model.parameters() if p.requires_grad and p.dim() > 1)

    @property
    def model(self) -> nn.Module | None:
        """The attached model, while it is alive."""
        return self._model() if self._model is not None else None

    def stop(self) -> None:
        """Remove every hook from model and optimizer; what was learnt stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hooked.clear()
        self.averages.clear()
        self._model = self.optimizer = self.open = self.ddp = self.shards = None

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the schedule, and the gradient averages by parameter name."""
        if self.optimizer is None and self.ddp is None and self.shards is None:
            # Nobody tells when a step is over; whoever saves a state thinks that it is.
            self._close(None)
        requested = self.requested or (self.open is not None and self.optimizer is None)
        state: dict[str, Any] = {
            "updates": self.updates,
            "counts_all_steps": self.counts_all_steps,
            "requested": requested,
        }
        state["optimizer"] = self.optimizer_name
        return state | {"averages": self.averages.state_dict(self._parameters())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run."""
        if "counted" in state:  # version 1, of release 0.1
            state = {**state, "counts_all_steps": state["counted"], "requested": state["again"]}
        missing = {"updates", "counts_all_steps", "requested", "averages"} - set(state)
        if missing:
            raise ValueError(f"this is not a state of a collection schedule: it lacks {sorted(missing)}")
        kept, given = state.get("optimizer", ""), self.optimizer_name
        if kept and kept != given:
            raise ValueError(
                f"this state was saved with the optimizer {kept}, but this training has {given}: its momentum has "
                "another unit. Attach with the same kind of optimizer as then"
            )
        updates, requested, counts_all = (
            int(state["updates"]),
            bool(state["requested"]),
            bool(state["counts_all_steps"]),
        )
        # The last that can fail, and it changes nothing then.
        self.averages.load_state_dict(state["averages"], self._parameters())
        self.updates, self.requested, self.counts_all_steps = updates, requested, counts_all
        self.open = None

    def _parameters(self) -> dict[str, Tensor]:
        model = self.model
        return dict(model.named_parameters()) if model is not None else {}

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_pass(self) -> CometCollector | None:
        """Return the collector of the training forward pass that begins; None outside of collection steps.

        A pass that begins while backward runs computes a region again, as checkpoints and reversible layers do. It
        belongs to the step that is going on, unless all that the step does is in such regions.
        """
        outside = current_graph_task() == -1
        if self._outside and not outside:
            return self.open
        self._outside = outside
        if self.optimizer is None:
            self._close(None)
            self.updates += 1
        step = self.updates + (self.optimizer is not None)
        self.averaging = self._collects_soon(step)
        inside = active_ddp_module()
        model = self.model
        self.ddp = model if isinstance(model, DistributedDataParallel) else inside
        collector = self.open
        if collector is not None:
            if any(weight.grad is not None for weight in collector.weights()):
                collector.batches += 1
                return collector
            # The optimizer's step was left out, as a gradient scaler does after an overflow: begin anew.
            self._in_vain += 1
            if self._in_vain == IN_VAIN:
                warnings.warn(
                    f"encke: {IN_VAIN} forward passes in a row were measured for nothing, because the optimizer given "
                    "to attach did not step: attach with the one that does, or without one",
                    RuntimeWarning,
                    stacklevel=2,
                )
        elif not (self.requested or self.due(step)):
            return None
        self.open = self.policy.collector()
        shards = Shards(model)
        self.shards = self.open.shards = shards if shards.mesh is not None else None
        return self.open

    def collects_next(self) -> bool:
        """Return whether the next training forward pass is a collection step."""
        return self.open is not None or self.requested or self.due(self.updates + 1)

    def collect_now(self) -> None:
        """Make the next training forward pass a collection step."""
        self.requested = True

    def due(self, step: int) -> bool:
        """Return whether a step is a collection step: 1, 10, 20, 40, ... and then every `every`."""
        doubled = step // FIRST
        early = step == 1 or (step < self.every and step % FIRST == 0 and doubled & (doubled - 1) == 0)
        return early or step % self.every == 0

    def _collects_soon(self, step: int) -> bool:
        """Return whether a collection step comes soon, from `step` on, so that gradients are averaged."""
        return self.requested or any(self.due(step + ahead) for ahead in range(AVERAGED_STEPS))

    def _average_gradients(self, weights: Iterable[Tensor]) -> None:
        """Average these weights' gradients as they come out of backward, where there is no optimizer."""

        def average(weight: Tensor) -> None:
            if weight.grad is not None and self.averaging:
                self.averages.add(weight, weight.grad)

        for weight in weights:
            if id(weight) not in self._hooked and weight.is_leaf:
                self._hooked.add(id(weight))
                self._hooks.append(weight.register_post_accumulate_grad_hook(average))

    def _before_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        if self.averaging:
            momenta = Momenta(optimizer)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None and p.dim() > 1 and not momenta.kept(p):
                        self.averages.add(p, p.grad if scale is None else p.grad / scale)
        norm = gradient_norm(self.open.weights()) if self.open is not None else None
        # A fused optimizer undoes the loss scale inside its step.
        self._norm_at_step = norm if norm is None or scale is None else norm / scale.to(norm.device)

    def _after_step(self, optimizer: Optimizer, *arguments: Any) -> None:
        self.updates += 1
        self._in_vain, self._outside = 0, False
        self._close(self._norm_at_step)

    def _close(self, norm_at_step: Tensor | None) -> None:
        """Hand an open collection to the policy: the step is over, and new settings come into force."""
        collector, self.open = self.open, None
        if collector is None:
            return
        momenta = Momenta(self.optimizer) if self.optimizer is not None else None
        updates = self.updates if self.counts_all_steps else None
        # The average of a few gradients is larger than it will be: later ones cancel in part.
        seen = 1 - DECAY**updates if updates else 1.0

        kept = {}
        for weight in collector.weights():
            found = momenta.momentum(weight, updates) if momenta is not None else None
            found = found or self.averages.momentum(weight)
            if found is not None:
                kept[id(weight)] = (found[0], found[1] / seen)
        means = dict(zip(kept, mean_abs(list(kept.values())), strict=True))
        averaged = self.ddp is not None and self.optimizer is not None
        ranks = dist.get_world_size(self.ddp.process_group) if averaged else 1
        step = FinishedStep(self.updates, collector, means, norm_at_step, ranks)
        self.policy.observe(step if self.shards is None else combined(step, self.shards))
        self.requested = not self.policy.update()
        groups = [self.ddp.process_group] if self.ddp is not None else self.shards.groups if self.shards else []
        for group in groups:
            self.requested = share_decisions(self.policy, self.requested, group)
        if self.optimizer is None and (self.model is None or self.shards is not None):
            # Parameters that were sharded after `attach` are others than those that it found.
            self._average_gradients(collector.weights())
        if not self._collects_soon(self.updates + 1):
            self.averages.clear()


def name_of(optimizer: Optimizer | None) -> str:
    """Return the kind of an optimizer, for states."""
    return "none" if optimizer is None else type(optimizer).__name__


def combined(step: FinishedStep, shards: Shards) -> FinishedStep:
    """Return a finished step with momenta and norms over all processes, each of which has only its part of a weight."""
    collector = step.collected
    numels = {id(weight): local_part(weight).numel() for weight in collector.weights()}
    known = {key: (mean, numels[key]) for key, mean in step.momenta.items()}
    norms = [norm for norm in (collector.norm_after_backward, step.norm_at_step) if norm is not None]
    means, norms = shards.combine(list(known.values()), norms)
    if step.norm_at_step is not None:
        step.norm_at_step = norms.pop()
    if norms:
        collector.norm_after_backward = norms.pop()
    # Gradients are averaged before the optimizer or anybody else sees them.
    return replace(step, momenta=dict(zip(known, means, strict=True)), ranks=shards.ranks)


def share_decisions(policy: MeasuringPolicy, requested: bool, group: Any) -> bool:
    """Give every process what the first one decided; return whether it wants the next step to collect."""
    first = dist.get_rank(group) == 0
    parcel = [(policy.decisions(), requested) if first else None]
    dist.broadcast_object_list(parcel, group_src=0, group=group)
    if first or parcel[0] is None:
        return requested
    decisions, requested = parcel[0]
    policy.adopt(decisions)
    return requested
