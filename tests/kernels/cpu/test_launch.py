"""The numba kernels against the reference: the same bytes, the same values, from any thread and after a fork."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import threading
import zlib
from collections.abc import Iterator

import pytest
import torch

from encke.kernels import reference

cpu = pytest.importorskip("encke.kernels.cpu.launch", reason="needs numba")
kernels = cpu.kernels

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
SIZES = [0, 1, 63, 64, 65, 1000, 1023, 1024, 1025, 5000, 70000]
BOUNDS = [0.0, 1e-30, 1e-7, 2.0**-24, 1e-2, 0.3, 1e4, 1e300]
LIMITS = [(bound, math.inf) for bound in BOUNDS] + [(math.inf, rel) for rel in (0.0, 1e-7, 1e-3, 0.3)]
SEEDS = [0, 1, -1, -(2**63), 2**63 + 12345, 2**64 - 1, 0x123456789ABCDEF]


def spread_out(n: int, g: torch.Generator) -> torch.Tensor:
    """Magnitudes from the smallest denormals of fp16 to its largest values."""
    return torch.randn(n, generator=g, dtype=torch.float64) * torch.exp2(torch.rand(n, generator=g) * 42 - 25)


def with_specials(n: int, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(n, generator=g, dtype=torch.float64)
    at = torch.rand(n, generator=g) < 0.002
    x[at] = torch.tensor([math.nan, math.inf, -math.inf, -0.0]).double().repeat(n)[: int(at.sum())]
    return x


CONTENTS = {
    "normal": lambda n, g: torch.randn(n, generator=g),
    "relu": lambda n, g: torch.randn(n, generator=g).relu(),
    "sparse": lambda n, g: torch.randn(n, generator=g) * (torch.rand(n, generator=g) < 0.03),
    "zeros": lambda n, g: torch.zeros(n),
    "negative zeros": lambda n, g: torch.zeros(n) * -1,
    "constant": lambda n, g: torch.full((n,), -3.7),
    "far from zero": lambda n, g: 1e4 + torch.rand(n, generator=g, dtype=torch.float64) * 2 - 1,
    "near base limits": lambda n, g: (
        torch.randint(-140, 140, (n // 64 + 1, 1), generator=g).expand(-1, 64).reshape(-1)[:n]
        + torch.rand(n, generator=g)
    ),
    "huge": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e37,
    "denormals": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 1e-39,
    "small": lambda n, g: torch.randn(n, generator=g, dtype=torch.float64) * 2.0**-23,
    "spread out": spread_out,
    "specials": with_specials,
    "all special": lambda n, g: torch.full((n,), math.nan),
    "largest": lambda n, g: torch.where(torch.rand(n, generator=g) < 0.5, 1.0, -1.0).double() * 3.4028234663852886e38,
    "outlier": lambda n, g: torch.cat([torch.randn(n, generator=g)[1:], torch.full((min(n, 1),), 1e5)]),
    "integers": lambda n, g: torch.randint(-5, 200, (n,), generator=g).double(),
}


def content(name: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    return CONTENTS[name](n, torch.Generator().manual_seed(zlib.crc32(name.encode()) + n)).to(dtype)


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def plain_nan(t: torch.Tensor) -> torch.Tensor:
    """The bits, the same for all NaNs."""
    return bits(torch.where(torch.isnan(t), torch.tensor(math.nan, dtype=t.dtype), t))


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The reference's many small operations are much slower on threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_eb(x: torch.Tensor, bound: float, rel: float, stochastic: bool, seed: int, bitmap: bool) -> None:
    about = (x.dtype, x.numel(), bound, rel, stochastic, seed, bitmap)
    ours = cpu.eb_encode(x, bound, rel, stochastic, seed, bitmap, -1)
    with one_thread():
        theirs = reference.eb_encode(x, bound, rel, stochastic, seed, bitmap, -1)
        values = reference.eb_decode(*theirs, x.numel(), x.dtype, False)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), about
        assert a.untyped_storage().nbytes() == a.numel(), about
    for mask, b in ((False, values), (True, values != 0)):
        a = cpu.eb_decode(*ours, x.numel(), x.dtype, mask)
        assert a.dtype == b.dtype and torch.equal(bits(a), bits(b)), (*about, mask)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CONTENTS)
def test_error_bounded_equals_reference(name: str, dtype: torch.dtype) -> None:
    chance = random.Random(f"{name} {dtype}")
    for n in SIZES:
        x = content(name, n, dtype)
        for _ in range(2 if n in (1000, 5000) else 1):
            bound, rel = chance.choice(LIMITS)
            check_eb(x, bound, rel, chance.random() < 0.5, chance.choice(SEEDS), chance.random() < 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bitmap", [True, False])
def test_every_width(dtype: torch.dtype, bitmap: bool) -> None:
    g = torch.Generator().manual_seed(5)
    for width in range(24):
        x = torch.randn(3000, generator=g, dtype=torch.float64) * 2.0**width
        x *= torch.rand(3000, generator=g) < torch.linspace(-0.1, 1.1, 3000)  # any number of non-zeros
        check_eb((x.abs() if width % 2 else x).to(dtype), 0.9, math.inf, width % 3 == 0, width, bitmap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_finite_halves_and_ties(dtype: torch.dtype) -> None:
    """Each fp16 or bf16 pattern (as values in the wider types): conversions and rounding have no gaps."""
    pattern = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    x = pattern.view(half).to(dtype)
    for bound in (2.0**-24, 1e-6, 3e-3, 7.0, 1e36):
        for stochastic in (False, True):
            check_eb(x, bound, math.inf, stochastic, 3, True)


def test_groups_in_any_order() -> None:
    x = content("outlier", 5000, torch.float32)
    meta, payload = reference.eb_encode(x, 0.01, math.inf, False, 0, True, -1)
    groups = 5
    at = meta[32 : 32 + 4 * groups].view(torch.int32)
    starts = [*(at * 4).tolist(), payload.numel()]
    pieces = [payload[starts[i] : starts[i + 1]] for i in range(groups)]
    order = [3, 0, 4, 1, 2]
    shuffled = torch.cat([pieces[i] for i in order])
    position = 0
    for i in order:
        at[i] = position // 4
        position += pieces[i].numel()
    decoded = cpu.eb_decode(meta, shuffled, 5000, torch.float32, False)
    assert torch.equal(decoded, reference.eb_decode(meta, shuffled, 5000, torch.float32, False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_group_quant_equals_reference(width: int, dtype: torch.dtype) -> None:
    for i, name in enumerate(CONTENTS):
        for n in (SIZES[i % 5], SIZES[5 + i % 5], 3000 + i, *SIZES[10:][: i % 6 == 0]):
            x, seed, group = content(name, n, dtype), SEEDS[(i + width) % len(SEEDS)], 128
            rest = (seed, 1, width > 2 and n % 2 == 1)
            ours = cpu.gq_encode(x, width, group, *rest)
            with one_thread():
                theirs = reference.gq_encode(x, width, group, *rest)
                values = [reference.gq_decode(theirs, n, width, group, dtype, mask, *rest) for mask in (False, True)]
            at_lo, at_step, _ = reference.gq_sizes(n, width, group, dtype)
            kept = torch.float64 if dtype == torch.float64 else torch.bfloat16
            assert torch.equal(ours[:at_step], theirs[:at_step]), (name, n, group)
            # torch's cast to bf16 gives NaNs other bits on other machines
            assert torch.equal(
                plain_nan(ours[at_step:].clone().view(kept)), plain_nan(theirs[at_step:].clone().view(kept))
            )
            for mask, b in zip((False, True), values, strict=True):
                a = cpu.gq_decode(ours, n, width, group, dtype, mask, *rest)
                assert a.dtype == b.dtype and torch.equal(plain_nan(a), plain_nan(b)), (name, n, group, mask)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_groups_of_a_channel_equal_reference(width: int) -> None:
    for pixels, channels in ((300, 7), (256, 16), (1, 40), (5000, 130), (0, 4)):
        x = torch.randn(pixels, channels).mul(torch.logspace(-3, 3, channels)).view(-1)
        ours = cpu.gq_encode(x, width, 128, 5, channels)
        assert torch.equal(ours, reference.gq_encode(x, width, 128, 5, channels))
        for mask in (False, True):
            args = (ours, x.numel(), width, 128, x.dtype, mask, 5, channels)
            assert torch.equal(cpu.gq_decode(*args), reference.gq_decode(*args))
    for module in (cpu, reference):
        with pytest.raises(ValueError, match="7 apart"):
            module.gq_encode(torch.randn(100), width, 128, 5, 7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "signs"), [(2, False), (4, True), (8, False)])
def test_channels_of_any_content_equal_reference(width: int, signs: bool, dtype: torch.dtype) -> None:
    names = [*CONTENTS, *CONTENTS][: 2 * len(CONTENTS) - 1]  # an odd number of channels, of every kind side by side
    for pixels in (100, 128, 300):
        x = torch.stack([content(name, pixels, dtype) for name in names], 1).reshape(-1)
        rest = (-(2**63) + 77, len(names), signs)
        ours, theirs = (module.gq_encode(x, width, 128, *rest) for module in (cpu, reference))
        at_step = reference.gq_sizes(x.numel(), width, 128, dtype, len(names))[1]
        kept = torch.float64 if dtype == torch.float64 else torch.bfloat16
        assert torch.equal(ours[:at_step], theirs[:at_step]), pixels
        a, b = (plain_nan(t[at_step:].clone().view(kept)) for t in (ours, theirs))
        assert torch.equal(a, b), pixels
        for mask in (False, True):
            a, b = (m.gq_decode(ours, x.numel(), width, 128, dtype, mask, *rest) for m in (cpu, reference))
            assert a.dtype == b.dtype and torch.equal(plain_nan(a), plain_nan(b)), (pixels, mask)


@pytest.mark.parametrize("group", [64, 128, 256, 512, 1024])
def test_every_group_size_equals_reference(group: int) -> None:
    for n in (group - 1, 3 * group, 5 * group + 7):
        x = torch.cat([content("normal", n // 2, torch.float32), content("relu", n - n // 2, torch.float32)])
        ours = cpu.gq_encode(x, 2, group, 9)
        assert torch.equal(ours, reference.gq_encode(x, 2, group, 9))
        a, b = (module.gq_decode(ours, n, 2, group, x.dtype, False, 9) for module in (cpu, reference))
        assert torch.equal(a, b)


def test_many_tasks_equal_reference() -> None:
    x = content("outlier", 2_000_003, torch.float32)
    ours = cpu.gq_encode(x, 2, 128, 9)
    assert torch.equal(ours, reference.gq_encode(x, 2, 128, 9))
    for mask in (False, True):
        a, b = (module.gq_decode(ours, x.numel(), 2, 128, x.dtype, mask, 9) for module in (cpu, reference))
        assert torch.equal(a, b)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_small_integers_equal_reference(width: int) -> None:
    for n in [*SIZES, 300_001]:
        x = torch.randint(0, 1 << width, (n,), dtype=torch.uint8)
        for values in (x, x.bool()) if width == 1 else (x,):
            packed = cpu.bits_encode(values, width)
            assert torch.equal(packed, reference.bits_encode(values, width))
            assert torch.equal(cpu.bits_decode(packed, width, n), x)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 0.1), (torch.float16, 0.08), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("n", [*SIZES, 300_001])
def test_log_probabilities_equal_reference(n: int, dtype: torch.dtype, far: float) -> None:
    x = (-torch.rand(n) * 27).to(dtype)
    x[::97], x[5::301] = math.nan, -math.inf
    ours = cpu.lp_encode(x, 0.1, far, 5)
    assert torch.equal(ours, reference.lp_encode(x, 0.1, far, 5))
    values, theirs = (kernels.lp_decode(ours, 0.1, far, 1e-3, 5, dtype) for kernels in (cpu, reference))
    assert torch.equal(plain_nan(values), plain_nan(theirs)) and values.isnan().equal(x.isnan())


def test_views_and_grad() -> None:
    x = torch.randn(3000, requires_grad=True)
    strided = torch.randn(6000)[::2]
    for t in (x, strided):
        check_eb(t, 0.01, math.inf, False, 0, True)
        assert torch.equal(cpu.gq_encode(t, 4, 128, 1), reference.gq_encode(t, 4, 128, 1))
    meta, payload = cpu.eb_encode(strided, 0.01, math.inf, False, 0, True, -1)
    buffer = torch.cat([torch.zeros(1, dtype=torch.uint8), meta, payload])  # nothing is aligned
    decoded = cpu.eb_decode(buffer[1 : 1 + meta.numel()], buffer[1 + meta.numel() :], 3000, torch.float32, False)
    assert torch.equal(decoded, cpu.eb_decode(meta, payload, 3000, torch.float32, False))


def test_damaged_metadata_stays_inside_the_payload() -> None:
    meta, payload = cpu.eb_encode(torch.randn(5000), 0.01, math.inf, False, 0, True, -1)
    g = torch.Generator().manual_seed(0)
    for _ in range(50):
        damaged = meta.clone()
        damaged[32:] = torch.randint(0, 256, (meta.numel() - 32,), generator=g, dtype=torch.uint8)
        assert cpu.eb_decode(damaged, payload, 5000, torch.float32, False).numel() == 5000


def test_without_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled(function, **options)

    compiled = kernels.numba.njit
    monkeypatch.setattr(kernels.numba, "njit", njit)
    assert kernels.jit(lambda x: x + 1)(1) == 2


def test_threads_at_once() -> None:
    tensors = [torch.randn(400_000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [cpu.eb_encode(x, 0.01, math.inf, False, 0, True, -1) for x in tensors]
    wrong: list[int] = []
    start = threading.Barrier(len(tensors))

    def work(i: int) -> None:
        start.wait()
        for _ in range(20):
            meta, payload = cpu.eb_encode(tensors[i], 0.01, math.inf, False, 0, True, -1)
            decoded = cpu.eb_decode(meta, payload, tensors[i].numel(), torch.float32, False)
            same = torch.equal(meta, expected[i][0]) and torch.equal(payload, expected[i][1])
            if not same or float((decoded - tensors[i]).abs().max()) > 0.01:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []


def encode_in_child(connection: multiprocessing.connection.Connection, x: torch.Tensor) -> None:
    meta, payload = cpu.eb_encode(x, 0.01, math.inf, False, 0, True, -1)
    decoded = cpu.eb_decode(meta, payload, x.numel(), torch.float32, False)
    connection.send([bytes(t.view(torch.uint8).numpy()) for t in (meta, payload, decoded)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork() -> None:
    x = torch.randn(400_000)
    meta, payload = cpu.eb_encode(x, 0.01, math.inf, False, 0, True, -1)  # the parent's threads are running
    decoded = cpu.eb_decode(meta, payload, x.numel(), torch.float32, False)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=encode_in_child, args=(there, x))
    child.start()
    answered = here.poll(60)
    theirs = here.recv() if answered else None
    child.join(10)
    child.kill()
    assert theirs is not None, "the child hangs"
    assert theirs == [bytes(t.view(torch.uint8).numpy()) for t in (meta, payload, decoded)]
