"""Recomputation in compiled graphs: from which packed tensors, with which codecs, and how exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.compiled.model import CompiledModel
from encke.policies import Fixed
from tests.compiled.common import Settable, as_inductor_gets_it, compile, constant_codecs, graphs, same

WIDTH, INNER = 64, 192
FOUR = Fixed(GroupQuant(4))
COPIES = "(copies of weights)"


class RMSNorm(nn.Module):
    """An RMS norm as models of transformers write it out; Gemma's adds one to the weight."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 - offset + 0.1 * torch.randn(WIDTH))
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return y * (self.offset + self.weight) if self.offset else self.weight * y


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.merge = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for layer in self.qkv)
        return self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Llama(nn.Module):
    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = RMSNorm(offset), Attention(), RMSNorm(offset)
        self.gate, self.up = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(WIDTH, INNER, bias=False)
        self.act, self.down = nn.SiLU(), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


class Vit(nn.Module):
    """Norms in front of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.first, self.act, self.second = nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.second(self.act(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Bert(Vit):
    """Norms behind them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Model(nn.Module):
    """Blocks of one kind behind an embedding, whose sums are fp32 under autocast."""

    def __init__(self, kind: str, layers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.leave = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 8)
        self.blocks = nn.Sequential(*(BLOCKS[kind]() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.blocks(self.enter(x)))


BLOCKS: dict[str, Callable[[], nn.Module]] = {"llama": Llama, "gemma": lambda: Llama(1.0), "vit": Vit, "bert": Bert}
ATTENTION = ["attention.ScaledDotProductAttention"] * 3 + ["attention.merge.Addmm"]
GATED = [".Mul", "act.Silu", "norm1.RmsNorm", "norm2.RmsNorm", *ATTENTION]
NORMED = ["act.Gelu", "norm1.NativeLayerNorm", "norm2.NativeLayerNorm", *ATTENTION]
PACKED = {"llama": GATED, "gemma": GATED, "vit": NORMED, "bert": NORMED}
"""Layer and operation of what each block packs."""


def some_slow(first: str, *others: str) -> list[object]:
    """Return parameters of which all but the first are slow."""
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


def tokens(batch: int = 4) -> Tensor:
    return torch.randint(50, (batch, 64), generator=torch.Generator().manual_seed(7))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(8))
    (y.float() * probe).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compiled(model: nn.Module, **options: object) -> nn.Module:
    return compile(model, backend=as_inductor_gets_it, **options)


def held(handle: encke.Handle) -> int:
    return sum(row.packed_bytes for row in handle.report().sites if row.operation != COPIES)


def packed_sites(handle: encke.Handle, prefix: str) -> list[str]:
    """Return layer and operation of what a block packs."""
    rows = [row for row in handle.report().sites if row.codec == "GroupQuant" and row.layer.startswith(prefix)]
    return [f"{row.layer.removeprefix(prefix).removeprefix('.')}.{row.operation}" for row in rows]


def total_error(expected: list[Tensor], found: list[Tensor]) -> float:
    a, b = (torch.cat([g.flatten() for g in each]) for each in (expected, found))
    return float((a - b).norm() / a.norm())


def spy_on_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Collect forward and backward graphs as they are compiled."""
    seen: list[Graph] = []
    inline = CompiledModel.inline

    def spy(self: CompiledModel, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, *rest: object) -> None:
        inline(self, forward, backward, *rest)  # type: ignore[arg-type]
        seen.extend((forward.graph, backward.graph))

    monkeypatch.setattr(CompiledModel, "inline", spy)
    return seen


@pytest.mark.parametrize("kind", some_slow(*BLOCKS))
def test_nothing_is_packed_that_can_be_computed_from_what_else_is_packed(kind: str) -> None:
    layers = 1 + (kind == "bert")
    model = compiled(Model(kind, layers))
    handle = encke.attach(model, FOUR)
    gradients(model, tokens())
    # With norms at the ends of blocks, the first one reads the embedding itself.
    assert sorted(packed_sites(handle, f"blocks.{layers - 1}")) == sorted(PACKED[kind])
    assert not [row for row in handle.report().sites if row.codec == "kept" and row.saved_bytes >= 16384]


@pytest.mark.parametrize("kind", some_slow("llama", "vit", "bert"))
def test_as_much_is_held_as_in_eager_mode_with_as_small_an_error(kind: str) -> None:
    model = Model(kind)
    eager = copy.deepcopy(model)
    plain = gradients(eager, tokens())
    reference = encke.attach(eager, FOUR)
    for _ in range(3):
        expected = gradients(eager, tokens())
    handle = encke.attach(wrapped := compiled(model), FOUR)
    for _ in range(3):
        found = gradients(wrapped, tokens())
    assert held(handle) <= 1.2 * held(reference)
    assert 0 < total_error(plain, found) <= 1.5 * total_error(plain, expected)


@pytest.mark.parametrize("kind", some_slow("llama", "bert"))
def test_exact_codecs_give_plain_gradients_in_a_graph_made_for_lossy_ones(kind: str) -> None:
    """Settings are no constants of the graph; with a bound, what others are computed from is exact as well."""
    model = compiled(Model(kind))
    plain = gradients(model, tokens())
    policy = Settable(GroupQuant(4))
    handle = encke.attach(model, policy)
    for _ in range(3):
        assert not same(plain, gradients(model, tokens()))
    before, small = graphs(), held(handle)
    policy.codec = ErrorBounded(0)
    assert same(plain, gradients(model, tokens()))
    policy.codec = ErrorBounded(1e-3)
    gradients(model, tokens())
    codecs = {(row.layer, row.operation): row for row in handle.report().sites}
    inner = "Silu" if kind == "llama" else "Gelu"
    assert codecs["blocks.0.act", inner].bound == "0 (bit-exact)"
    assert codecs["blocks.0.attention.merge", "Addmm"].bound == "0.001 abs"
    policy.codec = GroupQuant(4)
    gradients(model, tokens())
    assert held(handle) == small
    assert graphs() == before


def test_a_graph_made_for_exact_codecs_gives_plain_gradients() -> None:
    model = compiled(Model("llama"))
    plain = gradients(model, tokens())
    encke.attach(model, Fixed(ErrorBounded(0)))
    assert same(plain, gradients(model, tokens()))


@pytest.mark.parametrize("constant", [False, True], ids=["run time", "constant"])
def test_sources_of_curved_functions_have_four_bits(constant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if constant:
        constant_codecs(monkeypatch)
    model = compiled(Model("llama"))
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    gradients(model, tokens())
    rate = {row.operation: row.saved_bytes / row.packed_bytes for row in handle.report().sites if row.packed_bytes}
    assert 3.5 < rate["Silu"] < 4
    assert 6 < rate["Mul"] < 8


class Square(nn.Module):
    """Reads a square, which is not linear in what it is made from, and a product of two values, which is."""

    def __init__(self, other: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.layers
        x = first(x)
        y = second(x)
        return last(y * (third(x) if self.other else y))


@pytest.mark.parametrize("other", [True, False])
def test_products_of_a_value_with_itself_are_packed(other: bool) -> None:
    model = compiled(Square(other))
    handle = encke.attach(model, FOUR)
    gradients(model, torch.randn(4, 64, WIDTH))
    rows = [row for row in handle.report().sites if row.layer == "layers.3"]
    assert [row.codec for row in rows] == ["recomputed" if other else "GroupQuant"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_batches_of_any_size_share_a_graph(kind: str) -> None:
    model = Model(kind)
    plain = gradients(model, tokens(6))
    wrapped = compiled(model, dynamic=True)
    handle = encke.attach(wrapped, Fixed(GroupQuant(8)))
    gradients(wrapped, tokens(4))
    before = graphs()
    for _ in range(3):
        found = gradients(wrapped, tokens(6))
    assert total_error(plain, found) < 0.02
    assert graphs() == before
    assert sorted(packed_sites(handle, "blocks.0")) == sorted(PACKED[kind])


@pytest.mark.parametrize("rows, again", [(512, True), (64, False)])
def test_copies_of_large_weights_are_made_again(rows: int, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spy_on_graphs(monkeypatch)
    torch.manual_seed(0)
    model = compiled(nn.Sequential(nn.Linear(1024, rows), nn.GELU(), nn.Linear(rows, 1024)))
    x = torch.randn(256, 1024)
    plain = gradients(model, x)
    encke.attach(model, Fixed(GroupQuant(8)))
    found = gradients(model, x)
    saved = [node for node in seen[0].output_node().args[0][1:] if node is not None]
    weights = [node for node in saved if node.meta["val"].numel() == 1024 * rows]
    assert [node.op == "placeholder" for node in weights] == [again] * len(weights)
    assert weights
    assert total_error(plain, found) < 0.02


def test_a_weight_that_changes_before_backward_is_an_error() -> None:
    """Its copy would be made again from other values than forward had."""
    model = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    attached = compiled(model)
    encke.attach(attached, Fixed(GroupQuant(8)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = attached(torch.randn(256, 1024)).float().square().mean()
    with torch.no_grad():
        model[2].weight.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
