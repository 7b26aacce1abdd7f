"""Formula of layer norm and RMS norm over rows, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowNorm:
    """Formula of a norm over rows of `width` values."""

    width: int
    centred: bool
    """Whether the mean is subtracted first, as in layer norm."""
    eps: float
    offset: float = 0.0
    """Number that is added to the weight: 1 in the Gemma family."""
    inner: torch.dtype = torch.float32
    """Dtype to which normalised values are rounded before they are multiplied by the weight."""
    out: torch.dtype = torch.float32
    """Dtype of the result."""

    def compute(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Compute the norm of `x` over its last dimension, in plain torch."""
        v = x.float()
        if self.centred:
            v = v - v.mean(-1, keepdim=True)
        y = (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps)).to(self.inner).float()
        if weight is not None:
            y = y * (weight.float() + self.offset)
        return (y if bias is None else y + bias.float()).to(self.out)
