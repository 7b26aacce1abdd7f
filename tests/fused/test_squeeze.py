"""Blocks with squeeze-and-excite, as in EfficientNet: what their layers compute one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import encke
from encke import kernels
from encke.capture import encoding, expressions, hooks, negligible
from encke.codecs import Codec, GroupQuant
from encke.fused import block, steps
from encke.fused.smooth import SMOOTH
from encke.kernels.formats import SMOOTH as ACTS
from encke.policies import Comet, Fixed, Policy
from encke.train.models.vision import torchvision_models
from tests.fused import test_block
from tests.fused.test_block import Change, attach, close, images, model_of, records, same
from tests.fused.test_program import OtherOrder, squeezed

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
    """The kernels of batch norm leave activations to torch: results are those of single layers bit for bit."""
    from encke.kernels.gpu.norm_forward import ForwardPlan

    normalise, step = ForwardPlan.normalise, steps.NormStep
    plan_backward, backward = step.plan_backward, step.backward

    def forward(self: Any, x: torch.Tensor, kept: torch.Tensor, out: torch.Tensor, act: int = 0) -> None:
        normalise(self, x, kept, out)
        for kind in SMOOTH.values():
            if ACTS[kind.operation] == act:
                kind.function_(out.data)  # as a kernel, without counting a modification

    def without(self: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        kept, (self.smooth, self.act) = (self.smooth, self.act), (None, 0)
        found = function(self, *arguments)
        self.smooth, self.act = kept
        return found

    def backward_in_two(self: Any, kept: Any, grad: torch.Tensor, held: Any) -> Any:
        if self.smooth is not None:
            grad = self.smooth.kind.gradient(grad, held.smooth_input(self.smooth).restore())
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


def mbconv(
    ratio: int = 2, out: int = 8, inplace: bool = True, gate: type[nn.Module] = nn.Sigmoid, stride: int = 1
) -> nn.Module:
    """Return a block of EfficientNet with 8 channels."""
    torchvision_models()
    from torchvision.models.efficientnet import MBConv, MBConvConfig

    found: nn.Module = MBConv(MBConvConfig(ratio, 3, stride, 8, out, 1), 0.3, nn.BatchNorm2d)
    found.block[-2].scale_activation = gate()  # type: ignore[index,union-attr]
    for module in found.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = inplace
    return found


def residual(activation: str) -> nn.Module:
    """Return a block of MobileNetV3 with 8 channels, without a shortcut: activations are "RE" or "HS"."""
    torchvision_models()
    from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig

    return InvertedResidual(InvertedResidualConfig(8, 3, 16, 16, True, activation, 1, 1, 1), nn.BatchNorm2d)


def train(
    make: Callable[[], nn.Module], blocks: bool, change: Change | None = None, count: int = STEPS,
    policy: Policy | None = None, dtype: torch.dtype = torch.bfloat16, batch: int = 2,
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
        out = forward(model, step, dtype, batch)
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
    "other order": lambda: model_of(squeezed(OtherOrder())),
    "with a stride": lambda: model_of(mbconv(stride=2)),
    "hard swish": lambda: model_of(residual("HS"), nn.Conv2d(16, 8, 1)),
    "ReLU": lambda: model_of(residual("RE"), nn.Conv2d(16, 8, 1)),
    "in a row": lambda: model_of(mbconv(out=16), nn.Conv2d(16, 8, 1)),
}
WITHOUT_SHORTCUT = ("hard swish", "ReLU", "in a row", "other order", "with a stride")


@pytest.mark.parametrize("name", MODELS)
def test_values_and_records_are_those_of_single_layers(ran, apart, name, monkeypatch):
    """Inputs behind a block without a shortcut are computed again from its last batch norm."""
    monkeypatch.setattr(test_block, "MIN_BYTES", 512)
    noted = both(ran, MODELS[name], batch=8 if name == "with a stride" else 2)
    assert ran == [11 if name in ("not expanded", "other order") else 14] * (STEPS - 2)
    again = {(site.layer, site.operation) for site, _, _, codec in noted if codec == "recomputed"}
    behind = {("2.block.3.0", "Convolution"), ("2.block.2.0", "Convolution"), ("2.2.0", "Convolution")}
    assert behind & again, "the product"
    assert (("3", "Convolution") in again) == (name in WITHOUT_SHORTCUT)
    assert (("2.block.1.0", "Convolution") in again) == (name not in ("ReLU", "not expanded", "other order"))


@pytest.mark.parametrize("name", ["expanded", "hard swish"])
def test_kernels_compute_smooth_activations(ran, name):
    expected, before, _ = train(MODELS[name], False)
    found, noted, _ = train(MODELS[name], True)
    assert ran == [14, 14] and noted == before and close(found, expected, 4e-2)


@pytest.mark.parametrize("kind", ["32 bits", "large"])
def test_what_is_not_fused_or_not_small_goes_layer_by_layer(ran, apart, kind, monkeypatch):
    if kind == "large":
        monkeypatch.setattr(test_block, "MIN_BYTES", 1)
    both(ran, MODELS["expanded"], dtype=torch.float32 if kind == "32 bits" else torch.bfloat16)
    assert 14 not in ran


def test_negligible_tensors_are_kept_as_they_are(ran, apart, monkeypatch):
    """Those of more than the smallest size; a state that may have others ends the plan."""
    monkeypatch.setattr(test_block, "MIN_BYTES", None)
    for name, value in {"SHARE": 5e-3, "TOGETHER": 0.5}.items():
        monkeypatch.setattr(negligible, name, value)
    monkeypatch.setattr(hooks, "SMALL", 8)

    def load(step: int, model: nn.Module) -> None:
        if step == 4:
            known = encke.api._handles[model]._capture.negligible
            assert {"2.block.2.fc1/0/Convolution.input.0", "2.block.2/0/Mul.self.0"} <= known.places
            known.load_state_dict(known.state_dict())

    both(ran, MODELS["expanded"], load, 6)
    assert ran.count(14) == 3


def test_collection_steps_decide_the_same(ran, apart):
    both(ran, MODELS["expanded"], count=7, policy=Comet(every=5))
    assert ran.count(14) == 2


# -- what changes between two passes ----------------------------------------------------------------------------------


def squeeze_of(model: nn.Module) -> Any:
    return model[2].block[2]


def hook_the_gate(step: int, model: nn.Module) -> None:
    if step == 4:
        squeeze_of(model).scale_activation.register_forward_hook(lambda m, args, out: out * 2)


def hook_the_whole(step: int, model: nn.Module) -> None:
    if step == 4:
        squeeze_of(model).register_forward_hook(lambda m, args, out: out * 2)


def backward_hook(step: int, model: nn.Module) -> None:
    if step == 4:
        squeeze_of(model).scale_activation.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))


def freeze(step: int, model: nn.Module) -> None:
    squeeze_of(model).fc1.weight.requires_grad_(step != 4)


def evaluate(step: int, model: nn.Module) -> None:
    squeeze_of(model).avgpool.train(step != 4)


def replace_a_method(step: int, model: nn.Module) -> None:
    if step == 4:
        squeeze_of(model)._scale = squeeze_of(model).avgpool.forward


def replace_a_method_of_the_class(step: int, model: nn.Module) -> None:
    kind, current = type(squeeze_of(model)), type(squeeze_of(model))._scale
    if step == 4:
        kind._scale = lambda self, x: 2 * current(self, x)
        kind._scale.before = current
    elif step == 5:
        kind._scale = current.before


def pool_less(step: int, model: nn.Module) -> None:
    squeeze_of(model).avgpool.output_size = 8 if step == 4 else 1


def stride(step: int, model: nn.Module) -> None:
    squeeze_of(model).fc2.stride = (2, 2) if step == 4 else (1, 1)


def work_in_place(step: int, model: nn.Module) -> None:
    model[2].block[0][2].inplace = model[2].block[1][2].inplace = step != 4


def replace_a_layer(step: int, model: nn.Module) -> None:
    if step == 4:
        squeeze_of(model).scale_activation = nn.Tanh()


def new_weight(step: int, model: nn.Module) -> None:
    if step == 4:
        squeeze_of(model).fc2.weight = nn.Parameter(squeeze_of(model).fc2.weight.detach() * 2)


def parametrize(step: int, model: nn.Module) -> None:
    if step == 4:
        nn.utils.parametrizations.weight_norm(squeeze_of(model).fc1)


def other_choice(step: int, model: nn.Module) -> None:
    encke.api._handles[model].policy.bits = 8 if step == 4 else 4  # type: ignore[attr-defined]


class Switching(Policy):
    """Choose four bits, and others for the product."""

    bits = 4

    def choose(self, site: encke.Site) -> Codec:
        return GroupQuant(bits=self.bits if site.operation == "Mul" else 4)


CHANGES = [
    hook_the_gate, hook_the_whole, backward_hook, freeze, evaluate, replace_a_method, replace_a_method_of_the_class,
    pool_less, stride, work_in_place, replace_a_layer, parametrize, other_choice,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_changes_between_passes_count(ran, apart, change):
    """A change takes effect at once, as layer by layer."""
    both(ran, MODELS["expanded"], change, 6, policy=Switching())
    assert ran[:2] == [14, 14] and ran.count(14) < 4


def test_a_new_weight_counts(ran, apart):
    both(ran, MODELS["expanded"], new_weight, 6)


def test_another_batch_goes_layer_by_layer(ran, apart):
    found = []
    for blocks in (False, True):
        model = train(MODELS["expanded"], blocks)[2]
        del ran[:]
        for step, batch in enumerate((4, 4, 4, 2)):
            model.zero_grad()
            forward(model, step, batch=batch).float().square().mean().backward()
            found.append([p.grad for p in model.parameters()])
    assert all(same(a, b) for a, b in zip(found[:4], found[4:], strict=True)) and ran.count(14) == 2


# -- backward ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["expanded", "not in place"])
def steady(request, ran) -> tuple[nn.Module, torch.Tensor]:
    """A model after steps enough for blocks, and the loss of one more that ran with a block."""
    model = train(MODELS[request.param], True, count=2)[2]
    model.zero_grad()
    loss = forward(model, 2).float().square().mean()
    assert ran == [14]
    return model, loss


def test_backward_twice(steady):
    model, loss = steady
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert same([p.grad for p in model.parameters()], first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("layer", ["1.0", "1.1", "3.0", "3.1"])
def test_a_weight_that_was_modified_is_an_error(steady, layer):
    model, loss = steady
    with torch.no_grad():
        model[2].block.get_submodule(layer).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_copies_of_small_weights_are_kept(steady):
    """As in plain training under autocast, the weight may be modified."""
    model, loss = steady
    first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    with torch.no_grad():
        squeeze_of(model).fc1.weight.mul_(2)
    assert same([*torch.autograd.grad(loss, [*model.parameters()])], [*first])


def test_create_graph_is_an_error(steady):
    model, loss = steady
    with pytest.raises(RuntimeError, match="create_graph=True came to a block"):
        torch.autograd.grad(loss, [*model.parameters()], create_graph=True)


def test_what_is_packed_is_released_step_by_step(steady, monkeypatch):
    seen: list[int] = []
    backward = steps.ConvStep.backward

    def watched(self: Any, kept: Any, grad: Any, held: Any) -> Any:
        seen.append(len(held.kept))
        return backward(self, kept, grad, held)

    monkeypatch.setattr(steps.ConvStep, "backward", watched)
    steady[1].backward()
    assert seen == [13, 10, 8, 4, 1]
