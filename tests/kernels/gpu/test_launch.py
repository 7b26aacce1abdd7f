"""The Triton kernels against the reference: on a GPU where there is one, otherwise through Triton's interpreter."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when launch.py is imported

from encke.codecs.base import mix  # noqa: E402
from encke.kernels import reference
from encke.kernels.gpu import launch  # noqa: E402
from encke.kernels.reference import GROUP, HEADER  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROOT = Path(__file__).resolve().parents[3]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
SEED = 0x9E3779B97F4A7C15 >> 1
# The interpreter is slow: the quick tests take the two most used dtypes.
DTYPES = [
    torch.bfloat16,
    torch.float32,
    pytest.param(torch.float16, marks=pytest.mark.slow),
    pytest.param(torch.float64, marks=pytest.mark.slow),
]


def content(name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    if name == "mixed":  # another content in each group: every base kind, bitmaps, raw blocks
        parts = ("relu", "normal", "far", "sparse", "special")
        sizes = [min(GROUP, numel - i * GROUP) for i in range(-(-numel // GROUP))]
        return torch.cat([content(part, size, dtype) for part, size in zip(parts, sizes, strict=True)])
    if name in ("special", "outlier") and numel:
        x[numel // 3] = 3e38 if dtype != torch.float16 else 6e4
        if name == "special":
            x[::97], x[5::301], x[6::300], x[::7] = float("nan"), INF, -INF, -0.0
    else:
        x = {
            "normal": x,
            "relu": x.relu(),
            "zeros": x * 0.0,
            "constant": x * 0.0 + 3.0,
            "far": x + (1e4 if dtype == torch.float16 else 1e5),
            "sparse": torch.where(x > 1.3, x, 0.0),
            "denormal": x * {torch.float16: 1e-6, torch.float64: 1e-310}.get(dtype, 1e-41),
            "largest": x.sign() * torch.finfo(dtype).max,
        }[name]
    return x.to(dtype).to(DEVICE)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check_eb(x: torch.Tensor, bound: float, rel: float, stochastic: bool, bitmap: bool) -> None:
    """Both implementations store the same, and each decodes what the other stored."""
    args = (x, bound, rel, stochastic, SEED, bitmap, -1)
    (meta, payload), (gpu_meta, gpu_payload) = reference.eb_encode(*args), launch.eb_encode(*args)
    numel, groups = x.numel(), -(-x.numel() // GROUP)
    expected = reference.eb_decode(meta, payload, numel, x.dtype, False)
    assert meta[:8].view(torch.float64) == gpu_meta[:8].view(torch.float64)
    assert torch.equal(meta[8:16], gpu_meta[8:16])
    assert torch.equal(meta[HEADER + 4 * groups :], gpu_meta[HEADER + 4 * groups :])
    assert len(payload) == len(gpu_payload)
    assert same(reference.eb_decode(gpu_meta, gpu_payload, numel, x.dtype, False), expected)
    assert same(launch.eb_decode(meta, payload, numel, x.dtype, False), expected)
    assert torch.equal(launch.eb_decode(gpu_meta, gpu_payload, numel, x.dtype, True), expected != 0)


@pytest.mark.slow
@pytest.mark.parametrize("bitmap", [False, True])
@pytest.mark.parametrize(
    "dtype,stochastic",
    [
        (torch.float32, False),
        (torch.float32, True),
        (torch.bfloat16, False),
        (torch.float16, True),
        (torch.float64, True),
    ],
)
def test_eb_every_kind_of_block(dtype, stochastic, bitmap):
    check_eb(content("mixed", 5000, dtype), *((1e-2, INF) if stochastic else (INF, 1e-3)), stochastic, bitmap)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeros", "constant", "denormal", "largest", "outlier"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_eb_contents(dtype, name):
    x = content(name, 1025, dtype)
    check_eb(x, 1e-2, INF, stochastic=name == "outlier", bitmap=name in ("constant", "denormal"))
    check_eb(x, *((INF, 1e-2) if name in ("largest", "outlier") else (1e30, INF)), stochastic=False, bitmap=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_eb_bounds(dtype, bound):
    check_eb(content("special", 1000, dtype), bound, INF, False, False)
    check_eb(content("relu", 1000, dtype), bound, INF, True, True)


@pytest.mark.parametrize("numel", [0, 1, 63, 65, 1024])
def test_eb_sizes(numel):
    check_eb(content("relu", numel, torch.float32), 1e-2, INF, False, True)
    check_eb(content("normal", numel, torch.float16), INF, 1e-2, False, False)


def encode_guarded(x: torch.Tensor, bitmap: bool, capacity: int, monkeypatch) -> tuple[torch.Tensor, ...]:
    """eb_encode with a payload inside a larger buffer: meta, payload, and what lies behind the payload."""
    buffer = torch.full((capacity + 4096,), 77, dtype=torch.uint8, device=DEVICE)
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *s, **k: buffer[:capacity] if s == (capacity,) else empty(*s, **k))
        meta, payload = launch.eb_encode(x, 1e-2, INF, False, SEED, bitmap, capacity)
    return meta, payload, buffer[capacity:]


@pytest.mark.parametrize("bitmap", [False, True])
def test_eb_capacity(monkeypatch, bitmap):
    """Too little space: the size is still counted, something is written, and nothing after the end."""
    x = content("mixed", 5000, torch.float32)
    meta, payload = reference.eb_encode(x, 1e-2, INF, False, SEED, bitmap, -1)
    for capacity in (len(payload) // 8 * 4, len(payload) + 400):
        gpu_meta, gpu_payload, behind = encode_guarded(x, bitmap, capacity, monkeypatch)
        assert len(gpu_payload) == capacity
        assert torch.equal(gpu_meta[8:16], meta[8:16])
        assert bool((behind == 77).all())
        assert bool((gpu_payload != 77).any())
    expected = reference.eb_decode(meta, payload, 5000, torch.float32, False)
    assert same(launch.eb_decode(gpu_meta, gpu_payload, 5000, torch.float32, False), expected)


def test_eb_groups_in_any_order():
    x = content("mixed", 5000, torch.float32)
    meta, payload = reference.eb_encode(x, 1e-2, INF, False, SEED, True, -1)
    expected = reference.eb_decode(meta, payload, 5000, torch.float32, False)
    moved = meta.clone()
    offsets = moved[HEADER : HEADER + 20].view(torch.int32)
    offsets += 3
    offsets[0] += (len(payload) + 12) // 4
    shifted = torch.cat([payload.new_zeros(12), payload, payload.new_zeros(12), payload])
    assert same(launch.eb_decode(moved, shifted, 5000, torch.float32, False), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "signs"), [(2, False), (4, False), (8, False), (4, True), (8, True)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gq(dtype, bits, signs):
    rest = (SEED, 1, signs)
    sizes = {"normal": 5000, "relu": 5000, "special": 1000, "largest": 300, "denormal": 300, "far": 1}
    for name, numel in sizes.items():
        x = content(name, numel, dtype)
        data, gpu_data = reference.gq_encode(x, bits, 256, *rest), launch.gq_encode(x, bits, 256, *rest)
        expected = reference.gq_decode(data, numel, bits, 256, dtype, False, *rest)
        if name not in ("special", "largest"):  # codes of a group that decodes to NaN do not matter
            assert torch.equal(data, gpu_data)
        for kept in (data, gpu_data):
            decoded = launch.gq_decode(kept, numel, bits, 256, dtype, False, *rest)
            assert torch.equal(decoded.isnan(), expected.isnan())
            assert torch.equal(decoded.nan_to_num(0.0), expected.nan_to_num(0.0))
            flags = reference.gq_decode(data, numel, bits, 256, dtype, True, *rest)
            assert torch.equal(launch.gq_decode(kept, numel, bits, 256, dtype, True, *rest), flags)


@pytest.mark.parametrize(("bits", "signs", "group", "channels"), [
    (2, False, 128, 1), (4, True, 128, 1), (8, False, 256, 1), (2, False, 200, 1), (2, False, 128, 24),
    (4, False, 128, 7),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gq_gate(dtype, bits, signs, group, channels):
    """The gradient where the packed values are not zero."""
    numel = 5000 // channels * channels
    x, gradient = content("relu", numel, dtype), content("special", numel, dtype)
    x[:10] = float("nan")
    data = reference.gq_encode(x, bits, group, SEED, channels, signs)
    mask = reference.gq_decode(data, numel, bits, group, dtype, True, SEED, channels, signs)
    assert mask[:10].all() and not mask.all()
    gated = launch.gq_gate(data, gradient, bits, group, channels, signs)
    assert same(gated, torch.where(mask, gradient, 0))


@pytest.mark.parametrize("group", [128, 512, 200])
def test_gq_groups(group):
    x = content("normal", 3000, torch.float32)
    data = launch.gq_encode(x, 4, group, SEED)
    assert torch.equal(data, reference.gq_encode(x, 4, group, SEED))
    args = (data, 3000, 4, group, x.dtype, False, SEED)
    assert same(launch.gq_decode(*args), reference.gq_decode(*args))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("pixels", "channels"), [(300, 7), (256, 16), (1, 40), (513, 3), (300, 66)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gq_groups_of_a_channel(dtype, pixels, channels, bits):
    x = content("normal", pixels * channels, dtype)
    x[: channels * 2] = x[: channels * 2].relu()
    data = launch.gq_encode(x, bits, 256, SEED, channels)
    assert torch.equal(data, reference.gq_encode(x, bits, 256, SEED, channels))
    for mask in (False, True):
        args = (data, x.numel(), bits, 256, x.dtype, mask, SEED, channels)
        assert torch.equal(launch.gq_decode(*args), reference.gq_decode(*args))


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("numel", [0, 1, 63, 1000, 5003])
def test_bits(bits, numel):
    x = torch.randint(0, 1 << bits, (numel,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    data = launch.bits_encode(x, bits)
    assert torch.equal(data, reference.bits_encode(x, bits))
    assert torch.equal(launch.bits_decode(data, bits, numel), x)
    if bits == 1:
        assert torch.equal(launch.bits_encode(x.bool(), 1), data)


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 0.1), (torch.float16, 0.08), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("numel", [0, 1, 4096, 5003])
def test_log_probabilities(numel, dtype, far):
    x = (-torch.rand(numel, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 27).to(dtype)
    x[::97], x[5::301] = float("nan"), -INF
    data = launch.lp_encode(x, 0.1, far, SEED)
    assert torch.equal(data, reference.lp_encode(x, 0.1, far, SEED))
    values, expected = (kernels.lp_decode(data, 0.1, far, 1e-3, SEED, dtype) for kernels in (launch, reference))
    assert torch.equal(values.isnan(), x.isnan())
    assert same(values.nan_to_num(0.0), expected.nan_to_num(0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 24])
def test_seeds_on_the_device_are_those_given_as_numbers(dtype, stride):
    numel = 24 * 300
    x = torch.randn(numel, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
    seeds = torch.tensor([7, SEED, -SEED], device=DEVICE)
    given, read = (launch.gq_plan(numel, 2, 128, dtype, stride, False, x.device, table) for table in (False, True))
    data = given.codes(x, SEED)
    assert torch.equal(read.codes(x, (seeds, 1)), data) and not torch.equal(read.codes(x, (seeds, 2)), data)
    assert same(read.values(data, (seeds, 1), False), given.values(data, SEED, False))
    assert same(read.values(data, (seeds, 2), False), given.values(data, -SEED, False))
    if given.statistics is not None:
        parts = [torch.zeros(2 * 3 * 24, device=DEVICE) for _ in range(2)]
        encoded = given.encode_beside(given.statistics, x, parts[0], SEED)
        assert torch.equal(read.encode_beside(read.statistics, x, parts[1], (seeds, 1)), encoded)
        assert torch.equal(*parts)


@pytest.mark.parametrize("count", [0, 1, 128, 301])
def test_seeds_of_sites(count):
    chance = random.Random(count)
    sites, salts = ([chance.randrange(-(1 << 63), 1 << 63) for _ in range(count)] for _ in range(2))
    for step, rank in ((0, 0), (1, 0), (1 << 40, 12), (-3, 1023)):
        found = launch.site_seeds(
            *(torch.tensor(v, dtype=torch.int64, device=DEVICE) for v in (sites, salts)), step, rank
        )
        assert found.tolist() == [mix(b, mix(step, a, rank)) for a, b in zip(sites, salts, strict=True)]


COMPILE = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from encke.kernels.gpu import decode
from encke.kernels.gpu import encode
from encke.kernels.gpu import pairs
from encke.kernels.gpu import rate

def build(kernel, pointers, constants):
    types = {p.name: pointers.get(p.name, p.annotation_type) for p in kernel.params}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

dtype, name = {
    "float32": (tl.float32, "*fp32"), "float64": (tl.float64, "*fp64"),
    "float16": (tl.float16, "*fp16"), "bfloat16": (tl.bfloat16, "*i16"),
}[sys.argv[1]]
pointers = {"meta": "*u8", "payload": "*u8", "scratch": "*u8", "data": "*u8", "x": name, "out": name}
flags, half = pointers | {"out": "*u8"}, dtype in (tl.float16, tl.bfloat16)
common = {"DTYPE": dtype, "G": 1}
build(encode.range_kernel, pointers, {"DTYPE": dtype, "SIZE": 16384})
# Denormal values are not zero.
assert "cvt.rpi.ftz" not in build(
    encode.encode_kernel, pointers, common | {"RELATIVE": False, "STOCHASTIC": False, "BITMAP": False}
)
build(encode.encode_kernel, pointers, common | {"RELATIVE": True, "STOCHASTIC": True, "BITMAP": True})
build(decode.decode_kernel, pointers, common | {"MASK": False})
build(decode.decode_maps_kernel, flags, common | {"MASK": True, "TILES": 4})
pointers["seeds"] = flags["seeds"] = "*i64"
for bits, signs, table in ((2, False, False), (4, True, True)):
    seeded = {"TABLE": table}
    rated = {"DTYPE": dtype, "BITS": bits, "GROUP": 128, "SIGNS": signs}
    rows, channels = rated | {"ROWS": 16, "LANES": 8 if half else 4}, rated | {"CHANNELS": 16}
    build(rate.gq_encode_kernel, pointers, rows | seeded)
    build(rate.gq_decode_kernel, pointers, rows | {"MASK": False} | seeded)
    build(rate.gq_decode_kernel, flags, rows | {"MASK": True} | seeded)
    build(rate.gq_gate_kernel, pointers, rows)
    build(rate.gq_encode_channels_kernel, pointers, channels | seeded)
    build(rate.gq_decode_channels_kernel, pointers, channels | {"BYTES": 8, "MASK": False} | seeded)
    build(rate.gq_gate_channels_kernel, pointers, channels | {"BYTES": 8})
    if half:
        build(pairs.gq_encode_pairs_kernel, pointers, rated | {"ROWS": 16, "THREADS": 2} | seeded)
if dtype == tl.float32:
    build(rate.seeds_kernel, dict.fromkeys(("sites", "salts", "seeds"), "*i64"), {"SIZE": 128})
if dtype != tl.float64:
    build(rate.lp_encode_kernel, pointers, {"DTYPE": dtype, "SIZE": 4096})
    build(rate.lp_decode_kernel, pointers, {"DTYPE": dtype, "SIZE": 4096})
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_compiles_for_hopper(dtype):
    """The interpreter takes what the compiler refuses; no GPU is needed to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
