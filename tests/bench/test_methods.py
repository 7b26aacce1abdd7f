"""Methods: the same gradients whatever is checkpointed, and words for what cannot be measured here."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import encke
from encke.bench.methods import METHODS, checkpoint_blocks, checkpoint_selectively, usual
from encke.bench.models import MODELS, build, loss_of, synthetic_batch
from encke.train.models.vision import torchvision_models


class SmallVgg(nn.Module):
    """Like VGG: a ReLU that changes a convolution's result in place, and poolings."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 8), (8, 16)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(16, MODELS["resnet18"].classes)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def small_densenet(size):
    return torchvision_models().densenet.DenseNet(4, (2, 2), 8, num_classes=MODELS["resnet18"].classes)


BUILDERS = {
    "resnet18": partial(build, "resnet18"),
    "vgg": lambda size: SmallVgg(),
    "densenet": small_densenet,
    "efficientnet_b0": partial(build, "efficientnet_b0"),
    "gpt": partial(build, "gpt"),
}


def gradients(builder, kind, wrap):
    torch.manual_seed(0)
    model = builder(32)
    if wrap is not None:
        wrap(model)
    data = synthetic_batch(kind, 3, 32, "cpu")
    torch.manual_seed(1)
    loss = loss_of(model, data)
    loss.backward()
    return loss, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("name", BUILDERS)
def test_checkpoints_do_not_change_gradients(name):
    kind = MODELS["gpt" if name == "gpt" else "resnet18"]
    loss, plain = gradients(BUILDERS[name], kind, None)
    for wrap in (checkpoint_blocks, checkpoint_selectively):
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
        model = build("resnet18", 64)
        if wrap is not None:
            wrap(model)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss_of(model, synthetic_batch(MODELS["resnet18"], 2, 64, "cpu"))
        return total

    assert saved(checkpoint_blocks) < saved(None) / 2


def test_inputs_of_checkpointed_blocks_are_packed_on_request():
    model = build("llama_small", 128)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    packed = {}
    for name in ("checkpoint-packed", "default"):
        try:
            if name == "checkpoint-packed":
                METHODS[name].wrap(model)  # once: default then runs with the same checkpoints
            handle = METHODS[name].attach(model, optimizer)
            for _ in range(2):
                loss_of(model, synthetic_batch(MODELS["llama_small"], 4, 128, "cpu")).backward()
        finally:
            encke.register_reader("Checkpoint", "input", "exact")
        (packed[name],) = {row.codec for row in handle.report().sites if row.operation == "Checkpoint" and row.layer}
        handle.detach()
    assert packed == {"checkpoint-packed": "GroupQuant", "default": "kept"}


def test_methods_say_in_words_what_they_lack(monkeypatch):
    monkeypatch.setattr("encke.bench.methods.offloader", lambda: None)
    assert METHODS["save-on-cpu"].missing("cpu") == "only on a GPU"
    assert METHODS["budget20"].missing("cpu") == ""
    assert "torchtune or trl" in METHODS["offload"].missing("cuda")
    assert "budget20" in usual(True) and "budget20" not in usual(False)
    assert not {"budget30", "checkpoint-packed"} & set(usual(True))


def test_policies_have_the_names_of_presets_and_default_is_what_attach_uses():
    names = ["default", "careful", "aggressive", "comet", "division"]
    names += ["group2", "group4", "group8", "bounded", "dithered"]
    assert [name for name, method in METHODS.items() if method.kind == "encke"] == names
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert METHODS["plain"].attach(model, optimizer) is None
    handle = METHODS["default"].attach(model, optimizer)
    usual_handle = encke.attach(nn.Linear(4, 4))
    assert repr(handle.policy) == repr(usual_handle.policy)
