"""Data-parallel training on one machine: do all ranks take the same decisions, and what does sharing them cost?

python3 benchmarks/scaling.py [--ranks 1 2 4] [--model resnet18] [--batch 8] [--collections 5] [--csv FILE]

Every rank is a process with one thread; gloo connects them. Every third step is a collection step, after which the
settings of all ranks are compared: rank r sees images that are 1 + 2 r times as large, so that ranks would decide
differently by themselves. `share_ms` is the time of the broadcast alone, behind a barrier; `share_cpu_ms` its processor
time. Exits with 1 if any rank holds other settings.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.bench.models import build, loss_of, optimizer_for, synthetic_batch  # noqa: E402
from encke.policies.comet import schedule  # noqa: E402
from encke.tools import process  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.registry import MODELS  # noqa: E402

PERIOD = 3
"""Every so many steps one collects."""


class Clock:
    """Wall time and processor time of some calls, in milliseconds."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def time(self, function: Any, *arguments: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = function(*arguments)
        self.wall.append(1e3 * (time.perf_counter() - wall))
        self.cpu.append(1e3 * (time.process_time() - cpu))
        return result


def work(model: str, size: int, batch: int, collections: int) -> None:
    """Train as one rank; the first one prints its figures as JSON."""
    process.die_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    info = MODELS[model]
    network = build(model, size)
    optimizer = optimizer_for(network, info)
    parallel = DistributedDataParallel(network)
    handle = encke.attach(parallel, optimizer=optimizer)
    policy = handle.policy
    images, labels = synthetic_batch(info, batch, size, "cpu")
    images = images * (1 + 2 * rank)
    shared, plain, collecting = Clock(), Clock(), Clock()
    share = schedule.share_decisions

    def timed_share(*arguments: Any) -> Any:
        dist.barrier()
        return shared.time(share, *arguments)

    schedule.share_decisions = timed_share

    def step() -> None:
        loss_of(parallel, (images, labels)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    agree = True
    for number in range(1, PERIOD * (collections + 1)):
        collects = number % PERIOD == 0
        if collects:
            handle.collect_now()
        (collecting if collects else plain).time(step)
        if collects:
            everyone: list[Any] = [None] * ranks
            dist.all_gather_object(everyone, policy.decisions()["settings"])
            agree &= bool(everyone[0]) and all(each == everyone[0] for each in everyone)
    if rank == 0:
        # The first step compiles and is a collection step as well.
        figures = {
            "settings": len(policy.decisions()["settings"]),
            "same_settings": agree,
            "share_bytes": len(pickle.dumps((policy.decisions(), False))),
            "share_ms": statistics.median(shared.wall),
            "share_cpu_ms": statistics.median(shared.cpu),
            "step_cpu_ms": statistics.median(plain.cpu[1:]),
            "collection_cpu_ms": statistics.median(collecting.cpu),
        }
        print(json.dumps(figures), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort an ordinary exit, after everything is done


def free_port() -> int:
    """Return a port that nobody uses."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def measure(ranks: int, model: str, size: int, batch: int, collections: int) -> dict[str, Any]:
    """Train with so many ranks; return the row of the table."""
    row = {"ranks": ranks, "model": model, "size": size, "batch_of_a_rank": batch, "collections": collections}
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    job = json.dumps([model, size, batch, collections])
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--job", job],
            env=process.environment() | common | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [child.communicate()[0] for child in children]
    finally:
        for child in children:
            child.kill()
    failed = [rank for rank, child in enumerate(children) if child.returncode]
    if failed:
        raise SystemExit(f"rank {failed[0]} of {ranks} failed with exit status {children[failed[0]].returncode}")
    return row | json.loads(outputs[0].splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2, 4))
    parser.add_argument("--model", default="resnet18", choices=[n for n, i in MODELS.items() if i.data == "images"])
    parser.add_argument("--size", type=int, default=64, help="pixels along a side")
    parser.add_argument("--batch", type=int, default=8, help="images of each rank in a step")
    parser.add_argument("--collections", type=int, default=5, help="collection steps to measure")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        work(*json.loads(args.job))
    rows = []
    for ranks in args.ranks:
        rows.append(measure(ranks, args.model, args.size, args.batch, args.collections))
        print(rows[-1], flush=True)
        if args.csv:
            write_csv(args.csv, rows)
    return 0 if all(row["same_settings"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
