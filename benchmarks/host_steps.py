"""Host time of a training step, plain and attached, with everything but the host's work made small.

The real capture and the real functions of batch norm, ReLU and convolutions run on CPU tensors of a few values; what
a GPU would compute is left out: kernels are not launched, so values are meaningless and times are those of Python and
of PyTorch's own dispatch. What is attached minus what is plain is the host's share of Encke; "single layers" are
attached without blocks. Times are the processor's for this thread, the least of many steps; the numbers of calls do not
depend on the machine. EfficientNet-B0 and MobileNetV3 have many small tensors, in their squeeze-and-excite layers: they
are negligible beside the others, as they are on a GPU. BERT and Llama are of transformers, 12 layers of width 64.

python3 benchmarks/host_steps.py [--model MODEL] [--steps N] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import itertools
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke import kernels  # noqa: E402
from encke.bench import models  # noqa: E402
from encke.capture import encoding, expressions, hooks, negligible  # noqa: E402
from encke.capture.readers import Readers  # noqa: E402
from encke.fused import registry  # noqa: E402
from encke.fused.base import LayerForward  # noqa: E402
from encke.fused.block import BlockForward  # noqa: E402
from encke.fused.conv import ConvForward  # noqa: E402
from encke.fused.rownorm import RowNormForward  # noqa: E402
from encke.kernels import gpu, reference  # noqa: E402
from encke.kernels.gpu import launch, logs  # noqa: E402
from encke.train.models.registry import MODELS  # noqa: E402
from encke.train.models.unet import UNet  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402

CHANNELS, BATCH, IMAGE = 16, 256, 2
"""Size of every tensor: the smallest that is packed in groups of one channel each, at 32 and 16 bits a value."""
TOKENS = 16
"""Length of sequences, and number of them in a batch."""
REAL_STEPS = 12
"""Steps of the real training: the default policy collects in the first and in the tenth."""


@dataclass(frozen=True)
class Setup:
    """A model, and what is small beside its activations when these are of few values themselves."""

    model: str
    min_bytes: int | None
    """As for `attach`: bytes of a weight at 16 bits a value; None where negligible tensors are found by their share."""
    fused: int
    """Bytes from which on layers are fused."""

    def prepare(self) -> None:
        """Move the limits of what is negligible to where a GPU has them, between squeezed planes and whole ones."""
        # On a GPU the host does not look at values before it saves as in the pass before.
        encoding.EXAMINED = ()  # type: ignore[assignment]
        if self.min_bytes is None:
            hooks.SMALL, negligible.SHARE, negligible.TOGETHER = 4096, 5e-3, 0.5  # type: ignore[misc]

    def build(self) -> nn.Module:
        """Return a model with all its layers, each of few values."""
        if self.model in TRANSFORMERS:
            return slim_transformer(self.model)
        return NARROW[self.model]().train() if self.model in NARROW else slim_cnn(self.model)


TRANSFORMERS = ("bert", "llama")


def narrow_convnext() -> nn.Module:
    """Return a ConvNeXt-T of 16 to 64 channels."""
    convnext = torchvision_models().convnext
    widths = zip((16, 32, 64, 64), (32, 64, 64, None), (3, 3, 9, 3), strict=True)
    return convnext.ConvNeXt([convnext.CNBlockConfig(*each) for each in widths], stochastic_depth_prob=0.1)  # type: ignore[no-any-return]


NARROW = {
    "vit_b_16": lambda: torchvision_models().VisionTransformer(16, 4, 12, 4, 64, 256),
    "swin_t": lambda: torchvision_models().SwinTransformer([4, 4], 32, [2, 2, 6, 2], [1, 2, 4, 8], [2, 2]),
    "convnext_tiny": narrow_convnext,
    "unet3d": lambda: UNet(4, 1, 3, (16, 32, 32, 32, 32)),
    "densenet121": lambda: torchvision_models().DenseNet(16, (6, 12, 24, 16), 16, bn_size=1),
}
"""Models with all their layers, of few channels."""
SETUPS = {
    setup.model: setup
    for setup in (
        Setup("resnet50", 512, 1),
        Setup("efficientnet_b0", None, 32768),
        Setup("mobilenet_v3_large", None, 32768),
        # Statistics of norms are negligible, though rows are short here.
        *[Setup(name, 20000 if name == "convnext_tiny" else 4096, 1) for name in (*NARROW, *TRANSFORMERS)],
    )
}


def slim_transformer(name: str) -> nn.Module:
    """Return a language model with twelve narrow layers."""
    model = replace(MODELS[name].model, context=TOKENS, heads=4, width=64)
    with mock.patch.dict(MODELS, {name: replace(MODELS[name], model=model, classes=128)}):
        return models.build(name, TOKENS).train()


def slim_cnn(name: str) -> nn.Module:
    """Return a model of few channels without strides."""
    model = getattr(torchvision_models(), name)()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            inputs = min(module.in_channels, CHANNELS)
            module.weight = nn.Parameter(module.weight[:CHANNELS, :inputs].detach().clone())
            module.groups = 1 if module.groups == 1 else CHANNELS
            module.bias = None if module.bias is None else nn.Parameter(module.bias[:CHANNELS].detach().clone())
            module.stride = (1, 1)
        elif isinstance(module, nn.BatchNorm2d):
            module.__init__(CHANNELS)  # type: ignore[misc]
        elif isinstance(module, nn.MaxPool2d):
            module.stride = 1
    *hidden, last = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    for name in (*hidden, last):
        model.set_submodule(name, nn.Linear(CHANNELS, 1000 if name == last else CHANNELS))
    return model.to(memory_format=torch.channels_last).train()


def leave_kernels_out() -> None:
    """Send CPU tensors to the code for GPUs, up to the launch. Built-in functions stand in for CUDA's."""
    nothing = "".format
    launch.current_cuda_device = itertools.repeat(-1).__next__
    launch.current_cuda_stream = abs
    for module in (launch, logs):
        module.launch_kernel = lambda *arguments, **more: (nothing, ())  # type: ignore[attr-defined]
    # Max-pool's backward writes where its indices point to: they have to be right.
    gpu.bits_encode, gpu.bits_decode = reference.bits_encode, reference.bits_decode
    kernels.backend_for = expressions.backend_for = lambda device: gpu  # type: ignore[assignment]
    # Memory that no kernel has written may hold NaN, for which sites would become exact.
    Readers.intact = lambda *arguments: True  # type: ignore[method-assign,assignment]


def settled_state(setup: Setup, dtype: torch.dtype) -> dict[str, Any]:
    """Train for real until the default policy has collected, and return its state."""
    model = setup.build()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer, min_bytes=setup.min_bytes)
    step = step_of(model, inputs(setup.model), dtype)
    for _ in range(REAL_STEPS):
        step()
        optimizer.step()
    state = handle.state_dict()
    handle.detach()
    return state


def attached(setup: Setup, model: nn.Module, state: dict[str, Any], blocks: bool) -> None:
    """Attach the default policy as it is between two collection steps, with layers fused as on a GPU.

    Without `blocks` layers run one by one.

    Every second convolution is left unfused, in place of those whose inputs are not large.
    """
    LayerForward.device_type = RowNormForward.device_type = "cpu"
    LayerForward.min_bytes = ConvForward.min_bytes = setup.fused
    every = registry.FORWARDS
    registry.FORWARDS = tuple(each for each in every if blocks or each is not BlockForward)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer, min_bytes=setup.min_bytes)
    registry.FORWARDS = every
    handle.load_state_dict(state)
    # Gradients are meaningless here. A collection step that finds values that are not finite is repeated.
    handle.policy.schedule.begin_pass = lambda: None  # type: ignore[union-attr]
    convolutions = [module.forward for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)]
    for forward in convolutions[::2]:
        forward.min_bytes = 1 << 62  # type: ignore[attr-defined]


def inputs(name: str) -> torch.Tensor:
    """Return a batch of small images, or of short sequences."""
    if name in TRANSFORMERS:
        return torch.randint(128, (TOKENS, TOKENS))
    if name == "unet3d":
        return torch.randn(2, 1, 32, 32, 32)
    size = (BATCH, 3, IMAGE, IMAGE) if name not in NARROW else (TOKENS, 3, *(2 * [16 if name == "vit_b_16" else 64]))
    return torch.randn(size).contiguous(memory_format=torch.channels_last)


def step_of(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = model(x).mean() if x.is_floating_point() else model(input_ids=x, labels=x).loss
        loss.backward()

    return step


def calls_of(step: Callable[[], None]) -> tuple[int, int]:
    """Count calls of Python functions and of built-in ones in a step."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return counts["call"], counts["c_call"]


def print_calls(step: Callable[[], None]) -> None:
    """Print how often each Python function is called in a step, the most frequent ones first."""
    counts: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            counts[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    for name, number in counts.most_common(70):
        print(f"{number:6} {name}")


def collections_of(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Return garbage collections per step, and their milliseconds per step."""
    found: list[float] = []

    def watch(phase: str, info: Any) -> None:
        found.append(time.perf_counter())

    gc.collect()
    gc.callbacks.append(watch)
    for _ in range(steps):
        step()
    gc.callbacks.remove(watch)
    return len(found) / 2 / steps, 1e3 * (sum(found[1::2]) - sum(found[::2])) / steps


def measure(setup: Setup, dtype: torch.dtype, state: dict[str, Any], count: int, profiled: bool) -> None:
    """Print the host time of a plain and an attached step, with activations of that dtype."""
    x, model, single = inputs(setup.model), setup.build(), setup.build()
    attached(setup, single, state, blocks=False)
    attached(setup, model, state, blocks=True)
    models = {"plain": setup.build(), "single layers": single, "attached": model}
    steps = {name: step_of(each, x, dtype) for name, each in models.items()}
    for step in steps.values():
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for _ in range(count):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            times[name].append(1e3 * (time.thread_time() - start))
    gc.enable()
    least = {name: min(values) for name, values in times.items()}
    print(dtype)
    for name, step in steps.items():
        python, builtin = calls_of(step)
        often, long = collections_of(step, 20)
        print(
            f"{name:13} {least[name]:6.2f} ms, {python} calls of Python functions, {builtin} of built-in ones, "
            f"{often:.1f} garbage collections of {long:.2f} ms together"
        )
    print(f"Encke's share {least['attached'] - least['plain']:.2f} ms", flush=True)
    if profiled:
        print_calls(steps["attached"])
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(10):
            steps["attached"]()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SETUPS, default="resnet50")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="where the time of an attached step goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    setup = SETUPS[args.model]
    setup.prepare()
    states = {dtype: settled_state(setup, dtype) for dtype in (torch.float32, torch.bfloat16)}
    leave_kernels_out()
    for dtype, state in states.items():
        measure(setup, dtype, state, args.steps, args.profile)


if __name__ == "__main__":
    main()
