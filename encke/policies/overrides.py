"""Overrides: another policy, another codec, or none at all, for some layers of a model."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from encke.capture.sites import Site
from encke.codecs import Codec
from encke.policies.base import AdaptivePolicy, Collector, PackedMemory, Policy, SavedTensor, Schedule
from encke.policies.fixed import Fixed
from encke.policies.presets import preset

Override = Codec | Policy | str | None
"""Value of an override: a codec, a policy, a preset's name, or None to leave the layer uncompressed."""


def matches(layer: str, pattern: str) -> bool:
    """Return whether a pattern names this layer or one that contains it."""
    return not pattern or fnmatchcase(layer, pattern) or fnmatchcase(layer, f"{pattern}.*")


def resolve(overrides: Mapping[str, Override], layers: Sequence[str]) -> dict[str, Policy | None]:
    """Return the policy of each overridden layer, by layer name; None for a layer that is left uncompressed.

    Args:
        overrides: Overrides by pattern, as `attach` takes them; the last pattern that matches a layer wins.
        layers: The names of all layers.

    Raises:
        TypeError: A pattern is not a string, or a value is not a valid override.
        ValueError: A pattern matches no layer.
    """
    if not isinstance(overrides, Mapping):
        raise TypeError(f'overrides must be a dictionary such as {{"head": None}}, got {overrides!r}')
    found: dict[str, Policy | None] = {}
    for pattern, value in overrides.items():
        if not isinstance(pattern, str):
            raise TypeError(f'overrides takes patterns of layer names such as "layer4.*", got {pattern!r}')
        if isinstance(value, Codec):
            policy: Policy | None = Fixed(value)
        elif value is None or isinstance(value, Policy | str):
            policy = preset(value) if isinstance(value, str) else value
        else:
            raise TypeError(f"overrides[{pattern!r}] must be None, a codec, a policy or a preset's name, got {value!r}")
        named = [layer for layer in layers if matches(layer, pattern)]
        if not named:
            near = difflib.get_close_matches(pattern, layers, 3, 0.4) or [layer for layer in layers if layer][:3]
            raise ValueError(f"overrides: no layer matches {pattern!r}; layers near to it: {', '.join(near)}")
        found.update(dict.fromkeys(named, policy))
    return found


def with_overrides(policy: Policy, overrides: dict[str, Policy | None]) -> Policy:
    """Return a policy that delegates to `policy`, or to the override of a layer as `resolve` returned it."""
    by_layer = {layer: other for layer, other in overrides.items() if other is not None}
    if not by_layer:
        return policy
    adaptive = any(isinstance(each, AdaptivePolicy) for each in (policy, *by_layer.values()))
    return (AdaptiveLayerPolicies if adaptive else LayerPolicies)(policy, by_layer)


class LayerPolicies(Policy):
    """One policy for most layers, and others for some."""

    def __init__(self, policy: Policy, by_layer: dict[str, Policy]) -> None:
        self.policy = policy
        self.by_layer = by_layer
        self.all = list({id(each): each for each in (policy, *by_layer.values())}.values())
        """Every policy once, the one for most layers first."""

    def __repr__(self) -> str:
        others = {repr(each): [layer for layer, p in self.by_layer.items() if p is each] for each in self.all[1:]}
        return f"{self.policy!r} with {', '.join(f'{each} for {shown(layers)}' for each, layers in others.items())}"

    def responsible(self, site: Site) -> Policy:
        """Return the policy of the layer that a site belongs to."""
        return self.by_layer.get(site.layer, self.policy)

    def choose(self, site: Site) -> Codec:
        """Return the codec that the layer's policy chooses."""
        return self.responsible(site).choose(site)

    def choose_lasting(self, site: Site) -> Codec:
        """Return the codec that the layer's policy chooses where it cannot change soon."""
        return self.responsible(site).choose_lasting(site)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all policies, that of the policy for most layers first."""
        return {"policies": [each.state_dict() for each in self.all]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run. A state that does not fit changes nothing."""
        states = state.get("policies")
        if not isinstance(states, list) or len(states) != len(self.all):
            raise ValueError("this state was saved with other overrides: attach with the same overrides as then")
        before = [each.state_dict() for each in self.all]
        try:
            for each, its_state in zip(self.all, states, strict=True):
                each.load_state_dict(its_state)
        except Exception:
            for each, its_state in zip(self.all, before, strict=True):
                each.load_state_dict(its_state)
            raise


def shown(layers: list[str]) -> str:
    """Return layer names for display: the first few, and how many more."""
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"


class AdaptiveLayerPolicies(LayerPolicies, AdaptivePolicy):
    """Policies of layers, some of them adaptive: each measures its own layers on its own schedule."""

    def bind(self, model: nn.Module | None, optimizer: Optimizer | None) -> AdaptiveLayerPolicies:
        """Return all policies bound to one training; see `AdaptivePolicy.bind`."""
        bound = {id(p): p.bind(model, optimizer) if isinstance(p, AdaptivePolicy) else p for p in self.all}
        by_layer = {layer: bound[id(each)] for layer, each in self.by_layer.items()}
        return AdaptiveLayerPolicies(bound[id(self.policy)], by_layer)

    @property
    def adaptive(self) -> list[AdaptivePolicy]:
        """The adaptive policies, the one for most layers first."""
        return [each for each in self.all if isinstance(each, AdaptivePolicy)]

    @property
    def schedule(self) -> Schedule:
        """The schedules of all adaptive policies as one."""
        return CombinedSchedule(self)

    def observe(self, sample: Any) -> None:
        """Do nothing: each policy gets its samples from its own schedule."""

    def update(self) -> bool:
        """Do nothing: each policy is updated by its own schedule."""
        return True

    @property
    def history(self) -> list[dict[str, Any]]:
        """The entries of all policies, oldest first."""
        return sorted((row for each in self.adaptive for row in each.history), key=lambda row: row["step"])


class CombinedSchedule:
    """The schedules of several policies as one: every policy that is due collects the forward pass."""

    def __init__(self, policies: AdaptiveLayerPolicies) -> None:
        self.policies = policies
        self.schedules = [(each, each.schedule) for each in policies.adaptive]

    def begin_pass(self) -> Collector | None:
        """Return the collectors of all policies that collect now, as one."""
        begun = [(policy, schedule.begin_pass()) for policy, schedule in self.schedules]
        collectors = [(policy, collector) for policy, collector in begun if collector is not None]
        return CombinedCollector(self.policies, collectors) if collectors else None

    def collects_next(self) -> bool:
        """Return whether any policy collects in the next training forward pass."""
        return any(schedule.collects_next() for _, schedule in self.schedules)

    def collect_now(self) -> None:
        """Make the next training forward pass a collection step of all policies."""
        for _, schedule in self.schedules:
            schedule.collect_now()

    def stop(self) -> None:
        """Remove every hook from model and optimizer; learnt facts stay."""
        for _, schedule in self.schedules:
            schedule.stop()


class CombinedCollector:
    """Passes to each collector the tensors for which its policy is responsible."""

    def __init__(self, policies: LayerPolicies, collectors: list[tuple[AdaptivePolicy, Collector]]) -> None:
        self.policies = policies
        self.collectors = collectors

    def saved(self, saved: SavedTensor, cell: PackedMemory, flat: Tensor) -> None:
        """Pass a packed tensor to the collector of its layer."""
        responsible = self.policies.responsible(saved.site)
        for policy, collector in self.collectors:
            if policy is responsible:
                collector.saved(saved, cell, flat)

    def walk(self, nodes: Iterable[Any], saved_by: Callable[[Any], Iterable[tuple[str, SavedTensor]]]) -> None:
        """Show the finished graph to all collectors, each with its own saved tensors."""
        nodes = list(nodes)
        for policy, collector in self.collectors:
            collector.walk(nodes, self._saved_for(policy, saved_by))

    def _saved_for(
        self, policy: Policy, saved_by: Callable[[Any], Iterable[tuple[str, SavedTensor]]]
    ) -> Callable[[Any], Iterable[tuple[str, SavedTensor]]]:
        def saved_for(node: Any) -> list[tuple[str, SavedTensor]]:
            return [(slot, each) for slot, each in saved_by(node) if self.policies.responsible(each.site) is policy]

        return saved_for
