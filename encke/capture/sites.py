"""Sites: where tensors are saved. A site is the key of policies, reports and random numbers."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Literal

import torch

Need = Literal["weight", "shape", "mask", "sign", "range", "exact", "recomputed", "attention", "logprob", "lossy"]


@dataclass(frozen=True, slots=True)
class Site:
    """One place where the forward pass saves a tensor: the key of a policy's settings.

    The same place has the same key in every run, in eager and in compiled mode.
    """

    layer: str
    """Name of the module whose call saves the tensor; empty for the model itself."""
    operation: str
    """Operation whose backward reads the tensor, such as `Convolution`."""
    slot: str
    """Name under which the operation saves it, such as `input`."""
    call: int = 0
    """Index of the layer's call within the forward pass."""
    occurrence: int = 0
    """Index of the tensor among those that this call saves for the same operation and slot."""
    need: Need = field(default="exact", compare=False)
    """Need of the reader, which decides how far a policy may go."""
    dtype: torch.dtype = field(default=torch.float32, compare=False)
    dimensions: int = field(default=0, compare=False)
    place_v1: str = field(default="", compare=False, repr=False)
    """Key in states of version 1: layer, call, and index of the tensor within the call. Eager mode only."""
    place: str = field(init=False, compare=False, repr=False)
    """The key as a text, `layer/call/operation.slot.occurrence`: quick to look up."""
    number: int = field(init=False, compare=False, repr=False)
    """Hash of the key, which makes random numbers differ between sites."""

    def __post_init__(self) -> None:
        place = f"{self.layer}/{self.call}/{self.operation}.{self.slot}.{self.occurrence}"
        object.__setattr__(self, "place", place)
        object.__setattr__(self, "number", zlib.crc32(place.encode()))

    @property
    def name(self) -> str:
        """Layer, operation and slot, for people."""
        return f"{self.layer or '(root)'}:{self.operation}.{self.slot}"
