"""Savings of a block: how its steps hold values from forward to backward, as single layers would.

Each has the site that would save, with its decisions, and what the report counts. `hold` returns what is kept of a
value, and `restore` the value that backward reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from encke.capture.encoding import RECOMPUTED
from encke.capture.facts import SiteFacts
from encke.capture.ledger import Record
from encke.capture.passes import ForwardPass
from encke.codecs.base import check_version
from encke.codecs.groupquant import GroupQuantPacked
from encke.codecs.layout import Layout
from encke.kernels import GroupPlan, mix


class Run:
    """Forward of a block: the forward pass, and the memory that its steps write to.

    One allocation serves many steps: with small batches the time to allocate counts.
    """

    __slots__ = ("codes", "forward", "statistics", "workspace")

    def __init__(self, plan: Any, forward: ForwardPass, device: torch.device) -> None:
        self.forward = forward
        self.codes: Iterator[Tensor | None] = itertools.repeat(None)
        """Memory for the codes of each saving in turn; None: the saving allocates it."""
        if plan.code_sizes:
            codes = torch.empty(plan.codes_size, dtype=torch.uint8, device=device)
            self.codes = iter(codes.split_with_sizes(plan.code_sizes))
        self.statistics: Any = None
        """Memory for the statistics of each batch norm in turn."""
        self.workspace: Any = None
        """Memory for the moments of any batch norm's groups."""
        if plan.channels:
            statistics = torch.empty(4 * sum(plan.channels), dtype=torch.float32, device=device)
            self.statistics = iter(statistics.split_with_sizes([4 * each for each in plan.channels]))
            self.workspace = torch.empty(plan.workspace_numel, dtype=torch.float32, device=device)


class Saving:
    """A value that a step needs in backward. This one is the block's input, which the block holds."""

    code_bytes = 0
    """Bytes of codes for which memory is taken from the run."""
    small_bytes = 0
    """Bytes that the report counts among small tensors."""
    gives_sources = False
    """Whether all that is computed again from this value is inside the block, or finds it on the function's node."""

    def __init__(self, facts: SiteFacts | None = None) -> None:
        self.facts: Any = facts
        """Site inside the block that saves; None for the block's input and small tensors."""
        self.steady: Any = None if facts is None else facts.steady
        """Decisions of that site."""
        self.records: list[Record] = []

    def hold(self, value: Tensor, run: Run) -> Any:
        """Return what is kept of a value."""

    def restore(self, kept: Any, held: Any) -> Tensor:
        """Return the value for backward. `held` is what the block holds."""
        return held.restore()


class SmallSaving(Saving):
    """A small tensor, kept as it is."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.small_bytes = nbytes

    def hold(self, value: Tensor, run: Run) -> tuple[Tensor, int]:
        return value, value._version

    def restore(self, kept: tuple[Tensor, int], held: Any) -> Tensor:
        t, version = kept
        if t._version != version:
            check_version(t, version)
        return t


class PackedSaving(Saving):
    """A value that is packed."""

    def __init__(self, facts: SiteFacts) -> None:
        super().__init__(facts)
        self.plan: GroupPlan = facts.encoder_state.plan[4]
        self.layout: Layout = self.steady.layout
        self.code_bytes = self.plan.nbytes if self.plan.fuses_forward else 0
        record = Record(facts, self.plan.numel * self.plan.format.dtype.itemsize, self.plan.nbytes)
        record.codec = self.steady.codec
        self.records.append(record)

    def seed(self, forward: ForwardPass) -> int:
        """Return the seed of what is packed in this pass."""
        return mix(self.steady.codec.seed, mix(forward.step, self.facts.site.number, forward.rank))

    def packed(self, data: Tensor, seed: int) -> GroupQuantPacked:
        """Return codes with all that is needed to decode them."""
        return GroupQuantPacked(self.steady.codec, self.steady.packed_layout, data, seed, self.plan)

    def hold(self, value: Tensor, run: Run) -> GroupQuantPacked:
        seed = self.seed(run.forward)
        data = next(run.codes) if self.code_bytes else None
        if data is None:
            data = self.plan.encode(value, seed)
        else:
            self.plan.encode_into(value, seed, data)
        return self.packed(data, seed)

    def restore(self, kept: GroupQuantPacked, held: Any) -> Tensor:
        return kept.decode_in(self.layout)


class SharedSaving(Saving):
    """A value that the step which made it has packed."""

    def __init__(self, facts: SiteFacts, maker: int) -> None:
        super().__init__(facts)
        self.maker = maker
        """Number of that step."""

    def restore(self, kept: None, held: Any) -> Tensor:
        found: Tensor = held.kept[self.maker].decode_in(self.steady.layout)
        return found


class ComputedSaving(Saving):
    """A value that backward computes again."""

    def __init__(self, facts: SiteFacts, compute: Callable[[Any], Tensor]) -> None:
        super().__init__(facts)
        self.compute = compute
        """Returns the value, given what the block holds."""
        record = Record(facts, self.steady.length * facts.site.dtype.itemsize)
        record.codec = RECOMPUTED
        self.records.append(record)

    def restore(self, kept: None, held: Any) -> Tensor:
        return self.compute(held)
