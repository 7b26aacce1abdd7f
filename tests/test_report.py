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
        (ErrorBounded(1e-3, rounding="dithered", signs=True), ("ErrorBounded", "0.001 abs dithered with signs")),
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


def test_the_table_fits_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    long = report.Row(
        "encoder.layers.encoder_layer_11.self_attention", "ScaledDotProductAttention", "query", "ErrorBounded",
        "0.25 abs, 0.00195 rel", 123_456_789, 23_456_789,
    )  # fmt: skip
    found = report.Report(
        "Comet()", 10**8, 10**7, 10**9, 2, (long, report.Row("fc", "Addmm", "mat1", "kept", "", 9, 9))
    )
    monkeypatch.setenv("COLUMNS", "200")
    whole = str(found)
    monkeypatch.setenv("COLUMNS", "80")
    narrow = str(found)
    assert max(map(len, narrow.splitlines())) == 80 < max(map(len, whole.splitlines()))
    assert "encoder.layers.encoder_layer_11.self_attention  ScaledDotProductAttention.query" in whole
    assert "…attention …tion.query ErrorBounded 0.25 abs, 0.00195 rel 123.5 MB 23.5 MB   5.3" in narrow
    assert "fc         Addmm.mat1  kept" in narrow
