"""The policy contract: `Policy` chooses a codec for each site, `AdaptivePolicy` also measures the training.

Capture and api know these classes and no concrete policy. A policy is asked only for what may be lossy; masks, signs,
shapes and exact values are settled by what their reader needs.
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
        """Return the codec for what `site` saves.

        Args:
            site: Where the tensor is saved: layer, operation, slot and what its reader needs.
        """

    def choose_lasting(self, site: Site) -> Codec:
        """Return the codec for what `site` saves where it cannot change soon, as in a CUDA graph.

        An adaptive policy may leave room for what it may choose later.

        Args:
            site: Where the tensor is saved.
        """
        return self.choose(site)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to make the same choices; empty for a policy without state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()` of an earlier run. A state that does not fit changes nothing.

        Args:
            state: What `state_dict()` of the same kind of policy returned.

        Raises:
            ValueError: The state belongs to another policy.
        """
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got the keys {sorted(state)}")


class AdaptivePolicy(Policy):
    """A policy that measures the training in collection steps and changes its choices.

    `attach` calls `bind` once and uses what it returns. From then on the policy's schedule says in which forward passes
    to collect, and gives capture a collector for them. When the step is over the schedule hands the sample to
    `observe`, and `update` changes the choices.
    """

    @abstractmethod
    def bind(self, model: nn.Module | None, optimizer: Optimizer | None) -> Self:
        """Return a policy with these settings at work in one training; it shares no state with this one.

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
        """Take what was measured in a collection step that is over."""

    @abstractmethod
    def update(self) -> bool:
        """Change the choices to fit the last sample; return False if it was of no use and must be taken again."""

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry for each choice made in a collection step, oldest first, with the figures behind it."""
        return []


class Schedule(Protocol):
    """Decides which forward passes are collection steps."""

    def begin_pass(self) -> Collector | None:
        """Return who measures the training forward pass that begins; None if nobody does."""
        ...

    def collects_next(self) -> bool:
        """Return whether the next training forward pass is a collection step."""
        ...

    def collect_now(self) -> None:
        """Make the next training forward pass a collection step."""
        ...

    def stop(self) -> None:
        """Remove every hook from model and optimizer; what was learnt stays."""
        ...


class PackedMemory(Protocol):
    """One piece of memory, packed once for all who saved it."""

    @property
    def packed(self) -> Packed | None: ...
    @property
    def key(self) -> int: ...
    @property
    def masked(self) -> bool:
        """Whether somebody reads which of its values are zero."""

    @property
    def fixed(self) -> bool:
        """Whether it needs codes of a fixed rate: backward may compute it, or others from it."""

    @property
    def signed(self) -> bool:
        """Whether somebody reads its signs."""


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
        """See a tensor that was just packed, or that shares what was packed before; `flat` has the exact values."""
        ...

    def walk(self, nodes: Iterable[Any], saved_by: Callable[[Any], Iterable[tuple[str, SavedTensor]]]) -> None:
        """See the autograd graph behind `nodes` at the end of the forward pass.

        Args:
            nodes: The nodes that backward starts from.
            saved_by: Gives (slot, saved tensor) for everything that a node saved through capture.
        """
        ...
