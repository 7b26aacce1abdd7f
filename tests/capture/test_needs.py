"""Needs: the table, reader by reader, and the same answer in eager and in compiled mode."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import encke
from encke.capture import needs
from encke.capture.needs import CANONICAL, JUMPS, LIPSCHITZ, TABLE, listed_need, need_of
from encke.codecs import GroupQuant
from encke.compiled.names import READERS
from encke.policies import Fixed
from encke.torch_internals import raw_saved_slots
from tests.capture.common import batch

# (operation, slot) -> need of floats that require a gradient, without further facts.
NEEDS = {
    ("Convolution", "input"): "lossy",
    ("Convolution", "weight"): "weight",
    ("BatchNorm", "input"): "lossy",
    ("BatchNorm", "result1"): "exact",
    ("BatchNorm", "running_mean"): "exact",
    ("NativeLayerNorm", "input"): "lossy",
    ("NativeLayerNorm", "result2"): "exact",
    ("NativeGroupNorm", "input"): "lossy",
    ("FusedRmsNorm", "input"): "lossy",
    ("Relu", "result"): "mask",
    ("LeakyRelu", "self"): "sign",
    ("LeakyRelu", "result"): "sign",
    ("Hardtanh", "self"): "exact",
    ("Gelu", "self"): "lossy",
    ("Silu", "self"): "lossy",
    ("Tanh", "result"): "lossy",
    ("Sigmoid", "result"): "lossy",
    ("Mul", "self"): "lossy",
    ("Mul", "other"): "lossy",
    ("Addmm", "mat1"): "lossy",
    ("Mm", "self"): "lossy",
    ("Mm", "mat2"): "lossy",
    ("Bmm", "self"): "lossy",
    ("Bmm", "mat2"): "lossy",
    ("Softmax", "result"): "lossy",
    ("ScaledDotProductAttention", "query"): "attention",
    ("ScaledDotProductAttention", "key"): "attention",
    ("ScaledDotProductAttention", "value"): "lossy",
    ("ScaledDotProductAttention", "output"): "recomputed",
    ("ScaledDotProductAttention", "logsumexp"): "recomputed",
    ("FlashAttention", "query"): "exact",
    ("EfficientAttention", "logsumexp"): "exact",
    ("LogSoftmax", "result"): "logprob",
    ("MaxPool2DWithIndices", "self"): "shape",
    ("AvgPool2D", "self"): "shape",
    ("AdaptiveAvgPool2D", "self"): "shape",
    ("NllLoss", "self"): "shape",
    ("MseLoss", "self"): "exact",
    ("CheckpointFunction", "tensors0"): "exact",
    ("Div", "other"): "exact",
    ("Log", "self"): "exact",
    ("Sqrt", "result"): "exact",
    ("Pow", "self"): "exact",
    ("LinalgVectorNorm", "self"): "exact",
    ("Sin", "self"): "exact",
    ("Amax", "result"): "exact",
    ("GridSampler2D", "grid"): "exact",
    ("GridSampler2D", "input"): "lossy",
    ("Exp", "result"): "lossy",
    ("IndexAdd", "source"): "shape",
    ("ReflectionPad2D", "self"): "shape",
    ("Gather", "self"): "shape",
    ("SomebodysFunction", "tensors0"): "exact",
    ("RreluWithNoise", "noise"): "weight",
}


@pytest.mark.parametrize(("reader", "need"), NEEDS.items(), ids=lambda item: ".".join(item) if len(item) == 2 else item)
def test_need_of_each_reader(reader: tuple[str, str], need: str) -> None:
    assert need_of(*reader, torch.float32, requires_grad=True) == need


def test_the_output_of_attention_with_dropout_is_kept() -> None:
    kinds = {"requires_grad": True, "dropout": True}
    assert need_of("ScaledDotProductAttention", "output", torch.float32, **kinds) == "lossy"
    assert need_of("ScaledDotProductAttention", "logsumexp", torch.float32, **kinds) == "recomputed"


def test_what_else_is_known_changes_the_need() -> None:
    def need(operation: str, slot: str, dtype: torch.dtype = torch.float32, **known: bool) -> str:
        return need_of(operation, slot, dtype, **{"requires_grad": True, **known})

    assert need("Convolution", "input", reads_input=False) == "shape"
    assert need("Convolution", "input", requires_grad=False) == "lossy"
    assert need("Mul", "self", requires_grad=False) == "exact"
    assert need("Mul", "self", parameter=True) == "weight"
    assert need("Embedding", "indices", torch.int64, parameter=True) == "exact"
    assert need("Addmm", "mat2", in_linear=True) == "weight"
    assert need("Addmm", "mat2", from_leaves=True) == "weight"
    assert need("Addmm", "mat2", requires_grad=False) == "weight"
    assert need("Hardtanh", "self", limits=True) == "range"
    assert need("Pow", "self", setting=3) == "lossy"
    assert need("Pow", "self", setting=-1.5) == "exact"
    assert need("LinalgVectorNorm", "self", setting=2) == "lossy"
    assert need("LinalgVectorNorm", "self", setting=1) == "exact"
    assert need("LinalgVectorNorm", "self", setting=2, together=3) == need("Std", "self", together=7) == "exact"
    assert need("Softplus", "self", setting=100.0) == "exact"


def test_compiled_mode_has_the_names_of_the_table() -> None:
    """Compiled mode translates into the names of eager mode."""
    for slots in READERS.values():
        for operation, slot in slots.values():
            assert operation not in CANONICAL
            assert listed_need(operation, slot) is not None, (operation, slot)


def test_what_is_not_listed_is_exact() -> None:
    """Every slot in which a torch autograd node can save a tensor is in the table, or exact."""
    functions = torch._C._functions
    nodes = [kind for name in dir(functions) if isinstance(kind := getattr(functions, name), type)]
    readers = {(kind.__name__.rpartition("Backward")[0], slot) for kind in nodes for slot in raw_saved_slots(kind)}
    assert len(readers) > 500
    for operation, slot in readers:
        operation = CANONICAL.get(operation, operation)
        if (operation, slot) not in TABLE and not slot.startswith("weight"):
            assert need_of(operation, slot, torch.float32, requires_grad=True, limits=True, setting=2) == "exact"
    assert {reader for reader in TABLE if reader[0] != "BatchNorm"} - readers <= {
        ("ScaledDotProductAttention", slot) for slot in ("query", "key", "value", "output", "logsumexp", "log_sumexp")
    }


INDEX = torch.tensor([[0, 2, 1], [3, 1, 0]])
READS_NO_VALUE = {
    ("IndexAdd", "source"): lambda x: torch.zeros(4, 6).index_add(0, INDEX[1], x[:3]),
    ("IndexCopy", "source"): lambda x: torch.zeros(4, 6).index_copy(0, INDEX[1], x[:3]),
    ("Put", "source"): lambda x: torch.zeros(4, 6).put(INDEX, x[:2, :3]),
    ("Gather", "self"): lambda x: x.gather(1, INDEX),
    ("Take", "self"): lambda x: x.take(INDEX),
    ("MaskedSelect", "self"): lambda x: x.masked_select(torch.arange(6) % 2 == 0),
    ("Cummax", "self"): lambda x: x.cummax(0)[0],
    ("Cummin", "self"): lambda x: x.cummin(0)[0],
    ("ReflectionPad1D", "self"): lambda x: F.pad(x, (1, 2), "reflect"),
    ("ReflectionPad2D", "self"): lambda x: F.pad(x[None], (1, 2, 1, 0), "reflect"),
    ("ReflectionPad3D", "self"): lambda x: F.pad(x.view(1, 2, 2, 6), (1, 2, 1, 0, 1, 1), "reflect"),
    ("ReplicationPad1D", "self"): lambda x: F.pad(x, (1, 2), "replicate"),
    ("ReplicationPad2D", "self"): lambda x: F.pad(x[None], (1, 2, 1, 0), "replicate"),
    ("ReplicationPad3D", "self"): lambda x: F.pad(x.view(1, 2, 2, 6), (1, 2, 1, 0, 1, 1), "replicate"),
    ("FractionalMaxPool2D", "self"): lambda x: F.fractional_max_pool2d(x[None], 2, (2, 3)),
    ("FractionalMaxPool3D", "self"): lambda x: F.fractional_max_pool3d(x.view(1, 1, 2, 2, 6), 1, (1, 1, 3)),
}


@pytest.mark.parametrize("reader", READS_NO_VALUE, ids=".".join)
def test_operations_that_read_the_shape_alone(reader: tuple[str, str]) -> None:
    """Replacing the saved values changes no gradient."""

    def gradient(change: float) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(4, 6, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.detach(), lambda t: t + change if t.is_floating_point() else t
        ):
            y = READS_NO_VALUE[reader](x)
        assert y.grad_fn.name() == f"{reader[0]}Backward0" and hasattr(y.grad_fn, f"_saved_{reader[1]}")
        return torch.autograd.grad(y, x, torch.randn_like(y))[0]

    assert TABLE[reader] == "shape" and gradient(0.0).any()
    assert torch.equal(gradient(1e6), gradient(0.0)) and torch.equal(gradient(math.nan), gradient(0.0))


FEW = {
    "normalize": lambda x: F.normalize(x, dim=1),
    "norm": lambda x: x.norm(dim=1),
    "std": lambda x: x.std(1),
    "var_mean": lambda x: torch.var_mean(x, 1)[0],
}


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("channels", "codec"), [(2, "Lossless"), (16, "GroupQuant")])
def test_norms_and_deviations_of_few_values_are_exact(name: str, channels: int, codec: str) -> None:
    """If both values of a pixel are almost zero, errors as large as the neighbours' values would be divided by them."""
    x = torch.randn(4, channels, 32, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with encke.compress(Fixed(GroupQuant(2))) as handle:
        FEW[name](x * 1.0).square().square().sum().backward()
    rows = [row for row in handle.report().sites if row.operation in needs.REDUCTIONS and row.slot == "self"]
    assert [row.codec for row in rows] == [codec]


SMOOTH = {
    "Gelu": F.gelu,
    "Silu": F.silu,
    "Mish": F.mish,
    "Hardswish": F.hardswish,
    "Softplus": F.softplus,
    "Elu": F.selu,
    "PreluKernel": lambda x: F.prelu(x, torch.zeros(1, dtype=x.dtype)),
    "Pow": torch.square,
}


@pytest.mark.parametrize("operation", sorted(LIPSCHITZ))
def test_constants_of_smooth_operations(operation: str) -> None:
    """The derivative, as a function of the saved tensor, changes by no more than the stated constants."""
    x = torch.linspace(-6, 6, 40_001, dtype=torch.float64, requires_grad=True)
    if operation in SMOOTH:
        (slope,) = torch.autograd.grad(SMOOTH[operation](x).sum(), x)
        saved = x.detach()
    else:
        saved = torch.linspace(0 if operation == "Sigmoid" else -1, 1, 10_001, dtype=torch.float64)
        slope = saved * (1 - saved) if operation == "Sigmoid" else 1 - saved**2
    change = (slope.diff().abs() - JUMPS.get(operation, 0) * (slope.diff().abs() > 0.1)).clamp(min=0)
    assert (change <= LIPSCHITZ[operation] * saved.diff() * (1 + 1e-6) + 1e-12).all()
    assert set(LIPSCHITZ) == {operation for (operation, _), need in TABLE.items() if need == "smooth"}


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, gradient):
        x, gate = ctx.saved_tensors
        return gradient * gate, gradient * x


def codecs_of_gate(function: type[torch.autograd.Function]) -> list[str]:
    x = batch().requires_grad_()
    with encke.compress(Fixed(GroupQuant(4))) as handle:
        function.apply(x * 2, x * 3).tanh().sum().backward()
    return [row.codec for row in sorted(handle.report().sites, key=lambda row: row.slot) if row.operation == "Gate"]


def test_registered_readers_are_lossy_and_their_namesakes_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_registered", {})
    namesake = type("Gate", (Gate,), {})
    assert codecs_of_gate(Gate) == ["Lossless"] * 2
    encke.register_reader(Gate, 0, "linear")
    assert codecs_of_gate(Gate) == ["GroupQuant", "Lossless"]
    assert codecs_of_gate(namesake) == ["Lossless"] * 2
    encke.register_reader("Gate", "tensors1", "linear")
    assert codecs_of_gate(namesake) == ["Lossless", "GroupQuant"]
    encke.register_reader(Gate, 0, "exact")
    assert codecs_of_gate(Gate) == ["Lossless", "GroupQuant"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.sin, 0, "linear"), TypeError, "torch.autograd.Function"),
        ((nn.Linear, 0, "linear"), TypeError, "torch.autograd.Function"),
        (("", 0, "linear"), TypeError, "name such as"),
        ((Gate, 0.5, "linear"), TypeError, "slot"),
        ((Gate, True, "linear"), TypeError, "slot"),
        ((Gate, 0, "lossy"), ValueError, "one of exact, shape, linear"),
        ((Gate, 0, "mask"), ValueError, "got 'mask'"),
    ],
)
def test_what_cannot_be_registered_is_refused(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        encke.register_reader(*arguments)
