"""Sharded weights (FSDP2): figures from each process's own part, summed over all processes at once.

The graph has a weight whole, while its layer runs. Optimizer, gradient and momentum have it sharded (`DTensor`): each
process keeps a part. So a weight of the graph is exchanged for its sharded one, and what is computed from the parts is
put together in one vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from encke.torch_internals import sharded_parameters


def local_part(t: Tensor) -> Tensor:
    """Return this process's part of a sharded tensor; any other tensor as it is."""
    to_local = getattr(t, "to_local", None)
    return t if to_local is None else to_local()


class Shards:
    """The sharded parameters of a model, and the processes that share them."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        # Without processes nothing is sharded, and a search through a large model takes its time.
        processes = dist.is_available() and dist.is_initialized()
        sharded = [each for _, each in sharded_parameters(model)] if model is not None and processes else []
        self.mesh: Any = next((each.device_mesh for each in sharded if hasattr(each, "device_mesh")), None)
        """Mesh of the processes; None if nothing is sharded."""

    @property
    def ranks(self) -> int:
        """Processes whose gradients are averaged."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def groups(self) -> list[Any]:
        """Process groups to go through one after the other, so that all processes are reached."""
        return [] if self.mesh is None else self.mesh.get_all_groups()

    def by_whole(self) -> dict[int, Tensor]:
        """Return the sharded parameters by the id of the whole one, which stands in the graph."""
        pairs = sharded_parameters(self._model) if self.mesh is not None and self._model is not None else []
        return {id(whole): sharded for whole, sharded in pairs if whole is not None}

    def combine(
        self, means: Sequence[tuple[Tensor, int]], norms: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return means and norms over all processes, from those of their parts.

        Args:
            means: Mean of this process's part, and the number of values in it.
            norms: Norms of this process's part.
        """
        device = torch.device(self.mesh.device_type)
        numbers = [mean * count if count else torch.zeros_like(mean) for mean, count in means]
        numbers += [norm.square() for norm in norms]
        column = [number.to(device, torch.float64).reshape(()) for number in numbers]
        counts = torch.tensor([float(count) for _, count in means], dtype=torch.float64, device=device)
        total = torch.cat([torch.stack(column), counts]) if column else counts
        for group in self.groups:
            dist.all_reduce(total, group=group)
        first, last = len(means), len(means) + len(norms)
        return list(total[:first] / total[last:]), list(total[first:last].sqrt())
