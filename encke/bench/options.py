"""The options that `encke bench memory`, `speed` and `max-batch` share, and the tasks that they describe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from encke.bench.methods import METHODS, usual
from encke.bench.models import MODELS, check_installed
from encke.bench.steps import Task
from encke.tools.errors import UsageError
from encke.tools.suggest import pick
from encke.train.models.registry import UNETS

Precision = Literal["fp32", "bf16"]
Device = Literal["cpu", "cuda"]
UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
CPU_BATCH = {"images": 16, "volumes": 1, "tokens": 4}
"""Images, volumes or sequences in a step without a GPU."""
VOLUME = {"cuda": 128, "cpu": 32}
"""Voxels along a volume's side, if --image is not given."""


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with the explanation that `--help` shows."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Options:
    """Models, methods and sizes to measure."""

    models: tuple[str, ...] = option((), f"Any of {', '.join(MODELS)}. By default resnet50, without a GPU resnet18.")
    methods: tuple[str, ...] = option((), f"Any of {', '.join(METHODS)}. By default all that can run here.")
    precision: tuple[Precision, ...] = option(
        ("fp32",), "fp32 (with TF32 on a GPU), or bf16: autocast, with channels_last for images."
    )
    compile: bool = option(False, "Compile the model with torch.compile, then attach.")
    graphs: bool = option(False, 'Compile with mode="reduce-overhead", so that the GPU replays CUDA graphs.')
    image: int | None = option(None, "Pixels along a side. By default 224, without a GPU 64; volumes 128 and 32.")
    tokens: int | None = option(None, "Tokens in a sequence. By default 1024, without a GPU 128.")
    steps: int = option(8, "Number of timed steps; the median is reported.")
    memory: tuple[str, ...] = option(
        (),
        "Caps on memory such as 16GiB, one after the other; without a GPU above interpreter and libraries. max-batch: "
        "by default 16GiB, same-memory: 8GiB, 16GiB and 24GiB, without a GPU 256MiB.",
    )
    device: Device | None = option(None, "By default a GPU if there is one.")
    out: Path = option(Path("runs/bench"), "The folder for CSV files and plots.")

    def device_or_default(self) -> Device:
        """Return the device that was named, otherwise a GPU if there is one."""
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def plan(self, batch: tuple[int, ...] = (), rounds: int = 1) -> Plan:
        """Check the options and fill in this machine's defaults."""
        device = self.device_or_default()
        gpu = device == "cuda"
        if gpu and not torch.cuda.is_available():
            raise UsageError("--device cuda: no CUDA GPU is available to torch; use --device cpu")
        if self.graphs and not gpu:
            raise UsageError("--graphs records CUDA graphs and needs a GPU; leave it out with --device cpu")
        image = self.image if self.image is not None else 224 if gpu else 64
        tokens = self.tokens if self.tokens is not None else 1024 if gpu else 128
        counts = [("--batch", n) for n in batch]
        counts += [("--steps", self.steps), ("--rounds", rounds), ("--image", image), ("--tokens", tokens)]
        for name, value in counts:
            if value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if not self.precision:
            raise UsageError("--precision needs at least one of fp32 and bf16")
        models = [pick(name, MODELS, "--models") for name in self.models or ["resnet50" if gpu else "resnet18"]]
        for name in models:
            check_installed(name)
            if (name == "vit_b_16" or name in UNETS) and (self.image or 0) % 16:
                why = "halves its input four times" if name in UNETS else "cuts images into squares of 16 pixels"
                raise UsageError(f"--image {image}: {name} {why}; use a multiple of 16")
        compiled = self.compile or self.graphs
        methods = [pick(name, METHODS, "--methods") for name in self.methods] or usual(compiled)
        caps = [parse_bytes(text) for text in self.memory]
        if caps and gpu and max(caps) > (total := torch.cuda.get_device_properties(0).total_memory):
            largest = self.memory[caps.index(max(caps))]
            raise UsageError(f"--memory {largest} is more than this GPU has ({total / 2**30:.0f} GiB)")
        self.out.mkdir(parents=True, exist_ok=True)
        sizes = (image, self.image or VOLUME[device], tokens, self.steps, caps or (None,))
        return Plan(models, batch, methods, self.precision, compiled, self.graphs, *sizes, device, rounds)


@dataclass(frozen=True)
class StepOptions(Options):
    """Options of a measurement at given batches."""

    batch: tuple[int, ...] = option((), "Images or sequences in a step; several are measured one after the other.")
    rounds: int = option(
        1,
        "Measure so many times, the methods of a table in turn; medians are shown. With more than one round all "
        "processes of a table stay alive, so that their memory must fit side by side.",
    )
    chunked: bool = option(
        False, "Compute logits and loss of a language model of transformers in chunks, whatever the method."
    )


@dataclass(frozen=True)
class Plan:
    """Options that have been checked, with the machine's defaults filled in."""

    models: Sequence[str]
    batch: Sequence[int]
    methods: Sequence[str]
    precision: Sequence[Precision]
    compile: bool
    graphs: bool
    image: int
    volume: int
    tokens: int
    steps: int
    caps: Sequence[int | None]
    device: Device
    rounds: int = 1
    chunked: bool = False

    def size(self, model: str) -> int:
        """Return the pixels along the side of an image or volume, or the tokens in a sequence."""
        return {"images": self.image, "volumes": self.volume, "tokens": self.tokens}[MODELS[model].data]

    def batches(self, model: str) -> Sequence[int]:
        """Return the batches to measure a model at."""
        return self.batch or [MODELS[model].batch if self.device == "cuda" else CPU_BATCH[MODELS[model].data]]

    def tables(self) -> list[list[Task]]:
        """Return the tasks of each table: the methods at one model, precision, cap and batch."""
        return [
            [self.task(model, method, precision, batch, cap) for method in self.methods]
            for model in self.models
            for precision in self.precision
            for cap in self.caps
            for batch in self.batches(model)
        ]

    def task(self, model: str, method: str, precision: Precision, batch: int, cap: int | None) -> Task:
        """Return one task with the plan's other settings. A method that needs the compiler is compiled."""
        compiled = self.compile or METHODS[method].needs == "compile"
        sizes = (batch, self.size(model), self.steps)
        graphs, chunked = self.graphs, self.chunked
        return Task(model, method, precision, *sizes, self.device, compiled, cap, graphs, chunked=chunked)


def parse_bytes(text: str, option: str = "--memory") -> int:
    """Return the number of bytes in a text such as `16GiB`, `900MiB` or `1.5 GB`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise UsageError(f"{option}: {text!r} is not an amount of memory; write it like 16GiB or 900MiB")
    return round(float(match[1]) * unit)
