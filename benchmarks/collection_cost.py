"""Cost of Comet's collection: a collection step beside an ordinary one.

Without options: time of both, ResNet-18 on CIFAR-sized images or ResNet-50 on photos. With --calls: calls of Python and
built-in functions and of PyTorch's operations in a step of ResNet-50 with tensors of a few values, which do not depend
on the machine and need no GPU; optimizer and assessment included. With --late, on a GPU: kernels that are compiled in
each of the first steps, beside those that worker processes have compiled by then.

python3 benchmarks/collection_cost.py [--model resnet50] [--batch 256] [--dtype bfloat16] [--csv FILE]
python3 benchmarks/collection_cost.py --calls
python3 benchmarks/collection_cost.py --late --model resnet50 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from benchmarks import host_steps  # noqa: E402
from encke.policies import Comet  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.registry import build  # noqa: E402
from encke.train.settings import Model  # noqa: E402

MODELS = {"resnet18": (Model("resnet18", stem="cifar"), 32, 10), "resnet50": (Model("resnet50"), 224, 1000)}
"""Model, pixels and classes."""
EARLY = 9
"""Collection steps among the first 1,000: 1, 10, 20, 40, ..., 640 and 1,000."""
WARM = 40
"""Steps before times count."""
LATE = 45
"""Steps that --late looks at: collection steps are 1, 10, 20 and 40."""


def training(args: argparse.Namespace, policy: Comet) -> tuple[encke.Handle, Callable[[], None]]:
    """Return a handle and what makes one training step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    settings, pixels, classes = MODELS[args.model]
    model = build(settings, classes).to(device)
    x = torch.randn(args.batch, 3, pixels, pixels, device=device)
    if dtype != torch.float32:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(classes, (args.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    handle = encke.attach(model, policy, optimizer=optimizer)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    return handle, step


def milliseconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return 1e3 * (time.perf_counter() - start)


def measure_times(args: argparse.Namespace) -> None:
    """Print the median time of both kinds of step."""
    rows = []
    for rounding in ("stochastic", "nearest"):
        handle, step = training(args, Comet(every=args.every, rounding=rounding))
        times = [milliseconds(step) for _ in range(args.steps)]
        handle.detach()
        collected = statistics.median(t for i, t in enumerate(times, 1) if i % args.every == 0 and i > WARM)
        plain = statistics.median(t for i, t in enumerate(times, 1) if i % args.every and i > WARM)
        rows.append(
            {"policy": f"Comet(rounding={rounding!r})", "model": args.model, "batch": args.batch, "dtype": args.dtype}
            | {"device": "cuda" if torch.cuda.is_available() else "cpu"}
            | {"step_ms": round(plain, 2), "collection_step_ms": round(collected, 2)}
            | {"steps_each": round(collected / plain, 2)}
            | {"percent_of_first_1000": round(EARLY * (collected - plain) / (10 * plain), 3)}
            | {"percent_later": round((collected - plain) / (10 * plain), 3)}
        )
        print(rows[-1], flush=True)
    if args.csv:
        write_csv(args.csv, rows)


def count_calls() -> None:
    """Print how many calls a collection step and an ordinary one make."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    setup = host_steps.SETUPS["resnet50"]
    model, x = setup.build(), host_steps.inputs(setup.model)
    # Weights stay, and so do the settings: no kernel is compiled in a step that is counted.
    optimizer = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9)
    handle = encke.attach(model, Comet(), optimizer=optimizer, min_bytes=setup.min_bytes)
    half = host_steps.step_of(model, x, torch.float32)

    def step() -> None:
        half()
        optimizer.step()

    for _ in range(host_steps.REAL_STEPS):
        step()
    counts: dict[str, list[int]] = {}
    for kind in ("ordinary", "collection"):
        for count in (step, step_calls(step, counts, kind), step_operations(step, counts, kind)):
            if kind == "collection":
                handle.collect_now()
            count()
    for name, found in counts.items():
        print(f"{name:10} {found[0]} calls of Python functions, {found[1]} of built-in ones, {found[2]} operations")
    more = [b - a for a, b in zip(counts["ordinary"], counts["collection"], strict=True)]
    print(f"collection adds {more[0]}, {more[1]} and {more[2]}; {len(handle.policy.settings)} settings")  # type: ignore[attr-defined]


def step_calls(step: Callable[[], None], counts: dict[str, list[int]], kind: str) -> Callable[[], None]:
    return lambda: counts.__setitem__(kind, [*host_steps.calls_of(step)])


def step_operations(step: Callable[[], None], counts: dict[str, list[int]], kind: str) -> Callable[[], None]:
    """Return what adds the number of PyTorch's operations in a step to the counts, those called by others included."""

    def count() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            step()
        counts[kind].append(sum(e.count for e in profile.key_averages() if e.key.startswith("aten::")))

    return count


def watch_compilation(args: argparse.Namespace) -> None:
    """Print, for each of the first steps, its time and the kernels that Triton compiled in it, not found on disk."""
    import triton

    from encke.kernels.gpu import compiler, launch

    compiled: list[str] = []

    def listen(*, src: Any, metadata: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    triton.knobs.compilation.listener = listen
    _, step = training(args, Comet())
    for number in range(1, LATE + 1):
        before = len(launch._compiled)
        took = milliseconds(step)
        child = compiler._compiler.child
        beside = "a compiler runs beside it" if child is not None and child.poll() is None else "nothing runs beside it"
        loaded = len(launch._compiled) - before
        if loaded or compiled:
            print(
                f"step {number:3} {took:9.1f} ms: {loaded} kernels for the first time, {len(compiled)} of them "
                f"compiled ({', '.join(sorted(set(compiled)))}); {beside}",
                flush=True,
            )
        compiled.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="resnet18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--calls", action="store_true", help="count calls instead, without a GPU")
    parser.add_argument("--late", action="store_true", help="list kernels compiled in the first steps")
    args = parser.parse_args()
    if args.calls:
        count_calls()
    elif args.late:
        watch_compilation(args)
    else:
        measure_times(args)


if __name__ == "__main__":
    main()
