"""Sharded weights without processes; tests/integration/test_distributed.py runs two processes."""

from __future__ import annotations

import torch
from torch import nn

from encke.policies.comet.shards import Shards, local_part


class Part:
    """Replacement for a DTensor."""

    def to_local(self) -> torch.Tensor:
        return torch.ones(3)


def test_the_local_part_of_a_sharded_tensor_and_of_a_plain_one() -> None:
    plain = torch.zeros(2)
    assert local_part(plain) is plain
    assert local_part(Part()).shape == (3,)  # type: ignore[arg-type]


def test_a_model_that_is_not_sharded_has_no_processes_to_ask() -> None:
    shards = Shards(nn.Linear(2, 2))
    assert shards.mesh is None and shards.ranks == 1 and shards.groups == [] and shards.by_whole() == {}
