"""The models: shapes, the stem for small images, and torchvision beside a torch it does not fit."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch import nn

from encke.train.models import builders


def test_resnet18_keeps_small_images_large_up_to_its_second_stage():
    model = builders.resnet18(classes=7).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert model.maxpool(model.relu(model.bn1(model.conv1(x)))).shape == (2, 64, 32, 32)
        assert model(x).shape == (2, 7)


def test_vgg16_has_no_batch_norm_and_its_own_number_of_classes():
    with torch.device("meta"):
        model = builders.vgg16(classes=7)
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 7)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.slow
def test_torchvision_imports_in_a_fresh_process_and_twice():
    load = "from encke.train.models.builders import torchvision_models as t; "
    code = load + "assert t() is t(); t().resnet18; import torchvision"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_torchvision_is_named_with_the_way_to_install_it(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'", name="torchvision")

    monkeypatch.setattr(builders.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install 'encke\[train\]'"):
        builders.torchvision_models()


def test_another_error_of_torchvision_is_not_hidden(monkeypatch):
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::other does not exist")

    monkeypatch.setattr(builders.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="other"):
        builders.torchvision_models()


def tiny_gpt(**settings) -> builders.Gpt:
    torch.manual_seed(0)
    return builders.Gpt(11, **{"context": 8, "layers": 2, "heads": 2, "width": 16, **settings})


def test_gpt_gives_logits_near_uniform_at_the_start():
    tokens = torch.randint(11, (4, 8))
    logits = tiny_gpt()(tokens)
    assert logits.shape == (4, 8, 11)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flip(1).flatten())
    assert abs(loss.item() - math.log(11)) < 0.1


def test_gpt_does_not_look_ahead():
    model = tiny_gpt().eval()
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_gpt_scales_residual_projections_and_drops_in_training_only():
    model = tiny_gpt(layers=8, width=64, dropout=0.5)
    assert model.blocks[0].narrow.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].widen.weight.std().item() == pytest.approx(0.02, rel=0.1)
    tokens = torch.randint(11, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_gpt_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="width 16 and heads 3"):
        tiny_gpt(heads=3)
    with pytest.raises(ValueError, match="8 tokens at once, got 9"):
        tiny_gpt()(torch.zeros(1, 9, dtype=torch.long))


def test_build_finds_models_by_name_and_lists_them_otherwise():
    assert builders.build("resnet18", 3).fc.out_features == 3
    assert isinstance(builders.build("gpt", 5), builders.Gpt)
    with pytest.raises(ValueError, match="'resnet19'; choose one of resnet18, vgg16, gpt"):
        builders.build("resnet19", 10)
