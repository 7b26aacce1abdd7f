"""The processes of a training: a single one, or those that torchrun started."""

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
    """This process among those of the training, and its device."""

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
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def first(self) -> bool:
        """Whether this process writes to the folder of the run."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, wrapped so that its gradients are averaged over all processes."""
        if self.size == 1:
            return model
        return DistributedDataParallel(model, device_ids=[self.device.index] if self.cuda else None)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all processes."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)).item()) if self.size > 1 else flag

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes on the first one, an empty list on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values)
        return values or []

    def share(self, value: Any) -> Any:
        """Return the first process's value on every process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def leave(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class StopSignal:
    """Catches Ctrl-C and SIGTERM, so that the current step is finished and saved; a second one ends at once."""

    def __init__(self) -> None:
        self.received = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
