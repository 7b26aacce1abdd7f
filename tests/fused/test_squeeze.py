"""Blocks with squeeze-and-excite, as in EfficientNet: what their layers compute one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from encke import kernels
from encke.capture import encoding, expressions
from encke.codecs import ErrorBounded, GroupQuant
from encke.fused import block, steps
from encke.policies import Comet, Fixed, Policy
from encke.train.models.vision import torchvision_models
from tests.fused.test_block import Change, attach, close, images, model_of, records, same

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 4


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, the GPU kernels are called, in Triton's interpreter, and sites may save as in the pass before."""
    from encke.kernels import gpu

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    monkeypatch.setattr(expressions, "backend_for", lambda device: gpu)
    monkeypatch.setattr(encoding, "EXAMINED", ())
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of batch norm leave SiLU to torch: results are those of single layers bit for bit."""
    from encke.kernels.gpu.norm_forward import ForwardPlan

    normalise, step = ForwardPlan.normalise, steps.NormStep
    plan_backward, backward = step.plan_backward, step.backward

    def forward(self: Any, x: torch.Tensor, kept: torch.Tensor, out: torch.Tensor, silu: bool = False) -> None:
        normalise(self, x, kept, out)
        if silu:
            nn.functional.silu(out, inplace=True)

    def without(self: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        silu, self.silu = self.silu, None
        found = function(self, *arguments)
        self.silu = silu
        return found

    def backward_in_two(self: Any, kept: Any, grad: torch.Tensor, held: Any) -> Any:
        if self.silu is not None:
            grad = steps.silu_backward(grad, held.silu_input(self.silu).restore())
        return without(self, backward, kept, grad, held)

    monkeypatch.setattr(ForwardPlan, "normalise", forward)
    monkeypatch.setattr(step, "plan_backward", lambda self, device: without(self, plan_backward, device))
    monkeypatch.setattr(step, "backward", backward_in_two)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of steps of the blocks that ran as one function."""
    seen: list[int] = []
    run = block.BlockPlan.run

    def watched(self: Any, *args: Any) -> Any:
        seen.append(len(self.steps))
        return run(self, *args)

    monkeypatch.setattr(block.BlockPlan, "run", watched)
    return seen


def mbconv(ratio: int = 2, out: int = 8, inplace: bool = True, gate: type[nn.Module] = nn.Sigmoid) -> nn.Module:
    """Return a block of EfficientNet with 8 channels."""
    torchvision_models()
    from torchvision.models.efficientnet import MBConv, MBConvConfig

    found: nn.Module = MBConv(MBConvConfig(ratio, 3, 1, 8, out, 1), 0.3, nn.BatchNorm2d)
    found.block[-2].scale_activation = gate()  # type: ignore[index,union-attr]
    for module in found.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = inplace
    return found


def train(
    make: Callable[[], nn.Module], blocks: bool, change: Change | None = None, count: int = STEPS,
    policy: Policy | None = None, dtype: torch.dtype = torch.bfloat16,
) -> tuple[list[Any], list[Any], nn.Module]:  # fmt: skip
    """Return outputs, buffers and gradients of every step, all records, and the model."""
    model = make().to(memory_format=torch.channels_last)
    handle = attach(model, policy or Fixed(GroupQuant(bits=4)), blocks)
    found: list[Any] = []
    noted: list[Any] = []
    for step in range(count):
        if change is not None:
            change(step, model)
        model.zero_grad()
        out = forward(model, step, dtype)
        out.float().square().mean().backward()
        found += [out.detach(), *(b.clone() for b in model.buffers())]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        noted.append(records(handle))
    return found, noted, model


def forward(model: nn.Module, step: int, dtype: torch.dtype = torch.bfloat16, batch: int = 2) -> torch.Tensor:
    torch.manual_seed(step)  # stochastic depth
    with torch.autocast(DEVICE, dtype, enabled=dtype is torch.bfloat16):
        found: torch.Tensor = model(images(step, batch).contiguous(memory_format=torch.channels_last))
    return found


def both(
    ran: list[int], make: Callable[[], nn.Module], change: Change | None = None, count: int = STEPS, **more: Any
) -> list[Any]:
    """Check that a model trains alike with and without blocks, and return the records of the last step."""
    expected, before, _ = train(make, False, change, count, **more)
    assert not ran
    found, noted, _ = train(make, True, change, count, **more)
    assert same(found, expected) and noted == before
    return noted[-1]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "expanded": lambda: model_of(mbconv()),
    "not expanded": lambda: model_of(mbconv(1)),
    "not in place": lambda: model_of(mbconv(inplace=False)),
    "hard": lambda: model_of(mbconv(gate=nn.Hardsigmoid)),
    "in a row": lambda: model_of(mbconv(out=16), nn.Conv2d(16, 8, 1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_records_are_those_of_single_layers(ran, apart, name):
    """What is behind a block without a shortcut is computed again from its last batch norm."""
    noted = both(ran, MODELS[name])
    assert ran == [11 if name == "not expanded" else 14] * (STEPS - 2)
    again = {(site.layer, site.operation) for site, _, _, codec in noted if codec == "recomputed"}
    assert {("2.block.3.0", "Convolution"), ("2.block.2.0", "Convolution")} & again, "the product"
    assert (("3", "Convolution") in again) == (name == "in a row")
    assert (("2.block.1.0", "Convolution") in again) == (name == "not in place")


def test_kernels_compute_the_silus(ran):
    expected, before, _ = train(MODELS["expanded"], False)
    found, noted, _ = train(MODELS["expanded"], True)
    assert ran == [14, 14] and noted == before and close(found, expected, 4e-2)


@pytest.mark.parametrize("kind", ["32 bits", "large", "exact"])
def test_what_is_not_fused_or_not_small_goes_layer_by_layer(ran, kind, monkeypatch):
    from tests.fused import test_block

    more: dict[str, Any] = {"dtype": torch.float32} if kind == "32 bits" else {}
    if kind == "exact":
        more["policy"] = Fixed(ErrorBounded(0))
    if kind == "large":
        monkeypatch.setattr(test_block, "MIN_BYTES", 1)
    both(ran, MODELS["expanded"], **more)
    assert 14 not in ran
