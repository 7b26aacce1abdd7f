"""The policy contract: `Policy` chooses a codec for each site, `AdaptivePolicy` also measures the training.

Capture and api know these classes and no concrete policy. A policy is asked only for tensors that may be lossy; the
reader's need alone decides about masks, signs, shapes and exact values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from encke.capture.sites import Site
from encke.codecs import Codec, Packed
from encke.codecs.layout import Layout


class Policy(ABC):
    """Chooses the codec for each site. A subclass needs `choose`; the rest has defaults for policies without state."""

    @abstractmethod
    def choose(self, site: Site) -> Codec:
        """Return the codec for the tensors that `site` saves.

        Args:
            site: Where the tensor is saved: layer, operation, slot and what its reader needs.
        """

    def choose_lasting(self, site: Site) -> Codec:
        """Return the codec for `site` where it cannot change soon, as in a CUDA graph.

        An adaptive policy may leave room for settings that it may choose later.

        Args:
            site: Where the tensor is saved.
        """
        return self.choose(site)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to make the same choices; empty for a policy without state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run. A state that does not fit changes nothing.

        Args:
            state: Return value of `state_dict()` of the same kind of policy.

        Raises:
            ValueError: The state belongs to another policy.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got the keys {sorted(state)}")


class AdaptivePolicy(Policy):
    """A policy that measures the training in collection steps and changes its choices.

    `attach` calls `bind` once and uses the policy that it returns. From then on that policy's schedule decides in which
    forward passes to collect, and gives capture a collector for them. When the step is over, the schedule passes the
    sample to `observe`, and `update` changes the choices.
    """

    @abstractmethod
    def bind(self, model: nn.Module | None, optimizer: Optimizer | None) -> Self:
        """Return a copy of this policy bound to one training; it has the same settings and shares no state.

        Args:
            model: The attached model; None in a `compress` context.
            optimizer: The optimizer, if it was given.
        """

    @property
    @abstractmethod
    def schedule(self) -> Schedule:
        """The schedule of collection steps, once the policy is bound."""

    @abstractmethod
    def observe(self, sample: Any) -> None:
        """Read the measurements of a finished collection step."""

    @abstractmethod
    def update(self) -> bool:
        """Change the choices to fit the last sample; return False if it was unusable and must be taken again."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each choice made in a collection step, oldest first, with the figures it was based on."""
        return []


class Schedule(Protocol):
    """Decides which forward passes are collection steps."""

    def begin_pass(self) -> Collector | None:
        """Return the collector for the training forward pass that begins; None if it is not a collection step."""
        ...

    def collects_next(self) -> bool:
        """Return whether the next training forward pass is a collection step."""
        ...

    def collect_now(self) -> None:
        """Make the next training forward pass a collection step."""
        ...

    def stop(self) -> None:
        """Remove every hook from model and optimizer; learnt facts stay."""
        ...


class PackedMemory(Protocol):
    """One run of memory, packed once for all its readers."""

    @property
    def packed(self) -> Packed | None: ...
    @property
    def key(self) -> int: ...
    @property
    def masked(self) -> bool:
        """Whether some reader needs only which values are zero."""

    @property
    def fixed(self) -> bool:
        """Whether it needs codes of a fixed rate: it is recomputed, or a source for others."""

    @property
    def signed(self) -> bool:
        """Whether a reader needs its signs."""


class SavedTensor(Protocol):
    """One saved tensor: its site, and its layout in memory that it may share with others."""

    @property
    def site(self) -> Site: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def cell(self) -> PackedMemory | None: ...


class Collector(Protocol):
    """Measures one collection step. Capture shows it every packed tensor, then the finished autograd graph."""

    def saved(self, saved: SavedTensor, cell: PackedMemory, flat: Tensor) -> None:
        """Measure a tensor that was just packed, or that shares packed memory; `flat` has the exact values."""
        ...

    def walk(self, nodes: Iterable[Any], saved_by: Callable[[Any], Iterable[tuple[str, SavedTensor]]]) -> None:
        """Visit the autograd graph behind `nodes` at the end of the forward pass.

        Args:
            nodes: The nodes that backward starts from.
            saved_by: Returns (slot, saved tensor) for every tensor that a node saved through capture.
        """
        ...
