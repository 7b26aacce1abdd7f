"""Plans have the same methods, with the same results, in all backends."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import Backend, GroupFormat, dispatched, reference

BACKENDS: dict[str, Backend] = {"reference": reference, "operators": dispatched}
for _module in ("cpu", "gpu"):
    BACKENDS[_module] = pytest.importorskip(f"encke.kernels.{_module}", reason="needs numba and triton")
DEVICES = {"gpu": "cuda" if torch.cuda.is_available() else "cpu"}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> tuple[Backend, str]:
    return BACKENDS[request.param], DEVICES.get(request.param, "cpu")


@pytest.mark.parametrize("last", [False, True])
def test_memory_is_read_and_written_as_it_lies(backend: tuple[Backend, str], last: bool) -> None:
    kernels, device = backend
    x = torch.randn(4, 8, 16, 9, generator=torch.Generator().manual_seed(1)).relu().to(device)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    format = GroupFormat(4, 128, x.dtype, 8 if last else 1)
    flat = x.as_strided((x.numel(),), (1,))
    plain = reference.group_plan(format, x.numel(), x.device)
    plan = kernels.group_plan(format, x.numel(), x.device)
    data, expected = plan.encode(flat, 5), plain.decode(plain.encode(flat, 5), 5)
    assert plan.nbytes == data.numel() == format.nbytes(x.numel())
    assert torch.equal(plan.decode(data, 5), expected)
    restored = plan.decode_strided(data, 5, x.shape, x.stride())
    assert restored.stride() == x.stride() and torch.equal(restored, expected.as_strided(x.shape, x.stride()))
    into, out, mask, gated = torch.empty_like(data), torch.empty_like(x), torch.empty_like(x, dtype=torch.bool), x + 1
    if kernels is not dispatched:  # operators take flat tensors
        plan.encode_into(x, 5, into)
        assert torch.equal(into, data)
    plan.decode_into(data, 5, out)
    plan.mask_into(data, mask)
    assert torch.equal(out, restored) and torch.equal(mask, x != 0)
    assert torch.equal(plan.mask(data), flat != 0)
    grad = torch.randn_like(x)
    plan.gate_into(data, grad, gated)
    assert torch.equal(gated, grad * (x != 0)) and torch.equal(plan.gate(data, grad), gated)


def test_nothing_is_encoded_to_nothing(backend: tuple[Backend, str]) -> None:
    kernels, device = backend
    plan = kernels.group_plan(GroupFormat(2, 128, torch.float32), 0, torch.device(device))
    data = plan.encode(torch.empty(0, device=device), 1)
    assert data.numel() == plan.decode(data, 1).numel() == plan.mask(data).numel() == 0


def test_plans_are_cached() -> None:
    format = GroupFormat(2, 128, torch.float32)
    for kernels in (reference, BACKENDS["cpu"], BACKENDS["gpu"]):
        plan = kernels.group_plan(format, 640, torch.device("cpu"))
        assert kernels.group_plan(GroupFormat(2, 128, torch.float32), 640, torch.device("cpu")) is plan


def test_without_kernels_for_it_the_forward_is_not_fused() -> None:
    plan = reference.group_plan(GroupFormat(2, 128, torch.float32), 640, torch.device("cpu"))
    x = torch.randn(640)
    assert not plan.fuses_forward
    for call in (plan.encode_relu, plan.encode_moments):
        with pytest.raises(NotImplementedError, match="fuses_forward"):
            call(x, x, 1)
