"""Random numbers that depend only on seed, epoch, sample and purpose.

They do not depend on the number of workers and processes, or on the step at which a training is resumed.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)


class Purpose(IntEnum):
    """Purpose of random numbers: no two purposes share any."""

    ORDER = auto()
    AUGMENT = auto()
    HELD_OUT = auto()
    PATTERN = auto()
    NOISE = auto()
    PLACE = auto()
    WINDOW = auto()
    SEQUENCE = auto()
    VOCABULARY = auto()


def scramble(bits: Bits) -> Bits:
    """Return a 32-bit hash of an int, or of each value of an int64 tensor."""
    bits = (bits ^ bits >> 16) * 0x7FEB352D & MASK
    bits = (bits ^ bits >> 15) * 0x846CA68B & MASK
    return bits ^ bits >> 16


def key_of(*numbers: int) -> int:
    """Return 32 bits that depend on all of the numbers and on their order."""
    key = 0
    for number in numbers:
        for part in (number & MASK, number >> 32 & MASK):
            key = scramble(scramble(key ^ part) + 0x9E3779B9 & MASK)
    return key


def bits(index: Tensor, *key: int) -> Tensor:
    """Return 32 random bits for each index, as int64."""
    return scramble(scramble(index & MASK) + key_of(*key) & MASK)


def uniform(index: Tensor, columns: int, *key: int) -> Tensor:
    """Return a row of `columns` random numbers in [0, 1) for each index."""
    places = index[:, None] * columns + torch.arange(columns, device=index.device)
    return (bits(places, *key) >> 8).float() * 2.0**-24


def below(index: Tensor, end: int, *key: int) -> Tensor:
    """Return a random integer in [0, end) for each index; `end` has at most 31 bits."""
    return bits(index, *key) * end >> 32


def permutation(count: int, *key: int) -> Tensor:
    """Return a random permutation of [0, count), on the CPU, so that it is the same for every device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(key_of(*key)))
