"""Payloads in a predicted capacity. Without a GPU its kernels are stood in for: Triton's interpreter is too slow."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, GroupQuant, base, pending
from encke.codecs.base import WAITS, EncoderState
from encke.codecs.layout import flatten
from encke.codecs.pending import PendingPacked
from encke.kernels import BoundedFormat, backend_for
from encke.policies import Fixed
from tests.kernels.gpu.common import DEVICE, INF, same

N = 65536
NAN = float("nan")
BOUND = 0.05


class Kernels:
    """Functions of the GPU's kernels, by those of the CPU (tests/kernels/gpu/test_bounded.py compares them)."""

    cpu = backend_for("cpu")
    bounded_encode, bounded_decode = staticmethod(cpu.bounded_encode), staticmethod(cpu.bounded_decode)

    @classmethod
    def bounded_encode_within(
        cls, x: Tensor, format: BoundedFormat, seed: int, capacity: int, sizes: Tensor, factors: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        for attempt, factor in enumerate(factors):
            coarser = BoundedFormat(format.bound * factor, format.relative * factor, format.rounding, format.dtype)
            meta, payload = cls.cpu.bounded_encode(x, coarser, seed)
            sizes[attempt] = payload.numel() // 4
            if payload.numel() <= capacity:
                return meta, torch.cat([payload, payload.new_zeros(capacity - payload.numel())])
        return meta, payload[:capacity].clone()


class Snapshot:
    """A `Transfer` without a GPU: the words as they are when they are sent."""

    waits = 0

    def __init__(self, words: Tensor) -> None:
        self.words = words.clone()

    def wait(self) -> list[list[int]]:
        Snapshot.waits += 1
        return self.words.tolist()


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":
        monkeypatch.setattr(pending, "operations", lambda flat: Kernels)
        monkeypatch.setattr(pending, "Transfer", Snapshot)
    yield
    pending._open.clear()


def noise(scale: float = 1.0, seed: int = 0) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * scale


def known(codec: ErrorBounded, x: Tensor) -> EncoderState:
    """Return the state of an encoder that knows the size of such payloads."""
    state, packed = EncoderState(lambda: "3:Convolution.input"), encode(codec, x, EncoderState())
    for _ in range(WAITS):
        state.learn(packed.format, packed.buffers[1].numel(), x.nbytes)
    return state


def encode(codec: ErrorBounded, x: Tensor, state: EncoderState) -> Any:
    packed = codec.encode_flat(*flatten(x), 0, state)
    assert isinstance(packed, PendingPacked)
    return packed


def test_the_first_payloads_are_waited_for_and_the_others_get_a_capacity() -> None:
    codec, state, x = ErrorBounded(BOUND), EncoderState(), noise()
    packed = [encode(codec, x, state) for _ in range(WAITS + 1)]
    assert [each.row is None for each in packed] == [True] * WAITS + [False]
    needed, capacity = (each.buffers[1].numel() for each in packed[-2:])
    assert needed * 9 / 8 <= capacity - base.SLACK + 512 < needed * 9 / 8 + 1024
    assert packed[-1].nbytes == packed[-1].buffers[0].numel() + capacity
    assert same(packed[-1].decode(), packed[0].decode())
    # With another bound nothing is known.
    assert encode(ErrorBounded(BOUND / 2), x, state).row is None


def test_nothing_of_the_source_is_kept() -> None:
    codec, x = ErrorBounded(BOUND), noise()
    state, copy = known(codec, x), x.clone()
    waits, source = Snapshot.waits, weakref.ref(copy.untyped_storage())
    packed = encode(codec, copy, state)
    del copy
    assert source() is None and Snapshot.waits == waits
    assert (packed.decode() - x).abs().max() <= BOUND


def test_a_bound_of_the_users_holds_or_reading_raises() -> None:
    codec = ErrorBounded(BOUND)
    state = known(codec, noise())
    packed = encode(codec, noise(30), state)
    with pytest.raises(RuntimeError, match=r"3:Convolution\.input took .* predicted for ErrorBounded\(bound=0.05"):
        packed.decode()
    with pytest.raises(RuntimeError, match="run this step again"):
        packed.decode_flat(mask=True)
    again = encode(codec, noise(30), state)
    assert again.row is not None and (again.decode() - noise(30)).abs().max() <= BOUND
    assert not state.coarsened


@pytest.mark.parametrize(("scale", "factor"), [(4, 4), (100, 64)])
def test_a_bound_of_a_policys_is_coarsened(scale: float, factor: int) -> None:
    codec = ErrorBounded(BOUND, coarsens=True)
    state, x = known(codec, noise()), noise(scale)
    packed = encode(codec, x, state)
    decoded = packed.decode()
    assert factor / 4 * BOUND < (decoded - x).abs().max() <= factor * BOUND
    assert same(decoded, ErrorBounded(factor * BOUND).encode(x).decode()) and state.coarsened == 1
    # From then on there is room for the bound that was chosen.
    assert (encode(codec, x, state).decode() - x).abs().max() <= BOUND and state.coarsened == 1


def test_where_no_bound_is_coarse_enough_reading_raises() -> None:
    """Every block holds an infinity, and is stored as it is."""
    codec, x = ErrorBounded(BOUND, coarsens=True), noise()
    state = known(codec, x)
    x[::100], x[1::100] = INF, NAN
    with pytest.raises(RuntimeError, match="3:Convolution.input"):
        encode(codec, x, state).decode()
    assert not state.coarsened
    decoded = encode(codec, x, state).decode()
    assert torch.equal(decoded.isfinite(), x.isfinite()) and torch.equal(decoded[::100], x[::100])


def test_a_few_values_that_are_not_finite_survive() -> None:
    codec, x = ErrorBounded(BOUND), noise()
    state = known(codec, x)
    x[:2] = torch.tensor([INF, NAN])
    decoded = encode(codec, x, state).decode()
    assert same(decoded[:2], x[:2]) and (decoded[2:] - x[2:]).abs().max() <= BOUND


def test_what_must_be_exact_is_never_lost() -> None:
    codec, x = ErrorBounded(0), noise()
    dense = encode(codec, x, known(codec, x))
    assert dense.row is not None and dense.buffers[1].numel() == x.nbytes and same(dense.decode(), x)
    # Where a capacity could be too small, the size is waited for.
    sparse = torch.where(torch.arange(N, device=DEVICE) < N // 8, x, 0)
    state = known(codec, sparse)
    for each, share in ((sparse, 8), (x, 1)):
        packed = encode(codec, each, state)
        assert packed.row is None and same(packed.decode(), each)
        assert packed.buffers[1].numel() == x.nbytes // share


def test_runs_repeat_bit_for_bit() -> None:
    found = []
    for _ in range(2):
        state, codec = EncoderState(), ErrorBounded(BOUND, rounding="dithered", coarsens=True)
        scales = [*[1.0] * WAITS, 1.1, 6.0, 1.0]
        packed = [encode(codec, noise(scale, seed), state) for seed, scale in enumerate(scales)]
        found.append(([each.decode() for each in packed], state.coarsened, state.share, state.least))
    assert all(map(same, found[0][0], found[1][0])) and found[0][1:] == found[1][1:] and found[0][1] == 1


def test_full_tables_are_sent_and_every_row_is_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "ROWS", 2)
    codec = ErrorBounded(BOUND)
    states = [known(codec, noise()) for _ in range(3)]
    packed = [encode(codec, noise(), state) for state in states]
    assert packed[0].row.table is packed[1].row.table is not packed[2].row.table
    assert packed[0].row.table.transfer is not None and packed[2].row.table.transfer is None
    packed[0].decode()
    assert [state.known for state in states] == [WAITS + 1, WAITS + 1, WAITS]
    packed[2].decode()
    assert states[2].known == WAITS + 1


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(DEVICE)


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_backward_raises_at_its_end_and_the_next_step_works(model: nn.Module) -> None:
    handle = encke.attach(model, Fixed(ErrorBounded(BOUND)))
    x = noise().view(-1, 64)
    for _ in range(WAITS + 1):
        step(model, x)
    waits = Snapshot.waits
    output = model(100 * x)
    assert handle.report().sites and Snapshot.waits == waits
    with pytest.raises(RuntimeError, match=r"encke: 1:Addmm\.mat1 took"):
        output.sum().backward()
    after = step(model, 100 * x)
    handle.detach()
    for ours, plain in zip(after, step(model, 100 * x), strict=True):
        assert (ours - plain).norm() < 0.1 * plain.norm()


@pytest.mark.slow
def test_compiled_models_predict_raise_and_go_on_alike(model: nn.Module) -> None:
    torch._dynamo.reset()
    handle = encke.attach(compiled := torch.compile(model, backend="aot_eager"), Fixed(ErrorBounded(BOUND)))
    x = noise().view(-1, 64)
    for _ in range(WAITS + 1):
        step(compiled, x)
    output, (row,) = compiled(100 * x), [each for each in handle.report().sites if each.codec == "ErrorBounded"]
    with pytest.raises(RuntimeError, match=rf"encke: {row.layer}:{row.operation}\.{row.slot} took"):
        output.sum().backward()
    after = step(compiled, 100 * x)
    handle.detach()
    for ours, plain in zip(after, step(model, 100 * x), strict=True):
        assert (ours - plain).norm() < 0.1 * plain.norm()
    torch._dynamo.reset()


def test_a_forward_pass_without_backward_raises_nothing(model: nn.Module) -> None:
    encke.attach(model, Fixed(ErrorBounded(BOUND)))
    x = noise().view(-1, 64)
    for _ in range(WAITS + 1):
        step(model, x)
    model(100 * x)
    step(model, x)


def test_the_report_counts_what_was_coarsened(model: nn.Module) -> None:
    handle = encke.attach(model, Fixed(ErrorBounded(BOUND, coarsens=True)))
    x = noise().view(-1, 64)
    for _ in range(WAITS + 1):
        step(model, x)
    assert handle.report().coarsened == 0 and "coarser" not in str(handle.report())
    step(model, 4 * x)
    report = handle.report()
    assert report.coarsened == 1 and str(report).endswith("; 1 packed with a coarser bound")
    assert report.to_dict()["coarsened"] == 1


def test_a_capacity_leaves_room_for_what_varied_before() -> None:
    state, source = EncoderState(), 1 << 20
    assert state.capacity("format", source) is None
    for size in (100_000, 100_000, 100_000):
        state.learn("format", size, source)
    assert state.capacity("another", source) is None
    assert 112_500 <= state.capacity("format", source) - base.SLACK + 512 <= 113_500  # type: ignore[operator]
    state.learn("format", 200_000, source)
    assert 297_000 <= state.capacity("format", source) - base.SLACK + 512 <= 300_500  # type: ignore[operator]
    for _ in range(400):
        state.learn("format", 100_000, source)
    assert state.capacity("format", source) < 120_000  # type: ignore[operator]
    state.learn("format", 900_000, source)
    assert state.capacity("format", source) == source
    state.learn("another", 5, source)
    assert state.known == 1 and state.capacity("another", source) is None


def test_codecs_of_fixed_size_have_nothing_to_confirm() -> None:
    assert not isinstance(GroupQuant().encode(noise()), PendingPacked)
