"""Batch norm and ReLU from packed tensors, convolutions in two parts: the gradients of plain hooks, nothing else.

Without a GPU the kernels run on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import encke
from encke import kernels
from encke.api import Handle
from encke.codecs import ErrorBounded, GroupQuant
from encke.codecs.base import Hint
from encke.codecs.packed import flatten
from encke.fused import layers as fused_layers
from encke.policies import Fixed

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TWO_BITS = Fixed(GroupQuant(bits=2))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NEAR = 1e-4 if torch.cuda.is_available() else 1e-5
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def full_precision(monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def deterministic(monkeypatch) -> None:
    """Where gradients are compared bit for bit: left to itself cuDNN adds those of weights in any order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def attach(model: nn.Module, policy=TWO_BITS, device: str = DEVICE) -> Handle:
    """An attached model whose layers are fused on that device, whatever their size; nowhere on `none`."""
    handle = encke.attach(model, policy)
    for forward in [hook for hook in handle._hooks if isinstance(hook, fused_layers.Forward)]:
        forward.device, forward.where, forward.smallest = device, None, 1
    return handle


def net(norm: nn.Module | None = None, channels: int = 8) -> nn.Sequential:
    """Convolution, batch norm, ReLU, convolution: planes of 18 x 18 are no multiple of a group."""
    torch.manual_seed(1)
    norm = nn.BatchNorm2d(channels) if norm is None else norm
    with torch.no_grad():
        for p in norm.parameters():
            p.uniform_(0.5, 1.5)
    first = nn.Conv2d(3, channels, 3, padding=1, bias=False)  # a bias there would have a gradient of rounding errors
    return nn.Sequential(first, norm, nn.ReLU(inplace=True), nn.Conv2d(channels, 4, 1)).to(DEVICE)


def data(last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(2, 3, 18, 18, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def gradients(model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Output, gradients and buffers after a few steps: from the second one on the sites are known."""
    for _ in range(steps):
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [out.detach(), *grads, *(b.float() for b in model.buffers())]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What happened: `forward` for each fused call, `packed` or `plain` for each backward."""
    seen: list[str] = []
    norm, packed, plain = fused_layers.norm, fused_layers.packed_gradients, fused_layers.plain_gradients

    def watched(*args):
        found = packed(*args)
        seen.extend([] if found is None else ["packed"])
        return found

    monkeypatch.setattr(fused_layers, "norm", lambda *args: seen.append("forward") or norm(*args))
    monkeypatch.setattr(fused_layers, "packed_gradients", watched)
    monkeypatch.setattr(fused_layers, "plain_gradients", lambda *args: seen.append("plain") or plain(*args))
    return seen


def near(a: list[torch.Tensor], b: list[torch.Tensor], tolerance: float) -> bool:
    pairs = list(zip(a, b, strict=True))
    return all((x - y).abs().max() <= tolerance * y.abs().max() for x, y in pairs)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bits", [2, 8])
def test_gradients_are_those_of_plain_hooks(last, bits, calls):
    model, x = net(), data(last)
    if last:
        model = model.to(memory_format=torch.channels_last)
    other, policy = copy.deepcopy(model), Fixed(GroupQuant(bits=bits))
    attach(other, policy, device="none")
    expected = gradients(other, x)
    assert not calls
    attach(model, policy)
    got = gradients(model, x)
    # 2 x 18 x 18 pixels fill groups of 128 badly: such channels_last inputs are kept in groups across channels.
    assert calls == (["forward", "packed"] if not last else ["forward", "plain"])
    assert torch.equal(got[0], expected[0]) and near(got, expected, NEAR)


def test_channels_last_reads_packed_values(calls):
    model = net().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 24, device=DEVICE).contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, x), gradients(other, x), NEAR)
    assert calls == ["forward", "packed"]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(8, affine=False),
        nn.BatchNorm2d(8, momentum=None),
        nn.BatchNorm2d(8, track_running_stats=False),
        nn.BatchNorm2d(8, eps=0.1, momentum=0.3),
    ],
    ids=str,
)
def test_settings(norm, calls):
    model = net(norm)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    got, expected = gradients(model, data(), 3), gradients(other, data(), 3)
    assert calls == ["forward", "packed"] * 2
    assert torch.equal(got[0], expected[0]) and near(got, expected, NEAR)
    buffers = zip(model.buffers(), other.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)


def test_eval_without_running_statistics_is_training_too(calls):
    model = net(nn.BatchNorm2d(8, track_running_stats=False))
    other = copy.deepcopy(model)
    for m in (model, other):
        m[1].eval()
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, data()), gradients(other, data()), NEAR)
    assert calls == ["forward", "packed"]


@pytest.mark.parametrize("frozen", [("weight",), ("weight", "bias")])
def test_frozen_parameters_get_no_gradient(frozen, calls):
    model = net()
    for name in frozen:
        getattr(model[1], name).requires_grad_(False)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, data()), gradients(other, data()), NEAR)
    assert calls == ["forward", "packed"] and model[1].weight.grad is None


def test_input_without_a_gradient(calls):
    model = nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)).to(DEVICE)
    other, x = copy.deepcopy(model), torch.randn(2, 8, 18, 18, device=DEVICE)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, x), gradients(other, x), NEAR)
    assert calls == ["forward", "packed"]


def test_eval_no_grad_and_exact_policies_go_the_plain_way(calls):
    model = net()
    handle = attach(model)
    gradients(model, data())
    calls.clear()
    model.eval()
    gradients(model, data())
    model.train()
    with torch.no_grad():
        model(data())
    model[1].eval()
    gradients(model, data())
    handle.detach()
    model.train()
    attach(model, Fixed(ErrorBounded(1e-3)))
    gradients(model, data())
    assert not calls


class Direct(nn.Module):
    """Calls the function itself, whatever the policy."""

    def __init__(self) -> None:
        super().__init__()
        # A bias there would have a gradient of rounding errors.
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused_layers.norm(self.norm, self.first(x), fused_layers.function_named("NativeBatchNorm"))


class Plain(Direct):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x))


@pytest.mark.parametrize("policy", [None, Fixed(ErrorBounded(0))], ids=str)
def test_bit_equal_where_the_input_is_exact(policy, deterministic):
    torch.manual_seed(0)
    model, other, x = Direct().to(DEVICE), Plain().to(DEVICE), torch.randn(4, 3, 30, 30, device=DEVICE)
    other.load_state_dict(model.state_dict())
    if policy is not None:
        encke.attach(model, policy)
    for a, b in zip(gradients(model, x, 3), gradients(other, x, 3), strict=True):
        assert torch.equal(a, b)


def second_order(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    for _ in range(2):
        x = x.detach().requires_grad_()
        first = torch.autograd.grad(model(x).tanh().square().mean(), x, create_graph=True)[0]
        grads = torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)
    return [g for g in grads if g is not None]


def test_double_backward(calls):
    model, other = net(nn.BatchNorm2d(8)), net(nn.BatchNorm2d(8))
    attach(model)
    attach(other, device="none")
    got, expected = second_order(model, data()), second_order(other, data())
    assert "forward" in calls and len(got) == len(expected) > 3
    assert near(got, expected, 1e-4)


def test_double_backward_is_right(calls):
    direct, plain = Direct().double().to(DEVICE), Plain().double().to(DEVICE)
    plain.load_state_dict(direct.state_dict())
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64, device=DEVICE)
    assert near(second_order(direct, x), second_order(plain, x), 1e-9)


def test_backward_twice(calls):
    model = net()
    attach(model)
    gradients(model, data())
    loss = model(data()).square().mean()
    first = torch.autograd.grad(loss, model[1].weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, model[1].weight)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_weight_changed_in_place_is_an_error(calls):
    model = net()
    attach(model)
    gradients(model, data())
    loss = model(data()).square().mean()
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_expanded_and_transposed_gradients(calls):
    model = net()[:2]
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    for loss in (
        lambda y: y.sum(),
        lambda y: (y.permute(0, 2, 3, 1).contiguous() * torch.arange(8, device=DEVICE)).sum(),
    ):
        for m in (model, other):
            m.zero_grad()
            for _ in range(2):
                loss(m(data())).backward()
        assert torch.allclose(model[1].bias.grad, other[1].bias.grad)
        assert torch.allclose(model[1].weight.grad, other[1].weight.grad, atol=1e-2)
    assert calls.count("packed") == 3


def test_inside_a_checkpoint_nothing_is_fused(calls):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    model = Checkpointed()
    attach(model)
    gradients(model, data().requires_grad_())
    assert not calls


def test_a_second_call_of_a_layer_is_fused_too(calls):
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm, nn.Conv2d(8, 8, 1, bias=False), norm).to(DEVICE)
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    assert near(gradients(model, data()), gradients(other, data()), 1e-4)
    assert calls.count("packed") == 2


def test_detach_leaves_the_layer_as_it_was(calls):
    model = net()
    before = dict(model[1].__dict__)
    handle = attach(model)
    assert isinstance(model[1].__dict__["forward"], fused_layers.Forward)
    gradients(model, data())
    loss = model(data()).square().mean()
    handle.detach()
    assert model[1].__dict__.keys() == before.keys() and model[1].forward.__func__ is nn.BatchNorm2d.forward
    loss.backward()
    assert calls.count("packed") == 2


def copies(model: nn.Module) -> list[nn.Module]:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]


def test_copies_are_unattached_and_can_be_attached(calls):
    model = net()
    attach(model)
    gradients(model, data())
    calls.clear()
    first = copies(model)
    for again in copies(first[0]) + copies(first[1]):
        gradients(again, data())
    for other in first:
        other[1].running_mean.fill_(7.0)
        gradients(other, data())
        assert not calls and model[1].running_mean.abs().max() < 7.0
        handle = attach(other)
        gradients(other, data())
        assert calls == ["forward", "packed"]
        calls.clear()
        handle.detach()
        assert "forward" not in other[1].__dict__


def test_a_replica_brings_its_own_weights(calls):
    """As DataParallel makes them: another object with the same attributes but its own weights."""
    model = net()
    handle = attach(model)
    gradients(model, data())
    replica = model[1]._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.full((8,), 3.0).to(DEVICE), torch.full((8,), 5.0).to(DEVICE)
    x = torch.randn(2, 8, 4, 4, device=DEVICE)
    expected = nn.functional.batch_norm(x, None, None, replica.weight, replica.bias, True)
    assert torch.equal(replica(x), expected)
    before = handle.report().forwards
    handle.detach()
    assert torch.equal(replica(x), expected) and handle.report().forwards == before


def test_who_is_left_alone():
    class Own(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm2d(8), Own(8), nn.SyncBatchNorm(8), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    mine = model[3].forward = lambda x: x
    handle = encke.attach(model, TWO_BITS, filter=lambda module, name: name != "4")
    handle.detach()
    layers = [encke.capture.modules.Layer(name, m, None, name != "4") for name, m in model.named_modules()]
    installed = fused_layers.install(layers, handle._capture)
    assert [
        name for name, m in model.named_modules() if isinstance(m.__dict__.get("forward"), fused_layers.Forward)
    ] == ["0"]
    assert model[3].forward is mine and len(installed) == 1


def test_switched_off(monkeypatch):
    monkeypatch.setattr(fused_layers, "ENABLED", False)
    model = net()
    attach(model)
    assert "forward" not in model[1].__dict__


def blocks(count: int, channels: int) -> nn.Sequential:
    parts = [
        m
        for _ in range(count)
        for m in (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )
    ]
    return nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *parts, nn.Conv2d(channels, 4, 1)).cuda()


@needs_gpu
@pytest.mark.parametrize("size", [7, 14, 28, 56])
@pytest.mark.parametrize("last", [False, True])
def test_on_a_gpu_fused_and_unfused_agree(last, size, calls, monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(256, 3, size, size, device="cuda")
    model = blocks(2, 64)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    results = []
    for m, enabled in ((model, True), (other, False)):
        monkeypatch.setattr(fused_layers, "ENABLED", enabled)
        attach(m, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=last):
            results.append(gradients(m, x))
    assert calls == ["forward", "forward", "packed", "packed"]
    assert near(*results, 0.05 if last else 5e-3)


@needs_gpu
def test_on_a_gpu_the_peak_is_no_higher(monkeypatch):
    peaks = {}
    for enabled in (False, True):
        monkeypatch.setattr(fused_layers, "ENABLED", enabled)
        torch.manual_seed(0)
        model, x = blocks(6, 64), torch.randn(64, 3, 56, 56, device="cuda")
        handle = attach(model, device="cuda")
        gradients(model, x)
        torch.cuda.reset_peak_memory_stats()
        gradients(model, x)
        peaks[enabled] = torch.cuda.max_memory_allocated()
        handle.detach()
    assert peaks[True] <= peaks[False] * 1.01, peaks


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_relu_reads_its_mask_from_what_is_packed_for_the_next_layer(inplace, last, deterministic, monkeypatch):
    gates: list[int] = []
    gated = fused_layers.gated_gradient

    def watched(ctx, grad):
        found, packed = gated(ctx, grad), ctx._raw_saved_tensors[0].data.cell.packed
        gates.extend([] if found is None else [packed.stride])
        return found

    monkeypatch.setattr(fused_layers, "gated_gradient", watched)
    torch.manual_seed(2)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(8, 8, 1), nn.ReLU(inplace), nn.Conv2d(8, 4, 1)
    model = nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(4, 3, 32, 32, device=DEVICE)
    if last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    other = copy.deepcopy(model)
    attach(other, device="none")
    expected = gradients(other, x, steps=3)
    assert not gates
    attach(model)
    got = gradients(model, x, steps=3)
    assert gates == [8 if last else 1] * 4
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_relu_of_an_exact_or_small_tensor_goes_the_plain_way(deterministic):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).to(DEVICE), data()
    plain = copy.deepcopy(model)
    attach(model, Fixed(ErrorBounded(0)))
    for a, b in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(a, b)


CONVS = {
    "bias": nn.Conv2d(8, 12, 3, padding=1),
    "no bias": nn.Conv2d(8, 12, 3, bias=False),
    "one pixel": nn.Conv2d(8, 12, 1, bias=False),
    "strided": nn.Conv2d(8, 12, 3, stride=2, padding=1),
    "strided, a rest": nn.Conv2d(8, 12, 3, stride=(3, 2), padding=(0, 1)),
    "dilated": nn.Conv2d(8, 12, 3, padding=2, dilation=2),
    "grouped": nn.Conv2d(8, 12, 3, groups=4),
    "depthwise": nn.Conv2d(8, 8, 3, groups=8, bias=False),
    "three dimensions": nn.Conv3d(8, 4, 3, padding=1),
}
EXACT = Fixed(ErrorBounded(0))


@pytest.fixture
def parted(monkeypatch) -> list[bool]:
    """For each backward of a fused convolution: whether its input was let go of before its gradient was computed."""
    seen: list[bool] = []
    inputs: list[StorageWeakRef] = []
    read, hollow = fused_layers.read_format, fused_layers.hollow

    def watched(x, *args):
        seen.append(False)
        inputs.append(StorageWeakRef(x.untyped_storage()))
        return read(x, *args)

    def emptied(*args):
        assert inputs[-1].expired()
        seen[-1] = True
        found = hollow(*args)
        assert found.untyped_storage().nbytes() == 0
        return found

    monkeypatch.setattr(fused_layers, "read_format", watched)
    monkeypatch.setattr(fused_layers, "hollow", emptied)
    return seen


def volume(conv: nn.Module, last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = (3, 8, 6, 14, 14) if isinstance(conv, nn.Conv3d) else (16, 8, 19, 18)
    x = torch.randn(size, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
    x = x.contiguous(memory_format=fused_layers.FORMATS[x.dim()]) if last else x
    return x.requires_grad_()


def conv_gradients(model: nn.Module, x: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Output and gradients after a few steps, the input's among them."""
    for _ in range(steps):
        model.zero_grad()
        x.grad = None
        y = model(x)
        y.float().tanh().square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    """Bit for bit and in the same memory format; on a GPU cuDNN may add in another order."""
    if any(x.stride() != y.stride() or x.dtype != y.dtype for x, y in zip(a, b, strict=True)):
        return False
    return near(a, b, 1e-2) if DEVICE == "cuda" else all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", [TWO_BITS, EXACT], ids=["2 bits", "exact"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CONVS)
def test_convolutions_have_the_gradients_of_plain_hooks(name, last, policy, parted):
    model = nn.Sequential(copy.deepcopy(CONVS[name])).to(DEVICE)
    other, x = copy.deepcopy(model), volume(model[0], last)
    if policy is not EXACT:
        attach(other, policy, device="none")
    expected = conv_gradients(other, x)
    assert not parted
    attach(model, policy)
    assert same(conv_gradients(model, x), expected)
    assert len(parted) == 2 and (all(parted) or name == "depthwise")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_convolutions_under_autocast(bias, last, parted):
    layers = nn.Conv2d(8, 16, 3, bias=bias), nn.ReLU(), nn.Conv2d(16, 12, 3, bias=bias), nn.Conv2d(12, 4, 1, bias=bias)
    model = nn.Sequential(*layers).to(DEVICE)
    other, x = copy.deepcopy(model), volume(model[0], last)
    attach(model)
    attach(other, device="none")
    with torch.autocast(DEVICE, torch.bfloat16):
        got, expected = conv_gradients(model, x), conv_gradients(other, x)
    assert same(got, expected) and got[0].dtype == torch.bfloat16
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    # The first one's input would have to be cast: plain.
    assert parted == [True] * 4


def test_weights_cast_for_a_fused_convolution_do_not_spoil_the_next_plain_call():
    """Autocast remembers casts: one made where nothing is recorded would take the weight's gradient away."""
    conv = nn.Conv2d(8, 8, 3, padding=1).to(DEVICE)
    model, x = nn.Sequential(conv), volume(conv, dtype=torch.bfloat16)
    attach(model)
    with torch.autocast(DEVICE, torch.bfloat16):
        conv_gradients(model, x)
        weight = conv.weight
        y = model(x)
        small = nn.functional.conv2d(x.detach()[:1], weight)
        grads = torch.autograd.grad(small.float().sum(), weight)[0], torch.autograd.grad(y.float().sum(), weight)[0]
    assert all(g.abs().max() > 0 for g in grads)


@pytest.mark.parametrize("case", ["frozen", "input", "reflect", "same", "one sample", "subclass"])
def test_convolutions_that_go_the_plain_way(case, parted):
    class Own(nn.Conv2d):
        pass

    conv = nn.Conv2d(8, 12, 3, padding=1, padding_mode="reflect" if case == "reflect" else "zeros")
    conv = Own(8, 12, 3) if case == "subclass" else nn.Conv2d(8, 12, 3, padding="same") if case == "same" else conv
    model = nn.Sequential(conv).to(DEVICE)
    conv.weight.requires_grad_(case != "frozen")
    x = volume(conv)
    x = torch.randn(8, 60, 60, device=DEVICE).requires_grad_() if case == "one sample" else x
    other = copy.deepcopy(model)
    attach(model, EXACT)
    if case == "input":
        x = x.detach()
        assert same(gradients(model, x), gradients(other, x))
    else:
        assert same(conv_gradients(model, x), conv_gradients(other, x))
    assert not parted


def test_a_weight_frozen_and_thawed_between_steps(parted):
    model = nn.Sequential(nn.Conv2d(8, 12, 3)).to(DEVICE)
    other, x = copy.deepcopy(model), volume(model[0])
    attach(model, EXACT)
    for trained in (True, False, True, True):
        for m in (model, other):
            m[0].weight.requires_grad_(trained)
        assert same(conv_gradients(model, x, 1), conv_gradients(other, x, 1))


def test_some_gradients_of_a_convolution():
    model = nn.Sequential(nn.Conv2d(8, 12, 3)).to(DEVICE)
    other, x = copy.deepcopy(model), volume(model[0])
    attach(model, EXACT)
    conv_gradients(model, x)
    for wanted in (lambda m: x, lambda m: m[0].weight, lambda m: m[0].bias):
        got, expected = (torch.autograd.grad(m(x).square().sum(), wanted(m)) for m in (model, other))
        assert same(list(got), list(expected))


def test_double_backward_of_a_convolution(parted):
    model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.Tanh(), nn.Conv2d(12, 4, 3)).to(DEVICE)
    other, x = copy.deepcopy(model), volume(model[0])
    attach(model, EXACT)
    conv_gradients(model, x)
    parted.clear()
    loss = model(x).square().mean()
    torch.autograd.grad(loss, [x, model[0].weight], create_graph=True)
    assert not parted
    got, expected = second_order(model, x), second_order(other, x)
    assert len(got) == len(expected) == 4 and near(got, expected, 1e-5)


def test_a_convolution_twice_in_a_pass_and_backward_twice(parted):
    conv = nn.Conv2d(8, 8, 3, padding=1).to(DEVICE)
    model = nn.Sequential(conv, nn.Tanh(), conv)
    other, x = copy.deepcopy(model), volume(conv)
    attach(model)
    attach(other, device="none")
    assert same(conv_gradients(model, x), conv_gradients(other, x)) and parted == [True] * 4
    loss = model(x).square().mean()
    first = torch.autograd.grad(loss, [x, conv.weight], retain_graph=True)
    assert same(list(torch.autograd.grad(loss, [x, conv.weight])), list(first))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_convolution_whose_weight_changed_in_place_is_an_error(parted):
    model = nn.Sequential(nn.Conv2d(8, 12, 3)).to(DEVICE)
    attach(model)
    conv_gradients(model, volume(model[0]))
    loss = model(volume(model[0])).square().mean()
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_convolutions_are_detached_and_copied(parted):
    model = nn.Sequential(nn.Conv2d(8, 12, 3)).to(DEVICE)
    x, handle = volume(model[0]), attach(model)
    conv_gradients(model, x)
    parted.clear()
    for other in copies(model):
        conv_gradients(other, x)
        assert not parted
        attach(other)
        conv_gradients(other, x)
        assert parted
        parted.clear()
    loss = model(x).square().mean()
    handle.detach()
    assert "forward" not in model[0].__dict__ and model[0].forward.__func__ is nn.Conv2d.forward
    loss.backward()
    assert parted == [True]


def test_convolutions_of_small_inputs_are_left_alone():
    model = nn.Sequential(nn.Conv2d(8, 12, 3), nn.BatchNorm2d(12))
    encke.attach(model, TWO_BITS)
    assert model[0].__dict__["forward"].smallest == fused_layers.LARGE_CONV > model[1].__dict__["forward"].smallest


@needs_gpu
@pytest.mark.parametrize("last", [False, True])
def test_on_a_gpu_a_convolution_holds_its_input_or_its_gradient(last, monkeypatch):
    peaks, size = {}, 64 * 256 * 56 * 56 * 2
    for enabled in (False, True):
        monkeypatch.setattr(fused_layers, "ENABLED", enabled)
        model = nn.Sequential(nn.Conv2d(256, 32, 1, bias=False)).to("cuda", torch.bfloat16)
        x = torch.randn(64, 256, 56, 56, device="cuda", dtype=torch.bfloat16)
        if last:
            model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        handle = encke.attach(model, TWO_BITS)
        conv_gradients(model, x.requires_grad_())
        loss, x.grad = model(x).float().square().mean(), None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peaks[enabled] = torch.cuda.max_memory_allocated() - before
        handle.detach()
    assert peaks[True] < peaks[False] - 0.6 * size, peaks


@pytest.mark.slow
def test_a_collection_step_learns_the_same_through_the_kernels():
    """Comet's figures do not depend on which function computes the gradients."""
    from encke.policies import Comet

    torch.manual_seed(4)
    layers = nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *layers).to(DEVICE)
    other, x = copy.deepcopy(model), torch.randn(4, 3, 26, 26, device=DEVICE)
    histories = []
    for m, device in ((model, DEVICE), (other, "none")):
        handle = attach(m, Comet(every=3), device=device)
        optimizer = torch.optim.SGD(m.parameters(), 0.01, momentum=0.9)
        for _ in range(7):
            optimizer.zero_grad()
            m(x).square().mean().backward()
            optimizer.step()
        histories.append(handle.history)
    assert len(histories[0]) == len(histories[1]) > 4
    for a, b in zip(*histories, strict=True):
        assert (a["place"], a["bits"], a["operation"], a["slot"]) == (b["place"], b["bits"], b["operation"], b["slot"])
        for name in ("std", "momentum", "in_force_predicted"):
            assert (name in a) == (name in b)
            assert a.get(name, 0.0) == pytest.approx(b.get(name, 0.0), rel=1e-2)


def test_a_layer_whose_class_changes_after_attach_goes_the_plain_way(deterministic):
    """A parametrization computes the weight at every look at it: spectral norm would take further steps."""
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)).to(DEVICE), data().requires_grad_()
    plain = copy.deepcopy(model)
    attach(model, Fixed(ErrorBounded(0)))
    gradients(model, x)
    gradients(plain, x)
    for m in (model, plain):
        torch.manual_seed(7)
        nn.utils.parametrizations.spectral_norm(m[1])
    for a, b in zip(gradients(model, x, steps=3), gradients(plain, x, steps=3), strict=True):
        assert torch.equal(a, b)


def test_fused_layers_tell_of_their_calls_without_hooks():
    model = net()
    handle = attach(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model) and len(model._forward_pre_hooks) == 1
    gradients(model, data())
    assert {row.layer for row in handle.report().sites if row.codec != "kept"} == {"1", "2"}


def test_a_fused_layer_on_its_own_is_compressed_and_leaves_nothing_behind_after_an_error():
    model, x = nn.BatchNorm2d(8).to(DEVICE), torch.randn(4, 8, 18, 18, device=DEVICE)
    plain = copy.deepcopy(model)
    handle = attach(model)
    with pytest.raises(ValueError, match="expected 4D input"):
        model(x[0, 0])
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(gradients(model, x)[0], gradients(plain, x)[0])
    assert handle.report().forwards == 3 and handle.report().packed_bytes > 0


@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_no_leaves_get_their_gradients(bias, calls):
    """As in DataParallel's replicas, whose weights are copies that the graph leads back from."""
    model, x, found = net(), data(), []
    if not bias:
        model[1].bias = None
    for m, device in ((model, DEVICE), (copy.deepcopy(model), "none")):
        attach(m, device=device)
        gradients(m, x)
        factor = torch.ones(8, device=DEVICE, requires_grad=True)
        replica = m[1]._replicate_for_data_parallel()
        replica.weight = m[1].weight * factor
        if bias:
            replica.bias = m[1].bias * 1
        else:
            replica._parameters["bias"] = None
        m._modules["1"] = replica
        m(x).square().mean().backward()
        found.append([factor.grad])
    assert near(*found, 1e-3) and calls == ["forward", "packed"] * 2


def test_compiling_a_fused_layer_after_attach_is_an_error():
    model = net()
    attach(model)
    with pytest.raises(Exception, match="Compile it first"):
        torch.compile(model[1], backend="eager", fullgraph=True)(torch.randn(2, 8, 18, 18, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(1, 3, 0, 2),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x[1:],
    ],
)
def test_memory_read_as_it_lies_gives_the_codes_of_its_flat_run(view, dtype, monkeypatch):

    from encke.kernels.gpu import launch

    monkeypatch.setattr(kernels, "of", lambda device: launch)
    x = view(torch.randn(4, 8, 16, 8, device=DEVICE).to(dtype)).requires_grad_()
    codec, hint, (flat, layout) = GroupQuant(bits=4), Hint(), flatten(x.detach())
    expected = codec.encode_flat(flat, layout, key=5)
    for _ in range(2):
        packed = codec.encode_run(x, layout, flat.numel(), 5, hint)
        assert torch.equal(packed.parts[0], expected.parts[0]) and packed.nbytes == expected.nbytes
        decoded = packed.decode()
        assert torch.equal(decoded, expected.decode()) and decoded.stride() == x.stride()
    assert (packed.plan is not None) == layout.dense
