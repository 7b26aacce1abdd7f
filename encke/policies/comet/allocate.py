"""Allocation of bits: the fewest bytes with which the predicted error of all gradients together stays within a limit.

Every piece of saved memory adds an error to the gradients, in proportion to the mean square error of its codes, and
takes bytes. More bits go where they remove most error for each byte, until the limit is kept (reverse water-filling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BITS = (2, 4, 8)
"""Bits of a value to choose from."""


@dataclass(slots=True)
class Memory:
    """One piece of saved memory: its size, and the squared error that it adds to the gradients at each of BITS."""

    values: int
    errors: list[float]
    least: int = 0
    """Index in BITS of the fewest bits that are allowed."""


def allocate(memories: Sequence[Memory], allowed: float, spare: float) -> list[int]:
    """Return the index in BITS of the bits that each piece of memory gets.

    Args:
        memories: Pieces of memory.
        allowed: Squared error that all of them may add together.
        spare: Bits that may be spent beyond the fewest in any case, where they remove most error.
    """
    chosen = [memory.least for memory in memories]
    total = sum(memory.errors[i] for memory, i in zip(memories, chosen, strict=True))
    steps: list[tuple[float, int, int]] = []
    for index, memory in enumerate(memories):
        for i in range(memory.least + 1, len(BITS)):
            cost = memory.values * (BITS[i] - BITS[i - 1])
            steps.append(((memory.errors[i - 1] - memory.errors[i]) / max(cost, 1), index, i))
    taken: list[tuple[int, int, int]] = []
    # Where a second step is steeper than the first, it is taken in the next round.
    for slope, index, i in sorted(steps, key=lambda step: -step[0]) * (len(BITS) - 1):
        cost = memories[index].values * (BITS[i] - BITS[i - 1])
        if i == chosen[index] + 1 and slope > 0 and (total > allowed or cost <= spare):
            spare -= cost
            chosen[index], total = i, total - slope * max(cost, 1)
            taken.append((cost, index, i))
    # The last step may have removed more than was asked for: others before it are then not needed.
    for cost, index, i in sorted(taken, reverse=True):
        added = memories[index].errors[i - 1] - memories[index].errors[i]
        if spare < 0 and chosen[index] == i and total + added <= allowed:
            chosen[index], total, spare = i - 1, total + added, spare + cost
    return chosen
