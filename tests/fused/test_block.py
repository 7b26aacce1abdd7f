"""Blocks that run as one function: what their layers compute one by one, bit for bit."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import encke
from encke import kernels
from encke.capture import expressions
from encke.codecs import Codec, GroupQuant
from encke.fused import block, registry, steps
from encke.fused.base import LayerForward
from encke.fused.program import program_of
from encke.fused.smooth import SMOOTH
from encke.policies import Comet, Fixed, Policy
from encke.torch_internals import top_saved_tensors_hooks

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 5
MIN_BYTES = 256


class Bottleneck(nn.Module):
    """Two convolutions and a shortcut, as in ResNet."""

    def __init__(self, channels: int, widened: int | None = None, bias: bool = False) -> None:
        super().__init__()
        width = widened or channels
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 1, bias=bias), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if widened is not None:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def model_of(*blocks: nn.Module) -> nn.Module:
    """Return a model with these blocks between two convolutions, whose weights are the same every time."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), *blocks, nn.Conv2d(8, 4, 1))
    for p in model.parameters():
        nn.init.uniform_(p, -0.5, 1.0)
    return model.to(DEVICE).train()


def attach(model: nn.Module, policy: Policy | None = None, blocks: bool = True) -> encke.Handle:
    """Attach with layers that are fused whatever their size, with or without blocks."""
    with pytest.MonkeyPatch.context() as patch:
        if not blocks:
            others = tuple(each for each in registry.FORWARDS if each is not block.BlockForward)
            patch.setattr(registry, "FORWARDS", others)
        handle = encke.attach(model, policy or Fixed(GroupQuant(bits=2)), min_bytes=MIN_BYTES)
    for forward in handle._hooks:
        if isinstance(forward, LayerForward):
            forward.device_type, forward.min_bytes = DEVICE, 1
    return handle


def images(seed: int = 0, batch: int = 2, size: int = 8) -> torch.Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def half_images(seed: int) -> torch.Tensor:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


def records(handle: encke.Handle) -> list[tuple[Any, ...]]:
    return [(r.site, r.saved_bytes, r.packed_bytes, r.codec) for r in handle._capture.ledger.last]


Change = Callable[[int, nn.Module], None]


def train(model: nn.Module, handle: encke.Handle, change: Change | None = None, count: int = STEPS) -> list[Any]:
    """Return outputs, gradients, buffers and records of every step."""
    found: list[Any] = []
    for step in range(count):
        if change is not None:
            change(step, model)
        model.zero_grad()
        out = model(images(step))
        out.square().mean().backward()
        found += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        found += [b.clone() for b in model.buffers()] + records(handle)
    return found


def same(got: list[Any], expected: list[Any]) -> bool:
    return len(got) == len(expected) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(got, expected, strict=True)
    )


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the results of blocks that ran as one function."""
    seen: list[str] = []
    run = block.BlockPlan.run

    def watched(self: Any, *args: Any) -> Any:
        seen.append(type(self.steps[-1]).__name__)
        return run(self, *args)

    monkeypatch.setattr(block.BlockPlan, "run", watched)
    return seen


def both(ran: list[str], make: Callable[[], nn.Module], change: Change | None = None, count: int = STEPS) -> list[str]:
    """Check that a model trains alike with and without blocks, and return which blocks ran as one."""
    model = make()
    expected = train(model, attach(model, blocks=False), change, count)
    assert not ran
    model = make()
    assert same(train(model, attach(model), change, count), expected)
    return ran


def test_bits_and_records_are_those_of_single_layers(ran):
    assert both(ran, lambda: model_of(Bottleneck(8), Bottleneck(8))) == ["SumStep"] * 6


def test_a_shortcut_with_layers(ran):
    """The block's input is read by two convolutions, and a part of the block is a block itself."""
    assert both(ran, lambda: model_of(Bottleneck(8, 8), Bottleneck(8, bias=True))) == ["SumStep"] * 6


class Plain(nn.Sequential):
    """Convolution, batch norm and ReLU, twice; without a shortcut."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        super().__init__(*layers, *copy.deepcopy(layers))


def test_a_batch_norm_at_the_end(ran):
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Identity())
    assert both(ran, lambda: model_of(copy.deepcopy(inner), nn.ReLU())) == ["NormStep"] * 3


def test_a_batch_norm_without_weights_is_no_part_of_a_block(ran):
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8, affine=False), nn.ReLU())
    assert both(ran, lambda: model_of(copy.deepcopy(inner))) == []


def test_without_a_shortcut(ran):
    assert both(ran, lambda: model_of(Plain())) == ["NormStep"] * 3


def test_samples_of_large_inputs_are_taken_in_parts(ran, monkeypatch):
    """In parts of the same sizes as by single layers, and the weights' gradients are added in the same order."""
    from encke.fused import conv

    seen: list[int] = []
    plain = torch.convolution
    monkeypatch.setattr(torch, "convolution", lambda x, *args: seen.append(len(x)) or plain(x, *args))
    monkeypatch.setattr(conv, "CONV_PART_BYTES", 1 << 13)
    monkeypatch.setattr(conv, "PARTED", (4,))
    few = images
    monkeypatch.setitem(globals(), "images", lambda seed: few(seed, batch=16))
    model = model_of(Plain())
    assert both(ran, lambda: copy.deepcopy(model)) == ["NormStep"] * 3
    assert 4 in seen and set(seen) <= {4, 16}  # another backend may compute the parts of some


def test_what_is_behind_a_batch_norm_is_computed_again_from_it(ran):
    """Its input, statistics and parameters are found on the function's node, as on the plain operation's."""
    inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    model = model_of(copy.deepcopy(inner), nn.Conv2d(8, 8, 1), copy.deepcopy(inner))
    assert both(ran, lambda: copy.deepcopy(model)) == ["NormStep"] * 6
    handle = attach(model)
    train(model, handle)
    assert {site.layer for site, *_, codec in records(handle) if codec == "recomputed"} == {"3", "5"}


@pytest.mark.parametrize("split", [False, True])
def test_autocast_and_channels_last(ran, split, monkeypatch):
    """Kernels for 16 bits compute while they pack; the copies of weights are made again, or kept if they are small."""
    from encke.kernels import gpu

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    together: list[torch.Tensor] = []
    encode = gpu.plans.GpuPlan.encode_norm_relu

    def watched(self: Any, x: torch.Tensor, norm: Any, out: torch.Tensor, *args: Any) -> torch.Tensor:
        assert out is x
        together.append(norm)
        return encode(self, x, norm, out, *args)

    monkeypatch.setattr(gpu.plans.GpuPlan, "encode_norm_relu", watched)

    def train_half(blocks: bool) -> list[Any]:
        model = model_of(Bottleneck(8, 8)).to(memory_format=torch.channels_last)
        handle, found = attach(model, blocks=blocks), []
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.forward.min_bytes = 1 if split else 1 << 40  # type: ignore[attr-defined]
        for step in range(4):
            model.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                out = model(images(step).contiguous(memory_format=torch.channels_last))
            out.float().square().mean().backward()
            found += [out.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
            found += records(handle)
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(images().contiguous(memory_format=torch.channels_last))
        with torch.no_grad():
            model[2].conv1.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified between forward and backward"):
            out.float().sum().backward()
        return found

    expected = train_half(False)
    assert not ran and not together
    assert same(train_half(True), expected) and len(ran) == len(together) == 3


def smooth_blocks(activation: type[nn.Module], inplace: bool) -> list[nn.Module]:
    """Convolution, batch norm and activation, and the same with one filter for each channel, as in EfficientNet."""
    layers = [nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)]
    return [nn.Sequential(layer, nn.BatchNorm2d(8), activation(inplace)) for layer in layers]


def train_smooth(
    blocks: bool, activation: type[nn.Module], inplace: bool = True, change: Change | None = None, count: int = STEPS
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return outputs, gradients and buffers of every step, and all records."""
    model = model_of(*smooth_blocks(activation, inplace)).to(memory_format=torch.channels_last)
    handle = attach(model, Fixed(GroupQuant(bits=4)), blocks)
    tensors: list[torch.Tensor] = []
    noted: list[Any] = []
    for step in range(count):
        if change is not None:
            change(step, model)
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(images(step).contiguous(memory_format=torch.channels_last))
        out.float().square().mean().backward()
        tensors += [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        tensors += [b.clone() for b in model.buffers()]
        noted.append(records(handle))
    return tensors, noted


def close(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 2e-2) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all((a.double() - b.double()).norm() <= tolerance * b.double().norm() + 1e-6 for a, b in pairs)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too, the GPU kernels are called, in Triton's interpreter."""
    from encke.kernels import gpu

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    monkeypatch.setattr(expressions, "backend_for", lambda device: gpu)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activation_behind_a_batch_norm(ran, launched, activation, inplace):
    """One step computes both; what the convolution behind it reads is computed again from the batch norm's codes."""
    expected, before = train_smooth(False, activation, inplace)
    assert not ran
    found, noted = train_smooth(True, activation, inplace)
    assert ran == ["SmoothStep"] * 2 * (STEPS - 2)
    assert close(found, expected) and noted == before
    again = {(site.layer, site.operation) for site, _, _, codec in noted[-1] if codec == "recomputed"}
    operation = SMOOTH[activation].operation
    assert again == {("2.2", operation), ("3.2", operation), ("3.0", "Convolution"), ("4", "Convolution")}


@pytest.mark.parametrize("activation", SMOOTH)
def test_gradients_of_another_dtype_go_through_a_smooth_activation(ran, launched, activation, monkeypatch):
    """Where the kernels do not take them, plain operations compute the same."""
    expected, _ = train_smooth(False, activation)
    monkeypatch.setattr(steps.NormStep, "plan_backward", lambda self, device: None)
    found, _ = train_smooth(True, activation)
    assert len(ran) == 2 * (STEPS - 2) and close(found, expected, 0.05)


def freeze_first_norm(step: int, model: nn.Module) -> None:
    model[2][1].bias.requires_grad_(step != 4)


def evaluate_first_norm(step: int, model: nn.Module) -> None:
    model[2][1].train(step != 4)


def hook_first_activation(step: int, model: nn.Module) -> None:
    if step == 4:
        model[2][2].register_forward_hook(lambda m, args, out: out * 2)


SMOOTH_CHANGES = [freeze_first_norm, evaluate_first_norm, hook_first_activation]


@pytest.mark.parametrize("change", SMOOTH_CHANGES, ids=lambda f: f.__name__)
def test_changes_around_a_smooth_activation_count(ran, launched, change):
    expected, _ = train_smooth(False, nn.Hardswish, change=change, count=7)
    found, _ = train_smooth(True, nn.Hardswish, change=change, count=7)
    assert ran[:4] == ["SmoothStep"] * 4 and close(found, expected)


@pytest.mark.parametrize("activation", SMOOTH)
def test_a_smooth_activation_elsewhere_is_no_part_of_a_block(activation):
    """In front of a batch norm, behind a convolution, or read again within the container."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), activation()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.conv(x))
            return self.act(y) + y

    conv, norm, act = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), activation()
    assert program_of(nn.Sequential(conv, norm, act)) is not None
    others = [nn.Sequential(conv, act), nn.Sequential(conv, act, norm), Twice(), nn.Sequential(conv, norm, act, conv)]
    assert [program_of(each) for each in others] == [None] * 4


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: on a CPU the statistics of such a batch norm have 16 bits")
def test_weights_of_16_bits(ran, monkeypatch):
    """Without autocast: kernels that compute while they pack take weights of batch norms in fp32 only."""
    model = model_of(Bottleneck(8, 8))

    def make() -> nn.Module:
        return copy.deepcopy(model).to(torch.bfloat16, memory_format=torch.channels_last)

    monkeypatch.setattr(sys.modules[__name__], "images", half_images)
    assert both(ran, make) == ["SumStep"] * 3


# -- what changes between two passes ----------------------------------------------------------------------------------


def hook_inside(step: int, model: nn.Module) -> None:
    if step == 3:
        model[2].bn1.register_forward_hook(lambda m, args, out: out * 2)


def backward_hook_inside(step: int, model: nn.Module) -> None:
    if step == 3:
        model[2].conv2.register_full_backward_hook(lambda m, into, out: (into[0] * 2,))


def backward_hook_around(step: int, model: nn.Module) -> None:
    if step == 3:
        model[2].register_full_backward_hook(lambda m, into, out: (into[0] * 2,))


def evaluate_a_norm(step: int, model: nn.Module) -> None:
    model[2].bn2.train(step != 3)


def freeze(step: int, model: nn.Module) -> None:
    model[2].conv2.weight.requires_grad_(step != 3)


def freeze_a_norm(step: int, model: nn.Module) -> None:
    model[2].bn1.bias.requires_grad_(step != 3)


def replace_a_layer(step: int, model: nn.Module) -> None:
    if step == 3:
        model[2].bn1 = copy.deepcopy(model[2].bn1)


def add_a_shortcut(step: int, model: nn.Module) -> None:
    if step == 3:
        torch.manual_seed(5)
        model[2].downsample = nn.Conv2d(8, 8, 1).to(DEVICE)


def dilate(step: int, model: nn.Module) -> None:
    model[2].conv1.dilation = model[2].conv1.padding = (2, 2) if step == 3 else (1, 1)


def new_weight(step: int, model: nn.Module) -> None:
    if step == 3:
        model[2].conv1.weight = nn.Parameter(model[2].conv1.weight.detach() * 2)


def replace_a_forward(step: int, model: nn.Module) -> None:
    if step == 3:
        model[2].bn1.forward = nn.Identity().forward


def parametrize(step: int, model: nn.Module) -> None:
    if step == 3:
        torch.manual_seed(7)
        nn.utils.parametrizations.spectral_norm(model[2].conv2)


def hook_everywhere(step: int, model: nn.Module) -> None:
    def doubled(module: nn.Module, args: Any, out: Any) -> Any:
        return out * 2 if module is model[2].bn1 else None

    if step == 3:
        model.everywhere = nn.modules.module.register_module_forward_hook(doubled)
    elif step == 4:
        model.everywhere.remove()


CHANGES = [
    hook_everywhere,
    parametrize,
    hook_inside, backward_hook_inside, backward_hook_around, evaluate_a_norm, freeze, freeze_a_norm, replace_a_layer,
    add_a_shortcut, dilate, new_weight, replace_a_forward,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_changes_between_passes_count(ran, change):
    """A change takes effect at once, as layer by layer, and the third pass, before it, was one of blocks."""
    assert both(ran, lambda: model_of(Bottleneck(8)), change, 6)[:1] == ["SumStep"]


class Switching(Policy):
    """Choose two bits, and others for one layer inside the block."""

    bits = 2

    def choose(self, site: encke.Site) -> Codec:
        return GroupQuant(bits=self.bits if site.layer == "2.conv2" else 2)


@pytest.mark.parametrize("change", ["codec", "batch"])
def test_choices_and_sizes_may_change(ran, change):
    def results(blocks: bool) -> list[Any]:
        model, policy = model_of(Bottleneck(8)), Switching()
        handle, found = attach(model, policy, blocks), []
        for step in range(7):
            policy.bits = 4 if change == "codec" and step >= 4 else 2
            model.zero_grad()
            out = model(images(step, batch=3 if change == "batch" and step >= 4 else 2))
            out.square().mean().backward()
            found += [out.detach(), *(p.grad for p in model.parameters()), *records(handle)]
        return found

    expected = results(False)
    assert not ran and same(results(True), expected) and len(ran) == 4


def test_a_block_that_cannot_be_planned_is_tried_again_after_a_pause(ran, monkeypatch):
    monkeypatch.setattr(block, "ATTEMPTS", 2)
    monkeypatch.setattr(block, "PAUSE", 2)
    attempts: list[int] = []
    plan = block.Planner.plan

    def failing(self: Any) -> bool:
        attempts.append(handle._capture.step)
        return len(attempts) > 4 and plan(self)

    monkeypatch.setattr(block.Planner, "plan", failing)
    model = model_of(Bottleneck(8))
    handle = attach(model)
    train(model, handle, count=10)
    assert [step - attempts[0] for step in attempts] == [0, 1, 4, 5, 8]
    assert ran, "planned as soon as it can be"


def test_collection_steps_go_layer_by_layer_and_decide_the_same(ran):
    histories = []
    for blocks in (False, True):
        model = model_of(Bottleneck(8))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        handle = attach(model, Comet(every=4), blocks)
        train(model, handle, lambda step, model, optimizer=optimizer: optimizer.step() if step else None, 12)
        histories.append(handle.history)
    assert ran and histories[0] == histories[1]


# -- backward ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def steady(ran) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """A model after steps enough for blocks, and the loss of one more that ran with a block."""
    model = model_of(Bottleneck(8))
    train(model, attach(model), count=3)
    ran.clear()
    model.zero_grad()
    loss = model(images(3)).square().mean()
    assert ran
    yield model, loss


def test_backward_twice(steady):
    model, loss = steady
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss.backward()
    assert same([p.grad for p in model.parameters()], first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_what_is_packed_is_released_after_backward(steady):
    """The loss keeps the graph alive, and what the graph holds is released before that."""
    model, loss = steady
    node, found = loss.grad_fn, []
    while node is not None:
        found += [raw.data for raw in getattr(node, "_raw_saved_tensors", ())]
        node = node.next_functions[0][0] if node.next_functions else None
    held = [weakref.ref(each) for each in found if isinstance(each, block.BlockSaved)]
    del found
    assert len(held) == 1 and held[0]() is not None
    loss.backward()
    assert held[0]() is None


@pytest.mark.parametrize(("retain", "expected"), [(False, [4, 1]), (True, [6, 6])])
def test_what_is_packed_is_released_step_by_step(steady, monkeypatch, retain, expected):
    seen: list[int] = []
    backward = steps.ConvStep.backward

    def watched(self: Any, kept: Any, grad: Any, held: Any) -> Any:
        seen.append(len(held.kept))
        return backward(self, kept, grad, held)

    monkeypatch.setattr(steps.ConvStep, "backward", watched)
    steady[1].backward(retain_graph=retain)
    assert seen == expected


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1, inplace=True)], ids=["ReLU", "leaky ReLU"])
def test_the_gradient_of_the_result_is_released_by_the_step_that_reads_it_last(ran, activation, monkeypatch):
    """Autograd would hold it until the block's backward has ended."""
    released: list[bool] = []
    taken: list[Any] = []
    take, backward = block.take_over, steps.ConvStep.backward

    def watched(grad: torch.Tensor) -> torch.Tensor:
        assert grad.stride() == (0,) * 4 and grad.isnan().all()
        found = take(grad)
        taken.append(StorageWeakRef(found.untyped_storage()))
        return found

    def noted(self: Any, kept: Any, grad: Any, held: Any) -> Any:
        gc.collect()  # Triton's interpreter leaves cycles
        released.append(taken[-1].expired())
        return backward(self, kept, grad, held)

    layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), activation]
    model = model_of(nn.Sequential(*layers, *copy.deepcopy(layers)))
    handle = attach(model)
    train(model, handle)
    assert ran
    monkeypatch.setattr(block, "take_over", watched)
    monkeypatch.setattr(steps.ConvStep, "backward", noted)
    for _ in range(2):
        model(images()).square().mean().backward()
    assert len(taken) == 2 and released == [True] * 4


def test_gradients_that_others_look_at_are_right(ran, monkeypatch):
    """In anomaly mode autograd looks for NaN; hooks of nodes see a stand-in, and leave it as it is."""
    model = model_of(Plain(), Plain())
    with torch.autograd.detect_anomaly():
        assert both(ran, lambda: copy.deepcopy(model))
    ran.clear()
    other = copy.deepcopy(model)
    expected = train(other, attach(other, blocks=False))
    handle, seen = attach(model), []
    forward = model.forward

    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = forward(x)
        stack = [y.grad_fn]
        while stack:
            node = stack.pop()
            if node is not None:
                node.register_prehook(lambda grads: seen.append([g.clone() for g in grads]))
                stack += [each for each, _ in node.next_functions]
        return y

    monkeypatch.setattr(model, "forward", hooked)
    assert same(train(model, handle), expected)
    assert ran and seen


@pytest.mark.parametrize("layer", ["conv2", "bn2"])
def test_a_weight_that_was_modified_is_an_error(steady, layer):
    model, loss = steady
    with torch.no_grad():
        getattr(model[2], layer).weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_a_part_of_the_gradients(steady):
    model, loss = steady
    wanted = [model[2].conv2.weight, model[2].bn1.bias]
    some = torch.autograd.grad(loss, wanted, retain_graph=True)
    loss.backward()
    assert same([p.grad for p in wanted], [*some])


def test_create_graph_is_an_error_once_and_works_from_then_on(steady, ran):
    model, loss = steady
    with pytest.raises(RuntimeError, match="create_graph=True came to a block"):
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    ran.clear()
    loss = model(images(4)).square().mean()
    (first,) = torch.autograd.grad(loss, [model[2].conv1.weight], create_graph=True)
    first.square().sum().backward()
    assert not ran and model[2].conv2.weight.grad is not None


def test_a_training_that_differentiates_twice_never_runs_blocks(ran):
    model = model_of(Bottleneck(8))
    attach(model)
    for step in range(5):
        (first,) = torch.autograd.grad(model(images(step)).square().mean(), [model[0].weight], create_graph=True)
        first.square().sum().backward()
    assert not ran


# -- around the block -------------------------------------------------------------------------------------------------


def test_nothing_runs_as_one_without_training(steady, ran):
    model, _ = steady
    ran.clear()
    with torch.no_grad():
        model(images())
    model.eval()
    model(images()).sum().backward()
    model.train()
    torch.utils.checkpoint.checkpoint(model[2], torch.randn(2, 8, 8, 8, device=DEVICE), use_reentrant=False)
    other = copy.deepcopy(model)
    other(images()).sum().backward()
    assert not ran


def test_detach_gives_the_forward_back(steady):
    model, _ = steady
    assert isinstance(model[2].__dict__["forward"], block.BlockForward)
    encke.api._handles[model].detach()
    assert "forward" not in model[2].__dict__


def test_blocks_keep_no_module_alive(steady):
    model, loss = steady
    del loss
    inner = weakref.ref(model[2].conv1)
    handle = encke.api._handles[model]
    model[2] = nn.Identity()
    gc.collect()
    assert handle is not None and inner() is None


def test_an_error_inside_leaves_nothing_behind(steady, monkeypatch):
    model, _ = steady

    def broken(*args: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "convolution", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            model(images())
    assert top_saved_tensors_hooks() is None
    model(images()).sum().backward()
