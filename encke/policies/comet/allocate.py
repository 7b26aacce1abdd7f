"""Allocation of bits: the fewest bytes with which the predicted error of all gradients together stays within a limit.

Every piece of saved memory adds an error to the gradients, in proportion to the mean square error of its codes, and
takes bytes. More bits go where they remove most error for each byte, until the limit is kept (reverse water-filling).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

BITS = (2, 3, 4, 8)
"""Bits of a value to choose from, at a fixed rate."""


@dataclass(slots=True)
class Memory:
    """One piece of saved memory: its size, and the squared error that it adds to the gradients with each code."""

    values: int
    errors: list[float]
    least: int = 0
    """Index of the coarsest code that is allowed."""
    bits: Sequence[float] = field(default_factory=lambda: BITS)
    """Bits of a value with each code."""

    def cost(self, i: int, j: int) -> float:
        """Return the bits that it takes to go from one code to another."""
        return self.values * (self.bits[j] - self.bits[i])

    def steps(self) -> Iterator[tuple[float, int, int]]:
        """Yield the steps to more bits that pay, steepest first: error removed for each bit, and indices of codes.

        They follow the lower convex hull of error over bits. Where the second step would be steeper than the first,
        both are one.
        """
        i, errors, bits, count = self.least, self.errors, self.bits, len(self.bits)
        sizes = [self.values * each for each in bits]
        while i + 1 < count:
            slopes = {j: (errors[i] - errors[j]) / max(sizes[j] - sizes[i], 1) for j in range(i + 1, count)}
            j = max(slopes, key=slopes.__getitem__)
            if not slopes[j] > 0:
                return
            yield slopes[j], i, j
            i = j


def allocate(memories: Sequence[Memory], allowed: float, spare: float) -> list[int]:
    """Return the index of the code that each piece of memory gets.

    Args:
        memories: Pieces of memory.
        allowed: Squared error that all of them may add together.
        spare: Bits that may be spent beyond the fewest in any case, where they remove most error.
    """
    chosen = [memory.least for memory in memories]
    total = sum(memory.errors[i] for memory, i in zip(memories, chosen, strict=True))
    steps = [(*step, index) for index, memory in enumerate(memories) for step in memory.steps()]
    taken: list[tuple[float, int, int, int]] = []
    for _, i, j, index in sorted(steps, key=lambda step: -step[0]):
        memory, cost = memories[index], memories[index].cost(i, j)
        if i == chosen[index] and (total > allowed or cost <= spare):
            spare -= cost
            chosen[index], total = j, total - memory.errors[i] + memory.errors[j]
            taken.append((cost, index, i, j))
    # The last step may have removed more than was asked for: others before it are then not needed.
    for _, index, first, last in sorted(taken, reverse=True):
        memory = memories[index]
        for i in range(first, last):
            added = memory.errors[i] - memory.errors[last]
            if spare < 0 and chosen[index] == last and total + added <= allowed:
                chosen[index], total, spare = i, total + added, spare + memory.cost(i, last)
    return chosen
