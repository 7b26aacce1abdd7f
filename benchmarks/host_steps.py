"""Host time of a ResNet-50 training step, plain and attached, with everything but the host's work made small.

The real capture and the real functions of batch norm, ReLU and convolutions run on CPU tensors of a few channels; what
a GPU would compute is left out: kernels are not launched, so values are meaningless and times are those of Python and
of PyTorch's own dispatch. What is attached minus what is plain is the host's share of Halley. Times are the processor's
for this thread, the least of many steps; the numbers of calls do not depend on the machine.

python3 benchmarks/host_steps.py [--steps N] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import halley
from halley import fused, kernels
from halley.kernels import gpu, reference
from halley.train.models import torchvision_models

SLIM = 16
"""Channels are divided by this."""
BATCH, IMAGE = 32, 64
LARGE = 1 << 18
"""Inputs of this many bytes stand for those of convolutions that are large on a GPU."""


def slim_resnet50() -> nn.Module:
    """ResNet-50 with all its layers, of few channels each."""
    model = torchvision_models().resnet50()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            inputs = module.in_channels if module.in_channels == 3 else module.in_channels // SLIM
            module.weight = nn.Parameter(module.weight[: module.out_channels // SLIM, :inputs].detach().clone())
        elif isinstance(module, nn.BatchNorm2d):
            module.__init__(module.num_features // SLIM)  # type: ignore[misc]
    model.fc = nn.Linear(model.fc.in_features // SLIM, 1000)
    return model.to(memory_format=torch.channels_last).train()


def leave_kernels_out() -> None:
    """CPU tensors go to the code for GPUs, up to the launch."""

    def nothing(*arguments: Any) -> None:
        return None

    torch._C._cuda_getDevice = lambda: -1  # type: ignore[attr-defined]
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    gpu._launch = lambda *arguments, **more: (nothing, ())  # type: ignore[assignment]
    # Max-pool's backward writes where its indices point to: they have to be right.
    gpu.bits_encode, gpu.bits_decode = reference.bits_encode, reference.bits_decode
    kernels.of = lambda device: gpu  # type: ignore[assignment]


def attached(model: nn.Module) -> halley.Handle:
    """The model with the default policy, between two collection steps, its layers fused as on a GPU."""
    install = fused.install
    smallest = {fused.NormForward: 1, fused.ReluForward: 1, fused.ConvForward: LARGE}
    for kind, least in smallest.items():
        kind.least = least
    fused.install = lambda layers, capture: install(layers, capture, "cpu")  # type: ignore[assignment]
    handle = halley.attach(model, optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    handle.policy.follower.updates = 1500  # type: ignore[attr-defined]
    return handle


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step


def calls_of(step: Callable[[], None]) -> tuple[int, int]:
    """Calls of Python functions and of built-in ones in a step."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in counts:
            counts[event] += 1

    sys.setprofile(count)
    step()
    sys.setprofile(None)
    return counts["call"], counts["c_call"]


def collections_of(step: Callable[[], None], steps: int) -> tuple[float, float]:
    """Garbage collections a step, and their milliseconds a step."""
    found: list[float] = []

    def watch(phase: str, info: Any) -> None:
        found.append(time.perf_counter())

    gc.collect()
    gc.callbacks.append(watch)
    for _ in range(steps):
        step()
    gc.callbacks.remove(watch)
    return len(found) / 2 / steps, 1e3 * (sum(found[1::2]) - sum(found[::2])) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="where the time of an attached step goes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    leave_kernels_out()
    x = torch.randn(BATCH, 3, IMAGE, IMAGE).contiguous(memory_format=torch.channels_last)
    model = slim_resnet50()
    attached(model)
    steps = {"plain": step_of(slim_resnet50(), x), "attached": step_of(model, x)}
    for step in steps.values():
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    gc.disable()
    for _ in range(args.steps):
        for name, step in steps.items():
            start = time.thread_time()
            step()
            times[name].append(1e3 * (time.thread_time() - start))
    gc.enable()
    least = {name: min(values) for name, values in times.items()}
    for name, step in steps.items():
        python, builtin = calls_of(step)
        often, long = collections_of(step, 20)
        print(
            f"{name:9} {least[name]:6.2f} ms, {python} calls of Python functions, {builtin} of built-in ones, "
            f"{often:.1f} garbage collections of {long:.2f} ms together"
        )
    print(f"Halley's share {least['attached'] - least['plain']:.2f} ms")
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(10):
            steps["attached"]()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
