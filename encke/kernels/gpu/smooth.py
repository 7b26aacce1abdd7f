"""Smooth activations of values in registers, and their derivatives."""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.formats import SMOOTH

SILU, HARDSWISH = tl.constexpr(SMOOTH["Silu"]), tl.constexpr(SMOOTH["Hardswish"])
GELU, GELU_TANH = tl.constexpr(max(SMOOTH.values()) + 1), tl.constexpr(max(SMOOTH.values()) + 2)


@triton.jit
def activated(y, KIND: tl.constexpr):
    """Return the activation KIND of values."""
    if KIND == GELU:
        return 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif KIND == GELU_TANH:
        return y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif KIND == HARDSWISH:
        return y * tl.minimum(tl.maximum(y + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        return y * tl.sigmoid(y)


@triton.jit
def slope_of(y, KIND: tl.constexpr):
    """Return the derivative of SiLU or hard swish. That of hard swish is 0 at -3 and 1 at 3, as in torch."""
    if KIND == HARDSWISH:
        return tl.where(y <= -3.0, 0.0, tl.where(y < 3.0, y * (1.0 / 3.0) + 0.5, 1.0))
    else:
        share = tl.sigmoid(y)
        return share * (1.0 + y * (1.0 - share))
