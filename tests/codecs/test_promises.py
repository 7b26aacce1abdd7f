"""What the codecs promise, on all three implementations: the bound, zeros, signs, specials, size, exact shape."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import encke
from encke.codecs import ErrorBounded, GroupQuant, Lossless
from encke.codecs.exact import Window
from encke.kernels import Backend, BoundedFormat, GroupFormat, backend_for, reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
IMPLEMENTATIONS = {"reference": reference, "cpu": backend_for("cpu"), "gpu": backend_for("cuda")}
DEVICE = {"reference": "cpu", "cpu": "cpu", "gpu": "cuda" if torch.cuda.is_available() else "cpu"}
EXAMPLES = {"reference": 100, "cpu": 300, "gpu": 30}

CONTENT = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "relu": lambda n, g: torch.randn(n, generator=g).relu(),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.05),
    "zeros": lambda n, g: torch.zeros(n),
    "equal": lambda n, g: torch.full((n,), 3.3),
    "outlier": lambda n, g: torch.randn(n, generator=g).index_fill(0, torch.tensor([n // 2]), 1e30),
    "offset": lambda n, g: 1e5 + torch.rand(n, generator=g) * 2 - 1,
    "tiny": lambda n, g: torch.randn(n, generator=g) * 1e-38,
    "denormal": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e-42,
    "huge": lambda n, g: torch.randn(n, generator=g).sign() * torch.finfo(torch.float32).max,
    "special": lambda n, g: torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -2.5])[
        torch.randint(0, 7, (n,), generator=g)
    ],
    "wide": lambda n, g: torch.randn(n, generator=g) * 10.0 ** torch.randint(-30, 30, (n,), generator=g),
    "smallest_half": lambda n, g: torch.randint(-3, 4, (n,), generator=g) * 2.0**-24,
    "integers": lambda n, g: torch.randint(-3, 4, (n,), generator=g).float(),
}

cases = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "n": st.sampled_from([1, 2, 63, 64, 65, 127, 1000, 1023, 1024, 1025, 2500]),
        "content": st.sampled_from(sorted(CONTENT)),
        "bound": st.sampled_from([0.0, 1e-45, 1e-30, 2.0**-24, 2.0**-22, 1e-3, 0.01, 0.1, 0.3, 1.0, 7.5, 1e6, 1e38]),
        "mode": st.sampled_from(["abs", "rel"]),
        "stochastic": st.booleans(),
        "bitmap": st.booleans(),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)


def bits(t: Tensor) -> Tensor:
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def check_promise(backend: Backend, device: str, case: dict) -> None:
    generator = torch.Generator().manual_seed(case["seed"] % 2**31)
    x = CONTENT[case["content"]](case["n"], generator).to(case["dtype"])
    bound, rel = (case["bound"], math.inf) if case["mode"] == "abs" else (math.inf, case["bound"])
    format, seed = BoundedFormat(bound, rel, case["stochastic"], case["bitmap"], x.dtype), case["seed"]
    meta, payload = backend.bounded_encode(x.to(device), format, seed, -1)
    y = backend.bounded_decode(meta, payload, format, x.numel(), False).cpu()
    finite = torch.isfinite(x)
    wide = x.double()
    spread = float(wide[finite].max() - wide[finite].min()) if finite.any() else 0.0
    limit = case["bound"] if case["mode"] == "abs" else case["bound"] * spread

    assert y.shape == x.shape and y.dtype == x.dtype
    assert torch.equal(bits(y[~finite]), bits(x[~finite]))
    error = (y.double() - wide).abs()[finite]
    assert (error <= limit).all(), (float(error.max()), limit)
    if limit == 0:
        assert torch.equal(bits(y), bits(x))
    assert torch.equal(y == 0, x == 0)
    assert torch.equal(torch.sign(y[finite]), torch.sign(x[finite]))
    assert torch.equal(backend.bounded_decode(meta, payload, format, x.numel(), True).cpu(), x != 0)
    assert meta.numel() + payload.numel() <= x.numel() * x.element_size() * 1.02 + 64

    meta, payload = reference.bounded_encode(x, format, seed, -1)
    assert torch.equal(bits(reference.bounded_decode(meta, payload, format, x.numel(), False)), bits(y))


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_error_bounded_promise(name: str) -> None:
    # The interpreter is slow: shrinking a failure there would take many minutes.
    phases = (Phase.explicit, Phase.generate) if name == "gpu" else tuple(Phase)

    @settings(max_examples=EXAMPLES[name], deadline=None, derandomize=True, phases=phases)
    @given(cases)
    def run(case: dict) -> None:
        check_promise(IMPLEMENTATIONS[name], DEVICE[name], case)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "signs"), [(2, False), (4, False), (4, True), (8, True)])
def test_group_quant_is_unbiased_and_keeps_zeros_and_signs(
    name: str, dtype: torch.dtype, width: int, signs: bool
) -> None:
    device, format = torch.device(DEVICE[name]), GroupFormat(width, 256, dtype, 1, signs)
    plan = IMPLEMENTATIONS[name].group_plan(format, 700, device)
    oracle = reference.group_plan(format, 700, torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    draws = 3 if name == "gpu" and device.type == "cpu" else 200
    for content in ("normal", "relu", "integers", "zeros", "equal"):
        x = CONTENT[content](700, generator).to(dtype)
        total = torch.zeros(700, dtype=torch.float64)
        widest = 0.0
        for draw in range(draws):
            seed = draw * 0x9E3779B97F4A7C15 % 2**63
            data = plan.encode(x.to(device), seed)
            y = plan.decode(data, seed).cpu()
            if draw < 2:
                assert torch.equal(bits(oracle.decode(oracle.encode(x, seed), seed)), bits(y))
            if signs:
                assert torch.equal(y == 0, x == 0) and torch.equal(torch.sign(y), torch.sign(x))
            if signs or (x >= 0).all():
                assert (y[x == 0] == 0).all()
                assert torch.equal(plan.mask(data).cpu(), x != 0)
            else:
                step = (x.double().max() - x.double().min()) / (2**width - 1)
                assert (y.double() - x.double()).abs().max() <= 0.51 * step + torch.finfo(dtype).eps * 4
            total += y.double()
            widest = max(widest, float((y.double() - x.double()).abs().max()))
        # The mean of n unbiased draws with errors up to one step is within 5 standard deviations of the value; what
        # comes on top is the rounding of a level to the tensor's own dtype.
        cast = torch.finfo(dtype).eps * float(x.double().abs().max())
        error = total / draws - x.double()
        assert (error.abs() <= 5 * widest / math.sqrt(draws) + cast).all()
        if draws >= 100:
            assert abs(float(error.mean())) <= 5 * widest / math.sqrt(draws * 700) + cast / 8


@pytest.mark.parametrize("width", [2, 4, 8])
def test_group_quant_shows_nan_and_infinities(width: int) -> None:
    x = torch.randn(1024)
    x[300], x[700] = math.nan, math.inf
    y = GroupQuant(bits=width, group=256).encode(x).decode()
    assert y[256:512].isnan().all() and y[512:768].isnan().all()
    assert not y[:256].isnan().any() and not y[768:].isnan().any()


def test_stochastic_rounding_is_unbiased_between_levels() -> None:
    x = torch.rand(2000) * 3 + 0.2
    mean = torch.zeros(2000, dtype=torch.float64)
    for seed in range(400):
        y = ErrorBounded(0.4, rounding="stochastic", seed=seed).encode(x).decode()
        assert ((y - x).abs() <= 0.4).all()
        mean += y.double() / 400
    assert (mean - x).abs().max() < 5 * 0.2 / math.sqrt(400)
    assert abs(float((mean - x).mean())) < 5 * 0.2 / math.sqrt(400 * 2000)


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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_size_stride_and_dtype_come_back(shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = SHAPES[shape](torch.randn(4, 6, 9, 10).to(dtype))
    for codec in (ErrorBounded(0.1), ErrorBounded(0.01, "rel"), ErrorBounded(0), GroupQuant(bits=4), Lossless()):
        packed = codec.encode(x)
        y = packed.decode()
        assert (y.size(), y.stride(), y.dtype, y.device) == (x.size(), x.stride(), x.dtype, x.device)
        if codec.exact:
            assert torch.equal(x, y)
        elif codec == ErrorBounded(0.1):
            assert ((y.double() - x.double()).abs() <= 0.1).all()
    assert x.grad_fn is None


@pytest.mark.parametrize(
    ("make", "bits_each"),
    [
        (lambda g: torch.rand(3000, generator=g) < 0.5, 1),
        (lambda g: torch.randint(0, 2, (3000,), generator=g), 1),
        (lambda g: torch.randint(7, 11, (3000,), generator=g), 2),
        (lambda g: torch.randint(-8, 8, (3000,), generator=g), 4),
        (lambda g: torch.randint(1000, 1250, (3000,), generator=g), 8),
        (lambda g: torch.randint(-30000, 30000, (3000,), generator=g), 16),
        (lambda g: torch.randint(0, 2**31 - 1, (3000,), generator=g), 32),
        (lambda g: torch.randint(-(2**62), 2**62, (3000,), generator=g), 64),
        (lambda g: torch.randint(0, 100, (3000,), generator=g, dtype=torch.int32), 8),
        (lambda g: torch.randint(0, 255, (3000,), generator=g, dtype=torch.uint8), 8),
        (lambda g: torch.randint(-100, 100, (3000,), generator=g, dtype=torch.int8), 8),
    ],
)
def test_lossless_integers_take_the_narrowest_width(make, bits_each: int) -> None:
    x = make(torch.Generator().manual_seed(1)).view(30, 100)
    for view in (x, x.t(), x[:, ::3], x[0]):
        packed = Lossless().encode(view)
        y = packed.decode()
        assert torch.equal(y, view) and y.stride() == view.stride() and y.dtype == view.dtype
        assert packed.nbytes <= math.ceil(view.numel() * bits_each / 8) + 1


def test_lossless_float_that_is_zero_or_one_constant_takes_a_bit() -> None:
    x = torch.nn.functional.dropout(torch.ones(8000), 0.3)
    packed = Lossless().encode(x)
    assert torch.equal(packed.decode(), x) and packed.nbytes <= 1004
    x[5] = -0.0
    assert np.signbit(Lossless().encode(x).decode()[5].item())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ErrorBounded(-1.0), "zero or positive"),
        (lambda: ErrorBounded(math.nan), "zero or positive"),
        (lambda: ErrorBounded(math.inf), "finite"),
        (lambda: ErrorBounded(1.0, mode="both"), "mode must be"),
        (lambda: ErrorBounded(1.0, rounding="up"), "rounding must be"),
        (lambda: GroupQuant(bits=3), "bits must be 2, 4 or 8"),
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


def test_bound_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="bound must be a number, got '0.1'"):
        ErrorBounded("0.1")  # type: ignore[arg-type]


def test_codecs_print_as_they_are_written() -> None:
    assert repr(ErrorBounded(0.01, "rel")) == "ErrorBounded(bound=0.01, mode='rel')"
    assert eval(repr(GroupQuant(bits=4))) == GroupQuant(bits=4)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 2, False), (5, 3, 2, 1, True), ((1, 16), 4, 0, 1, False)],
)
def test_max_pool_indices_come_back_from_their_windows(kernel, stride, padding, dilation, ceil: bool, memory) -> None:
    x = torch.randn(3, 4, 13, 18).contiguous(memory_format=memory)
    _, index = F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)
    pairs = [(v, v) if isinstance(v, int) else v for v in (kernel, stride, padding, dilation)]
    packed = Window(*pairs, plane=(13, 18)).encode(index)
    decoded = packed.decode()
    assert torch.equal(decoded, index) and decoded.stride() == index.stride() and decoded.dtype == index.dtype
    assert packed.nbytes <= index.numel()


def test_max_pool_indices_in_three_dimensions_and_in_planes_smaller_than_the_window() -> None:
    _, index = F.max_pool3d(torch.randn(2, 3, 6, 7, 8), 3, 2, 1, return_indices=True)
    packed = Window((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), plane=(6, 7, 8)).encode(index)
    assert torch.equal(packed.decode(), index) and packed.nbytes == index.numel()
    _, index = F.max_pool2d(torch.randn(2, 3, 2, 2), 3, 1, 1, return_indices=True)
    assert torch.equal(Window((3, 3), (1, 1), (1, 1), (1, 1), plane=(2, 2)).encode(index).decode(), index)


def test_windows_too_large_for_a_byte_fall_back_to_the_range() -> None:
    x = torch.randn(4, 8, 40, 40, requires_grad=True)
    expected = torch.autograd.grad(F.max_pool2d(x, 20, 1).square().sum(), x)[0]
    context = encke.compress()
    for _ in range(2):
        with context as handle:
            y = F.max_pool2d(x, 20, 1)
        assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)
    (row,) = [row for row in handle.report().sites if row.slot == "result1"]
    assert row.codec == "Lossless" and row.ratio > 3.9
