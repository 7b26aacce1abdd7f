"""Requests for the kernels that a model will need, made when its first norms and activations are called.

Their inputs show dtype and memory format. The process that compiles kernels takes seconds to start, and a
model needs most of its kernels later in the first step.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from encke.capture.hooks import Capture
from encke.capture.sites import Site
from encke.codecs.layout import FORMATS
from encke.kernels import RowUse, UsualUse, compile_ahead

BITS_IN_TURN = (4, 8, 2, 3)
"""Numbers of bits, in the order in which training needs them."""


class KernelRequests:
    """Requests of one model for kernels."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.norms: list[tuple[type[nn.Module], int]] = []
        """Kind and width of each norm over rows."""
        self.asked: set[Any] = set()

    def codec_for(self, layer: str, operation: str, dtype: torch.dtype) -> tuple[Any, tuple[int, ...]]:
        """Return the codec of a norm's input, and the numbers of bits that it may have; empty if no kernel reads it."""
        codec: Any = self.capture.policy.choose(Site(layer, operation, "input", need="lossy", dtype=dtype))
        if not codec.reads_packed or codec.signs:
            return codec, ()
        # An adaptive policy may use another number of bits in the next step.
        others = () if self.capture.schedule is None else BITS_IN_TURN
        return codec, tuple(dict.fromkeys((codec.bits, *others)))

    def ask_for_images(self, layer: str, x: Tensor) -> None:
        """Request the usual kernels of a CNN; `x` is the input of one of its norms or activations."""
        last = not x.is_contiguous() and x.is_contiguous(memory_format=FORMATS[x.dim()])
        use = UsualUse(x.dtype, True, last)
        if use not in self.asked:
            self.asked.add(use)
            _, rates = self.codec_for(layer, "BatchNorm", x.dtype)
            if rates:
                compile_ahead(usual=[use], rates=rates)

    def ask_for_rows(self, layer: str, operation: str, kind: type[nn.Module], use: RowUse) -> None:
        """Request the kernels of a norm over rows, and of norms of the same kind with the other widths of the model.

        Under autocast a layer norm may also have an fp32 input, the sum of a residual stream.
        """
        if (kind, replace(use, width=0)) in self.asked:
            return
        dtypes = (use.dtype, torch.float32) if kind is nn.LayerNorm and use.again != use.out else (use.dtype,)
        orders = (use.transposed, False)
        each = [
            replace(use, dtype=dtype, transposed=transposed)
            for dtype, transposed in dict.fromkeys(itertools.product(dtypes, orders))
        ]
        self.asked |= {(kind, replace(one, width=0)) for one in each}
        codec, rates = self.codec_for(layer, operation, use.dtype)
        if rates:
            widths = dict.fromkeys(width for other, width in self.norms if other is kind)
            rows = [replace(one, width=width, group=codec.group) for one in each for width in widths]
            usual = [UsualUse(dtype, False, False) for dtype in dict.fromkeys(dtypes)]
            compile_ahead(rows=rows, usual=usual, rates=rates)
