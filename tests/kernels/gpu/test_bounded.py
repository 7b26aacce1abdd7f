"""The error-bounded kernels against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import BoundedFormat, reference
from encke.kernels.formats import DITHERED, NEAREST, PLANE_GROUP, PLANE_HEADER, SIGNED, STOCHASTIC
from tests.kernels.gpu.common import COMPILED_DTYPES, DEVICE, DTYPES, INF, SEED, compile_for_hopper, content, same

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
bounded, launch = (pytest.importorskip(f"encke.kernels.gpu.{name}") for name in ("bounded", "launch"))
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def check(x: torch.Tensor, bound: float, rel: float, rounding: int, seed: int = SEED) -> None:
    """Both implementations store the same, and each decodes what the other stored."""
    format = BoundedFormat(bound, rel, rounding, x.dtype)
    meta, payload = reference.bounded_encode(x, format, seed)
    gpu_meta, gpu_payload = gpu.bounded_encode(x, format, seed)
    numel, groups = x.numel(), -(-x.numel() // PLANE_GROUP)
    expected, mask = (reference.bounded_decode(meta, payload, format, numel, flag) for flag in (False, True))
    for part in (slice(PLANE_HEADER), slice(PLANE_HEADER + 4 * groups, None)):
        assert torch.equal(meta[part], gpu_meta[part]), part
    assert len(payload) == len(gpu_payload)
    assert same(reference.bounded_decode(gpu_meta, gpu_payload, format, numel, False), expected)
    assert same(gpu.bounded_decode(meta, payload, format, numel, False), expected)
    assert torch.equal(gpu.bounded_decode(gpu_meta, gpu_payload, format, numel, True), mask)
    grad = torch.linspace(-2, 2, numel).to(x)
    assert same(gpu.bounded_gate(gpu_meta, gpu_payload, format, grad), torch.where(mask, grad, 0))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", [NEAREST, STOCHASTIC, DITHERED, SIGNED])
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
    for rounding in (NEAREST, STOCHASTIC, DITHERED, SIGNED):
        check(content("special", 1000, dtype), bound, INF, rounding)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.soak)])
@pytest.mark.parametrize("rounding", [NEAREST, DITHERED, SIGNED])
def test_numbers_of_more_than_a_byte(dtype, rounding):
    """More than eight low bits, quotients above 255, and the largest levels that there are."""
    many, few = content("normal", 300, dtype) * 300, content("relu", 700, dtype) + 0.1
    few[5::256] = 1330.0
    largest = torch.tensor([9000.0, -9000.0], dtype=dtype, device=DEVICE).repeat(140)
    check(torch.cat([many, few, largest]), 1e-2, INF, rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_below_the_bound(dtype):
    for rounding in (STOCHASTIC, DITHERED, SIGNED):
        check(content("normal", 1500, dtype), 0.7, INF, rounding)


def test_the_smallest_random_number():
    """With this seed the first values have it: what rounding compares it with is next to it."""
    half = 1.0 - 2.0**-15  # of a step
    x = torch.tensor([2.0**-23 * half, 2.0**-24 * half, -(2.0**-23) * half, 1.0], device=DEVICE).repeat_interleave(16)
    for rounding in (STOCHASTIC, DITHERED, SIGNED):
        check(x, 1.0, INF, rounding, 0)


@pytest.mark.parametrize("numel", [0, 1, 63, 65, 4097])
def test_sizes(numel):
    check(content("relu", numel, torch.float32), 1e-2, INF, NEAREST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zeros", [0, 1, 256])
def test_whole_groups(dtype, zeros):
    """Groups with all values and no zeros take other ways than those with gaps, even of one value."""
    x = content("normal", PLANE_GROUP, dtype)
    x[512 : 512 + zeros] = 0.0
    check(x, 1e-2, INF, NEAREST)


def test_range_of_values_of_one_sign_and_of_values_that_are_not_finite():
    """The range is that of the finite values: zero is not among them, nor what lies behind the last."""
    x = content("normal", 300, torch.float32).abs() + 5.0
    for values in (x, -x, torch.cat([x, -x])):
        for special in ([], [INF, -INF, float("nan")]):
            check(torch.cat([values, values.new_tensor(special)]), INF, 1e-2, NEAREST)


def encode_guarded(
    x: torch.Tensor, format: BoundedFormat, capacity: int, factors: tuple[float, ...], monkeypatch
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Encode into a payload inside of a larger buffer, and see that nothing is written behind it."""
    buffer = torch.full((capacity + 4096,), 77, dtype=torch.uint8, device=DEVICE)
    empty, sizes = torch.empty, torch.zeros(8, dtype=torch.int64, device=DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *s, **k: buffer[:capacity] if s == (capacity,) else empty(*s, **k))
        meta, payload = gpu.bounded_encode_within(x, format, SEED, capacity, sizes, factors)
    assert bool((buffer[capacity:] == 77).all()) and len(payload) == capacity
    return meta, payload, sizes[:4].tolist()


@pytest.mark.slow
def test_too_small_a_capacity_is_counted_and_what_is_missing_decodes_to_nan(monkeypatch):
    x = content("blocks", 5000, torch.float32)
    format = BoundedFormat(1e-2, INF, NEAREST, x.dtype)
    expected = reference.bounded_encode(x, format, SEED)
    needed = len(expected[1])
    for capacity in (needed - 4, needed + 400):
        meta, payload, sizes = encode_guarded(x, format, capacity, (1.0,), monkeypatch)
        assert sizes == [needed // 4, 0, 0, 0] and bool((payload != 77).any())
        decoded, mask = (gpu.bounded_decode(meta, payload, format, 5000, flag) for flag in (False, True))
        right = reference.bounded_decode(*expected, format, 5000, False)
        # Groups are written whole or not at all.
        parts = [(decoded[a:b], mask[a:b], right[a:b]) for a, b in ((0, 4096), (4096, 5000))]
        lost = [bool(values.isnan().all()) and not bool(flags.any()) for values, flags, _ in parts]
        assert sum(lost) == (capacity < needed)
        for missing, (values, flags, same_values) in zip(lost, parts, strict=True):
            assert missing or (same(values, same_values) and torch.equal(flags, same_values != 0))


@pytest.mark.slow
@pytest.mark.parametrize("relative", [False, True])
def test_values_are_encoded_again_with_a_coarser_bound_until_they_fit(relative, monkeypatch):
    x = content("blocks", 2500, torch.float32)
    bounds = (INF, 1e-3) if relative else (1e-3, INF)
    formats = [BoundedFormat(*(bound * factor for bound in bounds), NEAREST, x.dtype) for factor in (1, 4, 64)]
    expected = [reference.bounded_encode(x, format, SEED) for format in formats]
    needed = [len(payload) for _, payload in expected]
    assert needed[0] > needed[1] > needed[2]
    for capacity, taken in ((needed[0] - 4, 1), (needed[1] - 4, 2)):
        meta, payload, sizes = encode_guarded(x, formats[0], capacity, (1.0, 4.0, 64.0), monkeypatch)
        assert sizes == [size // 4 for size in needed[: taken + 1]] + [0] * (3 - taken)
        # The bound stands in the metadata: whoever decodes needs not know.
        decoded = gpu.bounded_decode(meta, payload, formats[0], 2500, False)
        assert same(decoded, reference.bounded_decode(*expected[taken], formats[taken], 2500, False))


def test_later_attempts_touch_nothing_if_the_first_had_enough_space():
    x = content("blocks", 2500, torch.float32)
    format = BoundedFormat(1e-3, INF, NEAREST, x.dtype)
    capacity = len(reference.bounded_encode(x, format, SEED)[1])
    sizes = torch.zeros(8, dtype=torch.int64, device=DEVICE)
    meta, payload = gpu.bounded_encode_within(x, format, SEED, capacity, sizes)
    before = [t.clone() for t in (meta, payload, sizes)]
    # What a later attempt would encode is another tensor: it would show.
    tensors, constants = (x + 1, meta, payload, sizes), (launch.TYPES[x.dtype], False, NEAREST)
    for attempt in (1, 2):
        numbers = (2500, capacity, attempt, 1e-3 * 4**attempt, INF, 0, 0)
        launch.launch_kernel(bounded.encode_kernel, 1, tensors, numbers, constants, bounded.WARPS, specialised=1)
    assert all(map(torch.equal, before, (meta, payload, sizes)))


def test_groups_in_any_order():
    x = content("blocks", 5000, torch.float32)
    format = BoundedFormat(1e-2, INF, NEAREST, x.dtype)
    meta, payload = reference.bounded_encode(x, format, SEED)
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
pointers = {"meta": "*u8", "payload": "*u8", "sizes": "*i64", "x": name, "out": name, "grad": name}
for rounding in (0, 1, 2, 3):
    build(planes_encode.encode_kernel, pointers, {"DTYPE": dtype, "RELATIVE": rounding == 2, "ROUNDING": rounding})
build(planes_encode.range_kernel, pointers, {"DTYPE": dtype, "SIZE": 16384})
usual = {"DTYPE": dtype, "MASK": False, "GATE": False, "ROUNDING": 0}
build(planes_decode.decode_kernel, pointers, usual)
for rounding in (2, 3):
    build(planes_decode.decode_kernel, pointers, usual | {"ROUNDING": rounding})
build(planes_decode.decode_kernel, pointers, usual | {"GATE": True})
build(planes_decode.decode_kernel, pointers | {"out": "*u8", "grad": "*u8"}, usual | {"MASK": True})
"""


@pytest.mark.soak
@pytest.mark.parametrize("dtype", COMPILED_DTYPES)
def test_compiles_for_hopper(dtype):
    compile_for_hopper(COMPILE, dtype)
