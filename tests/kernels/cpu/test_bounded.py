"""Error-bounded codes from numba against the reference: the same bytes, the same values."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from encke.kernels import BoundedFormat, reference
from encke.kernels.formats import DITHERED, NEAREST, PLANE_HEADER, SIGNED, STOCHASTIC
from tests.kernels.common import CONTENTS, DTYPES, SEEDS, SIZES, bits, content, one_thread

cpu = pytest.importorskip("encke.kernels.cpu", reason="needs numba")

FORMAT = BoundedFormat(0.01, math.inf, NEAREST, torch.float32)
ROUNDINGS = (NEAREST, STOCHASTIC, DITHERED, SIGNED)
BOUNDS = [0.0, 1e-30, 1e-7, 2.0**-24, 1e-2, 0.3, 1e4, 1e300]
LIMITS = [(bound, math.inf) for bound in BOUNDS] + [(math.inf, rel) for rel in (0.0, 1e-7, 1e-3, 0.3)]


def check(x: torch.Tensor, bound: float, rel: float, rounding: int, seed: int) -> None:
    format, about = BoundedFormat(bound, rel, rounding, x.dtype), (x.numel(), seed)
    ours = cpu.bounded_encode(x, format, seed)
    with one_thread():
        theirs = reference.bounded_encode(x, format, seed)
        expected = [reference.bounded_decode(*theirs, format, x.numel(), mask) for mask in (False, True)]
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), (format, about)
        assert a.untyped_storage().nbytes() == a.numel(), (format, about)
    for mask, b in enumerate(expected):
        a = cpu.bounded_decode(*ours, format, x.numel(), bool(mask))
        assert a.dtype == b.dtype and torch.equal(bits(a), bits(b)), (format, about, mask)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONTENTS)
def test_error_bounded_equals_reference(name: str, dtype: torch.dtype) -> None:
    chance = random.Random(f"{name} {dtype}")
    # The reference takes long for the largest size, which has more than one task: for each content with one dtype.
    large = list(CONTENTS).index(name) % len(DTYPES) == DTYPES.index(dtype)
    for n in SIZES if large else SIZES[:-1]:
        x = content(name, n, dtype)
        for _ in range(2 if n in (1000, 5000) else 1):
            bound, rel = chance.choice(LIMITS)
            check(x, bound, rel, chance.choice(ROUNDINGS), chance.choice(SEEDS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_width(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(5)
    for width in range(24):
        x = torch.randn(3000, generator=g, dtype=torch.float64) * 2.0**width
        x *= torch.rand(3000, generator=g) < torch.linspace(-0.1, 1.1, 3000)  # any number of non-zeros
        check((x.abs() if width % 2 else x).to(dtype), 0.9, math.inf, ROUNDINGS[width // 2 % 4], width)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_finite_halves_and_ties(dtype: torch.dtype) -> None:
    """Each fp16 or bf16 pattern (as values in the wider types): conversions and rounding have no gaps."""
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    x = pattern.view(half).to(dtype)
    for bound in (2.0**-24, 1e-6, 3e-3, 7.0, 1e36):
        for rounding in ROUNDINGS:
            check(x, bound, math.inf, rounding, 3)


def test_groups_in_any_order() -> None:
    x = content("outlier", 20000, torch.float32)
    meta, payload = reference.bounded_encode(x, FORMAT, 0)
    groups = 5
    at = meta[PLANE_HEADER : PLANE_HEADER + 4 * groups].view(torch.int32)
    starts = [*(at * 4).tolist(), payload.numel()]
    pieces = [payload[starts[i] : starts[i + 1]] for i in range(groups)]
    order = [3, 0, 4, 1, 2]
    shuffled = torch.cat([pieces[i] for i in order])
    position = 0
    for i in order:
        at[i] = position // 4
        position += pieces[i].numel()
    decoded = cpu.bounded_decode(meta, shuffled, FORMAT, 20000, False)
    assert (decoded - x).abs().max() <= FORMAT.bound
    assert torch.equal(decoded, reference.bounded_decode(meta, shuffled, FORMAT, 20000, False))


def test_views_and_grad() -> None:
    x = torch.randn(3000, requires_grad=True)
    strided = torch.randn(6000)[::2]
    for t in (x, strided):
        check(t, 0.01, math.inf, NEAREST, 0)
    meta, payload = cpu.bounded_encode(strided, FORMAT, 0)
    buffer = torch.cat([torch.zeros(1, dtype=torch.uint8), meta, payload])  # nothing is aligned
    decoded = cpu.bounded_decode(buffer[1 : 1 + meta.numel()], buffer[1 + meta.numel() :], FORMAT, 3000, False)
    assert torch.equal(decoded, cpu.bounded_decode(meta, payload, FORMAT, 3000, False))


def test_damaged_metadata_stays_inside_the_payload() -> None:
    meta, payload = cpu.bounded_encode(torch.randn(5000), FORMAT, 0)
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        damaged = meta.clone()
        damaged[32:] = torch.randint(0, 256, (meta.numel() - 32,), generator=g, dtype=torch.uint8)
        for mask in (False, True):
            assert cpu.bounded_decode(damaged, payload, FORMAT, 5000, mask).numel() == 5000


def test_processors_without_bit_instructions() -> None:
    from encke.kernels.cpu import words

    g = torch.Generator().manual_seed(1)
    for word, mask in torch.randint(-(2**63), 2**63 - 1, (200, 2), generator=g).tolist():
        places = [i for i in range(64) if mask >> i & 1]
        gathered = sum((word >> place & 1) << i for i, place in enumerate(places))
        spread = sum((word >> i & 1) << place for i, place in enumerate(places))
        arguments = np.uint64(word % 2**64), np.uint64(mask % 2**64)
        assert words.gather_one_by_one(*arguments) == gathered
        assert words.spread_one_by_one(*arguments) == spread
