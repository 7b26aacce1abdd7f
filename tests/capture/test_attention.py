"""The gradient of attention equals that of its decoded inputs: softmax and output are recomputed from them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import encke
from encke.capture import attention, readers, scores
from encke.capture.hooks import SMALL
from encke.capture.nodes import operation_name, saved_by
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed

SHAPE = (2, 4, 64, 32)
SHARP = 172.0
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.5},
    "sharp": {"scale": SHARP / 32**0.5},
    "mask": {"attn_mask": torch.ones(64, 64, dtype=torch.bool).tril(8)},
    "bias": {"attn_mask": torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(1))},
    "grouped": {"enable_gqa": True},
}


@pytest.fixture
def any_score_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the limit on score errors, so that the policy decides: with it, sharp attention would be exact."""
    monkeypatch.setattr(scores, "SCORE_ERROR", 1e9)


def inputs(dtype: torch.dtype = torch.float32, heads: int = 4, seed: int = 0) -> list[Tensor]:
    """Return leaves from which query, key and value are computed."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (SHAPE, (2, heads, *SHAPE[2:]), (2, heads, *SHAPE[2:]))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def attend(leaves: list[Tensor], **options: Any) -> Tensor:
    """Run attention on activations: tensors that need a gradient and are not leaves."""
    return F.scaled_dot_product_attention(*(t + torch.zeros((), dtype=t.dtype) for t in leaves), **options)


def attention_node(output: Tensor) -> Any:
    stack = [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and operation_name(node) in attention.FORWARDS:
            return node
        stack.extend(next_node for next_node, _ in node.next_functions) if node is not None else None
    raise AssertionError("no fused attention in this graph")


def decoded(output: Tensor) -> list[Tensor]:
    """Return query, key and value as backward will see them."""
    node = attention_node(output)
    return [attention.value_of(attention.raw_saved(node, slot)).clone() for slot in attention.INPUTS]


def gradient(output: Tensor) -> Tensor:
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)


@pytest.mark.parametrize("min_bytes", [1, SMALL])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("any_score_error")
def test_the_gradient_is_that_of_the_decoded_inputs(name: str, dtype: torch.dtype, bits: int, min_bytes: int) -> None:
    options = dict(CALLS[name])
    if name == "bias":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    context = encke.compress(Fixed(GroupQuant(bits)), min_bytes=min_bytes)
    for _ in range(3):
        leaves = inputs(dtype, heads=2 if name == "grouped" else 4)
        with context:
            output = attend(leaves, **options)
        lossy = [t.requires_grad_() for t in decoded(output)]
        expected = torch.autograd.grad(F.scaled_dot_product_attention(*lossy, **options), lossy, gradient(output))
        assert not torch.equal(lossy[0], leaves[0])
        found = torch.autograd.grad(output, leaves, gradient(output))
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("any_score_error")
def test_sharp_scores_have_no_exponential_error(bits: int) -> None:
    """Gradients have the size of the plain ones; without recomputation they were 1e5 times as large."""
    context = encke.compress(Fixed(GroupQuant(bits)))
    leaves = inputs()
    options = CALLS["sharp"]
    plain = torch.autograd.grad(attend(leaves, **options), leaves, gradient(leaves[0]))
    for _ in range(3):
        with context:
            output = attend(leaves, **options)
        found = torch.autograd.grad(output, leaves, gradient(output))
        for a, b in zip(plain, found, strict=True):
            assert (a - b).norm() < 2 * a.norm()


def test_sharp_scores_are_exact_by_the_rule() -> None:
    context = encke.compress(Fixed(GroupQuant(2)))
    leaves, options = inputs(), CALLS["sharp"]
    plain = torch.autograd.grad(attend(leaves, **options), leaves, gradient(leaves[0]))
    for _ in range(3):
        with context:
            output = attend(leaves, **options)
        found = torch.autograd.grad(output, leaves, gradient(output))
        assert torch.equal(found[2], plain[2])
        assert all((a - b).norm() < 0.2 * a.norm() for a, b in zip(plain[:2], found[:2], strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_exact_inputs_give_the_same_bits(name: str) -> None:
    context = encke.compress(Fixed(ErrorBounded(0)), min_bytes=1)
    leaves = inputs(heads=2 if name == "grouped" else 4)
    plain = torch.autograd.grad(attend(leaves, **CALLS[name]), leaves, gradient(leaves[0]))
    for _ in range(3):
        with context:
            output = attend(leaves, **CALLS[name])
        for a, b in zip(plain, torch.autograd.grad(output, leaves, gradient(output)), strict=True):
            assert torch.equal(a, b)


def test_results_of_lossy_attention_are_not_kept() -> None:
    context = encke.compress(Fixed(GroupQuant(8)), min_bytes=1)
    for _ in range(3):
        leaves = inputs()
        with context as handle:
            output = attend(leaves)
        saved = dict(saved_by(attention_node(output)))
        rows = {row.slot: (row.codec, row.packed_bytes) for row in handle.report().sites if row.packed_bytes == 0}
        output.sum().backward()
    assert saved["output"].dropped and saved["logsumexp"].dropped and not saved["query"].dropped
    assert rows == {"output": ("recomputed", 0), "logsumexp": ("recomputed", 0)}


def test_an_output_that_others_read_is_packed_for_them_alone() -> None:
    model = Block()
    handle = encke.attach(model, Fixed(GroupQuant(2)))
    for _ in range(2):
        model(torch.randn(4, 64, 64)).square().mean().backward()
    bits = {(row.operation, row.slot): row.bound for row in handle.report().sites}
    assert bits["Addmm", "mat1"] == "2 bits"
    assert bits["ScaledDotProductAttention", "output"] == ""


class Block(nn.Module):
    """Attention on non-contiguous views of one projection, followed by a projection."""

    def __init__(self, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.merge = nn.Linear(64, 64)
        self.run = run

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x) if self.run is None else self.run(self.attend, x)


class SelfAttention(nn.Module):
    def __init__(self, weights: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(64, 4, batch_first=True)
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.weights)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "views": Block,
    "checkpoint": lambda: Block(lambda function, x: checkpoint(function, x, use_reentrant=False)),
    "reentrant": lambda: Block(lambda function, x: checkpoint(function, x, use_reentrant=True)),
    "multihead": lambda: SelfAttention(False),
    "multihead-weights": lambda: SelfAttention(True),
    "encoder": lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_with_attention(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.in_proj_weight.data *= 3
        elif module is getattr(model, "project", None):
            module.weight.data *= 8
    plain = copy.deepcopy(model)
    encke.attach(model, Fixed(GroupQuant(8)), min_bytes=1)
    x, target = torch.randn(4, 64, 64, requires_grad=True), torch.randn(4, 64, 64)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            # Two forward passes before one backward.
            sum((each(x.tanh() + seed) * target).sum() for seed in range(2)).backward()
        largest = max(p.grad.norm() for p in plain.parameters())
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert (a.grad - b.grad).norm() < 2 * scores.SCORE_ERROR * a.grad.norm() + 1e-3 * largest, step


def test_a_graph_can_be_read_twice() -> None:
    context = encke.compress(Fixed(GroupQuant(8)), min_bytes=1)
    for _ in range(2):
        leaves = inputs()
        with context:
            output = attend(leaves)
        first = torch.autograd.grad(output, leaves, gradient(output), retain_graph=True)
        assert attention.CACHE not in attention_node(output).metadata
        second = torch.autograd.grad(output, leaves, gradient(output))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_second_derivative_is_an_error_as_without_encke() -> None:
    context = encke.compress(Fixed(GroupQuant(8)), min_bytes=1)
    for _ in range(2):
        leaves = inputs()
        with context:
            output = attend(leaves)
        first = torch.autograd.grad(output, leaves, gradient(output), create_graph=True)
        with pytest.raises(RuntimeError, match="is not implemented"):
            first[0].sum().backward()


def test_a_result_that_is_not_kept_cannot_be_read_elsewhere() -> None:
    context = encke.compress(Fixed(GroupQuant(8)), min_bytes=1)
    for _ in range(2):
        with context:
            output = attend(inputs()).tanh()
        with pytest.raises(RuntimeError, match="computes it again"):
            _ = attention_node(output)._saved_output


def test_dropout_keeps_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU attention with dropout is not fused: a node with a dropout setting replaces a GPU's."""
    setting, dropout = attention.saved_setting, 0.5

    def with_dropout(node: Any, name: str, *default: Any) -> Any:
        return dropout if name == "dropout_p" else setting(node, name, *default)

    for module in (attention, readers):
        monkeypatch.setattr(module, "saved_setting", with_dropout)
    context = encke.compress(Fixed(GroupQuant(2)), min_bytes=1)

    def step() -> dict[str, Any]:
        leaves = inputs()
        with context:
            output = attend(leaves).tanh()
        saved = dict(saved_by(attention_node(output)))
        torch.autograd.grad(output, leaves, gradient(output))
        return saved

    for _ in range(2):
        saved = step()
        assert saved["logsumexp"].dropped
        assert saved["output"].cell.packed.codec == GroupQuant(8)
    dropout = 0.0
    context = encke.compress(Fixed(GroupQuant(2)), min_bytes=1)
    for _ in range(2):
        assert step()["output"].dropped
    dropout = 0.5
    with pytest.raises(RuntimeError, match="run this step again"):
        step()
    assert step()["output"].cell.packed.codec == GroupQuant(8)


def test_a_small_query_before_large_keys() -> None:
    """Query, logsumexp and output are kept unpacked, but the results still follow the decoded keys."""
    context = encke.compress(Fixed(GroupQuant(2)))
    leaves = inputs()
    leaves[0] = torch.randn(2, 4, 1, 32, requires_grad=True)
    for step in range(3):
        with context:
            output = attend(leaves, scale=1.0)
        lossy = [t.requires_grad_() for t in decoded(output)]
        # In the first step their reader becomes known in backward.
        assert torch.equal(lossy[0], leaves[0]) and torch.equal(lossy[1], leaves[1]) == (step == 0)
        expected = torch.autograd.grad(F.scaled_dot_product_attention(*lossy, scale=1.0), lossy, gradient(output))
        found = torch.autograd.grad(output, leaves, gradient(output))
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(expected, found, strict=True))
