"""The codec contract: what a codec with nothing but `encode` and `decode` may rely on, and who asks for what."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import encke
from encke.capture.scores import Scores
from encke.capture.sites import Need, Site
from encke.codecs import Codec, DualPrecision, ErrorBounded, GroupQuant, LogProb, Lossless, Packed
from encke.codecs.exact import Between, Keep, Mask, Sign, Window
from encke.policies import Fixed
from tests.codecs.common import SOME_SLOW, Rounded

ROOT = Path(encke.__file__).parent
CONCRETE = {
    "DualPrecision", "ErrorBounded", "GroupQuant", "LogProb", "Lossless", "Keep", "Mask", "Sign", "Between", "Window",
}  # fmt: skip


def asks_for_a_codec(node: ast.AST) -> bool:
    """Whether a node is `isinstance(x, Concrete)` or `type(x) is Concrete`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
        asked: list[ast.AST] = [node.args[1]]
    elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and ast.unparse(node.left.func) == "type":
        asked = list(node.comparators)
    else:
        return False
    names = {n.id for a in asked for n in ast.walk(a) if isinstance(n, ast.Name)}
    names |= {n.attr for a in asked for n in ast.walk(a) if isinstance(n, ast.Attribute)}
    return any(name.removesuffix("Packed") in CONCRETE for name in names)


def test_nobody_outside_codecs_asks_for_a_concrete_codec() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.parent != ROOT / "codecs"
        for node in ast.walk(ast.parse(path.read_text()))
        if asks_for_a_codec(node)
    ]
    assert not found
    assert asks_for_a_codec(ast.parse("isinstance(c, GroupQuant | DualPrecision)", mode="eval").body)
    assert asks_for_a_codec(ast.parse("type(c) is codecs.GroupQuant", mode="eval").body)


def test_a_codec_that_changes_size_or_type_is_told_so() -> None:
    class WrongPacked(Packed):
        def decode(self) -> Tensor:
            return self.buffers[0]

    @dataclass(frozen=True)
    class Wrong(Codec):
        def encode(self, tensor: Tensor) -> Packed:
            return WrongPacked.like(self, tensor, tensor.bfloat16())

    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    encke.attach(model, Fixed(Wrong()))
    with pytest.raises(RuntimeError, match=r"WrongPacked.decode\(\) returned torch.bfloat16"):
        for _ in range(2):
            model(torch.randn(64, 256)).sum().backward()


@dataclass(frozen=True)
class Replaceable(Rounded):
    """The same, which names a codec for compiled graphs."""

    def fixed_rate(self) -> GroupQuant:
        return GroupQuant(bits=8)


@pytest.mark.filterwarnings("ignore:encke")
@pytest.mark.parametrize(
    ("codec", "backend", "shown"),
    [
        (Rounded(), None, {"Rounded", "Mask"}),
        (Rounded(), "aot_eager", {"Rounded", "Mask"}),
        (Replaceable(), "aot_eager", {"Replaceable", "Mask"}),
    ],
    ids=["eager", "compiled", "compiled, with a stand-in for CUDA graphs"],
)
def test_a_codec_of_two_methods_trains(codec: Codec, backend: str | None, shown: set[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Tanh(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AvgPool2d(28))
    batches = [torch.randn(8, 3, 32, 32) for _ in range(3)]

    def gradients(called: nn.Module) -> Tensor:
        for x in batches:
            model.zero_grad()
            called(x).square().mean().backward()
        return model[0].weight.grad.clone()

    plain = gradients(model)
    called = torch.compile(model, backend=backend) if backend else model
    handle = encke.attach(called, Fixed(codec))
    found = gradients(called)
    assert torch.allclose(found, plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))
    assert not torch.equal(found, plain)
    report = handle.report()
    assert shown <= {row.codec for row in report.sites}, report
    assert report.ratio > 1


def site(need: Need, slot: str = "query") -> Site:
    return Site("layer", "?", slot, need=need, dimensions=4)


@pytest.mark.parametrize(
    ("codec", "need", "slot", "expected"),
    [
        (DualPrecision(bits=2), "attention", "query", DualPrecision(bits=8)),
        (DualPrecision(bits=2, seed=5), "logprob", "result", LogProb(seed=5)),
        (LogProb(), "logprob", "result", LogProb()),
        (Rounded(), "attention", "query", Keep()),
        (Rounded(), "logprob", "result", Keep()),
        (Rounded(), "lossy", "input", Rounded()),
        (Lossless(), "attention", "query", Lossless()),
    ],
    ids=str,
)
def test_attention_and_log_probabilities_are_fine_or_exact(codec: Codec, need: Need, slot: str, expected: Codec):
    assert Scores(Fixed(codec)).codec(site(need, slot)) == expected


def test_attention_has_4_and_8_bits_whatever_the_codec() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 192)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.project(x).view(8, 64, 3, 4, 16).permute(2, 0, 3, 1, 4)
            scores = (q.contiguous() @ k.contiguous().transpose(-1, -2)).softmax(-1)
            return scores @ v.contiguous()

    model = Attention()
    handle = encke.attach(model, Fixed(DualPrecision(bits=2)))
    for _ in range(2):
        model(torch.randn(8, 64, 64)).square().mean().backward()
    rows = {(row.operation, row.slot, row.bound) for row in handle.report().sites if row.codec == "DualPrecision"}
    bmm = {("Bmm", "self", "4 bits"), ("Bmm", "mat2", "4 bits")}
    assert rows == {("Softmax", "result", "8 bits"), *bmm}


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("codec", [GroupQuant(2), GroupQuant(8), DualPrecision(bits=4), ErrorBounded(0.5)], ids=str)
def test_refined_codecs_are_as_fine_as_asked(codec: Codec, bits: int) -> None:
    x = torch.rand(4, 2, 32, 32)
    error = (codec.refined(min_bits=bits).encode(x).decode() - x).abs().max()
    # Stochastic rounding is off by up to a step; differences from an average have up to twice the range.
    assert error <= 2 / (2**bits - 1)
    assert codec.refined(min_bits=9) is None or isinstance(codec, ErrorBounded)


@pytest.mark.parametrize("codec", [ErrorBounded(1.0), ErrorBounded(0.1, "rel"), ErrorBounded(0, "rel"), Lossless()])
def test_refined_bounds_hold(codec: Codec) -> None:
    x = torch.randn(5000)
    for bound in (0.5, 0.01):
        assert (codec.refined(bound=bound).encode(x).decode() - x).abs().max() <= bound
    assert GroupQuant().refined(bound=0.5) is None and Rounded().refined(bound=0.5) is None


@pytest.mark.parametrize("codec", [Mask(), Sign(), Between(-1, 1), Window((2,), (2,), (0,), (1,), (8,))], ids=str)
def test_codecs_for_one_reader_are_no_policy(codec: Codec) -> None:
    with pytest.raises(ValueError, match=f"{type(codec).__name__}.* does not restore values"):
        Fixed(codec)


def test_public_names() -> None:
    assert encke.codecs.__all__ == [
        "Codec", "DualPrecision", "ErrorBounded", "GroupQuant", "LogProb", "Lossless", "Packed"
    ]  # fmt: skip


@pytest.mark.parametrize("name", encke.codecs.__all__)
def test_public_classes_have_an_example(name: str) -> None:
    """tests/test_style.py runs them."""
    text = getattr(encke.codecs, name).__doc__
    assert "Example:" in text and ">>>" in text


@pytest.mark.parametrize("dtype", SOME_SLOW, ids=str)
@pytest.mark.parametrize("codec", [GroupQuant(2), GroupQuant(4, signs=True), DualPrecision(), Rounded()], ids=repr)
def test_packed_data_tells_whether_a_value_spoils_those_around_it(codec: Codec, dtype: torch.dtype) -> None:
    # Constant groups whose lowest bits, which are kept in place of a step, look like a NaN.
    constant = torch.arange(0x3F80FF00, 0x3F810000, 2, dtype=torch.int32).view(torch.float32).repeat_interleave(128)
    for x in (constant.to(dtype), torch.randn(2, 3, 16, 32, dtype=dtype)):
        assert codec.encode(x).intact(x)
        for value in (torch.inf, -torch.inf, torch.nan):
            spoilt = x.clone()
            spoilt.view(-1)[77] = value
            assert not codec.encode(spoilt).intact(spoilt)
    assert codec.encode(x[:0]).intact(x[:0])
