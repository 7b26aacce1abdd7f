"""Random numbers that depend on what they are for and on nothing else: seed, epoch and sample.

Workers, processes and the step at which a training goes on do not change them.
"""

from __future__ import annotations

from enum import IntEnum, auto
from typing import TypeVar

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
Bits = TypeVar("Bits", int, Tensor)


class Use(IntEnum):
    """What random numbers are for: no two uses share them."""

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
    """A hash of 32 bits, of an int or of each value of an int64 tensor."""
    bits = (bits ^ bits >> 16) * 0x7FEB352D & MASK
    bits = (bits ^ bits >> 15) * 0x846CA68B & MASK
    return bits ^ bits >> 16


def key_of(*numbers: int) -> int:
    """32 bits that depend on all of the numbers and on their order."""
    key = 0
    for number in numbers:
        for part in (number & MASK, number >> 32 & MASK):
            key = scramble(scramble(key ^ part) + 0x9E3779B9 & MASK)
    return key


def bits(index: Tensor, *key: int) -> Tensor:
    """32 random bits for each index, as int64."""
    return scramble(scramble(index & MASK) + key_of(*key) & MASK)


def uniform(index: Tensor, columns: int, *key: int) -> Tensor:
    """A row of `columns` random numbers from 0 up to 1 for each index."""
    places = index[:, None] * columns + torch.arange(columns, device=index.device)
    return (bits(places, *key) >> 8).float() * 2.0**-24


def below(index: Tensor, end: int, *key: int) -> Tensor:
    """A random whole number from 0 up to `end` for each index; `end` has at most 31 bits."""
    return bits(index, *key) * end >> 32


def permutation(count: int, *key: int) -> Tensor:
    """The numbers from 0 up to `count` in random order, on the CPU: the same whatever the device."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(key_of(*key)))
