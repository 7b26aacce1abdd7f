"""Fused kernel for the last step of batch norm, ReLU and packing of the result: channels_last memory, bf16 values.

The encoder has the values in registers, so the result is written once and not read again. A residual sum is not fused:
with a second tensor to read, one kernel took longer than two on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

from encke.kernels.gpu.common import INTERPRETED, narrow, seed_of
from encke.kernels.gpu.pairs import channel_words, encode_words, half_of, load_words, of_word, relu16, store_words


@triton.jit
def join16(low, high):
    """Round two floats to bf16 and pack them into one word."""
    if INTERPRETED:
        low, high = narrow(low, tl.bfloat16).to(tl.uint16), narrow(high, tl.bfloat16).to(tl.uint16)
        return low.to(tl.uint32) | (high.to(tl.uint32) << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def affine_of(mean, invstd, weight, bias, c, there, stride, ROWS: tl.constexpr):
    """Return mean, scale and bias of the channels `c`, broadcast to a tile of words.

    With ROWS, `mean` holds four rows: mean, 1 / deviation, scale, bias.
    """
    middle = tl.load(mean + c, mask=there, other=0.0)
    if ROWS:
        scale = tl.load(mean + 2 * stride + c, mask=there, other=0.0)
        shift = tl.load(mean + 3 * stride + c, mask=there, other=0.0)
    else:
        scale = tl.load(invstd + c, mask=there, other=0.0) * tl.load(weight + c, mask=there, other=0.0)
        shift = tl.load(bias + c, mask=there, other=0.0)
    return of_word(middle), of_word(scale), of_word(shift)


@triton.jit(do_not_specialize=["stride", "pixels", "seed_low", "seed_high"])
def norm_relu_encode_kernel(
    x, mean, invstd, weight, bias, out, data, seeds, stride: tl.int64, pixels: tl.int64, seed_low: tl.int32,
    seed_high: tl.int32,
    BITS: tl.constexpr, GROUP: tl.constexpr, CHANNELS: tl.constexpr, FULL: tl.constexpr, TABLE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write the ReLU of (x - mean) * (invstd * weight) + bias and encode it; see pairs.py."""
    seed_low, seed_high = seed_of(seeds, seed_low, seed_high, TABLE)
    block, c, there, pixel, read, start, i = channel_words(stride, pixels, BITS, GROUP, CHANNELS, FULL)
    words = load_words(x, start, i, there, FULL)
    middle, scale, shift = affine_of(mean, invstd, weight, bias, c * 2, there, stride, ROWS)
    low = tl.fma(half_of(words, False, tl.bfloat16) - middle, scale, shift)
    middle, scale, shift = affine_of(mean, invstd, weight, bias, c * 2 + 1, there, stride, ROWS)
    high = tl.fma(half_of(words, True, tl.bfloat16) - middle, scale, shift)
    words = relu16(join16(low, high), tl.bfloat16)
    store_words(out, start, i, words, there, pixel, read, FULL)
    encode_words(
        words, c, c, data, block, c, there, stride, pixels, seed_low, seed_high, tl.bfloat16, BITS, False, GROUP
    )
