"""What a training consists of, made from its settings; what a checkpoint takes of it and gives back."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import encke
from encke.api import Handle
from encke.tools.errors import UsageError
from encke.train.checkpoint import Folder
from encke.train.data.order import steps as batches_in
from encke.train.data.sources import Sets, load
from encke.train.distributed import World
from encke.train.factories import optimizer_for, policy_for
from encke.train.metrics import Meter
from encke.train.models.registry import build
from encke.train.settings import Settings


@dataclass
class Progress:
    """How far a training is, and the figures that go on from one process to the one that resumes it."""

    step: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    memory_before_bytes: int | None = None
    held_bytes: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    best_validation_loss: float | None = None
    best_validation_accuracy: float | None = None

    def note_peak(self, found: int | None) -> None:
        """The peak of all steps so far, without validation."""
        if found is not None:
            self.peak_bytes = max(self.peak_bytes or 0, found)


@dataclass
class Run:
    """One training in one process."""

    settings: Settings
    world: World
    sets: Sets
    raw: nn.Module
    """The model itself."""
    model: nn.Module
    """What is called: the model, compiled and wrapped as the settings say."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    handle: Handle | None
    meter: Meter
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def make(cls, settings: Settings, world: World) -> Run:
        """Everything as it is before the first step; the same weights in every process."""
        sets = load(settings.data, settings.seed, settings.model.context if settings.model.name == "gpt" else None)
        images = sets.kind == "images"
        torch.manual_seed(settings.seed)
        channels, side = sets.shape[:2] if images else (3, None)
        raw = build(settings.model, sets.classes, channels, side, tokens=not images).to(world.device)
        if settings.channels_last:
            raw = raw.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = optimizer_for(raw, settings.optimizer, fused=world.cuda)
        model = world.wrap(torch.compile(raw) if settings.compile else raw)  # type: ignore[arg-type]
        policy = policy_for(settings.policy, settings.seed)
        handle = encke.attach(model, policy, optimizer) if policy is not None else None
        scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
        torch.manual_seed(settings.seed + 1 + world.rank)
        return cls(settings, world, sets, raw, model, optimizer, scaler, handle, Meter(world.device, images))

    @property
    def images(self) -> bool:
        """Whether it is trained with images, not with tokens."""
        return self.sets.kind == "images"

    @property
    def an_epoch(self) -> int:
        """Steps in an epoch."""
        return batches_in(len(self.sets.train), self.settings.batch)

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return self.settings.steps or max(1, round(self.settings.epochs * self.an_epoch))

    @property
    def epoch(self) -> float:
        return self.progress.step / self.an_epoch

    @property
    def units(self) -> int:
        """Images or tokens in a step."""
        return self.settings.batch * (1 if self.images else self.settings.model.context)

    @property
    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint is: weights and the optimizer's state."""
        copies = {"sgd": 2, "adam": 3, "adamw": 3}[self.settings.optimizer.name]
        return copies * sum(p.nbytes for p in self.raw.parameters()) + sum(b.nbytes for b in self.raw.buffers())

    def snapshot(self) -> dict[str, Any]:
        """All that a resumed training needs to go on as if nothing had happened. Every process takes part."""
        world = self.world
        chance = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if world.cuda else None}
        return {
            "version": 1,
            "model": self.raw.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "policy": self.handle.state_dict() if self.handle is not None else None,
            "progress": asdict(self.progress),
            "processes": world.gather({**chance, "epoch": self.meter.epoch.cpu(), "part": self.meter.part.cpu()}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Everything as it was when the snapshot was taken."""
        if len(state["processes"]) != self.world.size:
            raise UsageError(f"this run was trained by {len(state['processes'])} processes: resume it with as many")
        self.raw.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.handle is not None:
            self.handle.load_state_dict(state["policy"])
        self.progress = Progress(**state["progress"])
        mine = state["processes"][self.world.rank]
        self.meter.epoch.copy_(mine["epoch"])
        self.meter.part.copy_(mine["part"])
        torch.set_rng_state(mine["cpu"])
        if self.world.cuda and mine["cuda"] is not None:
            torch.cuda.set_rng_state(mine["cuda"])


def shared_state(folder: Folder | None, world: World) -> dict[str, Any] | None:
    """The last checkpoint, for every process; None if there is none yet."""
    state = [folder.load() if folder is not None else None]
    if world.size > 1:
        torch.distributed.broadcast_object_list(state)
    return state[0]
