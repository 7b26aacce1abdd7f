"""One packed tensor for several readers: a codec that keeps what each of them asked for."""

from __future__ import annotations

import itertools

import pytest
import torch

from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, Lossless
from encke.codecs.algebra import strictest
from encke.codecs.exact import Mask, Sign


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([GroupQuant(2)], GroupQuant(2)),
        ([GroupQuant(2), GroupQuant(4)], GroupQuant(4)),
        ([GroupQuant(2), GroupQuant(8), GroupQuant(4)], GroupQuant(8)),
        ([GroupQuant(4, group=256), GroupQuant(2, group=64)], GroupQuant(4, group=64)),
        ([Sign(), GroupQuant(2)], GroupQuant(4, signs=True)),
        ([Sign(), GroupQuant(4)], GroupQuant(8, signs=True)),
        ([Sign(), GroupQuant(8)], GroupQuant(8, signs=True)),
        ([GroupQuant(4, signs=True), GroupQuant(4)], GroupQuant(8, signs=True)),
        ([ErrorBounded(0.1), ErrorBounded(0.02)], ErrorBounded(0.02)),
        ([ErrorBounded(0.1), ErrorBounded(0.01, "rel")], ErrorBounded(0.1, limit=0.01)),
        ([ErrorBounded(0.1, limit=0.5), ErrorBounded(0.2, limit=0.01)], ErrorBounded(0.1, limit=0.01)),
        ([ErrorBounded(0.1), Sign()], ErrorBounded(0.1)),
        ([ErrorBounded(0.1, coarsens=True), ErrorBounded(0.2, coarsens=True)], ErrorBounded(0.1, coarsens=True)),
        ([ErrorBounded(0.1, coarsens=True), ErrorBounded(0.2)], ErrorBounded(0.1)),
        (
            [ErrorBounded(0.1, coarsens=True), ErrorBounded(0.2, "rel", coarsens=True)],
            ErrorBounded(0.1, limit=0.2, coarsens=True),
        ),
        ([ErrorBounded(0.1, coarsens=True), ErrorBounded(0.2, "rel")], ErrorBounded(0.1, limit=0.2)),
        ([ErrorBounded(0.1), Lossless()], Lossless()),
        ([ErrorBounded(0.1), ErrorBounded(0.1, rounding="stochastic")], ErrorBounded(0)),
        ([Sign(), ErrorBounded(0.1, rounding="dithered")], ErrorBounded(0.1, rounding="dithered", signs=True)),
        (
            [ErrorBounded(0.1, rounding="dithered"), ErrorBounded(0.2, "rel", "dithered"), Sign()],
            ErrorBounded(0.1, rounding="dithered", limit=0.2, signs=True),
        ),
        (
            [ErrorBounded(0.1, rounding="dithered", signs=True), ErrorBounded(0.05, rounding="dithered")],
            ErrorBounded(0.05, rounding="dithered", signs=True),
        ),
        ([GroupQuant(2), ErrorBounded(0.1)], ErrorBounded(0)),
        ([Mask(), GroupQuant(2)], GroupQuant(2)),
        ([Mask(), DualPrecision()], DualPrecision(mask=True)),
        ([Mask(), DualPrecision(8, 2), DualPrecision(4, 4)], DualPrecision(4, 4, mask=True)),
        ([DualPrecision(), GroupQuant(2)], ErrorBounded(0)),
    ],
    ids=str,
)
def test_readers_of_one_tensor_share_one_codec_whatever_the_order(asked: list[Codec], expected: Codec) -> None:
    for order in itertools.permutations(asked):
        found = strictest(list(order))
        assert found == expected, order
        assert all(strictest([found, codec]) == strictest([codec, found]) == found for codec in order)
        assert all(strictest([found, codec]) is found for codec in order), "the same object, for who compares these"


def test_a_joined_codec_keeps_both_promises() -> None:
    x = torch.randn(4096) * 3
    spread = float(x.max() - x.min())
    for absolute, relative in ((0.5, 1e-3), (1e-3, 0.1)):
        y = strictest([ErrorBounded(absolute), ErrorBounded(relative, "rel")]).encode(x).decode()
        assert (y - x).abs().max() <= min(absolute, relative * spread) * (1 + 1e-6)
    y = strictest([Sign(), GroupQuant(2)]).encode(x).decode()
    coarse = GroupQuant(2).encode(x).decode()
    assert torch.equal(y.sign(), x.sign()) and (y - x).square().mean() <= (coarse - x).square().mean()
