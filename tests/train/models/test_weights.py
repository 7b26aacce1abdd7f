"""Pretrained weights: which files are loaded, and which are named as wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from encke.tools.errors import UsageError
from encke.train.loop import train
from encke.train.models.weights import load_weights
from encke.train.settings import read


def network(classes: int = 3, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, classes))


def same(one: nn.Module, other: nn.Module) -> list[bool]:
    """Whether the weights of each layer are the same."""
    pairs = zip(one.children(), other.children(), strict=True)
    return [
        all(torch.equal(a, b) for a, b in zip(x.state_dict().values(), y.state_dict().values(), strict=True))
        for x, y in pairs
    ]


@pytest.mark.parametrize("form", ["state_dict", "checkpoint", "nested", "safetensors"])
def test_weights_are_loaded_from_every_form(tmp_path, form):
    saved, model = network(), network()
    saved[1].running_mean += 1
    file, state = tmp_path / "weights.pt", saved.state_dict()
    if form == "safetensors":
        file = tmp_path / "weights.safetensors"
        pytest.importorskip("safetensors.torch").save_file(state, file)
    else:
        torch.save(
            {"checkpoint": {"model": state, "progress": {}}, "nested": {"state_dict": state}}.get(form, state), file
        )
    assert load_weights(model, str(file)) == "" and all(same(saved, model))


def test_the_last_layer_stays_fresh_if_the_number_of_classes_differs(tmp_path):
    saved, model = network(5), network(3)
    torch.save(saved.state_dict(), tmp_path / "w.pt")
    before = model[2].weight.clone()
    line = load_weights(model, str(tmp_path / "w.pt"))
    assert line == f"2 starts with fresh weights: {tmp_path / 'w.pt'} has 5 outputs, this training 3"
    assert torch.equal(model[2].weight, before) and same(saved[:2], model[:2]) == [True, True]


STATE = network().state_dict()
WRONG = {
    "width": (network(width=5).state_dict(), r"0.weight has the shape \(5, 2\), that of the model is \(4, 2\)"),
    "features": ({**STATE, "2.weight": torch.zeros(3, 7)}, r"2.weight has the shape \(3, 7\)"),
    "scalar": ({**STATE, "2.bias": torch.tensor(1.0)}, r"2.bias has the shape \(\)"),
    "missing": ({n: v for n, v in STATE.items() if n != "0.bias"}, "lacks 0.bias: these are weights of another model"),
    "more": ({**STATE, "a": STATE["0.bias"], "b": STATE["0.bias"]}, "has, and the model lacks, a and 1 others"),
    "nan": ({**STATE, "0.bias": torch.full((4,), float("nan"))}, "0.bias has values that are not finite"),
    "list": ([1, 2], "holds no state_dict"),
    "empty": ({}, "holds no state_dict"),
    "numbers": ({"0.weight": 3}, "holds no state_dict"),
    "keys": ({1: torch.zeros(2)}, "holds no state_dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_weights_of_another_model_change_nothing_and_are_named(tmp_path, name):
    content, words = WRONG[name]
    torch.save(content, tmp_path / "w.pt")
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UsageError, match=f"model.weights .*w.pt.*{words}") as error:
        load_weights(model, str(tmp_path / "w.pt"))
    assert "\n" not in str(error.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_file_that_is_not_weights_is_named(tmp_path):
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("no weights")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(UsageError, match="text.safetensors cannot be read"):
        load_weights(network(), str(tmp_path / "text.safetensors"))
    for name in ("text.pt", "module.pt"):
        with pytest.raises(UsageError, match=f"{name} holds no state_dict: save model.state_dict"):
            load_weights(network(), str(tmp_path / name))
    with pytest.raises(UsageError, match="gone.pt: there is no such file"):
        load_weights(network(), str(tmp_path / "gone.pt"))


def test_a_run_starts_from_the_checkpoint_of_another(tmp_path, capsys):
    small = "--data synthetic --data.samples 16 --data.size 8 --data.channels 1 --batch 8 --steps 1 --model cnn"
    small += " --policy none --schedule constant --optimizer sgd --optimizer.lr 0"
    first, second = tmp_path / "first", tmp_path / "second"
    train(read("digits", [*small.split(), "--seed", "1", "--data.classes", "4", "--out", str(first)]))
    file = first / "checkpoint.pt"
    more = ["--data.classes", "3", "--out", str(second), "--model.weights", str(file)]
    train(read("digits", [*small.split(), *more]))
    assert f"starts with fresh weights: {file} has 4 outputs, this training 3" in capsys.readouterr().out
    a, b = (torch.load(run / "checkpoint.pt", weights_only=True)["model"] for run in (first, second))
    assert sum(a[name].shape == b[name].shape and torch.equal(a[name], b[name]) for name in a if "weight" in name) > 1
