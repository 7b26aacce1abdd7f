"""Memory during one training step: bytes of all tensors, which rise in the forward pass and fall in backward."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from types import TracebackType

import torch
from torch import Tensor, nn

from encke.tools.allocations import Allocations

POINTS = 400
"""Number of points in a curve."""
FORWARD = "forward"


@dataclass(frozen=True)
class StepMemory:
    """Bytes of all tensors alive during one step, at equal time intervals."""

    seconds: float
    """Duration of the recorded step."""
    forward_seconds: float
    """Seconds until the first forward pass has ended and backward begins."""
    resting_bytes: int
    """Bytes alive between steps: weights, state of the optimizer, data."""
    peak_bytes: int
    """Bytes alive at most."""
    bytes: tuple[int, ...]
    """Peak of the bytes alive in each of the equal parts of the step."""


class StepRecorder:
    """Records one training step in a `with` block; call `forward_ended` in it, and read the result from `memory`.

    On a GPU times are host times; the host runs ahead of the device.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer.
        data: Tensors of the batch.

    Raises:
        RuntimeError: A torch profiler is active already.
    """

    memory: StepMemory

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[Tensor]) -> None:
        device = next(model.parameters()).device
        if device.type == "cuda":
            self.resting = torch.cuda.memory_allocated(device)
        else:
            self.resting = storage_bytes(chain(model.parameters(), model.buffers(), state_of(optimizer), data))
        self.allocations = Allocations(device.type)

    def __enter__(self) -> StepRecorder:
        self.allocations.__enter__()
        return self

    def forward_ended(self) -> None:
        """Note that a forward pass has ended."""
        self.allocations.mark(FORWARD)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = self.allocations
        found.__exit__(kind, value, trace)
        ends = [part.end for part in found.parts if part.name == FORWARD]
        alive = [self.resting + each for each in found.alive]
        self.memory = StepMemory(
            found.seconds,
            ends[0] if ends else found.seconds,
            self.resting,
            max(alive, default=self.resting),
            tuple(highest(found.times, alive, self.resting, found.seconds)),
        )


def highest(times: list[float], alive: list[int], before: int, seconds: float) -> Iterator[int]:
    """Yield the largest value in each of `POINTS` equal parts of the time; `before` is the initial value."""
    start = 0
    for part in range(1, POINTS + 1):
        end = bisect.bisect_right(times, seconds * part / POINTS) if part < POINTS else len(times)
        yield max([before, *alive[start:end]])
        before = alive[end - 1] if end else before
        start = end


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors of an optimizer's state."""
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
