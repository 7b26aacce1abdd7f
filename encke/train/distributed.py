"""The processes that train together: one alone, or as many as torchrun started."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from encke.tools.errors import UsageError


class World:
    """Which of how many processes this is, and the device it has."""

    def __init__(self, device: str) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device cuda: torch sees no GPU here; --device cpu, or auto, trains without")
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        local = int(os.environ.get("LOCAL_RANK", 0))
        if cuda and local >= torch.cuda.device_count():
            raise UsageError(f"process {local} of this machine has no GPU: there are {torch.cuda.device_count()}")
        self.device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if cuda else "gloo")

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, its gradients averaged over all processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.cuda else None)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it holds for one of them at least."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item()) if self.size > 1 else flag

    def gather(self, value: Any) -> list[Any]:
        """What each process has, on the first one."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, found)
        return found or []

    def wait(self) -> None:
        """Until all have come here."""
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class Stop:
    """Notes Ctrl-C and a request to end, so that the step at work is finished and saved; a second one ends at once."""

    def __init__(self) -> None:
        self.asked = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
