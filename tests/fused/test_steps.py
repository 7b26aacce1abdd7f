"""Steps of instance norm and leaky ReLU: blocks with them compute what their layers compute one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from encke.capture import encoding
from encke.codecs import GroupQuant
from encke.fused import steps
from encke.fused.program import program_of
from encke.policies import Comet
from tests.fused.test_block import STEPS, both, close, images, model_of, ran, records, same, train  # noqa: F401
from tests.fused.test_block import attach as attached

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, sites may save as in the pass before."""
    monkeypatch.setattr(encoding, "EXAMINED", ())
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def layers(affine: bool = True, inplace: bool = True) -> list[nn.Module]:
    """Convolution, instance norm and leaky ReLU, as in a U-Net for volumes, and the same with one filter a channel."""
    found: list[nn.Module] = []
    for groups in (1, 8):
        convolution = nn.Conv2d(8, 8, 3, padding=1, bias=False, groups=groups)
        found += [convolution, nn.InstanceNorm2d(8, affine=affine), nn.LeakyReLU(0.01, inplace)]
    return found


class Residual(nn.Module):
    """A sum between the last norm and the last activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1, self.act, self.conv2, self.norm2, _ = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += x
        return self.act(y)


class Volumes(nn.Module):
    """A block of volumes between layers of planes."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.LeakyReLU(0.01, True)
        self.block = nn.Sequential(nn.Conv3d(8, 8, 1, bias=False), nn.InstanceNorm3d(8, affine=True), act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.unflatten(2, (2, -1))).flatten(2, 3)


MODELS: dict[str, Any] = {
    "affine": lambda: model_of(nn.Sequential(*layers())),
    "without weights": lambda: model_of(nn.Sequential(*layers(affine=False))),
    "residual": lambda: model_of(Residual()),
    "volumes": lambda: model_of(Volumes()),
    "batch norm": lambda: model_of(nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), *layers()[2:])),
    "ReLU": lambda: model_of(nn.Sequential(*layers()[:2], nn.ReLU(True), *layers()[3:])),
}


@pytest.mark.parametrize("name", MODELS)
def test_bits_and_records_are_those_of_single_layers(ran, name):  # noqa: F811
    expected = "SumStep" if name == "residual" else "InstanceNormStep"
    assert both(ran, MODELS[name]) == [expected] * (STEPS - 2)


def test_memory_that_leaky_relu_and_a_convolution_share_is_packed_once(ran):  # noqa: F811
    model = MODELS["affine"]()
    handle = attached(model)
    train(model, handle)
    packed = {(site.layer, site.operation): codec for site, *_, codec in records(handle)}
    assert ran and ("2.3", "Convolution") not in packed
    assert packed["2.2", "LeakyRelu"] == GroupQuant(bits=4, signs=True)


def test_autocast(ran):  # noqa: F811
    """Values of 16 bits with weights of 32, whose copies are kept."""

    def results(blocks: bool) -> list[Any]:
        model = MODELS["affine"]()
        handle, found = attached(model, blocks=blocks), []
        for step in range(STEPS):
            model.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                out = model(images(step))
            out.float().square().mean().backward()
            found += [out.detach(), *(p.grad.clone() for p in model.parameters()), *records(handle)]
        return found

    expected = results(False)
    assert not ran and same(results(True), expected) and ran == ["InstanceNormStep"] * (STEPS - 2)


def test_collection_steps_go_layer_by_layer_and_decide_the_same(ran):  # noqa: F811
    def results(blocks: bool) -> list[Any]:
        model = MODELS["affine"]()
        return train(model, attached(model, Comet(every=4), blocks), count=8)

    expected = results(False)
    assert same(results(True), expected) and len(ran) == 3


def other_slope(step: int, model: nn.Module) -> None:
    model[2][2].negative_slope = 0.2 if step == 4 else 0.01


def not_in_place(step: int, model: nn.Module) -> None:
    model[2][2].inplace = step != 4


def freeze(step: int, model: nn.Module) -> None:
    model[2][4].weight.requires_grad_(step != 4)


CHANGES = [other_slope, not_in_place, freeze]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_changes_between_passes_count(ran, change):  # noqa: F811
    """A change takes effect at once, as layer by layer."""
    assert both(ran, MODELS["affine"], change, 6)[:2] == ["InstanceNormStep"] * 2


def test_gradients_of_another_dtype_and_small_planes(ran, monkeypatch):  # noqa: F811
    """Where the kernels do not read the codes, plain operations compute the same."""
    model = MODELS["affine"]()
    expected = train(model, attached(model))
    monkeypatch.setattr(steps, "gradients_from_codes", lambda *arguments: None)
    model = MODELS["affine"]()
    found = train(model, attached(model))
    tensors = [[each for each in results if isinstance(each, torch.Tensor)] for results in (found, expected)]
    assert close(*tensors, 1e-4)


def test_weights_of_a_norm_may_be_modified_before_backward(ran):  # noqa: F811
    """Backward reads a copy of them for each sample, as plain autograd does."""
    model = MODELS["affine"]()
    attached_model = attached(model)
    train(model, attached_model, count=3)
    out = model(images())
    with torch.no_grad():
        model[2][1].weight.mul_(2)
    out.sum().backward()
    assert len(ran) == 2


def test_programs_of_instance_norms_and_leaky_relus():
    """The last activation stays a layer of its own, in place; without it the block has another size of result."""
    first, second = layers(), layers(inplace=False)
    program = program_of(nn.Sequential(*first))
    assert program is not None and len(program.calls) == 5 and program.modules[program.last]() is first[-1]
    assert program_of(nn.Sequential(*first[:5])) is None
    assert program_of(nn.Sequential(*second)) is not None, "left to the plan"
    norm = nn.InstanceNorm2d(8)
    others = [[norm, nn.Conv2d(8, 8, 1), norm], [norm, nn.SiLU(), nn.Conv2d(8, 8, 1), norm]]
    assert [program_of(nn.Sequential(nn.Conv2d(8, 8, 1), *each, nn.ReLU())) for each in others] == [None] * 2
