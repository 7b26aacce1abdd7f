"""The models that are measured: found by name, cut into blocks, and the same gradients whatever is checkpointed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from encke.bench.methods import METHODS, checkpointed, selective, usual
from encke.bench.models import CLASSES, MODELS, data_for, loss_of
from encke.train.models.vision import torchvision_models


class SmallVgg(nn.Module):
    """Like VGG: a ReLU that changes a convolution's result in place, and poolings."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 8), (8, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def small_densenet(size):
    return torchvision_models().densenet.DenseNet(4, (2, 2), 8, num_classes=CLASSES)


BUILDERS = {
    "resnet18": MODELS["resnet18"].build,
    "vgg": lambda size: SmallVgg(),
    "densenet": small_densenet,
    "efficientnet_b0": MODELS["efficientnet_b0"].build,
    "gpt_mini": MODELS["gpt_mini"].build,
}


def gradients(builder, kind, wrap):
    torch.manual_seed(0)
    model = builder(32)
    if wrap is not None:
        wrap(model)
    data = data_for(kind, 3, 32, "cpu")
    torch.manual_seed(1)
    loss = loss_of(model, data)
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", BUILDERS)
def test_checkpoints_do_not_change_gradients(name):
    kind = MODELS["gpt_mini" if name == "gpt_mini" else "resnet18"]
    loss, plain = gradients(BUILDERS[name], kind, None)
    for wrap in (checkpointed, selective):
        other_loss, found = gradients(BUILDERS[name], kind, wrap)
        assert torch.equal(loss, other_loss)
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, found, strict=True))


def test_checkpoints_save_less_and_selective_ones_something_in_between():
    def saved(wrap):
        total = 0

        def pack(x):
            nonlocal total
            total += x.nbytes
            return x

        torch.manual_seed(0)
        model = MODELS["resnet18"].build(64)
        if wrap is not None:
            wrap(model)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss_of(model, data_for(MODELS["resnet18"], 2, 64, "cpu"))
        return total

    assert saved(checkpointed) < saved(None) / 2


def test_methods_say_in_words_what_they_lack():
    assert METHODS["save-on-cpu"].missing("cpu", False) == "only on a GPU"
    assert METHODS["budget20"].missing("cpu", False) == "only with --compile"
    assert METHODS["budget20"].missing("cpu", True) == ""
    assert "torchtune or trl" in METHODS["offload"].missing("cuda", False)
    assert "budget20" in usual(True) and "budget20" not in usual(False)
