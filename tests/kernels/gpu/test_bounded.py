"""The error-bounded kernels against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import BoundedFormat, reference
from encke.kernels.formats import GROUP, HEADER
from tests.kernels.gpu.common import DEVICE, DTYPES, INF, SEED, compile_for_hopper, content, same

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(x: torch.Tensor, bound: float, rel: float, stochastic: bool, bitmap: bool) -> None:
    """Both implementations store the same, and each decodes what the other stored."""
    format = BoundedFormat(bound, rel, stochastic, bitmap, x.dtype)
    mapped = BoundedFormat(bound, rel, stochastic, True, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED, -1)
    gpu_meta, gpu_payload = gpu.bounded_encode(x, format, SEED, -1)
    numel, groups = x.numel(), -(-x.numel() // GROUP)
    expected = reference.bounded_decode(meta, payload, format, numel, False)
    assert meta[:8].view(torch.float64) == gpu_meta[:8].view(torch.float64)
    assert torch.equal(meta[8:16], gpu_meta[8:16])
    assert torch.equal(meta[HEADER + 4 * groups :], gpu_meta[HEADER + 4 * groups :])
    assert len(payload) == len(gpu_payload)
    assert same(reference.bounded_decode(gpu_meta, gpu_payload, format, numel, False), expected)
    assert same(gpu.bounded_decode(meta, payload, format, numel, False), expected)
    assert torch.equal(gpu.bounded_decode(gpu_meta, gpu_payload, mapped, numel, True), expected != 0)


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
def test_every_kind_of_block(dtype, stochastic, bitmap):
    check(content("mixed", 5000, dtype), *((1e-2, INF) if stochastic else (INF, 1e-3)), stochastic, bitmap)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeros", "constant", "denormal", "largest", "outlier"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contents(dtype, name):
    x = content(name, 1025, dtype)
    check(x, 1e-2, INF, stochastic=name == "outlier", bitmap=name in ("constant", "denormal"))
    check(x, *((INF, 1e-2) if name in ("largest", "outlier") else (1e30, INF)), stochastic=False, bitmap=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_bounds(dtype, bound):
    check(content("special", 1000, dtype), bound, INF, False, False)
    check(content("relu", 1000, dtype), bound, INF, True, True)


@pytest.mark.parametrize("numel", [0, 1, 63, 65, 1024])
def test_sizes(numel):
    check(content("relu", numel, torch.float32), 1e-2, INF, False, True)
    check(content("normal", numel, torch.float16), INF, 1e-2, False, False)


def encode_guarded(x: torch.Tensor, bitmap: bool, capacity: int, monkeypatch) -> tuple[torch.Tensor, ...]:
    """Encode with a payload inside a larger buffer: meta, payload, and what lies behind the payload."""
    buffer = torch.full((capacity + 4096,), 77, dtype=torch.uint8, device=DEVICE)
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *s, **k: buffer[:capacity] if s == (capacity,) else empty(*s, **k))
        meta, payload = gpu.bounded_encode(x, BoundedFormat(1e-2, INF, False, bitmap, x.dtype), SEED, capacity)
    return meta, payload, buffer[capacity:]


@pytest.mark.parametrize("bitmap", [False, True])
def test_capacity(monkeypatch, bitmap):
    """Too little space: the size is still counted, something is written, and nothing after the end."""
    x = content("mixed", 5000, torch.float32)
    format = BoundedFormat(1e-2, INF, False, bitmap, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED, -1)
    for capacity in (len(payload) // 8 * 4, len(payload) + 400):
        gpu_meta, gpu_payload, behind = encode_guarded(x, bitmap, capacity, monkeypatch)
        assert len(gpu_payload) == capacity
        assert torch.equal(gpu_meta[8:16], meta[8:16])
        assert bool((behind == 77).all())
        assert bool((gpu_payload != 77).any())
    expected = reference.bounded_decode(meta, payload, format, 5000, False)
    assert same(gpu.bounded_decode(gpu_meta, gpu_payload, format, 5000, False), expected)


def test_groups_in_any_order():
    x = content("mixed", 5000, torch.float32)
    format = BoundedFormat(1e-2, INF, False, True, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED, -1)
    expected = reference.bounded_decode(meta, payload, format, 5000, False)
    moved = meta.clone()
    offsets = moved[HEADER : HEADER + 20].view(torch.int32)
    offsets += 3
    offsets[0] += (len(payload) + 12) // 4
    shifted = torch.cat([payload.new_zeros(12), payload, payload.new_zeros(12), payload])
    assert same(gpu.bounded_decode(moved, shifted, format, 5000, False), expected)


COMPILE = """
from encke.kernels.gpu import decode, encode
dtype, name = TYPES[sys.argv[1]]
pointers = {"meta": "*u8", "payload": "*u8", "scratch": "*u8", "x": name, "out": name}
common = {"DTYPE": dtype, "G": 1}
build(encode.range_kernel, pointers, {"DTYPE": dtype, "SIZE": 16384})
# Denormal values are not zero.
assert "cvt.rpi.ftz" not in build(
    encode.encode_kernel, pointers, common | {"RELATIVE": False, "STOCHASTIC": False, "BITMAP": False}
)
build(encode.encode_kernel, pointers, common | {"RELATIVE": True, "STOCHASTIC": True, "BITMAP": True})
build(decode.decode_kernel, pointers, common | {"MASK": False})
build(decode.decode_maps_kernel, pointers | {"out": "*u8"}, common | {"MASK": True, "TILES": 4})
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_compiles_for_hopper(dtype):
    compile_for_hopper(COMPILE, dtype)
