"""ErrorBounded on all implementations: the bound, zeros, signs, special values and size."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from encke.codecs import ErrorBounded
from encke.kernels import Backend, BoundedFormat, reference
from tests.codecs.common import CONTENT, DEVICES, DTYPES, EXAMPLES, IMPLEMENTATIONS, bits

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
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_error_bounded_promise(name: str, times: int) -> None:
    # The interpreter is slow: shrinking a failure there would take many minutes.
    phases = (Phase.explicit, Phase.generate) if name == "gpu" else tuple(Phase)

    # At length every run has other cases. In the interpreter there are few more: a soak test may take four minutes.
    examples = min(times, 2) * EXAMPLES[name] if DEVICES[name] == "cpu" and name == "gpu" else times * EXAMPLES[name]

    @settings(max_examples=examples, deadline=None, derandomize=times == 1, phases=phases)
    @given(cases)
    def run(case: dict) -> None:
        check_promise(IMPLEMENTATIONS[name], DEVICES[name], case)

    run()


def test_stochastic_rounding_is_unbiased_between_levels() -> None:
    x = torch.rand(2000) * 3 + 0.2
    mean = torch.zeros(2000, dtype=torch.float64)
    for seed in range(400):
        y = ErrorBounded(0.4, rounding="stochastic", seed=seed).encode(x).decode()
        assert ((y - x).abs() <= 0.4).all()
        mean += y.double() / 400
    assert (mean - x).abs().max() < 5 * 0.2 / math.sqrt(400)
    assert abs(float((mean - x).mean())) < 5 * 0.2 / math.sqrt(400 * 2000)


def test_bound_must_be_a_number() -> None:
    with pytest.raises(TypeError, match="bound must be a number, got '0.1'"):
        ErrorBounded("0.1")  # type: ignore[arg-type]
