"""Convolutions in two parts: the gradients of plain hooks, and the input released between them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import encke
from encke.codecs.layout import FORMATS
from encke.fused import conv as conv_module
from encke.fused import registry
from tests.fused.common import DEVICE, EXACT, TWO_BITS, attach, copies, gradients, near, needs_gpu, second_order

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

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


@pytest.fixture
def parted(monkeypatch) -> list[bool]:
    """For each backward of a fused convolution: whether its input was released before its gradient was computed."""
    seen: list[bool] = []
    inputs: list[StorageWeakRef] = []
    read, empty = conv_module.conv_memory_format, conv_module.storageless

    def watched(x, *args):
        seen.append(False)
        inputs.append(StorageWeakRef(x.untyped_storage()))
        return read(x, *args)

    def emptied(*args):
        assert inputs[-1].expired()
        seen[-1] = True
        found = empty(*args)
        assert found.untyped_storage().nbytes() == 0
        return found

    monkeypatch.setattr(conv_module, "conv_memory_format", watched)
    monkeypatch.setattr(conv_module, "storageless", emptied)
    return seen


def volume(conv: nn.Module, last: bool = False, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    size = (8, 8, 6, 12, 12) if isinstance(conv, nn.Conv3d) else (16, 8, 19, 18)
    x = torch.randn(size, generator=torch.Generator().manual_seed(4)).to(DEVICE, dtype)
    x = x.contiguous(memory_format=FORMATS[x.dim()]) if last else x
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
    # The first one's input would have to be cast: plain. oneDNN computes with bf16 on some CPUs only.
    splits = DEVICE == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert parted == [splits] * 4


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


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Number of samples in each call of a convolution, where the samples of large inputs are taken in parts."""
    seen: list[int] = []
    plain = torch.convolution

    def counted(x, *args):
        seen.append(len(x))
        return plain(x, *args)

    monkeypatch.setattr(torch, "convolution", counted)
    monkeypatch.setattr(conv_module, "CONV_PART_BYTES", 1 << 16)
    monkeypatch.setattr(conv_module, "PARTED", (4, 5))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_samples_of_large_inputs_are_taken_in_parts(name, dtype, calls, monkeypatch):
    model = nn.Sequential(copy.deepcopy(CONVS[name])).to(DEVICE, dtype)
    other, x = copy.deepcopy(model), volume(model[0], dtype=dtype)
    attach(other, device="none")
    expected = conv_gradients(other, x)
    attach(model)
    calls.clear()
    released: list[torch.Size] = []
    empty = conv_module.storageless
    monkeypatch.setattr(conv_module, "storageless", lambda size, *args: released.append(size) or empty(size, *args))
    got = conv_gradients(model, x)
    if dtype == torch.bfloat16 and DEVICE == "cpu" and not released:
        pytest.skip("oneDNN computes with bf16 on some CPUs only")
    nbytes = x.numel() * x.element_size()
    parts = next(n for n in range(1, len(x) + 1) if len(x) % n == 0 and (nbytes <= n << 16 or n == len(x)))
    assert parts > 1
    conv = model[0]
    settings = (conv.stride, conv.padding, conv.dilation, False, (0,) * (x.dim() - 2), conv.groups)
    if not all(conv_module.copied_by_backend(each, conv.weight, settings) for each in (x, x[: len(x) // parts])):
        assert set(calls) == {len(x)}
        pytest.skip("another backend computes the parts")
    assert calls == [len(x) // parts] * parts * 2
    assert [size[0] for size in released] == calls  # the input, before each gradient
    assert near(got, expected, 1e-5 if dtype == torch.float32 else 1e-2)
    assert all(a.stride() == b.stride() and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))


def test_gradients_of_parts_are_added_in_fp32(calls):
    """Sums that are rounded each time would lose small parts."""
    small = torch.full((4,), 2.0**-8, dtype=torch.bfloat16)
    parts = (torch.ones(4, dtype=torch.bfloat16), *[small] * 8)
    found = conv_module.added(parts)
    assert found is not None and found.dtype == torch.bfloat16
    assert found.tolist() == [1 + 2.0**-5] * 4 and parts[0].tolist() == [1.0] * 4
    assert conv_module.added((None, None)) is None


@pytest.mark.parametrize("case", ["exact", "channels_last", "small", "images"])
def test_these_samples_are_taken_together(case, calls, monkeypatch):
    # What is computed again from an exact tensor is exact.
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3)).to(DEVICE)
    other, x = copy.deepcopy(model), volume(model[0], case == "channels_last")
    if case == "images":
        monkeypatch.setattr(conv_module, "PARTED", (5,))
    if case == "small":
        monkeypatch.setattr(conv_module, "CONV_PART_BYTES", x.numel() * 8)
    expected = conv_gradients(other, x)
    attach(model, EXACT if case == "exact" else TWO_BITS)
    got = conv_gradients(model, x)
    assert set(calls) == {len(x)}
    assert same(got, expected) or case != "exact"


def test_a_weight_frozen_and_unfrozen_between_steps(parted):
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


@needs_gpu
def test_on_a_gpu_parts_need_less_memory(monkeypatch):
    """cuDNN copies both tensors of a contiguous convolution in three dimensions."""
    peaks = {}
    for limit in (1 << 40, 1 << 26):
        monkeypatch.setattr(conv_module, "CONV_PART_BYTES", limit)
        model = nn.Sequential(nn.Conv3d(64, 32, 3, padding=1, bias=False)).to("cuda", torch.bfloat16)
        x = torch.randn(4, 64, 64, 64, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        handle = encke.attach(model, TWO_BITS)
        conv_gradients(model, x)
        x.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(x).float().mean()
        peaks[limit] = [torch.cuda.max_memory_allocated() - before]
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        peaks[limit].append(torch.cuda.max_memory_allocated() - before)
        handle.detach()
    whole, parts = peaks.values()
    size = 4 * 64**4 * 2
    assert all(few < all_ - size // 4 for all_, few in zip(whole, parts, strict=True)), peaks


@needs_gpu
@pytest.mark.parametrize("last", [False, True])
def test_on_a_gpu_a_convolution_holds_its_input_or_its_gradient(last, monkeypatch):
    peaks, size = {}, 64 * 256 * 56 * 56 * 2
    for enabled in (False, True):
        monkeypatch.setattr(registry, "ENABLED", enabled)
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
