"""Error of compressed gradients, step by step from the first one, and the bytes held.

A model with fresh weights is trained on synthetic data. In the steps that are measured the gradient is also computed
without Encke, on a copy with the same weights and the same batch. The error is |g - plain| / |plain|, over all
parameters. Steps 1 to 10 should not be worse than twice the steps from 50 on.

python3 benchmarks/gradient_steps.py [MODEL ...] [--policy default] [--batch N] [--size N] [--steps 60] [--csv FILE]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from benchmarks.gradient_error import without_dropout  # noqa: E402
from encke.policies import Comet  # noqa: E402
from encke.policies.base import Policy  # noqa: E402
from encke.policies.presets import FIXED, preset  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.registry import MODELS, ModelInfo, build  # noqa: E402
from encke.train.settings import Model  # noqa: E402


class Task(NamedTuple):
    """Samples in a batch, and pixels along a side or tokens in a sequence."""

    batch: int
    size: int


TASKS = {"repvgg_a0": Task(4, 64), "efficientnet_b0": Task(32, 96), "resnet50": Task(32, 96)}
"""The models measured by default, each with its batch."""
OTHERS = {"vit_b_16": Task(8, 96), "gpt2": Task(4, 128)}
"""Batches of other models than images of 96 pixels."""
CLASSES = 10
FIRST, LAST = 10, 10
"""Steps that are measured at the beginning and at the end."""


Batch = tuple[Tensor, Tensor]


def prepare(name: str, task: Task) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Batch]]:
    """Return a model with fresh weights, its usual optimizer, and a function that gives synthetic batches."""
    torch.manual_seed(0)
    info = MODELS.get(name, ModelInfo(Model(name)))
    tokens = info.data == "tokens"
    classes = info.classes if tokens else CLASSES
    shape = replace(info.model, context=task.size) if tokens else info.model
    model = without_dropout(build(shape, classes, side=task.size, tokens=tokens)).train()
    if info.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), info.lr, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), info.lr)
    generator = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        if tokens:
            # Each token is one of a few that may follow the one before it, so that there is something to learn.
            text = torch.randint(0, 4, (task.batch, task.size + 1), generator=generator).cumsum(1) % classes
            return text[:, :-1], text[:, 1:].flatten()
        labels = torch.randint(0, classes, (task.batch,), generator=generator)
        images = torch.randn(task.batch, 3, task.size, task.size, generator=generator)
        return images + 0.2 * (labels.view(-1, 1, 1, 1) - (classes - 1) / 2), labels

    return model, optimizer, batch


def gradient(network: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the whole gradient of a batch."""
    network.zero_grad()
    nn.functional.cross_entropy(network(x).flatten(0, -2), y).backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def measure(name: str, task: Task, policy: Policy, steps: int) -> list[dict[str, str | float]]:
    """Train a model; return one row for each step that was measured."""
    model, optimizer, batch = prepare(name, task)
    plain = copy.deepcopy(model)
    handle = encke.attach(model, policy, optimizer=optimizer)
    rows: list[dict[str, str | float]] = []
    for step in range(1, steps + 1):
        x, y = batch()
        measured = step <= FIRST or step > steps - LAST - 1
        if measured:
            plain.load_state_dict(model.state_dict())
            exact = gradient(plain, x, y)
        lossy = gradient(model, x, y)
        if measured:
            error, norm = float((lossy - exact).norm() / exact.norm()), float(exact.norm())
            held = handle.report().packed_bytes
            rows.append({"model": name, "batch": task.batch, "size": task.size, "policy": repr(policy), "step": step})
            rows[-1] |= {"error": round(error, 4), "norm": round(norm, 4), "held_bytes": held}
            rows[-1] |= {"ratio": round(handle.report().ratio, 2)}
            print(f"{name} step {step} error {error:.3f} norm {norm:.3g} ratio {handle.report().ratio:.2f}", flush=True)
        optimizer.step()
    handle.detach()
    return rows


def summary(rows: list[dict[str, str | float]]) -> str:
    """Return the errors of the first and the last steps in one line."""
    first = [float(row["error"]) for row in rows if float(row["step"]) <= FIRST]
    last = [row for row in rows if float(row["step"]) > FIRST]
    late = statistics.fmean(float(row["error"]) for row in last) if last else float("nan")
    ratio = rows[-1]["ratio"]
    return (
        f"| {rows[0]['model']} | {rows[0]['policy']} | {first[0]:.2f} | {max(first):.2f} | {late:.2f} "
        f"| {max(first) / late:.2f} | {rows[0]['ratio']} | {ratio} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(TASKS), help="repvgg_a0, gpt2, or any of torchvision")
    parser.add_argument("--policy", nargs="+", default=["default"], help="presets, group2, group4, or a value of sigma")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows, lines = [], []
    for name in args.models:
        task = (TASKS | OTHERS).get(name, Task(32, 96))
        task = Task(args.batch or task.batch, args.size or task.size)
        for choice in args.policy:
            number = choice.replace(".", "", 1).isdigit()
            policy = Comet(float(choice)) if number else FIXED.get(choice) or preset(choice)
            rows += measure(name, task, policy, args.steps)
            lines.append(summary([row for row in rows if row["model"] == name and row["policy"] == repr(policy)]))
    print("| model | policy | step 1 | largest of 1 to 10 | mean of the last | quotient | ratio, step 1 | at the end |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", *lines, sep="\n")
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
