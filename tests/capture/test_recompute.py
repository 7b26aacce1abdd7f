"""Saved tensors that backward recomputes from those of the preceding operation."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import encke
from encke.capture import expressions, recompute
from encke.capture.sites import Site
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.policies import Comet, Fixed
from encke.policies.base import Policy
from tests.capture.recomputation import EXACT, FINE, TOKENS, WIDTH, batch, codecs, error, gradients, recomputed


class RMSNorm(nn.Module):
    """RMS norm as written in the Llama family."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        kind, x = x.dtype, x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(kind)


class GemmaNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).type_as(x)


class GatedMLP(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down, self.act = nn.Linear(2 * WIDTH, WIDTH, bias=False), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A norm, then layers that read its result."""

    def __init__(self, norm: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.inp, self.norm, self.mlp = nn.Linear(WIDTH, WIDTH), norm, mlp

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        return x + self.mlp(self.norm(x))


BLOCKS = {
    "llama": lambda: Block(RMSNorm(), GatedMLP(nn.SiLU())),
    "gemma": lambda: Block(GemmaNorm(), GatedMLP(nn.GELU(approximate="tanh"))),
    "torch": lambda: Block(nn.RMSNorm(WIDTH), GatedMLP(nn.SiLU())),
    "bert": lambda: Block(
        nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    ),
}


def make(kind: str) -> Block:
    torch.manual_seed(1)
    return BLOCKS[kind]()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_at_bound_zero_gradients_are_bit_equal(kind: str, autocast: bool) -> None:
    plain, model = make(kind), make(kind)
    handle = encke.attach(model, EXACT)
    for _ in range(3):
        assert all(map(torch.equal, gradients(plain, batch(), autocast), gradients(model, batch(), autocast)))
    if kind != "bert":
        assert {"mlp:Mul.self", "mlp.down:Mm.self", "mlp.gate:Mm.self"} <= recomputed(handle)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_only_the_inputs_of_norm_and_activation_are_held(kind: str, autocast: bool) -> None:
    plain, model = make(kind), make(kind)
    handle = encke.attach(model, FINE)
    for _ in range(4):
        found = gradients(model, batch(), autocast)
    assert error(found, gradients(plain, batch(), autocast)) < (0.03 if autocast else 0.02)
    held = {name for name, codec in codecs(handle).items() if codec == "GroupQuant"}
    activation = "Silu" if kind in ("llama", "torch") else "Gelu"
    wanted = {"norm:RmsNorm.input", f"mlp.act:{activation}.self", "mlp:Mul.other"}
    if kind == "bert":
        wanted = {"norm:NativeLayerNorm.input", "mlp.1:Gelu.self"}
    assert held - {"inp:Addmm.mat1"} == wanted


def test_errors_are_not_larger_than_those_of_packed_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_error() -> float:
        plain, model = make("llama"), make("llama")
        encke.attach(model, Fixed(GroupQuant(4)))
        right = gradients(plain, batch())
        return sum(error(gradients(model, batch()), right) for _ in range(6)) / 6

    ours = mean_error()
    monkeypatch.setattr(recompute, "RULES", {})
    assert ours < 1.1 * mean_error()


def test_saved_bytes_are_those_of_plain_autograd() -> None:
    for autocast in (False, True):
        model, held, kept = make("llama"), {}, []

        def pack(t: Tensor, held=held, kept=kept) -> Tensor:
            kept.append(t.untyped_storage())
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(batch())
        for p in model.parameters():
            held.pop(p.untyped_storage().data_ptr(), None)
        del out
        handle = encke.attach(model, FINE)
        for _ in range(3):
            gradients(model, batch(), autocast)
        assert handle.report().saved_bytes == pytest.approx(sum(held.values()), rel=0.01)


def test_copies_that_autocast_makes_of_one_input_are_one_cell() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(WIDTH, WIDTH)
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = x + self.inp(x)  # fp32: the residual stream
            return self.q(h) * self.k(h) + self.v(h)

    torch.manual_seed(0)
    plain = Attention()
    for policy in (EXACT, FINE):
        model = copy.deepcopy(plain)
        handle = encke.attach(model, policy)
        for _ in range(3):
            found = gradients(model, batch(), True)
        rows = [row for row in handle.report().sites if row.operation == "Mm"]
        assert len(rows) == 1 and rows[0].saved_bytes == 3 * 2 * TOKENS * WIDTH
        right = gradients(plain, batch(), True)
        assert all(map(torch.equal, found, right)) if policy is EXACT else error(found, right) < 0.03


@dataclass(frozen=True)
class ByLayer(Policy):
    """Fine where a linear layer reads, coarse elsewhere."""

    fine: int = 8

    def choose(self, site: Site) -> Codec:
        return GroupQuant(self.fine if site.operation in ("Mm", "Addmm") else 2)


def test_a_source_is_packed_as_finely_as_the_strictest_of_its_dependents() -> None:
    model = make("llama")
    handle = encke.attach(model, ByLayer())
    for _ in range(5):
        gradients(model, batch())
    rows = {f"{row.layer}:{row.operation}.{row.slot}": (row.codec, row.bound) for row in handle.report().sites}
    assert rows["mlp.down:Mm.self"][0] == rows["mlp.gate:Mm.self"][0] == "recomputed"
    for source in ("norm:RmsNorm.input", "mlp.act:Silu.self", "mlp:Mul.other"):
        assert rows[source] == ("GroupQuant", "8 bits")


def test_nothing_is_read_through_an_activation_from_two_bits() -> None:
    model = make("bert")
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    for _ in range(3):
        gradients(model, batch())
    assert codecs(handle)["mlp.2:Addmm.mat1"] == "GroupQuant" and recomputed(handle) == {"mlp.0:Addmm.mat1"}


def test_codecs_that_promise_a_bound_pack_every_tensor() -> None:
    model = make("llama")
    handle = encke.attach(model, Fixed(ErrorBounded(1e-3)))
    for _ in range(3):
        gradients(model, batch())
    assert not recomputed(handle)


def test_a_result_that_is_much_worse_than_packing_is_packed() -> None:
    class Cancels(nn.Module):
        """One factor is small where the other one is large, so that its errors are large beside the product."""

        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.spikes = torch.zeros(WIDTH).index_fill(0, torch.arange(0, WIDTH, 8), 1000.0)
            self.scale = nn.Parameter(1 / (1 + self.spikes))

        def forward(self, x: Tensor) -> Tensor:
            return self.out((self.inp(x) + self.spikes) * self.scale)

    torch.manual_seed(0)
    model = Cancels()
    handle = encke.attach(model, FINE)
    for _ in range(3):
        gradients(model, batch())
    assert codecs(handle)["out:Addmm.mat1"] == "GroupQuant"


def test_behind_a_frozen_norm_the_input_of_an_adapter_is_computed_from_the_norm_s_input() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.norm = nn.Linear(WIDTH, WIDTH), RMSNorm()
            self.base, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
            self.norm.requires_grad_(False), self.base.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.inp(x))
            return self.base(h) + self.b(self.a(h))

    torch.manual_seed(0)
    plain = Adapted()
    model = copy.deepcopy(plain)
    handle = encke.attach(model, EXACT)
    for _ in range(3):
        assert all(map(torch.equal, gradients(plain, batch()), gradients(model, batch())))
    assert "a:Addmm.mat1" in recomputed(handle) and not any("base" in name for name in codecs(handle))


def test_functions_of_users_with_the_name_of_an_operation_are_left_alone() -> None:
    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return 3 * x

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return 3 * grad

    class Act(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Gelu.apply(x)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), Act(), nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(plain)
    handle = encke.attach(model, EXACT)
    for _ in range(3):
        assert all(map(torch.equal, gradients(plain, batch()), gradients(model, batch())))
    assert not recomputed(handle)


def test_double_backward_checkpoint_and_a_second_backward() -> None:
    results = []
    for attached in (False, True):
        model = make("llama")
        if attached:
            encke.attach(model, EXACT)
        for _ in range(3):
            model.zero_grad()
            x = batch().requires_grad_()
            (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            loss = g.square().sum() + checkpoint(model, x, use_reentrant=False).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max())) for a, b in zip(*results, strict=True))


def test_a_weight_that_is_modified_before_backward_is_an_error() -> None:
    model = make("llama")
    encke.attach(model, EXACT)
    gradients(model, batch())
    out = model(batch())
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_sharded_models_pack_every_tensor() -> None:
    model = make("llama")
    handle = encke.attach(model, EXACT)
    handle._capture.whole_weights = False
    for _ in range(3):
        gradients(model, batch())
    assert not recomputed(handle)


def test_rules_of_operations_that_the_cpu_does_not_choose_by_itself() -> None:
    x = torch.randn(32, WIDTH, requires_grad=True)
    weight = torch.rand(WIDTH)
    y, rstd = torch.ops.aten._fused_rms_norm(x, [WIDTH], weight, 1e-6)
    assert torch.allclose(expressions.rms_norm(x, rstd, weight), y, atol=1e-6)
    for p in (1.0, 0.25):
        y, mask = torch.native_dropout(x, p, True)
        assert torch.allclose(expressions.dropout(x, mask, p), y)
    node = y.grad_fn
    names = {name for name, _ in expressions.RULES["NativeDropout"].operands if name}
    assert all(hasattr(node, f"_saved_{name}") for name in names | {"p"})


def test_only_squares_whose_mean_is_taken_are_norms() -> None:
    class Squares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), RMSNorm()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.silu(self.inp(x)).pow(2) + self.norm(self.inp(x)))

    torch.manual_seed(0)
    model = Squares()
    handle = encke.attach(model, FINE)
    for _ in range(3):
        gradients(model, batch())
    assert {":Pow.self", "norm:RmsNorm.input"} <= set(codecs(handle))


def test_a_resumed_run_computes_again_what_the_first_one_did() -> None:
    runs = []
    for _ in range(2):
        model = make("llama")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        runs.append((model, optimizer, encke.attach(model, Comet(every=3), optimizer)))
    (model, optimizer, handle), (later, its_optimizer, its_handle) = runs
    for _ in range(4):
        gradients(model, batch())
        optimizer.step()
    later.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    its_handle.load_state_dict(handle.state_dict())
    for _ in range(4):
        # The first pass of a process learns the readers; it must hold the same tensors as a later pass.
        first, second = gradients(model, batch()), gradients(later, batch())
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert recomputed(handle) == recomputed(its_handle) != set()
        optimizer.step()
        its_optimizer.step()


@pytest.mark.parametrize("state", [[], {"decisions": 1}, {"decisions": {"a": 1}}, {"sources": {"a": {"name": "?"}}}])
def test_a_damaged_state_changes_nothing(state: Any) -> None:
    model = make("llama")
    handle = encke.attach(model)
    gradients(model, batch())
    before = handle.state_dict()
    with pytest.raises(ValueError, match="cannot continue from this state"):
        handle.load_state_dict({**before, "recomputed": state})
    assert handle.state_dict()["recomputed"] == before["recomputed"]


NORMS = {"batch": lambda: nn.BatchNorm2d(16), "group": lambda: nn.GroupNorm(4, 16)}


def conv_block(act: nn.Module, norm: str = "batch") -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), NORMS[norm](), act, nn.Conv2d(16, 8, 1))
    nn.init.uniform_(layers[1].weight, 0.5, 1.5)
    nn.init.uniform_(layers[1].bias, -0.5, 0.5)
    return layers


def images(last: bool = False) -> Tensor:
    x = torch.randn(8, 8, 16, 16, generator=torch.Generator().manual_seed(0))
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "act", [nn.SiLU(), nn.SiLU(inplace=True), nn.Hardswish(inplace=True), nn.Mish(), nn.ELU(), nn.SELU()], ids=str
)
@pytest.mark.parametrize("norm", NORMS)
def test_an_activation_reads_what_the_norm_in_front_has_saved(
    norm: str, act: nn.Module, last: bool, autocast: bool
) -> None:
    plain, model = (conv_block(copy.deepcopy(act), norm) for _ in range(2))
    handle = encke.attach(model, FINE)
    for _ in range(4):
        found = gradients(model, images(last), autocast)
    for _ in range(4):  # running statistics too
        expected = gradients(plain, images(last), autocast)
    name = {nn.SiLU: "Silu", nn.SELU: "Elu", nn.ELU: "Elu"}.get(type(act), type(act).__name__)
    saved = {"batch": "1:BatchNorm.input", "group": "1:NativeGroupNorm.input"}[norm]
    assert f"2:{name}.self" in recomputed(handle) and codecs(handle)[saved] == "GroupQuant"
    assert "3:Convolution.input" in recomputed(handle)
    # A bias in front of a norm has no gradient but rounding errors.
    assert error(found[:2] + found[3:], expected[:2] + expected[3:]) < (0.04 if autocast else 0.02)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_of_which_the_graph_tells_no_bias_is_not_computed_again(norm: str) -> None:
    """Frozen before the first step, or later: without it the result would be another."""
    for when in (0, 3):
        plain, model = conv_block(nn.SiLU(), norm), conv_block(nn.SiLU(), norm)
        handle = encke.attach(model, FINE)
        for step in range(5):
            for each in (plain, model):
                each[1].bias.requires_grad_(step < when)
            found, expected = gradients(model, images()), gradients(plain, images())
            assert error(found[:2] + found[3:], expected[:2] + expected[3:]) < 0.02
            if step >= when:
                assert codecs(handle)["2:Silu.self"] == "GroupQuant"


@pytest.mark.parametrize("size", [(2, 12), (2, 12, 5), (2, 12, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_group_norm_is_computed_again_from_its_exact_input(size: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(size, dtype=dtype) + 3, torch.rand(12), torch.randn(12)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias, exact = weight.to(wide), bias.to(wide), x.to(wide)
    for affine in (True, False):
        y, mean, rstd = torch.native_group_norm(
            exact, weight if affine else None, bias, 2, 12, exact[0, 0].numel(), 3, 1e-5
        )
        again = expressions.group_norm(x, mean, rstd, bias, weight if affine else None, 3)
        assert again.dtype == wide and torch.allclose(again, y, atol=1e-5)
    node = torch.native_group_norm(exact.requires_grad_(), weight, bias, 2, 12, exact[0, 0].numel(), 3, 1e-5)[0].grad_fn
    assert all(hasattr(node, f"_saved_{name}") for name in ("input", "result1", "result2", "weight", "group"))


def test_a_batch_norm_in_evaluation_is_not_computed_again() -> None:
    plain, model = conv_block(nn.SiLU()), conv_block(nn.SiLU())
    for each in (plain, model):
        each[1].eval()
    handle = encke.attach(model, FINE)
    for _ in range(3):
        found, expected = gradients(model, images()), gradients(plain, images())
    assert error(found, expected) < 0.02 and "2:Silu.self" not in recomputed(handle)


def test_a_bias_that_gets_other_memory_before_backward_does_not_matter() -> None:
    """Plain autograd does not save a batch norm's bias; a change in place is noticed."""
    plain, model = conv_block(nn.SiLU()), conv_block(nn.SiLU())
    handle = encke.attach(model, FINE)
    for _ in range(3):
        gradients(model, images())
    found = []
    for each in (plain, model):
        each.zero_grad()
        loss = each(images()).square().mean()
        each[1].bias.data = each[1].bias.data + 5.0
        loss.backward()
        found.append([p.grad for p in each.parameters()])
    assert "2:Silu.self" in recomputed(handle)
    assert error(found[1][:1] + found[1][2:], found[0][:1] + found[0][2:]) < 0.02
    loss = model(images()).square().mean()
    with torch.no_grad():
        model[1].bias.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
