"""Sums of loss and accuracy that stay on the device, and the lines of metrics made of them without waiting for it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from encke.tools.process import ALLOCATOR, forget_peak, memory


class Meter:
    """Loss, right answers and samples: of the epoch, and since the last line."""

    def __init__(self, device: torch.device, images: bool) -> None:
        self.images = images
        self.epoch = torch.zeros(3, dtype=torch.float64, device=device)
        self.part = torch.zeros(3, dtype=torch.float64, device=device)
        self.one = torch.ones((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, output: Tensor, target: Tensor) -> None:
        """One forward pass; `loss` is the mean over its samples."""
        count = len(target) if self.images else target.numel()
        right = (output.argmax(1) == target).sum() if self.images else self.one * 0
        self.part += torch.stack([loss * count, right, self.one * count])

    def take(self) -> Tensor:
        """The sums since the last time this was asked; they go into the epoch's."""
        found = self.part.clone()
        self.epoch += found
        self.part.zero_()
        return found

    def mean(self, sums: Tensor) -> tuple[float, float | None]:
        """Mean loss and accuracy."""
        loss, right, count = sums.tolist()
        if not count:
            return float("nan"), None
        return loss / count, right / count if self.images else None


class Later:
    """Figures on their way from the device: what is to be done with them happens when they have arrived."""

    def __init__(self) -> None:
        self.waiting: tuple[Tensor, Any, Callable[[Tensor], None]] | None = None

    def put(self, sums: Tensor, then: Callable[[Tensor], None]) -> None:
        """Starts the copy; the one before has arrived long ago."""
        self.flush()
        if sums.device.type != "cuda":
            then(sums)
            return
        copy = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        copy.copy_(sums, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.waiting = (copy, event, then)

    def flush(self) -> None:
        if self.waiting is not None:
            copy, event, then = self.waiting
            self.waiting = None
            event.synchronize()
            then(copy)


class Watch:
    """The time of steps, without what happens between them: validation, checkpoints."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.steps = 0
        self.each: list[float] = []

    def reset(self) -> None:
        self.begin, self.steps = time.perf_counter(), 0

    def lap(self) -> float:
        """Seconds of a step since the last lap."""
        now = time.perf_counter()
        mean = (now - self.begin) / max(self.steps, 1)
        if self.steps:
            self.each.append(mean)
        self.begin, self.steps = now, 0
        return mean

    @property
    def median(self) -> float | None:
        return statistics.median(self.each) if self.each else None


def memory_now(device: torch.device) -> int | None:
    """Bytes allocated on the GPU, or resident in this process."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else memory("VmRSS")


def telling(device: torch.device) -> bool:
    """Whether memory goes down when it is freed: on the CPU only if the allocator was told so (`ALLOCATOR`)."""
    return device.type == "cuda" or all(name in os.environ for name in ALLOCATOR)


def memory_held(device: torch.device) -> int | None:
    """The memory now, where differences of it mean something."""
    return memory_now(device) if telling(device) else None


def memory_peak(device: torch.device) -> int | None:
    """The largest since `forget_memory_peak`, where that means something."""
    if not telling(device):
        return None
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else memory("VmHWM")


def forget_memory_peak(device: torch.device) -> None:
    """The peak starts again from the memory in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        forget_peak()
