"""Bytes held against the error of the gradient: one model, one state of its training, several values of sigma.

A model is trained without Encke. Then `Comet` is attached with each sigma in turn, to the same weights and momentum. It
collects twice, with a learning rate of zero. Then the gradients of a few batches are compared with plain autograd's:
|g - plain| / |plain| over all parameters, and its median over the weights. Bytes are those that `report()` counts.
`--bits 2,4,8 2,3,4,8` compares allocations with different numbers of bits to choose from. `one_bit_saves` is the share
of all codes' bits that an allocation with codes of 1 bit would save, if these had nine times the variance of 2 bits and
the limits of single weights did not count: what codes below 2 bits could bring at most.
`--rounding stochastic dithered` compares fixed rates with codes of a variable rate.

python3 benchmarks/gradient_bytes.py [MODEL ...] [--sigma 0.1 0.2 0.4] [--rounding stochastic dithered]
    [--bits 2,3,4,8] [--steps 30] [--batch N] [--size N] [--csv FILE]
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from benchmarks.gradient_steps import Task, gradient, prepare  # noqa: E402
from encke.capture import scores  # noqa: E402
from encke.policies import Comet  # noqa: E402
from encke.policies.comet import allocate, assess, policy  # noqa: E402
from encke.policies.comet.allocate import Memory  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402

TASKS = {"resnet50": Task(16, 64), "efficientnet_b0": Task(16, 64), "vit_b_16": Task(4, 96), "gpt2": Task(2, 64)}
BATCHES = 3


def errors_of_weights(model: nn.Module, lossy: Tensor, exact: Tensor) -> list[float]:
    """Return the relative error of each weight's gradient."""
    sizes = [p.numel() for p in model.parameters() if p.grad is not None]
    weights = [p.dim() > 1 for p in model.parameters() if p.grad is not None]
    pairs = zip(lossy.split(sizes), exact.split(sizes), weights, strict=True)
    return [float((a - b).norm() / b.norm()) for a, b, weight in pairs if weight and b.norm() > 0]


def choose_from(bits: tuple[int, ...]) -> None:
    """Let allocation and attention choose from these numbers of bits."""
    scores.RATES = bits
    for module in (allocate, assess, policy):
        vars(module)["BITS"] = bits


class Recorder:
    """Allocates as `Comet` does, and keeps what it was asked last."""

    def __call__(self, memories: list[Memory], allowed: float, spare: float) -> list[int]:
        self.asked = memories, allowed, spare
        return allocate.allocate(memories, allowed, spare)

    def one_bit_saves(self) -> float:
        """Return the share of all bits that codes of 1 bit would save."""
        memories, allowed, spare = self.asked
        bits, before = allocate.BITS, self.bits_of(memories, allowed, spare)
        choose_from((1, *bits))
        finer = [Memory(m.values, [9 * m.errors[0], *m.errors], m.least + 1 if m.least else 0) for m in memories]
        after = self.bits_of(finer, allowed, spare)
        choose_from(bits)
        return 1 - after / before

    def bits_of(self, memories: list[Memory], allowed: float, spare: float) -> int:
        chosen = allocate.allocate(memories, allowed, spare)
        return sum(memory.values * allocate.BITS[i] for memory, i in zip(memories, chosen, strict=True))


def measure(
    name: str, task: Task, sigmas: list[float], roundings: list[Any], choices: list[tuple[int, ...]], steps: int
) -> list[dict[str, str | float]]:
    """Return one row for each sigma, each rounding and each choice of bits."""
    model, optimizer, batch = prepare(name, task)
    for _ in range(steps):
        gradient(model, *batch())
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    state = copy.deepcopy(optimizer.state_dict())
    batches = [batch() for _ in range(BATCHES)]
    exact = [gradient(model, *each) for each in batches]
    rows: list[dict[str, str | float]] = []
    recorder = vars(assess)["allocate"] = Recorder()
    for sigma, rounding, bits in itertools.product(sigmas, roundings, choices):
        choose_from(bits)
        optimizer.load_state_dict(copy.deepcopy(state))
        handle = encke.attach(model, Comet(sigma, rounding=rounding), optimizer)
        for _ in range(2):
            handle.collect_now()
            gradient(model, *batches[0])
            optimizer.step()
        whole, weights = [], []
        for each, right in zip(batches, exact, strict=True):
            lossy = gradient(model, *each)
            whole.append(float((lossy - right).norm() / right.norm()))
            weights.append(statistics.median(errors_of_weights(model, lossy, right)))
        report = handle.report()
        handle.detach()
        row: dict[str, str | float] = {"model": name, "batch": task.batch, "size": task.size, "steps": steps}
        row |= {
            "sigma": sigma,
            "rounding": rounding,
            "bits": " ".join(map(str, bits)),
            "error": round(statistics.fmean(whole), 4),
        }
        row |= {"median_error_of_weights": round(statistics.fmean(weights), 4)}
        row |= {"held_bytes": report.packed_bytes, "ratio": round(report.ratio, 2)}
        row |= {"one_bit_saves": round(recorder.one_bit_saves(), 4) if rounding == "stochastic" else ""}
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(TASKS))
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--rounding", nargs="+", default=["stochastic"], choices=("stochastic", "dithered"))
    parser.add_argument("--bits", nargs="+", default=[",".join(map(str, allocate.BITS))], help="such as 2,4,8 2,3,4,8")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--size", type=int)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    choices = [tuple(map(int, choice.split(","))) for choice in args.bits]
    rows = []
    for name in args.models:
        task = TASKS.get(name, Task(16, 64))
        task = Task(args.batch or task.batch, args.size or task.size)
        rows += measure(name, task, args.sigma, args.rounding, choices, args.steps)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
