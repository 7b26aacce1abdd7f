"""Memory at the peak of a training step on a GPU: the operation it falls into, the blocks alive then, and the sites
that hold most.

python3 benchmarks/peak_memory.py [--model resnet50] [--batch 256] [--precision fp32|bf16] [--method default]
        [--collect] [--csv FILE]

With --collect the recorded step is a collection step.
"""

from __future__ import annotations

import argparse
import csv
import functools
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.bench.methods import METHODS  # noqa: E402
from encke.bench.options import Options  # noqa: E402
from encke.bench.steps import Training  # noqa: E402
from encke.train.models.registry import MODELS  # noqa: E402

LARGE = 1 << 22
"""Bytes of a block that is listed on its own."""


def nodes_behind(tensor: torch.Tensor) -> list[Any]:
    """Return all nodes of the graph behind a tensor."""
    stack, seen = [tensor.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack.extend(next_node for next_node, _ in node.next_functions)
    return list(seen)


class Marks:
    """Memory before each operation of a step, and the highest while it ran."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, int]] = []
        self.name, self.before = "forward", torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def at(self, name: str, gradients: Any) -> None:
        """Mark the beginning of a node."""
        self(name)

    def __call__(self, name: str) -> None:
        self.rows.append((self.name, self.before, torch.cuda.max_memory_allocated()))
        torch.cuda.reset_peak_memory_stats()
        self.name, self.before = name, torch.cuda.memory_allocated()


def replay(events: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Return the peak of a trace of allocations, and the blocks alive then."""
    alive: dict[int, dict[str, Any]] = {}
    total, best, blocks = 0, 0, []
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
            total += event["size"]
            if total > best:
                best, blocks = total, list(alive.values())
        elif event["action"] == "free_completed":
            gone = alive.pop(event["addr"], None)
            total -= gone["size"] if gone else event["size"]
    return best, blocks


def source(block: dict[str, Any]) -> str:
    """Return the innermost lines outside torch that allocated a block; empty inside autograd's own operations."""
    frames = [f for f in block.get("frames", []) if f["filename"].endswith(".py")]
    known = [f for f in frames if "/torch/" not in f["filename"]]
    return " < ".join(f"{Path(f['filename']).stem}:{f['name']}" for f in known[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50")
    parser.add_argument("--batch", type=int, help="by default the model's usual batch")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--method", choices=[name for name, each in METHODS.items() if each.kind != "other"])
    parser.add_argument("--collect", action="store_true", help="make the recorded step a collection step")
    parser.add_argument("--warm", type=int, default=41, help="steps before; the default policy collects in the 40th")
    parser.set_defaults(method="default")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    options = Options((args.model,), (args.method,), (args.precision,))
    training = Training(options.plan(() if args.batch is None else (args.batch,)).tables()[0][0])

    def step(marks: Marks | None = None) -> None:
        if args.collect and not training.collect_next():
            raise SystemExit(f"--collect: {args.method} has no collection steps; use --method default")
        loss = training.forward()
        if marks is not None:
            for node in nodes_behind(loss):
                node.register_prehook(functools.partial(marks.at, node.name()))
        loss.backward()
        training.finish()
        if marks is not None:
            marks("end")

    for _ in range(args.warm):
        training.step()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(max_entries=400000, stacks="python")
    step()
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    best, blocks = replay(trace)
    marks = Marks()
    step(marks)
    print(f"before the step {base / 1e9:.3f} GB (weights, the optimizer's state, data)")
    print(f"peak {(base + best) / 1e9:.3f} GB, of which the step's own blocks:")
    groups = Counter[tuple[int, str]]()
    for block in blocks:
        groups[(block["size"], source(block)) if block["size"] >= LARGE else (0, source(block))] += 1
    small = sum(block["size"] for block in blocks if block["size"] < LARGE)
    rows = [{"MB": round(size / 1e6, 1), "blocks": n, "from": where} for (size, where), n in groups.items() if size]
    rows.sort(key=lambda row: -row["MB"] * row["blocks"])
    for row in rows:
        print(f"  {row['blocks']:3} x {row['MB']:8} MB  {row['from']}")
    print(f"  below {LARGE >> 20} MiB: {small / 1e6:.1f} MB in all")
    print("operations with the highest memory while they ran (before -> highest, GB):")
    for name, before, high in sorted(marks.rows, key=lambda row: -row[2])[:12]:
        print(f"  {name:34} {before / 1e9:.3f} -> {high / 1e9:.3f}")
    if training.handle is not None:
        print_sites(training.handle)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["MB", "blocks", "from"])
            writer.writeheader()
            rest = f"all below {LARGE >> 20} MiB"
            writer.writerows([*rows, {"MB": round(small / 1e6, 1), "blocks": 1, "from": rest}])


def print_sites(handle: encke.Handle) -> None:
    """Print how many bytes are held by kind of layer, operation, slot and codec."""
    report = handle.report()
    print(f"saved {report.saved_bytes / 1e9:.3f} GB, held {report.packed_bytes / 1e9:.3f} GB; most of it (MB, sites):")
    held = Counter[tuple[str, ...]]()
    sites = Counter[tuple[str, ...]]()
    for row in report.sites:
        key = (re.sub(r"\d+", "*", row.layer), f"{row.operation}.{row.slot}", f"{row.codec} {row.bound}")
        held[key] += row.packed_bytes
        sites[key] += 1
    for key, size in held.most_common(30):
        print(f"  {size / 1e6:8.1f} {sites[key]:4}  {' '.join(key)}")


if __name__ == "__main__":
    main()
