"""GELU written out: the gradients of the formula from its input alone, and nothing else changes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.fused import gelu, registry
from encke.policies import Fixed
from encke.torch_internals import top_saved_tensors_hooks

EXACT = Fixed(ErrorBounded(0))
NEARLY_EXACT = Fixed(ErrorBounded(1e-7))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class NewGELU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cubic = x + 0.044715 * torch.pow(x, 3.0)
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * cubic))


class Widened(NewGELU):
    """As autocast on a GPU computes it: powers in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float())


Widened.__name__ = "NewGELUActivation"


def net(kind: type[nn.Module] = NewGELU) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 128), kind(), nn.Linear(128, 64)).to(DEVICE)


def batch(rows: int = 128) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def gradients(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    model.zero_grad()
    with torch.autocast(DEVICE, dtype, enabled=dtype is not None):
        out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_near(a: list[torch.Tensor], b: list[torch.Tensor], near: float) -> None:
    assert torch.equal(a[0], b[0])
    for x, y in zip(a, b, strict=True):
        assert (x - y).norm() <= near * x.norm()


@pytest.mark.parametrize(("dtype", "near"), [(None, 1e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("kind", [NewGELU, Widened])
def test_gradients_are_those_of_the_formula(kind: type[nn.Module], dtype: torch.dtype | None, near: float) -> None:
    plain, model = net(kind), net(kind)
    handle = encke.attach(model, NEARLY_EXACT)
    for rows in (128, 200, 1, 128):
        assert_near(gradients(plain, batch(rows), dtype), gradients(model, batch(rows), dtype), near)
    rows = {f"{row.operation}.{row.slot}" for row in handle.report().sites if row.layer == "1"}
    assert "Gelu.(formula)" in rows and not any(name.startswith(("Pow", "Tanh", "Mul")) for name in rows)


@pytest.mark.parametrize("overrides", [{}, {"1": None}])
def test_where_values_come_back_exactly_gradients_are_bit_equal(overrides: dict[str, None]) -> None:
    plain, model = net(), net()
    encke.attach(model, EXACT, overrides=overrides)
    for _ in range(3):
        assert all(map(torch.equal, gradients(plain, batch()), gradients(model, batch())))


def test_saved_bytes_are_those_of_plain_autograd() -> None:
    for dtype in (None, torch.bfloat16):
        model, held, keep = net(), {}, []

        def pack(t: torch.Tensor, held=held, keep=keep) -> torch.Tensor:
            keep.append(t.untyped_storage())
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast(DEVICE, dtype, bool(dtype)):
            out = model(batch(512))
        for p in model.parameters():
            held.pop(p.untyped_storage().data_ptr(), None)
        del out
        handle = encke.attach(model, Fixed(GroupQuant(bits=2)))
        for _ in range(2):
            gradients(model, batch(512), dtype)
        report = handle.report()
        assert report.saved_bytes == pytest.approx(sum(held.values()), rel=0.01)
        saved, packed = (
            sum(getattr(r, f"{n}_bytes") for r in report.sites if r.layer == "1") for n in ("saved", "packed")
        )
        assert packed < saved / 20


def test_errors_are_smaller_than_those_of_the_formula_from_packed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def error() -> float:
        plain, model = net(), net()
        encke.attach(model, Fixed(GroupQuant(bits=2)))
        gradients(model, 4 * batch(512))
        a, b = gradients(plain, 4 * batch(512))[2], gradients(model, 4 * batch(512))[2]
        return float((a - b).norm() / a.norm())

    ours = error()
    monkeypatch.setattr(registry, "ENABLED", False)
    assert ours < 0.75 * error()


def test_double_backward_and_checkpoint() -> None:
    results = []
    for attached in (False, True):
        model = net()
        if attached:
            encke.attach(model, EXACT)
        for _ in range(2):
            model.zero_grad()
            x = batch().requires_grad_()
            (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            (g.square().sum() + checkpoint(model, x, use_reentrant=False).sum()).backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-3 * float(a.abs().max()))


def test_an_input_given_by_name_goes_the_plain_way() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act = nn.Linear(64, 128), NewGELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x=self.layer(x))

    torch.manual_seed(1)
    plain = Net().to(DEVICE)
    model = copy.deepcopy(plain)
    encke.attach(model, EXACT)
    for _ in range(2):
        assert_near(gradients(plain, batch()), gradients(model, batch()), 0)


def test_only_what_computes_that_formula_is_taken() -> None:
    class Other(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(1.702 * x)

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    Other.__name__ = Two.__name__ = "NewGELU"
    assert gelu.is_tanh_gelu(NewGELU()) and not gelu.is_tanh_gelu(Other()) and not gelu.is_tanh_gelu(Two())
    model = net(Other)
    encke.attach(model, EXACT)
    assert "forward" not in model[1].__dict__


def test_detach_copies_and_pickles_have_the_class_own_forward() -> None:
    model = net()
    handle = encke.attach(model, EXACT)
    assert isinstance(model[1].__dict__["forward"], gelu.GeluForward)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not isinstance(other[1].__dict__.get("forward"), gelu.GeluForward)
        assert_near(gradients(net(), batch()), gradients(other, batch()), 0)
    handle.detach()
    assert "forward" not in model[1].__dict__
    model = net()
    encke.attach(model, EXACT, overrides={"1": None})
    assert "forward" not in model[1].__dict__


def test_the_layer_tells_of_its_calls_without_hooks_and_leaves_nothing_behind_after_an_error() -> None:
    model = net()
    handle = encke.attach(model, EXACT)
    assert not model[1]._forward_hooks and not model[1]._forward_pre_hooks and model[0]._forward_pre_hooks
    with pytest.raises(TypeError):
        model[1](batch(), batch())
    assert top_saved_tensors_hooks() is None
    replica = model[1]._replicate_for_data_parallel()
    gradients(model, batch())
    handle.detach()
    before = handle.report().forwards
    assert torch.equal(replica(batch()), model[1](batch())) and handle.report().forwards == before


def test_compiling_after_attach_is_an_error_but_not_for_evaluation() -> None:
    model = net()
    encke.attach(model, EXACT)
    compiled = torch.compile(model[1], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="Compile it first"):
        compiled(batch())
    torch._dynamo.reset()
    model.eval()
    assert torch.equal(compiled(batch()), net()[1](batch()))
