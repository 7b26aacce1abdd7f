"""Kernels of later steps: after the first pass, the worker processes know every kernel that new settings may need."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="needs triton")

import encke  # noqa: E402
from encke import kernels  # noqa: E402
from encke.codecs import GroupQuant  # noqa: E402
from encke.codecs.layout import flatten, rows_for, with_rows  # noqa: E402
from encke.fused import requests, rownorm  # noqa: E402
from encke.fused.base import LayerForward  # noqa: E402
from encke.fused.conv import ConvForward  # noqa: E402
from encke.fused.smooth import SMOOTH  # noqa: E402
from encke.kernels import PackedUse, RowUse, UsualUse, gpu, reference  # noqa: E402
from encke.kernels.formats import SMOOTH as NUMBERS  # noqa: E402
from encke.kernels.gpu import activations, ahead, bits, launch, plans, row_norm, samples  # noqa: E402
from encke.policies.comet import measure  # noqa: E402
from encke.policies.comet.allocate import BITS  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402

PLANS = (
    plans.group_plan, gpu.norm_backward.norm_plan, gpu.norm_forward.forward_plan, row_norm.row_plan,
    row_norm.again_launch, activations.activation_launch,
)  # fmt: skip


class Watch:
    """Launches of a training whose kernels do not run, and the requests to the worker processes."""

    def __init__(self) -> None:
        self.needed: set[Any] = set()
        self.asked: list[PackedUse] = []
        self.rows: list[tuple[RowUse, int]] = []
        """Norms over rows that were asked for, and their numbers of bits."""
        self.usual: list[tuple[UsualUse, int]] = []
        """Usual tensors, and their numbers of bits."""

    def ask(self, rows: Any = (), usual: Any = (), rates: Any = ()) -> None:
        self.rows += [(use, rate) for rate in rates for use in rows]
        self.usual += [(use, rate) for rate in rates for use in usual]

    def launch(self, function: Any, programs: Any, tensors: Any, numbers: Any, constants: Any, *options: Any) -> None:
        specialised = options[2] if len(options) > 2 else 2
        self.needed.add(ahead.specialisation(function, tensors, numbers, constants, specialised))
        for t in tensors[1:]:
            t.data.zero_()  # as kernels do: not seen by autograd
        if function is samples.sample_kernel:
            tensors[2].data.copy_(torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]))  # a sample with a spread

    def known(self) -> set[Any]:
        found: set[Any] = set()

        def record(function: Any, programs: Any, tensors: Any, numbers: Any, constants: Any, *options: Any) -> None:
            specialised = options[2] if len(options) > 2 else 2
            found.add(ahead.specialisation(function, tensors, numbers, constants, specialised))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "launch_kernel", record)
            patch.setattr(bits, "launch_kernel", record)
            for use in self.asked:
                for rate in use.rates:
                    ahead.exercise_use(use, rate)
            for row_use, rate in self.rows:
                ahead.exercise_rows(row_use, rate)
            for usual_use, rate in self.usual:
                ahead.exercise(usual_use, rate)
        return found


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """CPU tensors go to the code for GPUs, up to the launch."""
    found = Watch()
    for plan in PLANS:
        plan.cache_clear()
    monkeypatch.setattr(launch, "launch_kernel", found.launch)
    monkeypatch.setattr(gpu, "bits_encode", reference.bits_encode)
    monkeypatch.setattr(gpu, "bits_decode", reference.bits_decode)
    monkeypatch.setattr(kernels, "backend_for", lambda device: gpu)
    monkeypatch.setattr(LayerForward, "device_type", "cpu")
    monkeypatch.setattr(LayerForward, "min_bytes", 1)
    monkeypatch.setattr(ConvForward, "min_bytes", 1)
    monkeypatch.setattr(measure.CometCollector, "compiled_for", "cpu")
    monkeypatch.setattr(measure, "compile_ahead", lambda uses: found.asked.extend(uses))
    monkeypatch.setattr(measure, "PROBE", 1 << 14)
    monkeypatch.setattr(rownorm.RowNormForward, "device_type", "cpu")
    monkeypatch.setattr(requests, "compile_ahead", found.ask)
    yield found
    for plan in PLANS:
        plan.cache_clear()


def network(channels: int, activation: type[nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for width in (channels, 2 * channels):
        convolution = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        layers += [
            nn.BatchNorm2d(width),
            activation(),
            nn.Sequential(convolution, nn.BatchNorm2d(2 * width), activation()),
        ]
        layers += [nn.Conv2d(2 * width, 2 * width, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(4 * channels), activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(("batch", "channels", "side"), [(16, 16, 16), (21, 24, 14), (9, 12, 14)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("memory", "activation"),
    [
        (torch.channels_last, nn.ReLU),
        (torch.contiguous_format, nn.ReLU),
        (torch.channels_last, nn.SiLU),
        (torch.channels_last, nn.Hardswish),
        (torch.contiguous_format, functools.partial(nn.LeakyReLU, inplace=True)),
    ],
)
def test_kernels_of_all_settings_are_known_after_the_first_pass(
    batch: int, channels: int, side: int, dtype: torch.dtype, memory: torch.memory_format, activation: type[nn.Module],
    watch: Watch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    model = network(channels, activation).to(memory_format=memory)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer, min_bytes=512)
    x = torch.randn(batch, 3, side, side).contiguous(memory_format=memory)
    choose, early = random.Random(0), set()
    for step in range(1, 32):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = model(x)
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            assert watch.asked
            watch.asked = list(watch.asked)
            early, first = watch.known(), len(watch.asked)
            watch.needed.clear()
        if step % 3 == 0:  # blocks run where nothing has changed in two passes
            for setting in handle.policy.settings.values():  # type: ignore[attr-defined]
                setting.codec = GroupQuant(bits=choose.choice(BITS))
    handle.detach()
    assert len(watch.asked) > first  # every collection step makes requests
    names = {function.__name__ if hasattr(function, "__name__") else str(function) for function, *_ in watch.needed}
    assert len(watch.needed) > 12 and any("encode" in name for name in names), names
    assert not watch.needed - early
    if activation in SMOOTH and dtype == torch.bfloat16 and side % 16 == 0:
        # Batch norm's backward has read the activation's gradient.
        number = NUMBERS[SMOOTH[activation].operation]
        gates = {constants[-1] for function, constants, *_ in watch.needed if "last_apply" in str(function.fn)}
        assert number in gates


class Mlp(nn.Module):
    """A gated MLP behind a norm, beside its input."""

    def __init__(self, norm: nn.Module, width: int, activation: nn.Module, gated: bool) -> None:
        super().__init__()
        self.norm, self.activation = norm, activation
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width) if gated else None
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        gate = self.activation(self.gate(y))
        return x + self.down(gate if self.up is None else gate * self.up(y))


class Transposed(nn.Module):
    """Swaps batch and sequence, as a transformer does whose batch is not first."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["layer norm", "RMS norm", "transposed"])
def test_kernels_of_a_transformer_are_known_when_its_first_norm_is_called(
    kind: str, dtype: torch.dtype, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of norms of other widths are compiled while the pass goes on, at every number of bits."""
    monkeypatch.setattr("encke.capture.expressions.backend_for", lambda device: gpu)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(48, 128)]
    for width, other in ((128, 96), (96, 48)):
        gated = kind == "RMS norm"
        norm, activation = (nn.RMSNorm(width), nn.SiLU()) if gated else (nn.LayerNorm(width), nn.GELU())
        layers += [Transposed()] if kind == "transposed" and width == 128 else []
        layers += [Mlp(norm, width, activation, gated), nn.Linear(width, other)]
    model = nn.Sequential(*layers).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer, min_bytes=512)
    early: set[Any] = set()

    def note(*_: Any) -> None:
        early.update(watch.known())
        hook.remove()

    gates = [module.gate for module in model if isinstance(module, Mlp)]
    hook = gates[0].register_forward_pre_hook(note)
    choose = random.Random(0)
    for step in range(1, 16):
        model(torch.randn(4, 64, 48, dtype=dtype)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            after = watch.known()
        if step % 3 == 0:
            for setting in handle.policy.settings.values():  # type: ignore[attr-defined]
                setting.codec = GroupQuant(bits=choose.choice(BITS))
    handle.detach()
    names = {each[0].fn.__name__ for each in watch.needed}
    assert {"row_forward_kernel", "row_again_kernel", "row_backward_kernel", "activate_kernel"} <= names
    rows = {each for each in watch.needed if "row" in each[0].fn.__name__}
    for some, known in ((rows, early), (watch.needed, after)):
        assert not some - known, [(each[0].fn.__name__, *each[1:]) for each in some - known]


def saved_tensors(batch: int, memory: torch.memory_format, dtype: torch.dtype) -> list[tuple[Tensor, bool]]:
    """Return the inputs of ResNet-50's convolutions and batch norms at 224 pixels, without memory."""
    model = torchvision_models().resnet50().to("meta", dtype).to(memory_format=memory)
    found: list[tuple[Tensor, bool]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d):
            norm = isinstance(module, nn.BatchNorm2d)

            def note(_: nn.Module, inputs: tuple[Tensor], norm: bool = norm) -> None:
                # Convolutions without memory forget the memory format.
                found.append((inputs[0].detach().contiguous(memory_format=memory), norm))

            module.register_forward_pre_hook(note)
    model(torch.empty(batch, 3, 224, 224, dtype=dtype, device="meta").contiguous(memory_format=memory))
    return found


@pytest.mark.parametrize(("batch", "dtype"), [(256, torch.bfloat16), (64, torch.bfloat16), (256, torch.float32)])
def test_kernels_of_resnet50_are_few(batch: int, dtype: torch.dtype, watch: Watch) -> None:
    """Kernels that two to fifty steps at 224 pixels may take at every rate; eight workers compile them in seconds."""
    memory = torch.channels_last if dtype == torch.bfloat16 else torch.contiguous_format
    for x, norm in saved_tensors(batch, memory, dtype):
        flat, layout = flatten(x)
        layout = with_rows(layout, rows_for(layout, flat.numel(), ("channels", 0)) if norm else None)
        plan = GroupQuant(2)._plan(flat, layout, flat.numel())
        use = PackedUse(plan.format, layout.size, bool(layout.channels_last), norm, True, (), BITS)
        watch.asked.append(use)
    watch.asked = list(dict.fromkeys(watch.asked))
    assert len(watch.asked) < 40
    assert len(watch.known()) < (130 if dtype == torch.bfloat16 else 170)
