"""Savings of a block: how its steps hold values from forward to backward, as single layers would.

Each saving has the site at which a single layer would save, the site's decisions, and the entries of the report. `hold`
returns the data kept for a value, and `restore` returns the value for backward.
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
    """One forward of a block: the forward pass, and the memory that the steps write to.

    Many steps share one allocation, because the time to allocate matters with small batches.
    """

    __slots__ = ("codes", "forward", "statistics", "workspace")

    def __init__(self, plan: Any, forward: ForwardPass, device: torch.device) -> None:
        self.forward = forward
        self.codes: Iterator[Tensor | None] = itertools.repeat(None)
        """Memory for the codes of each saving in turn; None if the saving allocates it."""
        if plan.code_sizes:
            codes = torch.empty(plan.codes_size, dtype=torch.uint8, device=device)
            self.codes = iter(codes.split_with_sizes(plan.code_sizes))
        self.statistics: Any = None
        """Memory for the statistics of each batch norm in turn."""
        self.workspace: Any = None
        """Memory for the moments of groups, shared by all batch norms."""
        if plan.channels:
            statistics = torch.empty(4 * sum(plan.channels), dtype=torch.float32, device=device)
            self.statistics = iter(statistics.split_with_sizes([4 * each for each in plan.channels]))
            self.workspace = torch.empty(plan.workspace_numel, dtype=torch.float32, device=device)


class Saving:
    """Value that a step needs in backward. The base class stands for the block's input, which the block holds."""

    code_bytes = 0
    """Bytes of codes that are stored in memory of the run."""
    small_bytes = 0
    """Bytes that the report counts as small tensors."""
    gives_sources = False
    """Whether every tensor recomputed from this value is in the block, or can find the value on the block's node."""

    def __init__(self, facts: SiteFacts | None = None) -> None:
        self.facts: Any = facts
        """Site inside the block that saves; None for the block's input and small tensors."""
        self.steady: Any = None if facts is None else facts.steady
        """Decisions of that site."""
        self.records: list[Record] = []

    def hold(self, value: Tensor, run: Run) -> Any:
        """Return the data to keep for a value."""

    def restore(self, kept: Any, held: Any) -> Tensor:
        """Return the value for backward. `held` is the block's `BlockSaved`."""
        return held.restore()


class SmallSaving(Saving):
    """Small tensor, kept as it is."""

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
    """Packed value."""

    def __init__(self, facts: SiteFacts) -> None:
        super().__init__(facts)
        self.plan: GroupPlan = facts.encoder_state.plan[4]
        self.layout: Layout = self.steady.layout
        self.code_bytes = self.plan.nbytes if self.plan.fuses_forward else 0
        record = Record(facts, self.plan.numel * self.plan.format.dtype.itemsize, self.plan.nbytes)
        record.codec = self.steady.codec
        self.records.append(record)

    def seed(self, forward: ForwardPass) -> int:
        """Return the seed for packing in this pass."""
        return mix(self.steady.codec.seed, mix(forward.step, self.facts.site.number, forward.rank))

    def packed(self, data: Tensor, seed: int) -> GroupQuantPacked:
        """Return the packed tensor: codes with everything needed to decode them."""
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
    """Value that the step that computed it has packed."""

    def __init__(self, facts: SiteFacts, maker: int) -> None:
        super().__init__(facts)
        self.maker = maker
        """Number of that step."""

    def restore(self, kept: None, held: Any) -> Tensor:
        found: Tensor = held.kept[self.maker].decode_in(self.steady.layout)
        return found


class ComputedSaving(Saving):
    """Value that backward recomputes."""

    def __init__(self, facts: SiteFacts, compute: Callable[[Any], Tensor]) -> None:
        super().__init__(facts)
        self.compute = compute
        """Function that returns the value, given the block's `BlockSaved`."""
        record = Record(facts, self.steady.length * facts.site.dtype.itemsize)
        record.codec = RECOMPUTED
        self.records.append(record)

    def restore(self, kept: None, held: Any) -> Tensor:
        return self.compute(held)
