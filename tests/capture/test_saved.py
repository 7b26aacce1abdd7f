"""Saved tensors: shared memory is packed once, restored exactly, and released."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import encke
from encke.capture import encoding, hooks, ledger
from encke.capture.nodes import saved_by
from encke.codecs import GroupQuant
from encke.policies import Fixed
from tests.capture.common import EXACT, batch, twins
from tests.integration.test_end_to_end import saved_in


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
        lambda x: x[:, ::2],
        lambda x: x[:, :, 3:, 1:],
        lambda x: x[:1].expand(8, -1, -1, -1),
        lambda x: x[:, :, :, :1].expand(-1, -1, -1, 32),
        lambda x: x.unfold(2, 8, 4).flatten(2, 3),
        lambda x: x.transpose(2, 3),
    ],
)
def test_size_and_stride_come_back_exactly(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = view(torch.randn(8, 4, 32, 32)).requires_grad_()
    context = encke.compress(EXACT)
    # In the first pass the tensor is held unpacked until backward identifies its reader; in the second it is packed.
    with context:
        y = x.sin()
    y.sum().backward()
    with context:
        y = x.sin()
    ((_, saved),) = saved_by(y.grad_fn)
    assert saved.cell is not None and saved.cell.held is None and saved.cell.packed is not None
    restored = y.grad_fn._saved_self
    assert restored.data_ptr() != x.data_ptr()
    assert torch.equal(restored, x) and restored.size() == x.size() and restored.stride() == x.stride()
    z = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(z, x.detach().cos())


def test_views_of_the_same_memory_are_packed_once() -> None:
    x = torch.randn(64, 128, requires_grad=True)
    context = encke.compress(EXACT)
    for _ in range(2):
        with context as handle:
            y = x * 2
            z = y.sin().sum() + y.t().cos().sum() + y.view(-1).square().sum()
        x.grad = None
        z.backward()
    y = 2 * x.detach()
    torch.testing.assert_close(x.grad, 2 * (y.cos() - y.sin() + 2 * y))
    packed = [row for row in handle.report().sites if row.packed_bytes]
    assert [row.operation for row in packed] == ["Sin"]
    assert handle.report().saved_bytes == x.nbytes


def test_one_decoded_copy_serves_all_who_read_at_the_same_time() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x)
            return (self.left(y) + self.right(y)).sum()

    model = Fork()
    encke.attach(model, Fixed(GroupQuant()))
    x = torch.randn(8, 4, 32, 32)
    model(x)
    (cell,) = {saved.cell for _, _, saved in saved_in(model(x)) if saved.cell is not None}
    assert cell.readers == 2
    first, second = cell.flat(False), cell.flat(False)
    assert first.data_ptr() == second.data_ptr() and torch.equal(first, second)
    reference = StorageWeakRef(first.untyped_storage())
    del first, second
    assert reference.expired()
    assert cell.flat(False).numel() == x.numel()


def chain_gradient(step: int, model: nn.Module) -> torch.Tensor:
    model.zero_grad()
    model(batch(step)).square().mean().backward()
    return model[0].weight.grad.clone()


def chain(layers: int) -> nn.Sequential:
    torch.manual_seed(5)
    parts = [m for _ in range(layers) for m in (nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64))]
    return nn.Sequential(*parts)


class Reuse:
    """Counts saved tensors at an address where another one, freed since, was saved in the same forward pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.seen, self.step = 0, {}, -1
        original = encoding.shared_cell

        def counting(site, t, layout, length, forward):
            if forward.step != self.step:
                self.seen, self.step = {}, forward.step
            known = self.seen.get(t.data_ptr())
            self.count += known is not None and known.expired()
            self.seen[t.data_ptr()] = StorageWeakRef(t.untyped_storage())
            return original(site, t, layout, length, forward)

        monkeypatch.setattr(hooks, "shared_cell", counting)


def test_hundreds_of_reused_addresses_change_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = chain(20), chain(20)
    reuse = Reuse(monkeypatch)
    encke.attach(model, EXACT)
    step = 0
    # How often an address is reused depends on the allocator and its history: from seldom to ten times a step.
    while reuse.count < 300 and step < 1000:
        assert torch.equal(chain_gradient(step, model), chain_gradient(step, plain))
        step += 1
    assert reuse.count >= 300


def test_without_the_storage_guard_gradients_go_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice. How soon depends on the allocator."""
    plain, model = chain(20), chain(20)
    for module in (encoding, ledger):
        monkeypatch.setattr(module, "storage_ref", lambda storage: lambda: "alive")
    encke.attach(model, EXACT)
    assert not all(torch.equal(chain_gradient(step, plain), chain_gradient(step, model)) for step in range(1000))


def test_nothing_stays_alive_after_backward() -> None:
    _, model, _ = twins()
    y = model(batch())
    cells = [saved.cell for _, _, saved in saved_in(y) if saved.cell is not None]
    references = [weakref.ref(cell) for cell in cells]
    del cells
    y.sum().backward()
    del y
    gc.collect()
    assert references and all(reference() is None for reference in references)
