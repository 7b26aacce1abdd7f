"""What a training step gains: ResNet-50, step time, memory held after forward and true peak, each codec beside plain.

python3 benchmarks/step_gpu.py [--batch 256] [--csv benchmarks/results/step_gpu.csv]
"""

from __future__ import annotations

import argparse
import csv
import time

import torch
import torchvision

import halley
from halley.codecs import ErrorBounded, GroupQuant
from halley.policies import Fixed

POLICIES = {
    "plain": None,
    "ErrorBounded 1% rel": Fixed(ErrorBounded(0.01, "rel", bitmap=False)),
    "ErrorBounded 1% rel, bitmap": Fixed(ErrorBounded(0.01, "rel", bitmap=True)),
    "ErrorBounded 0.05 abs": Fixed(ErrorBounded(0.05, bitmap=False)),
    "ErrorBounded 0.05 abs, bitmap": Fixed(ErrorBounded(0.05, bitmap=True)),
    "GroupQuant 2 bits": Fixed(GroupQuant(bits=2)),
}


def measure(policy: Fixed | None, batch: int, half: bool, steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    model = torchvision.models.resnet50().cuda()
    x, y = torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (batch,), device="cuda")
    if half:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    handle = halley.attach(model, policy) if policy else None
    held, times, host = 0, [], []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(model(x), y)
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    report = handle.report() if handle else None
    ms = sorted(times[3:])[len(times[3:]) // 2] * 1e3
    return {
        "step_ms": round(ms, 2),
        "host_ms": round(sorted(host[3:])[len(host[3:]) // 2] * 1e3, 2),
        "held_GB": round(held / 1e9, 3),
        "peak_GB": round(torch.cuda.max_memory_allocated() / 1e9, 3),
        "ratio": round(report.ratio, 2) if report else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", help="one method alone", choices=list(POLICIES))
    parser.add_argument("--csv")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    rows = []
    for half in (False, True):
        for name, policy in POLICIES.items():
            if args.only not in (None, name):
                continue
            row = {
                "model": "ResNet-50",
                "batch": args.batch,
                "precision": "bf16 channels_last" if half else "fp32 (tf32)",
            }
            row |= {"method": name, **measure(policy, args.batch, half, args.steps)}
            row |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
            rows.append(row)
            print(" | ".join(f"{k} {v}" for k, v in list(row.items())[2:9]), flush=True)
            torch.cuda.empty_cache()
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
