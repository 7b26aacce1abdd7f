"""What several tests of the codecs share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from encke.codecs import Codec, Packed


class RoundedPacked(Packed):
    def decode(self) -> Tensor:
        return self.buffers[0].to(self.dtype)


@dataclass(frozen=True)
class Rounded(Codec):
    """A codec of somebody else's, with nothing but what it must have."""

    def encode(self, tensor: Tensor) -> Packed:
        return RoundedPacked.like(self, tensor, tensor.to(torch.bfloat16))
