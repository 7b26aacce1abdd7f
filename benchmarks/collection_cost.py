"""Cost of Comet's collection: time of a collection step beside an ordinary one, ResNet-18 on CIFAR-sized images.

python3 benchmarks/collection_cost.py [--batch 256] [--csv benchmarks/results/collection.csv]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.policies import Comet  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.registry import build  # noqa: E402
from encke.train.settings import Model  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for rounding in ("stochastic", "nearest"):
        torch.manual_seed(0)
        model = build(Model("resnet18", stem="cifar"), 10).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        handle = encke.attach(model, Comet(every=args.every, rounding=rounding), optimizer=optimizer)
        x = torch.randn(args.batch, 3, 32, 32, device=device)
        y = torch.randint(10, (args.batch,), device=device)
        times = []
        for _ in range(args.steps):
            start = time.perf_counter()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        handle.detach()
        collected = statistics.median(times[i] for i in range(len(times)) if (i + 1) % args.every == 0 and i >= 40)
        plain = statistics.median(times[i] for i in range(len(times)) if (i + 1) % args.every and i >= 40)
        # In a training of 3,000 steps there are 11: at 1, 10, 20, 40, ..., 640, 1000, 2000 and 3000.
        share = 100 * 11 * (collected - plain) / (3000 * plain)
        rows.append(
            {"policy": f"Comet(rounding={rounding!r})", "model": "resnet18", "batch": args.batch, "device": device}
            | {"step_ms": round(plain, 2), "collection_step_ms": round(collected, 2)}
            | {"percent_of_3000_steps": round(share, 3)}
            | {"percent_at_1000": round((collected - plain) / (10 * plain), 3)}
        )
        print(rows[-1], flush=True)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
