"""The error-bounded kernels against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import BoundedFormat, reference
from encke.kernels.formats import DITHERED, NEAREST, PLANE_GROUP, PLANE_HEADER, STOCHASTIC
from tests.kernels.gpu.common import COMPILED_DTYPES, DEVICE, DTYPES, INF, SEED, compile_for_hopper, content, same

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(x: torch.Tensor, bound: float, rel: float, rounding: int) -> None:
    """Both implementations store the same, and each decodes what the other stored."""
    format = BoundedFormat(bound, rel, rounding, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED, -1)
    gpu_meta, gpu_payload = gpu.bounded_encode(x, format, SEED, -1)
    numel, groups = x.numel(), -(-x.numel() // PLANE_GROUP)
    expected, mask = (reference.bounded_decode(meta, payload, format, numel, flag) for flag in (False, True))
    for part in (slice(0, 16), slice(32, PLANE_HEADER) if numel else slice(0), slice(PLANE_HEADER + 4 * groups, None)):
        assert torch.equal(meta[part], gpu_meta[part]), part
    assert len(payload) == len(gpu_payload)
    assert same(reference.bounded_decode(gpu_meta, gpu_payload, format, numel, False), expected)
    assert same(gpu.bounded_decode(meta, payload, format, numel, False), expected)
    assert torch.equal(gpu.bounded_decode(gpu_meta, gpu_payload, format, numel, True), mask)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [NEAREST, STOCHASTIC, DITHERED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_block(dtype, rounding):
    check(content("blocks", 5500, dtype), *((INF, 1e-3) if rounding == STOCHASTIC else (1e-2, INF)), rounding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeros", "constant", "denormal", "largest", "outlier"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contents(dtype, name):
    x = content(name, 1025, dtype)
    check(x, 1e-2, INF, STOCHASTIC if name == "outlier" else DITHERED)
    check(x, *((INF, 1e-2) if name in ("largest", "outlier") else (1e30, INF)), NEAREST)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bound", [0.0, 0.3])
def test_bounds(dtype, bound):
    for rounding in (NEAREST, STOCHASTIC, DITHERED):
        check(content("special", 1000, dtype), bound, INF, rounding)


@pytest.mark.parametrize("numel", [0, 1, 63, 65, 4097])
def test_sizes(numel):
    check(content("relu", numel, torch.float32), 1e-2, INF, NEAREST)


def encode_guarded(x: torch.Tensor, format: BoundedFormat, capacity: int, monkeypatch) -> tuple[torch.Tensor, ...]:
    """Encode with a payload inside a larger buffer: meta, payload, and what lies behind the payload."""
    buffer = torch.full((capacity + 4096,), 77, dtype=torch.uint8, device=DEVICE)
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *s, **k: buffer[:capacity] if s == (capacity,) else empty(*s, **k))
        meta, payload = gpu.bounded_encode(x, format, SEED, capacity)
    return meta, payload, buffer[capacity:]


def test_capacity(monkeypatch):
    """Too little space: the size is still counted, something is written, and nothing after the end."""
    x = content("blocks", 5000, torch.float32)
    format = BoundedFormat(1e-2, INF, NEAREST, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED, -1)
    for capacity in (len(payload) - 4, len(payload) + 400):
        gpu_meta, gpu_payload, behind = encode_guarded(x, format, capacity, monkeypatch)
        assert len(gpu_payload) == capacity
        assert torch.equal(gpu_meta[8:16], meta[8:16])
        assert bool((behind == 77).all())
        assert bool((gpu_payload != 77).any())
    expected = reference.bounded_decode(meta, payload, format, 5000, False)
    assert same(gpu.bounded_decode(gpu_meta, gpu_payload, format, 5000, False), expected)


def test_groups_in_any_order():
    x = content("blocks", 5000, torch.float32)
    format = BoundedFormat(1e-2, INF, NEAREST, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED, -1)
    expected = reference.bounded_decode(meta, payload, format, 5000, False)
    moved = meta.clone()
    offsets = moved[PLANE_HEADER : PLANE_HEADER + 8].view(torch.int32)
    offsets += 3
    offsets[0] += (len(payload) + 12) // 4
    shifted = torch.cat([payload.new_zeros(12), payload, payload.new_zeros(12), payload])
    assert same(gpu.bounded_decode(moved, shifted, format, 5000, False), expected)


COMPILE = """
from encke.kernels.gpu import planes_decode, planes_encode
dtype, name = TYPES[sys.argv[1]]
pointers = {"meta": "*u8", "payload": "*u8", "x": name, "out": name}
for rounding in (0, 1, 2):
    build(planes_encode.encode_kernel, pointers, {"DTYPE": dtype, "RELATIVE": rounding == 2, "ROUNDING": rounding})
build(planes_encode.range_kernel, pointers, {"DTYPE": dtype, "SIZE": 16384})
for dithered in (False, True):
    build(planes_decode.decode_kernel, pointers, {"DTYPE": dtype, "MASK": False, "DITHERED": dithered})
build(planes_decode.decode_kernel, pointers | {"out": "*u8"}, {"DTYPE": dtype, "MASK": True, "DITHERED": False})
"""


@pytest.mark.soak
@pytest.mark.parametrize("dtype", COMPILED_DTYPES)
def test_compiles_for_hopper(dtype):
    compile_for_hopper(COMPILE, dtype)
