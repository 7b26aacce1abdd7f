"""Batch norm and ReLU whose results are computed while what they save is packed: the values of plain layers.

Without a GPU the kernels run on CPU tensors in Triton's interpreter.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn

import encke
from encke import kernels
from encke.capture.deferred import DeferredForward
from encke.capture.facts import SiteFacts, SiteState
from encke.capture.sites import Site
from encke.codecs import GroupQuant
from encke.fused.base import LayerForward
from encke.fused.batchnorm import DeferredBatchNorm
from encke.fused.relu import DeferredRelu
from encke.policies import Comet, Fixed
from encke.policies.comet import policy as comet_policy
from encke.torch_internals import top_saved_tensors_hooks

pytest.importorskip("triton")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when the kernels are imported
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TWO_BITS = Fixed(GroupQuant(bits=2))
HALF = 2**-8
BACKEND_FOR = kernels.backend_for


@pytest.fixture(autouse=True)
def gpu_kernels(monkeypatch) -> None:

    from encke.kernels import gpu

    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)


def attach(model: nn.Module, policy=TWO_BITS, device: str = DEVICE) -> encke.Handle:
    """An attached model whose layers are fused on that device, whatever their size; nowhere on `none`."""
    handle = encke.attach(model, policy, min_bytes=1)
    for forward in [hook for hook in handle._hooks if isinstance(hook, LayerForward)]:
        forward.device_type, forward.device_seen, forward.min_bytes = device, None, 1
    return handle


def photos(height: int = 16) -> torch.Tensor:
    x = torch.randn(1, 3, height, 16, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last)


def ready(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.uniform_(p, -0.5, 1.0)
    return model.to(DEVICE, memory_format=torch.channels_last).train()


def conv_norm_relu() -> nn.Module:
    return ready(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)))


def results(model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Output, gradients and buffers after a few steps: from the second one on the sites are known."""
    for _ in range(steps):
        model.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16):
            out = model(x)
        out.float().square().mean().backward()
    return [t.detach().float() for t in (out, *(p.grad for p in model.parameters()), *model.buffers())]


@pytest.fixture
def worked(monkeypatch) -> list[str]:
    """Record of results computed while packing and by `run_unfused`."""
    seen: list[str] = []

    def watch(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def watched(self, *args):
            seen.append(f"{kind.__name__} {name}")
            return original(self, *args)

        monkeypatch.setattr(kind, name, watched)

    for kind in (DeferredBatchNorm, DeferredRelu):
        watch(kind, "encode")
        watch(kind, "run_unfused")
    return seen


def agree(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Equal up to a few roundings of bf16, which pass through two layers."""
    pairs = zip(got, expected, strict=True)
    return all((a - b).norm() <= 4 * HALF * b.norm() and (a - b).abs().max() <= 0.05 * b.abs().max() for a, b in pairs)


def plain_results(model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[torch.Tensor]:
    """Results with plain hooks and the device's own kernels: on a CPU those that need no interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "backend_for", BACKEND_FOR)
        return results(model, x, steps)


def both(model: nn.Module, x: torch.Tensor) -> bool:
    """Whether the model trains as it does with plain hooks."""
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    return agree(results(model, x), plain_results(other, x))


@pytest.mark.parametrize("inplace", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_as_with_plain_hooks(inplace, worked):
    model = ready(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.Conv2d(16, 4, 1))
    )
    assert both(model, photos())
    assert worked == ["DeferredBatchNorm encode", "DeferredRelu encode"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "encoded"),
    [
        (nn.BatchNorm2d(16, affine=False), False),
        (nn.BatchNorm2d(16, momentum=None), True),
        (nn.BatchNorm2d(16, track_running_stats=False), True),
        (nn.BatchNorm2d(16, eps=0.1, momentum=0.3), True),
        (nn.BatchNorm2d(20), False),
    ],
    ids=str,
)
def test_settings(norm, encoded, worked):
    n = norm.num_features
    model = ready(nn.Sequential(nn.Conv2d(3, n, 3, padding=1, bias=False), norm, nn.Conv2d(n, 4, 1)))
    assert both(model, photos())
    assert worked == ["DeferredBatchNorm encode"] * encoded


def test_running_statistics_are_those_of_torch():
    model = ready(nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)))
    plain = copy.deepcopy(model)
    attach(model)
    results(model, photos())
    results(plain, photos())
    for got, want in zip(model[1].buffers(), plain[1].buffers(), strict=True):
        assert torch.allclose(got, want, rtol=1e-5, atol=1e-6)
    assert model[1].num_batches_tracked == 2


class Shared(nn.Module):
    """A batch norm whose input a convolution has saved before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)
        self.norm, self.relu, self.last = nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.side(x) + self.relu(self.norm(x)))


@pytest.mark.slow
def test_the_hook_does_not_come_for_an_input_that_is_packed_already(worked):
    assert both(ready(Shared()), photos())
    assert worked.count("DeferredBatchNorm run_unfused") == 1 and "DeferredBatchNorm encode" not in worked


def test_a_result_of_which_only_the_mask_is_kept(worked):
    model = ready(nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Sigmoid(), nn.Conv2d(16, 4, 1)))
    assert both(model, photos())
    assert worked == ["DeferredRelu encode", "DeferredRelu run_unfused"]


@pytest.mark.slow
def test_other_sizes_in_between(worked):
    """A last batch that fills groups badly goes the plain way, and the next one does not."""
    model = conv_norm_relu()
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    results(model, photos())
    plain_results(other, photos())
    worked.clear()
    assert agree(results(model, photos(17), 1), plain_results(other, photos(17), 1))
    assert "DeferredBatchNorm encode" not in worked
    worked.clear()
    assert agree(results(model, photos(), 1), plain_results(other, photos(), 1))
    assert worked == ["DeferredBatchNorm encode", "DeferredRelu encode"]


@pytest.mark.slow
def test_packing_raises_and_the_next_step_is_right(worked, monkeypatch):
    model = conv_norm_relu()
    other = copy.deepcopy(model)
    attach(model)
    attach(other, device="none")
    results(model, photos())

    def broken(*args):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(DeferredBatchNorm, "encode", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            results(model, photos(), 1)
    plain_results(other, photos(), 3)  # as many, so that random numbers are the same
    got, expected = results(model, photos(), 1), plain_results(other, photos(), 1)
    assert agree(got[:-3], expected[:-3])  # the interrupted step moved the counter of batches


class Misaligned(nn.Module):
    """Return its input at an address that is not a multiple of four bytes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.permute(0, 2, 3, 1).reshape(-1)
        y = torch.cat([flat[:1], flat])[1:].view(*x.shape[:1], *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)
        assert y.data_ptr() & 3 == 2
        return y


def test_inputs_that_are_not_aligned_are_not_deferred(worked):
    model = ready(nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), Misaligned(), nn.BatchNorm2d(16), nn.Conv2d(16, 4, 1)))
    assert both(model, photos())
    assert not worked


@pytest.mark.slow
def test_steps_in_which_the_policy_collects(worked, monkeypatch):
    model = conv_norm_relu()
    other = copy.deepcopy(model)
    seen = []
    figures_of = comet_policy.figures_of
    monkeypatch.setattr(
        comet_policy, "figures_of", lambda *args, **kw: seen.append(figures_of(*args, **kw)) or seen[-1]
    )
    for device, trained, train in ((DEVICE, model, results), ("none", other, plain_results)):
        handle = attach(trained, Comet(every=2), device)
        train(trained, photos(), 3)
        assert handle.history
    assert worked.count("DeferredBatchNorm encode") == 2
    assert len(seen) == 4  # after the first and the second step of each
    (found,), (expected,) = ([(norm.linear, norm.quadratic) for norm in step.norms.values()] for step in seen[1::2])
    assert found == pytest.approx(expected, rel=0.05)  # error that a coarse input adds to the propagated gradient


@pytest.mark.slow
def test_deferred_while_another_layer_is_learnt_again(worked):
    """Batch norm's input is held until ReLU saves: the graph behind that is read before ReLU is computed."""
    model = conv_norm_relu()
    other = copy.deepcopy(model)
    for handle, trained, train in (
        (attach(model), model, results),
        (attach(other, device="none"), other, plain_results),
    ):
        train(trained, photos())
        for record in handle._capture.ledger.last:
            if record.site.operation == "BatchNorm":
                record.facts.state = SiteState.UNSTABLE
    worked.clear()
    assert agree(results(model, photos(), 1), plain_results(other, photos(), 1))
    assert worked == ["DeferredRelu encode"]


class Left(DeferredForward):
    """A deferred forward for a tensor that is not saved next."""

    done = False

    def run_unfused(self) -> None:
        Left.done = True


class Other(nn.Module):
    """Saves a tensor while the deferred forward is for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.handle = nn.Conv2d(3, 16, 1), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.handle._capture.threads.forward.deferred = Left(SiteFacts(Site("", "?", "?")), None, x)
        return x.exp()


def test_the_hook_comes_for_another_tensor_first():
    model = Other().to(DEVICE)
    model.handle = attach(model)
    for _ in range(2):
        Left.done = False
        model(photos()).sum().backward()
        assert Left.done and model.handle._capture.threads.forward.deferred is None


# -- invariants of encke/capture/deferred.py; those above that begin with "the hook" or "packing" belong to them ------


@pytest.fixture
def marked_memory(monkeypatch) -> None:
    """Memory that nobody has written yet holds NaN."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: empty_like(*args, **named).fill_(float("nan")))


def test_nobody_sees_the_result_before_it_is_written(worked, marked_memory):
    model, seen = conv_norm_relu(), []
    attach(model)
    for layer in model[1:]:
        layer.register_forward_pre_hook(lambda m, args: seen.append(bool(args[0].detach().isfinite().all())))
        layer.register_forward_hook(lambda m, args, out: seen.append(bool(out.detach().isfinite().all())))
    got = results(model, photos())
    assert worked == ["DeferredBatchNorm encode", "DeferredRelu encode"]
    assert len(seen) == 12 and all(seen) and all(t.isfinite().all() for t in got)


def test_the_hook_does_not_come_where_no_gradient_is_needed(worked, marked_memory):
    model = nn.Sequential(nn.BatchNorm2d(16)).to(DEVICE).train()
    x = torch.randn(1, 16, 16, 16, device=DEVICE).contiguous(memory_format=torch.channels_last).bfloat16()
    handle = attach(model)
    for _ in range(2):
        model(x).float().square().mean().backward()
    worked.clear()
    for p in model.parameters():
        p.requires_grad_(False)
    out = model(x)
    assert worked == ["DeferredBatchNorm run_unfused"] and not out.requires_grad
    expected = nn.functional.batch_norm(x, None, None, model[0].weight, model[0].bias, True)
    assert torch.allclose(out.float(), expected.float(), atol=0.05)
    assert handle._capture.threads.forward.deferred is None


@pytest.mark.parametrize("kind", [DeferredBatchNorm, DeferredRelu])
def test_packing_raises_and_no_result_is_returned(kind, marked_memory, monkeypatch):
    """As a codec does that runs out of memory."""
    model = conv_norm_relu()
    handle, outputs = attach(model), []
    results(model, photos())
    layer = model[1] if kind is DeferredBatchNorm else model[2]
    layer.register_forward_hook(lambda m, args, out: outputs.append(out))

    def broken(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(kind, "encode", broken)
    with pytest.raises(RuntimeError, match="no memory"):
        results(model, photos(), 1)
    assert not outputs and handle._capture.threads.forward.deferred is None and top_saved_tensors_hooks() is None


class Hooked(nn.Module):
    """Puts hooks of its own around what it calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.on = inner, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return self.inner(x)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            return self.inner(x)


def test_hooks_of_others_are_on_top(worked, marked_memory):
    model = Hooked(conv_norm_relu())
    attach(model)
    results(model, photos())
    worked.clear()
    model.on = True
    assert all(t.isfinite().all() for t in results(model, photos(), 1)) and not worked
