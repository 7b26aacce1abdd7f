"""Needs: the table, reader by reader, and the same answer in eager and in compiled mode."""

from __future__ import annotations

import pytest
import torch

from encke.capture.needs import CANONICAL, NORMS, TABLE, listed_need, need_of
from encke.compiled.names import READERS

# (operation, slot) -> need of floats that need a gradient, where nothing else is known.
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
    ("Hardtanh", "self"): "lossy",
    ("Gelu", "self"): "lossy",
    ("Silu", "self"): "lossy",
    ("Tanh", "result"): "lossy",
    ("Sigmoid", "result"): "lossy",
    ("Mul", "self"): "lossy",
    ("Mul", "other"): "lossy",
    ("Addmm", "mat1"): "lossy",
    ("Mm", "self"): "lossy",
    ("Mm", "mat2"): "lossy",
    ("Bmm", "self"): "attention",
    ("Bmm", "mat2"): "attention",
    ("Softmax", "result"): "attention",
    ("ScaledDotProductAttention", "query"): "attention",
    ("ScaledDotProductAttention", "output"): "attention",
    ("ScaledDotProductAttention", "logsumexp"): "exact",
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
}


@pytest.mark.parametrize(("reader", "need"), NEEDS.items(), ids=lambda item: ".".join(item) if len(item) == 2 else item)
def test_need_of_each_reader(reader: tuple[str, str], need: str) -> None:
    assert need_of(*reader, torch.float32, requires_grad=True) == need


def test_what_else_is_known_changes_the_need() -> None:
    def need(operation: str, slot: str, dtype: torch.dtype = torch.float32, **known: bool) -> str:
        return need_of(operation, slot, dtype, **{"requires_grad": True, **known})

    assert need("Convolution", "input", weight_gradient=False) == "shape"
    assert need("Convolution", "input", requires_grad=False) == "lossy"
    assert need("Mul", "self", requires_grad=False) == "exact"
    assert need("Mul", "self", parameter=True) == "weight"
    assert need("Embedding", "indices", torch.int64, parameter=True) == "exact"
    assert need("Addmm", "mat2", in_linear=True) == "weight"
    assert need("Addmm", "mat2", from_leaves=True) == "weight"
    assert need("Addmm", "mat2", requires_grad=False) == "weight"
    assert need("Hardtanh", "self", limits=True) == "range"
    assert need("Pow", "self", polynomial=True) == "lossy"


def test_compiled_mode_has_the_names_of_the_table() -> None:
    """What compiled mode translates into is what eager mode calls it: each has an entry above, or is lossy."""
    for slots in READERS.values():
        for operation, slot in slots.values():
            assert operation not in CANONICAL
            expected = NEEDS.get((operation, slot), listed_need(operation, slot) or "lossy")
            found = need_of(operation, slot, torch.float32, requires_grad=True, limits=True)
            assert found == expected or (found == "range" and operation in ("Hardtanh", "Hardsigmoid"))


def test_every_normalisation_is_listed() -> None:
    for norm in NORMS:
        assert listed_need(f"Native{norm}", "input") == "lossy" and listed_need(norm, "result1") == "exact"
    assert len({entry[:2] for entry in TABLE}) == len(TABLE)
