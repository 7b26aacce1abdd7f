"""Models by name: outputs, stems for small images, channels, blocks, and what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from encke.tools.errors import UsageError
from encke.train.models.registry import MODELS, blocks, build
from encke.train.models.resnet164 import ResNet164
from encke.train.settings import Model


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (Model("alexnet"), 64),
        (Model("vgg16_bn"), 32),
        (Model("resnet18"), 64),
        (Model("resnet50", stem="cifar"), 32),
        (Model("densenet121", stem="cifar"), 32),
        (Model("efficientnet_b0"), 64),
        (Model("resnet164"), 32),
        (Model("digits"), 28),
        (Model("cnn"), 32),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_has_as_many_outputs_as_classes(model, size, channels):
    with torch.device("meta"):
        made = build(model, 7, channels)
        assert made(torch.empty(2, channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_the_stem_for_small_images_keeps_them_large(name):
    first = []
    with torch.device("meta"):
        made = build(Model(name, stem="cifar"), 10)
        block = next(m for m in made.modules() if type(m).__name__ in ("BasicBlock", "_DenseLayer"))
        block.register_forward_hook(lambda module, args, output: first.append(output.shape[-1]))
        made(torch.empty(1, 3, 32, 32))
    assert first == [32]


def test_resnet164_has_164_layers_with_weights_on_its_longest_path():
    model = ResNet164()
    beside = sum(block.shortcut is not None for block in model.blocks)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) - beside == 164


def test_gpt_takes_its_size_from_the_settings():
    gpt = build(Model("gpt", context=16, layers=2, heads=2, width=8, dropout=0.0), 11, tokens=True)
    assert gpt(torch.zeros(3, 16, dtype=torch.long)).shape == (3, 16, 11)
    assert len(gpt.blocks) == 2 and not any(m.p for m in gpt.modules() if isinstance(m, nn.Dropout))


def test_dropout_can_be_set_where_there_is_some():
    with torch.device("meta"):
        assert {m.p for m in build(Model("alexnet", dropout=0.1), 2).modules() if isinstance(m, nn.Dropout)} == {0.1}


@pytest.mark.parametrize(
    ("model", "tokens", "words"),
    [
        (Model("resnet17"), False, ["resnet17", "did you mean resnet18"]),
        (Model("zebra"), False, ["zebra", "torchvision"]),
        (Model("mine.py"), False, ["name a function in the file, such as mine.py:build"]),
        (Model("gpt"), False, ["gpt", "text"]),
        (Model("resnet18"), True, ["resnet18", "gpt"]),
        (Model("gpt", width=10, heads=4), True, ["10", "4"]),
        (Model("alexnet", stem="cifar"), False, ["stem", "alexnet"]),
        (Model("resnet164", stem="cifar"), False, ["stem", "resnet164"]),
        (Model("resnet18", dropout=0.5), False, ["dropout", "resnet18"]),
        (Model("digits", dropout=0.5), False, ["dropout", "digits"]),
    ],
)
def test_what_does_not_fit_is_named(model, tokens, words):
    with pytest.raises(UsageError) as error:
        build(model, 10, tokens=tokens)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_vision_transformer_is_built_for_the_size_of_the_images():
    with torch.device("meta"):
        assert build(Model("vit_b_16"), 7, side=64)(torch.empty(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "count"),
    {
        "cnn": 1,
        "resnet18": 8,
        "resnet50": 16,
        "wide_resnet50_2": 16,
        "vgg16": 5,
        "densenet161": 78,
        "efficientnet_b0": 16,
        "vit_b_16": 12,
        "gpt": 6,
        "gpt2": 12,
    }.items(),
)
def test_a_model_has_its_natural_blocks(name, count):
    info = MODELS[name]
    with torch.device("meta"):
        model = build(info.model, info.classes, tokens=info.data == "tokens")
    parameters = sum(p.numel() for p in model.parameters())
    found = blocks(model)
    assert len(found) == count
    assert all(any(True for _ in block.parameters()) for block in found)
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_vgg16_has_no_batch_norm():
    with torch.device("meta"):
        network = build(Model("vgg16"), 7)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
