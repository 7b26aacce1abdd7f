"""Time of a training step on a GPU: step and host time, and the kernels' own time by kind.

python3 benchmarks/step_kernels.py [--model resnet50] [--batch 256] [--precision fp32|bf16] [--method default]
        [--compile | --graphs] [--collect] [--single-layers] [--top 20] [--host 40] [--operators 40]
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.bench.methods import METHODS  # noqa: E402
from encke.bench.options import Options  # noqa: E402
from encke.bench.steps import Training  # noqa: E402
from encke.fused import registry  # noqa: E402
from encke.fused.block import BlockForward  # noqa: E402
from encke.kernels import wait_for_kernels  # noqa: E402
from encke.train.models.registry import MODELS  # noqa: E402

KINDS = {
    "gq_encode": "encode",
    "norm_relu_encode": "encode",
    "gq_decode": "decode",
    "gq_gate": "ReLU backward from codes",
    "row_forward": "layer norm and RMS norm",
    "row_again": "results computed again from codes",
    "activate_kernel": "results computed again from codes",
    "row_backward": "norm backward from codes",
    "column_sums": "norm backward from codes",
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="resnet50")
    parser.add_argument("--batch", type=int, help="by default the model's usual batch")
    parser.add_argument("--tokens", type=int, help="tokens in a sequence")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--method", choices=METHODS, default="default")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="compile, with CUDA graphs")
    parser.add_argument("--warm", type=int, default=41, help="warm-up steps; the default policy collects in the 40th")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--top", type=int, default=0, help="also that many kernels by name, with calls in a step")
    parser.add_argument("--host", type=int, default=0, help="also that many Python functions by their own time")
    parser.add_argument("--operators", type=int, default=0, help="also that many operators and CUDA calls by host time")
    parser.add_argument("--collect", action="store_true", help="look at collection steps")
    parser.add_argument("--single-layers", action="store_true", help="run layers one by one, not in blocks")
    args = parser.parse_args()
    if args.single_layers:
        registry.FORWARDS = tuple(each for each in registry.FORWARDS if each is not BlockForward)
    compiled = args.compile or args.graphs
    options = Options((args.model,), (args.method,), (args.precision,), compiled, args.graphs, tokens=args.tokens)
    task = options.plan(() if args.batch is None else (args.batch,)).tables()[0][0]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    training = Training(task)
    for _ in range(args.warm):
        training.step()
    wait_for_kernels()
    training.wait()
    torch.cuda.reset_peak_memory_stats()

    def steps(count: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(count):
            if args.collect and not training.collect_next():
                parser.error(f"--collect: the method {args.method} does not collect")
            found.append(training.timed())
        return found

    host, times = zip(*steps(args.steps), strict=True)
    kinds = ", compiled" * compiled + ", collection steps" * args.collect
    print(f"{task.model}, {task.batch} x {task.size}, {task.precision}, {task.method}{kinds}:")
    peak = torch.cuda.max_memory_allocated() / 1e9
    step = f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"
    print(f"  step {step}, host {statistics.median(host):.1f}, peak {peak:.2f} GB")
    if not args.collect:
        print(f"  pipelined {training.timed(args.steps)[1]:.1f} ms")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps(3)
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
    if args.operators:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            steps(3)
        found = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
        for event in found[: args.operators]:
            print(f"  {event.self_cpu_time_total / 3e3:8.2f} ms of the host {event.count / 3:6.0f} x  {event.key[:90]}")
    if args.host:
        profiled = cProfile.Profile()
        # A profile is of one thread: backward runs in this one, too.
        with torch.autograd.set_multithreading_enabled(False):
            steps(1)
            profiled.runcall(steps, 3)
        pstats.Stats(profiled).sort_stats("tottime").print_stats(args.host)


if __name__ == "__main__":
    main()
