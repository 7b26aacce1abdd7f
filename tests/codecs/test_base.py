"""Codec and Packed: defaults in terms of `encode` and `decode`, and settings as plain data."""

from __future__ import annotations

import pytest
import torch

from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, LogProb, Lossless
from encke.codecs.base import EncoderState
from encke.codecs.layout import layout_of
from tests.codecs.common import Rounded

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "gaps": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
    "one dimension": lambda x: x.view(-1),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("view", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_of_memory_goes_through_encode_and_decode(view) -> None:
    x = view(torch.randn(4, 6, 8, 10))
    layout, length = layout_of(x.shape, x.stride())
    packed = Rounded().encode_run(x, layout, length, 0, EncoderState())
    y = packed.decode_in(layout)
    assert torch.equal(y, x.bfloat16().float()) and y.stride() == x.stride()
    assert packed.nbytes == 2 * length and packed.codec == Rounded()
    assert torch.equal(layout.restore(packed.decode_flat(mask=True)), y != 0)


def test_what_is_packed_is_no_memory_of_the_source() -> None:
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    layout, length = layout_of(x.shape, x.stride())
    packed, before = Rounded().encode_run(x, layout, length, 0, EncoderState()), x.clone()
    x.zero_()
    assert torch.equal(packed.decode(), before)


@pytest.mark.parametrize(
    "codec",
    [GroupQuant(4, 256, 3, True), ErrorBounded(0.1, limit=0.5), DualPrecision(4, 8), LogProb(7), Lossless(), Rounded()],
    ids=str,
)
def test_settings_as_plain_data(codec: Codec) -> None:
    data = codec.to_dict()
    assert data["codec"] == type(codec).__name__ and Codec.from_dict(data) == codec


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"codec": "Nonsense"}, "no codec 'Nonsense'; known codecs: .*GroupQuant"),
        ({}, "no codec None"),
        ({"codec": "Codec"}, "no codec 'Codec'"),
        ({"codec": "GroupQuant", "rate": 2}, "not settings of GroupQuant"),
    ],
)
def test_wrong_data_is_named(data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Codec.from_dict(data)
