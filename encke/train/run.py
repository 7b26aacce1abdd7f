"""The state of a training: created from the settings, saved to a checkpoint and restored from one."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

import encke
from encke.api import Handle
from encke.tools.errors import UsageError, first_line
from encke.train.data.order import batches_per_epoch
from encke.train.data.sources import Datasets, load
from encke.train.distributed import World
from encke.train.factories import optimizer_for, policy_for
from encke.train.metrics import Meter
from encke.train.models.registry import build
from encke.train.settings import Settings, is_python_path


@dataclass
class Progress:
    """Position and figures of a training, which a resumed process continues."""

    step: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    memory_before_bytes: int | None = None
    held_bytes: int | None = None
    step_peak_bytes: int | None = None
    train_loss: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    best_validation_loss: float | None = None
    best_validation_accuracy: float | None = None

    def note_peak(self, peak: int | None) -> None:
        """Record the largest peak of all steps so far, without validation."""
        if peak is not None:
            self.peak_bytes = max(self.peak_bytes or 0, peak)

    def note_validation(self, loss: float | None, accuracy: float | None) -> None:
        """Record the last and the best result of validation."""
        self.validation_loss, self.validation_accuracy = loss, accuracy
        if loss is not None:
            best = self.best_validation_loss
            self.best_validation_loss = loss if best is None else min(loss, best)
        if accuracy is not None:
            self.best_validation_accuracy = max(accuracy, self.best_validation_accuracy or 0.0)


@dataclass
class Run:
    """One training in one process."""

    settings: Settings
    world: World
    data: Datasets
    model: nn.Module
    """The bare model."""
    wrapped: nn.Module
    """The model that is called in training: compiled and distributed as the settings say."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    handle: Handle | None
    meter: Meter
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def make(cls, settings: Settings, world: World) -> Run:
        """Create the state before the first step, with the same weights in every process."""
        takes_tokens = settings.model.name == "gpt" or is_python_path(settings.model.name)
        data = load(settings.data, settings.seed, settings.model.context if takes_tokens else None)
        torch.manual_seed(settings.seed)
        model = network_for(settings, data).to(world.device)
        if settings.channels_last:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = optimizer_for(model, settings.optimizer, fused=world.cuda)
        wrapped = world.wrap(torch.compile(model) if settings.compile else model)  # type: ignore[arg-type]
        policy = policy_for(settings.policy, settings.seed)
        handle = encke.attach(wrapped, policy, optimizer) if policy is not None else None
        scaler = torch.amp.GradScaler(world.device.type, enabled=settings.precision == "fp16")
        torch.manual_seed(settings.seed + 1 + world.rank)
        meter = Meter(world.device, data.kind == "images")
        return cls(settings, world, data, model, wrapped, optimizer, scaler, handle, meter)

    @property
    def images(self) -> bool:
        """Whether the data are images, not tokens."""
        return self.data.kind == "images"

    @property
    def steps_per_epoch(self) -> int:
        """Steps in an epoch."""
        return batches_per_epoch(len(self.data.train), self.settings.batch)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.settings.steps or max(1, round(self.settings.epochs * self.steps_per_epoch))

    @property
    def epoch(self) -> float:
        """Epochs that are done."""
        return self.progress.step / self.steps_per_epoch

    @property
    def items_per_step(self) -> int:
        """Images or tokens in a step."""
        return self.settings.batch * (1 if self.images else self.data.shape[0])

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate size of a checkpoint: weights and the optimizer's state."""
        copies = {"sgd": 2, "adam": 3, "adamw": 3}[self.settings.optimizer.name]
        return copies * sum(p.nbytes for p in self.model.parameters()) + sum(b.nbytes for b in self.model.buffers())

    def snapshot(self) -> dict[str, Any]:
        """Return the state for a checkpoint, from which a resumed training gives the same result. A collective call."""
        world = self.world
        generators = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state() if world.cuda else None}
        return {
            "version": 1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "policy": self.handle.state_dict() if self.handle is not None else None,
            "progress": asdict(self.progress),
            "processes": world.gather({**generators, "epoch": self.meter.epoch.cpu(), "part": self.meter.recent.cpu()}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a snapshot."""
        if len(state["processes"]) != self.world.size:
            raise UsageError(f"this run was trained by {len(state['processes'])} processes: resume it with as many")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.handle is not None:
            self.handle.load_state_dict(state["policy"])
        self.progress = Progress(**state["progress"])
        mine = state["processes"][self.world.rank]
        self.meter.epoch.copy_(mine["epoch"])
        self.meter.recent.copy_(mine["part"])
        torch.set_rng_state(mine["cpu"])
        if self.world.cuda and mine["cuda"] is not None:
            torch.cuda.set_rng_state(mine["cuda"])


def network_for(settings: Settings, data: Datasets) -> nn.Module:
    """Build the network for the shape of the samples."""
    model, images = settings.model, data.kind == "images"
    channels, side = data.shape[:2] if images and len(data.shape) == 3 else (3, None)
    network = build(model, data.classes, channels, side, tokens=not images)
    if is_python_path(model.name):
        return network
    wrong = len(data.shape) != 3 or not data.dtype.is_floating_point if images else data.shape[0] > model.context
    if wrong:
        takes = "images (channels, height, width)" if images else f"{model.context} tokens at most (model.context)"
        raise UsageError(f"model.name {model.name} takes {takes}, samples of {settings.data.kind} have {data.shape}")
    check_shape(network, settings, data)
    return network


def check_shape(network: nn.Module, settings: Settings, data: Datasets) -> None:
    """Raise an error if the network does not accept the samples of a step. The check runs on the meta device."""
    shape = (max(1, settings.batch // settings.accumulate), *data.shape)
    tensors = {name: x.to("meta") for name, x in itertools.chain(network.named_parameters(), network.named_buffers())}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            functional_call(network, tensors, torch.empty(shape, dtype=data.dtype, device="meta"))
    except Exception as error:
        raise UsageError(
            f"model.name {settings.model.name} does not take a batch of shape {shape} ({first_line(error)}): "
            "change data.size or batch, or take another model"
        ) from None
