"""Models of the registry as they are measured."""

from __future__ import annotations

import pytest
import torch

from encke.bench.models import MODELS, build, check_installed, loss_of, optimizer_for, source, synthetic_batch
from encke.tools.errors import UsageError

LARGE = ("llama", "bert", "gpt2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in MODELS])
def test_a_model_trains_on_its_synthetic_batch(name):
    # RegNet reads values of tensors while it is built, GPT-2 of transformers when it is called.
    called_on = "cpu" if source(name) == "transformers" else "meta"
    with torch.device("cpu" if name.startswith("regnet") else called_on):
        model = build(name, 32).to(called_on)
    data = tuple(x.to(called_on) for x in synthetic_batch(MODELS[name], 2, 32, "cpu"))
    loss = loss_of(model, data)
    assert loss.shape == ()
    transformers = ("vit", "gpt", "llama", "bert", "swin", "convnext")
    expected = torch.optim.AdamW if name.startswith(transformers) else torch.optim.SGD
    assert isinstance(optimizer_for(model, MODELS[name]), expected)


def test_the_source_of_a_model_is_named(monkeypatch):
    monkeypatch.setattr("encke.bench.models.installed", lambda module: False)
    assert [source(name) for name in ("cnn", "gpt", "gpt2", "resnet18")] == ["encke", "encke", "encke", "torchvision"]
    with pytest.raises(UsageError, match=r"torchvision: pip install 'encke\[train\]'"):
        check_installed("resnet18")
    monkeypatch.setattr("encke.bench.models.installed", lambda module: True)
    assert source("gpt2") == "transformers"


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_llama_and_bert_come_from_transformers_alone(monkeypatch, name):
    monkeypatch.setattr("encke.bench.models.installed", lambda module: False)
    with pytest.raises(UsageError, match=f"--models {name} comes from transformers: pip install"):
        check_installed(name)
