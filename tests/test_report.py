"""Reports: what is said about each codec."""

from __future__ import annotations

import pytest

from encke import report
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, LogProb, Lossless
from encke.codecs.exact import Mask, Window
from tests.codecs.common import Rounded


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (GroupQuant(bits=4), ("GroupQuant", "4 bits")),
        (DualPrecision(), ("DualPrecision", "2 bits")),
        (LogProb(), ("LogProb", "0.05 abs")),
        (ErrorBounded(0.1), ("ErrorBounded", "0.1 abs")),
        (ErrorBounded(1e-3, "rel", "stochastic"), ("ErrorBounded", "0.001 rel stochastic")),
        (ErrorBounded(1e-3, rounding="dithered"), ("ErrorBounded", "0.001 abs dithered")),
        (ErrorBounded(0.25, limit=1 / 512), ("ErrorBounded", "0.25 abs, 0.00195 rel")),
        (ErrorBounded(0), ("ErrorBounded", "0 (bit-exact)")),
        (Lossless(high=7), ("Lossless", "")),
        (Mask(), ("Mask", "")),
        (Window((2,), (2,), (0,), (1,), (8,)), ("Window", "")),
        (Rounded(), ("Rounded", "")),
        ("kept", ("kept", "")),
    ],
    ids=str,
)
def test_every_codec_describes_itself(codec: Codec | str, expected: tuple[str, str]) -> None:
    assert report.describe(codec) == expected
