"""DualPrecision: right on average, aligned to its tiles at any height and width, visible NaNs, exact masks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant
from encke.codecs.algebra import satisfies, strictest
from encke.codecs.dualprecision import DualPrecisionPacked
from encke.codecs.exact import Keep, Mask, Sign
from encke.codecs.layout import flatten

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

STRIDES = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "batch_last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "every_other": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "narrow": lambda x: F.pad(x, (2, 1, 1, 0))[:, :, 1:, 2:-1],
    "expanded": lambda x: x[:1].expand(3, -1, -1, -1),
    "three": lambda x: x[0],
    "five": lambda x: x[:, None],
}

cases = st.fixed_dictionaries(
    {
        "planes": st.tuples(st.integers(1, 3), st.integers(1, 5)),
        "height": st.integers(1, 35),
        "width": st.integers(1, 35),
        "dtype": st.sampled_from(DTYPES),
        "stride": st.sampled_from(sorted(STRIDES)),
        "block": st.sampled_from([2, 3, 8, 16]),
        "bits": st.sampled_from([2, 4, 8]),
        "mask": st.booleans(),
        "relu": st.booleans(),
        "seed": st.integers(0, 2**31),
    }
)


def tensor(case: dict) -> Tensor:
    g = torch.Generator().manual_seed(case["seed"])
    x = torch.randn(*case["planes"], case["height"], case["width"], generator=g, dtype=torch.float64) * 3 + 1
    return STRIDES[case["stride"]]((x.relu() if case["relu"] else x).to(case["dtype"]))


def as_planes(x: Tensor) -> Tensor:
    """Batch x 1 x height x width, as the codec sees planes: of three dimensions only the last is one."""
    return x.reshape(-1, 1, 1 if x.dim() == 3 else x.shape[-2], x.shape[-1])


def averages(x: Tensor, block: int) -> Tensor:
    """The averages of the tiles in float64, each at all places of its tile."""
    planes = as_planes(x.double())
    kernel = (min(block, planes.shape[2]), min(block, planes.shape[3]))
    low = F.avg_pool2d(planes, kernel, kernel, ceil_mode=True, count_include_pad=False)
    low = low.repeat_interleave(kernel[0], 2).repeat_interleave(kernel[1], 3)
    return low[:, :, : planes.shape[2], : planes.shape[3]]


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(cases)
def test_errors_stay_within_a_step_and_size_and_stride_come_back(case: dict) -> None:
    x = tensor(case)
    codec = DualPrecision(case["block"], case["bits"], mask=case["mask"])
    packed = codec.encode(x)
    y = packed.decode()
    assert (y.size(), y.stride(), y.dtype) == (x.size(), x.stride(), x.dtype)
    assert packed.nbytes <= x.numel() * x.element_size() * 1.02 + 300
    mask = packed.layout.restore(packed.decode_flat(mask=True))
    assert torch.equal(mask, (x if case["mask"] else y) != 0) and mask.dtype == torch.bool
    if not isinstance(packed, DualPrecisionPacked):
        return
    low, planes = averages(x, case["block"]), as_planes(x.double())
    rest = planes - low
    # A stored average is off by half a bf16 step, which widens the range; the stored step is rounded up to bf16.
    off = low.abs().amax((2, 3)) * 2.0**-8
    step = (rest.amax((2, 3)) - rest.amin((2, 3)) + 2 * off) / (2 ** case["bits"] - 1) * (1 + 2.0**-7)
    cast = planes.abs().amax((2, 3)) * (torch.finfo(x.dtype).eps + 2.0**-20)
    assert ((as_planes(y.double()) - planes).abs().amax((2, 3)) <= step + cast).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_decoded_values_are_right_on_average(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(2, 3, 13, 21) * 2 + 5).to(dtype)
    draws = torch.stack([DualPrecision(8, bits, seed=seed).encode(x).decode().double() for seed in range(300)])
    error, step = draws.mean(0) - x.double(), (draws.amax(0) - draws.amin(0)).amax((2, 3), keepdim=True)
    # Between two levels the standard deviation is at most half a step; the cast to 16 bits comes on top.
    cast = torch.finfo(dtype).eps * float(x.abs().max()) if dtype.itemsize == 2 else 1e-6
    assert (error.abs() <= 5 * step / 2 / math.sqrt(300) + cast).all()
    assert abs(float(error.mean())) <= 5 * float(step.mean()) / 2 / math.sqrt(300 * x.numel()) + cast / 8
    assert (step > 2 / 2**bits).all()  # it is rounded at all


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([2, 5, 8]), st.sampled_from(DTYPES))
def test_what_is_constant_in_each_tile_is_exact(height: int, width: int, block: int, dtype: torch.dtype) -> None:
    """At any height and width: the published code loses the alignment of its tiles at the edges."""
    tall, wide = min(block, height), min(block, width)
    tiles = torch.randint(-100, 100, (2, 3, -(-height // tall), -(-width // wide))).double()
    x = tiles.repeat_interleave(tall, 2).repeat_interleave(wide, 3)[:, :, :height, :width].to(dtype)
    packed = DualPrecision(block).encode(x)
    if isinstance(packed, DualPrecisionPacked):
        assert torch.equal(packed.decode(), x)
    else:
        assert height * width < 16 or dtype.itemsize == 2


def test_averages_carry_what_two_bits_could_not() -> None:
    torch.manual_seed(0)
    x = F.interpolate(torch.randn(4, 8, 7, 7) * 10, size=(56, 56), mode="nearest") + torch.randn(4, 8, 56, 56)
    error = [(codec.encode(x).decode() - x).square().mean() for codec in (DualPrecision(), GroupQuant(bits=2))]
    assert error[0] < error[1] / 4


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_plane_with_a_nan_or_an_infinity_comes_back_as_nan(bad: float, memory: torch.memory_format) -> None:
    x = torch.randn(3, 4, 17, 11).contiguous(memory_format=memory)
    x[1, 2, 16, 3] = bad
    packed = DualPrecision(mask=True).encode(x)
    hit = packed.decode().isnan()
    assert hit[1, 2].all() and int(hit.sum()) == 17 * 11
    assert torch.equal(packed.layout.restore(packed.decode_flat(mask=True)), x != 0)


def test_largest_finite_values_neither_overflow_nor_hide() -> None:
    x = torch.full((1, 2, 16, 16), torch.finfo(torch.float32).max)
    x[0, 1] = torch.finfo(torch.float32).max * torch.rand(16, 16)
    y = DualPrecision().encode(x).decode()
    assert torch.equal(y[0, 0], x[0, 0]) and y.isfinite().all()
    assert ((y - x)[0, 1].abs() <= 0.34 * x.max()).all()


def test_rounding_follows_seed_and_key() -> None:
    x = torch.randn(4, 8, 16, 16)
    flat, layout = flatten(x)

    def draw(seed: int, key: int) -> Tensor:
        return DualPrecision(seed=seed).encode_flat(flat, layout, key).decode()

    assert torch.equal(draw(3, 5), draw(3, 5))
    assert not torch.equal(draw(3, 5), draw(4, 5)) and not torch.equal(draw(3, 5), draw(3, 6))


@pytest.mark.parametrize(("mask", "each"), [(False, 2.25), (True, 3.25)])
def test_size_on_relu_output(mask: bool, each: float) -> None:
    x = torch.randn(32, 64, 32, 32).relu()
    planes = 32 * 64
    assert DualPrecision(mask=mask).encode(x).nbytes == int(x.numel() * each / 8) + 6 * planes


@pytest.mark.parametrize("shape", [(0, 4, 8, 8), (), (1,), (5000,), (64, 300), (64, 32, 1, 1), (64, 32, 3, 5)])
@pytest.mark.parametrize("mask", [False, True])
def test_without_planes_of_16_values_it_is_group_quant(shape: tuple[int, ...], mask: bool) -> None:
    x = torch.randn(shape)
    packed = DualPrecision(bits=4, mask=mask).encode(x)
    assert packed.codec == DualPrecision(bits=4, mask=mask)
    assert torch.equal(packed.decode(), GroupQuant(bits=4).encode(x).decode())
    assert torch.equal(packed.layout.restore(packed.decode_flat(mask=True)), x != 0)


@pytest.mark.parametrize("mask", [False, True])
def test_it_is_never_larger_than_the_source(mask: bool) -> None:
    x = torch.randn(64, 32, 1, 17).half()  # tiles of two values: an average for every other one
    assert DualPrecision(2, 8, mask=mask).encode(x).nbytes <= x.numel() * x.element_size() * 1.02


def test_memory_that_overlaps_is_group_quant() -> None:
    x = torch.randn(500).as_strided((2, 3, 8, 8), (100, 40, 5, 2))
    y = DualPrecision(bits=8).encode(x).decode()
    assert y.stride() == x.stride() and ((y - x).abs() < 0.1).all()


def test_one_decoded_run_serves_another_view_of_the_same_memory() -> None:
    x = torch.randn(4, 8, 16, 24).contiguous(memory_format=torch.channels_last)
    packed = DualPrecision(bits=8).encode(x)
    view = packed.decode_flat().view(4, 16, 24, 8)
    assert torch.equal(view, packed.decode().permute(0, 2, 3, 1))
    assert ((view - x.permute(0, 2, 3, 1)).abs() < 0.1).all()


@pytest.mark.parametrize(
    ("codec", "other", "expected"),
    [
        (DualPrecision(), DualPrecision(), True),
        (DualPrecision(4, 8), DualPrecision(8, 2), True),
        (DualPrecision(8, 2), DualPrecision(4, 2), False),
        (DualPrecision(8, 2), DualPrecision(8, 4), False),
        (DualPrecision(8, 2, mask=True), DualPrecision(), True),
        (DualPrecision(), DualPrecision(mask=True), False),
        (DualPrecision(), Mask(), False),
        (DualPrecision(mask=True), Mask(), True),
        (DualPrecision(mask=True), Sign(), False),
        (DualPrecision(8, 8), GroupQuant(), False),
        (DualPrecision(8, 8), ErrorBounded(1.0), False),
    ],
)
def test_whom_it_serves(codec: DualPrecision, other: Codec, expected: bool) -> None:
    assert satisfies(codec, other) is expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([Mask(), DualPrecision()], DualPrecision(mask=True)),
        ([DualPrecision(), Mask()], DualPrecision(mask=True)),
        ([DualPrecision(8, 4), Mask(), DualPrecision(4, 2)], DualPrecision(4, 4, mask=True)),
        ([DualPrecision(), DualPrecision()], DualPrecision()),
        ([DualPrecision(), ErrorBounded(0.1)], ErrorBounded(0)),
        ([DualPrecision(), Sign()], ErrorBounded(0)),
    ],
)
def test_readers_of_the_same_memory_are_joined(asked: list[Codec], expected: Codec) -> None:
    assert strictest(asked) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"block": 1}, ValueError, "block must be at least 2, got 1"),
        ({"block": -8}, ValueError, "block must be at least 2, got -8"),
        ({"block": 8.0}, TypeError, "block must be an integer, got 8.0"),
        ({"block": True}, TypeError, "block must be an integer, got True"),
        ({"bits": 3}, ValueError, "bits must be 2, 4 or 8, got 3"),
    ],
)
def test_wrong_settings_name_the_value(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DualPrecision(**arguments)


def test_prints_as_it_is_written_and_refuses_integers() -> None:
    assert eval(repr(DualPrecision(4, mask=True))) == DualPrecision(4, mask=True)
    for codec, x in ((DualPrecision(), torch.arange(64)), (Keep(), torch.ones(3))):
        with pytest.raises(TypeError, match="cannot take"):
            codec.encode(x)
