"""Time of a ResNet-50 training step on a GPU: step and host time, and the kernels' own time by kind.

python3 benchmarks/step_kernels.py [--batch 256] [--precision fp32|bf16] [--method group2]
        [--compile | --graphs] [--top 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.bench.methods import METHODS  # noqa: E402

KINDS = {
    "gq_encode": "encode",
    "gq_decode": "decode",
    "gq_gate": "ReLU backward from codes",
    "_apply_kernel": "norm backward from codes",
    "_reduce_kernel": "norm backward from codes",
    "gather_kernel": "norm backward from codes",
    "finish_kernel": "norm backward from codes",
    "bits_": "bits",
    "bn_": "batch norm",
    "batch_norm": "batch norm",
    "threshold": "ReLU",
    "clamp": "ReLU",
    "pool": "pooling",
    "multi_tensor": "optimizer",
    "triton_": "compiled",
    "elementwise": "elementwise",
}


def kind(name: str) -> str:
    """Return a kernel's kind from its name; convolutions are among the others."""
    if "at::" in name and "_kernel" in name and not any(key in name for key in ("batch_norm", "pool", "threshold")):
        return "optimizer" if "multi_tensor" in name else "elementwise" if "elementwise" in name else "others"
    return next((value for key, value in KINDS.items() if key in name), "others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--method", choices=[name for name, each in METHODS.items() if each.kind != "other"])
    parser.set_defaults(method="group2")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="the same, with CUDA graphs")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--top", type=int, default=0, help="also that many kernels by name, with calls in a step")
    args = parser.parse_args()
    half = args.precision == "bf16"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    model = torchvision.models.resnet50().cuda()
    x, y = torch.randn(args.batch, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (args.batch,), device="cuda")
    if half:
        model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    mode = "reduce-overhead" if args.graphs else None
    run = torch.compile(model, fullgraph=True, mode=mode) if args.compile or args.graphs else model
    METHODS[args.method].attach(run, optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = torch.nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()

    for _ in range(12):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9
    print(f"step {statistics.median(times) * 1e3:.1f} ms, host {statistics.median(host) * 1e3:.1f}, peak {peak:.2f} GB")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in profiler.key_averages():
        if not event.key.startswith("Optimizer"):
            total[kind(event.key)] = total.get(kind(event.key), 0.0) + event.self_device_time_total / 3e3
    for name, ms in sorted(total.items(), key=lambda item: -item[1]):
        print(f"  {name:28} {ms:8.2f} ms")
    print(f"  {'together':28} {sum(total.values()):8.2f} ms")
    events = [event for event in profiler.key_averages() if not event.key.startswith("Optimizer")]
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[: args.top]:
        print(f"  {event.self_device_time_total / 3e3:8.2f} ms {event.count / 3:6.0f} x  {event.key[:110]}")


if __name__ == "__main__":
    main()
