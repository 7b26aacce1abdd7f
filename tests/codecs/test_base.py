"""Codec and Packed: defaults in terms of `encode` and `decode`, and settings as plain data."""

from __future__ import annotations

import math

import pytest
import torch

from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, LogProb, Lossless
from encke.codecs.base import EncoderState
from encke.codecs.layout import layout_of
from tests.codecs.common import ALL_SOME_SLOW, Rounded

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


SHAPES = {
    "scalar": lambda x: x.view(-1)[0].clone(),
    "empty": lambda x: x[:0],
    "one": lambda x: x[:1, :1, :1, :1],
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "every_other": lambda x: x[:, ::2],
    "narrow": lambda x: x[:, :, 1:5, 2:],
    "expanded": lambda x: x[:1].expand(5, -1, -1, -1),
    "broadcast_inside": lambda x: x[:, :, :1].expand(-1, -1, 9, -1),
    "overlapping": lambda x: x.reshape(-1).unfold(0, 5, 2),
    "offset": lambda x: x.reshape(-1)[7:],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ALL_SOME_SLOW, ids=str)
def test_size_stride_and_dtype_come_back(shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = SHAPES[shape](torch.randn(4, 6, 9, 10).to(dtype))
    for codec in (ErrorBounded(0.1), ErrorBounded(0.01, "rel"), ErrorBounded(0), GroupQuant(bits=2), Lossless()):
        packed = codec.encode(x)
        y = packed.decode()
        assert (y.size(), y.stride(), y.dtype, y.device) == (x.size(), x.stride(), x.dtype, x.device)
        if codec.exact:
            assert torch.equal(x, y)
        elif codec == ErrorBounded(0.1):
            assert ((y.double() - x.double()).abs() <= 0.1).all()
    assert x.grad_fn is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ErrorBounded(-1.0), "zero or positive"),
        (lambda: ErrorBounded(math.nan), "zero or positive"),
        (lambda: ErrorBounded(math.inf), "finite"),
        (lambda: ErrorBounded(1.0, mode="both"), "mode must be"),
        (lambda: ErrorBounded(1.0, rounding="up"), "rounding must be"),
        (lambda: GroupQuant(bits=5), "bits must be 2, 3, 4 or 8"),
        (lambda: GroupQuant(group=100), "group must be"),
    ],
)
def test_wrong_settings_name_the_value(make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("codec", "x"),
    [
        (ErrorBounded(0.1), torch.arange(5)),
        (ErrorBounded(0.1), torch.ones(3, dtype=torch.complex64)),
        (GroupQuant(), torch.ones(3, dtype=torch.bool)),
        (ErrorBounded(0.1), [1.0, 2.0]),
        (ErrorBounded(0.1), torch.ones(3, 3).to_sparse()),
        (Lossless(), torch.ones(3, dtype=torch.complex64)),
    ],
)
def test_wrong_input_is_a_clear_error(codec, x) -> None:
    with pytest.raises(TypeError, match="encode"):
        codec.encode(x)


def test_codecs_print_as_they_are_written() -> None:
    assert repr(ErrorBounded(0.01, "rel")) == "ErrorBounded(bound=0.01, mode='rel')"
    assert eval(repr(GroupQuant(bits=4))) == GroupQuant(bits=4)
