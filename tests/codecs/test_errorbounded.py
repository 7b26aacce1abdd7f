"""ErrorBounded on all implementations: the bound, zeros, signs, special values, bias and size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.codecs.errorbounded import KINDS
from encke.codecs.exact import Sign
from encke.kernels import Backend, BoundedFormat, reference
from encke.policies.comet.policy import initial_codec
from tests.codecs.common import CONTENT, DEVICES, DTYPES, EXAMPLES, IMPLEMENTATIONS, bits

cases = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DTYPES),
        "n": st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 1000, 4095, 4096, 4097, 6000]),
        "content": st.sampled_from(sorted(CONTENT)),
        "bound": st.sampled_from([0.0, 1e-45, 1e-30, 2.0**-24, 2.0**-22, 1e-3, 0.01, 0.1, 0.3, 1.0, 7.5, 1e6, 1e38]),
        "mode": st.sampled_from(["abs", "rel"]),
        "rounding": st.sampled_from(["nearest", "stochastic", "dithered", "dithered with signs"]),
        "seed": st.integers(-(2**63), 2**63 - 1),
    }
)


def check_promise(backend: Backend, device: str, case: dict) -> None:
    generator = torch.Generator().manual_seed(case["seed"] % 2**31)
    x = CONTENT[case["content"]](case["n"], generator).to(case["dtype"])
    bound, rel = (case["bound"], math.inf) if case["mode"] == "abs" else (math.inf, case["bound"])
    seed, dithered = case["seed"], case["rounding"] == "dithered"
    format = BoundedFormat(bound, rel, KINDS[case["rounding"]], x.dtype)
    meta, payload = backend.bounded_encode(x.to(device), format, seed)
    y, mask = (backend.bounded_decode(meta, payload, format, x.numel(), flag).cpu() for flag in (False, True))
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
    if dithered:
        assert (y[x == 0] == 0).all()
    else:
        assert torch.equal(y == 0, x == 0)
        assert torch.equal(torch.sign(y[finite]), torch.sign(x[finite]))
    assert torch.equal(mask, x != 0)
    assert meta.numel() + payload.numel() <= x.numel() * x.element_size() * 1.02 + 64

    expected = reference.bounded_decode(*reference.bounded_encode(x, format, seed), format, x.numel(), False)
    assert torch.equal(bits(expected), bits(y))


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_error_bounded_promise(name: str, times: int) -> None:
    # The interpreter is slow: shrinking a failure there would take many minutes.
    phases = (Phase.explicit, Phase.generate) if name == "gpu" else tuple(Phase)

    # At length every run has other cases. In the interpreter there are few more: a soak test may take four minutes.
    examples = min(times, 5) * EXAMPLES[name] if DEVICES[name] == "cpu" and name == "gpu" else times * EXAMPLES[name]

    @settings(max_examples=examples, deadline=None, derandomize=times == 1, phases=phases)
    @given(cases)
    def run(case: dict) -> None:
        check_promise(IMPLEMENTATIONS[name], DEVICES[name], case)

    run()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_error_across_zero_is_within_the_bound_before_it_is_rounded(name: str) -> None:
    """The smallest fp16 value decodes to -7.5 at a bound of 7.5: in fp32 their distance is rounded to the bound."""
    case = {"dtype": torch.float16, "n": 2, "content": "smallest_half", "bound": 7.5, "mode": "abs", "seed": 0}
    check_promise(IMPLEMENTATIONS[name], DEVICES[name], case | {"rounding": "dithered"})


def test_stochastic_rounding_is_unbiased_between_levels() -> None:
    x = torch.rand(2000) * 3 + 0.2
    mean = torch.zeros(2000, dtype=torch.float64)
    for seed in range(400):
        y = ErrorBounded(0.4, rounding="stochastic", seed=seed).encode(x).decode()
        assert ((y - x).abs() <= 0.4).all()
        mean += y.double() / 400
    assert (mean - x).abs().max() < 5 * 0.2 / math.sqrt(400)
    assert abs(float((mean - x).mean())) < 5 * 0.2 / math.sqrt(400 * 2000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("ulps", [4, 100])
def test_dithered_values_are_unbiased_and_uniform_within_the_bound(dtype: torch.dtype, ulps: int) -> None:
    bound = ulps * torch.finfo(dtype).eps
    # Not next to a power of two, where the dtype's own steps change.
    x = (1.25 + torch.rand(64, generator=torch.Generator().manual_seed(0)) / 2).to(dtype)
    # So many values that 5 standard deviations of their mean are less than what is tested.
    x = x.repeat(1 << 15, 5)
    error = (ErrorBounded(bound, rounding="dithered", seed=3).encode(x).decode().double() - x.double()) / bound
    assert error.abs().max() <= 1
    assert abs(float(error.mean())) < 1e-3
    assert error.view(-1, 64).mean(0).abs().max() < 0.02  # each of the 64 values by itself
    # Next to the dtype's precision steps are smaller than twice the bound, and fp32 values are stored as they are.
    assert (0.0 if ulps == 4 else 0.9 / 3) <= float(error.square().mean()) < 1.01 / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dithered_values_with_signs_are_unbiased_next_to_zero_too(dtype: torch.dtype) -> None:
    bound = 0.1
    share = torch.cat([2.0 ** -torch.arange(11.0, 2, -1), torch.linspace(0.15, 1.3, 23)])
    x = (bound * torch.cat([share, -share])).to(dtype)
    # So many values that 5 standard deviations of their mean are less than what is tested.
    source = x.repeat(1 << 16, 3)
    y = ErrorBounded(bound, rounding="dithered", seed=3, signs=True).encode(source).decode()
    assert torch.equal(y.sign(), source.sign())
    error = ((y.double() - source.double()) / bound).view(-1, len(x))
    assert error.abs().max() <= 1
    assert abs(float((error * x.sign()).mean())) < 1e-3
    assert error.mean(0).abs().max() < 0.0065  # each value by itself
    # Errors are smaller next to zero. The smallest magnitude is no more than 2^-12 of the bound.
    share = (x.double().abs() / bound).clamp(max=1)
    assert torch.allclose(error.square().mean(0), share * (2 - share) / 3, rtol=0.05, atol=2.0**-12)


def test_dithered_values_with_signs_are_unbiased_over_seeds() -> None:
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 0.3
    error = torch.zeros(2000, dtype=torch.float64)
    for seed in range(400):
        error += (ErrorBounded(0.4, rounding="dithered", seed=seed, signs=True).encode(x).decode() - x).double() / 400
    # The variance is at most a third of the bound's square.
    assert error.abs().max() < 5 * 0.4 / math.sqrt(3 * 400)
    assert abs(float((error * x.sign()).mean())) < 5 * 0.4 / math.sqrt(3 * 400 * 2000)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_values_far_below_the_bound_keep_their_signs(name: str) -> None:
    """The smallest fp16 values are smaller than anything else that a bound near their size leaves."""
    for bound in (2.0**-22, 1e-3, 1e5, 1e30):
        case = {"dtype": torch.float16, "n": 600, "content": "smallest_half", "bound": bound, "mode": "abs", "seed": 5}
        check_promise(IMPLEMENTATIONS[name], DEVICES[name], case | {"rounding": "dithered with signs"})


def test_a_reader_of_signs_is_served_by_dithered_values_with_signs_alone() -> None:
    for rounding, served in (("nearest", True), ("stochastic", True), ("dithered", False)):
        codec = ErrorBounded(0.1, rounding=rounding)  # type: ignore[arg-type]
        assert codec.covers(Sign()) is codec.zeros_decode is served
        signed = replace(codec, signs=True)
        assert signed.covers(Sign()) and signed.zeros_decode and signed.covers(codec) and not codec.covers(signed)
        assert signed.unbiased is codec.unbiased and Codec.from_dict(signed.to_dict()) == signed
        assert signed.refined(bound=0.01) == replace(codec, signs=True, bound=0.01)
        assert signed.fixed_rate() == GroupQuant(8, signs=True)
    assert ErrorBounded(0.0, rounding="dithered").covers(Sign())


@pytest.mark.parametrize(("name", "most"), [("normal", (1.25, 0.9)), ("relu", (0.1, 0.1))], ids=["normal", "relu"])
def test_signs_take_up_to_a_bit_for_each_value(name: str, most: tuple[float, float]) -> None:
    x = CONTENT[name](1 << 18, torch.Generator().manual_seed(0))
    for bound, bits_more in zip((1.0, 0.5), most, strict=True):
        plain = ErrorBounded(bound, rounding="dithered").encode(x)
        signed = ErrorBounded(bound, rounding="dithered", signs=True).encode(x)
        assert plain.nbytes < signed.nbytes <= plain.nbytes + bits_more * len(x) / 8
        assert (signed.decode() - x).square().mean() < 0.93 * (plain.decode() - x).square().mean()


@pytest.mark.parametrize("rounding", ["nearest", "dithered"])
@pytest.mark.parametrize(
    ("name", "entropy", "bounds"),
    # Values of 2^20 bounds and more are stored as they are: 100,000 under a bound of 0.02.
    [("relu", 1.15, (0.1, 0.02)), ("normal", 1.1, (0.1, 0.02)), ("offset", 1.4, (0.2, 0.1))],
    ids=["relu", "normal", "offset"],
)
def test_size_is_near_the_entropy_of_the_levels(
    name: str, entropy: float, bounds: tuple[float, float], rounding: Literal["nearest", "dithered"]
) -> None:
    x = CONTENT[name](1 << 18, torch.Generator().manual_seed(0))
    for bound in bounds:
        packed = ErrorBounded(bound, rounding=rounding).encode(x)
        dither = torch.rand(x.shape) if rounding == "dithered" else 0
        levels = torch.where(x == 0, torch.inf, (x / (2 * bound) + dither).floor())
        counts = torch.unique(levels, return_counts=True)[1].double()
        assert packed.nbytes <= entropy * float((counts * -(counts / counts.sum()).log2()).sum()) / 8


def test_bound_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="bound must be a number, got '0.1'"):
        ErrorBounded("0.1")  # type: ignore[arg-type]


def test_only_a_bound_that_a_policy_has_chosen_may_be_coarsened() -> None:
    chosen = ErrorBounded(0.1, coarsens=True)
    assert not ErrorBounded(0.1).coarsens and Codec.from_dict(chosen.to_dict()) == chosen != ErrorBounded(0.1)
    # States of earlier releases do not say: then it holds.
    old = {name: value for name, value in chosen.to_dict().items() if name != "coarsens"}
    assert Codec.from_dict(old) == ErrorBounded(0.1)
    assert ErrorBounded(0.1).covers(chosen) and not chosen.covers(ErrorBounded(0.1))
    # What a reader needs holds, whatever the policy.
    for refined in (chosen.refined(min_bits=4), chosen.refined(bound=0.05), chosen.refined(bound=1.0)):
        assert isinstance(refined, ErrorBounded) and not refined.coarsens
    assert all(codec.coarsens for codec in (initial_codec(False, 0, 4), initial_codec(False, 0, 8)))
