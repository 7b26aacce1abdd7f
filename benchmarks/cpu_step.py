"""A training step on the CPU, plain and with a policy, turn by turn in one process.

python3 benchmarks/cpu_step.py [--policy group2 ...] [--steps 20] [--threads 2] [--csv benchmarks/results/cpu_step.csv]

On a busy machine only processor time on one thread tells anything: `--threads 1`, column cpu_ratio.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.codecs import ErrorBounded, GroupQuant  # noqa: E402
from encke.policies import Comet, Fixed  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.small import digits  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402

# Name, batch, channels and side of the images.
CASES = [("digits", 125, 1, 28), ("resnet18", 16, 3, 128)]
POLICIES = {
    "default": "default",
    "variable": Comet(rounding="dithered"),
    "group2": Fixed(GroupQuant(bits=2)),
    "nearest": Fixed(ErrorBounded(0.1, "rel")),
    "dithered": Fixed(ErrorBounded(0.1, "rel", "dithered")),
}
"""A tenth of the range is about the bound at which levels have the variance of 2 bits."""
WARM = 12
"""Steps before the measurement: sites are learnt in the first, and the first collection is in the tenth."""


class Training:
    """A model with its optimizer, and the times of its steps."""

    def __init__(self, model: nn.Module, policy: str = "") -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.handle = encke.attach(model, POLICIES[policy], self.optimizer) if policy else None
        self.times: list[float] = []
        self.cpu: list[float] = []
        """Processor time of all threads, those included that wait busily for the next operation."""

    def step(self, images: Tensor, labels: Tensor) -> None:
        start, cpu = time.perf_counter(), time.process_time()
        loss = F.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.times.append(time.perf_counter() - start)
        self.cpu.append(time.process_time() - cpu)


def compare(plain: list[float], packed: list[float]) -> tuple[float, float, float]:
    """Milliseconds of both, and the median of the ratios of neighbouring steps."""
    first, second = (round(1e3 * statistics.median(times[WARM:]), 1) for times in (plain, packed))
    return first, second, round(statistics.median(b / a for a, b in zip(plain[WARM:], packed[WARM:], strict=True)), 3)


def measure(name: str, batch: int, channels: int, side: int, policy: str, steps: int) -> dict[str, str | int | float]:
    """Times of both trainings."""
    torch.manual_seed(0)
    model = digits(10) if name == "digits" else torchvision_models().resnet18(num_classes=10)
    images, labels = torch.randn(batch, channels, side, side), torch.randint(10, (batch,))
    plain, packed = Training(copy.deepcopy(model)), Training(model, policy)
    for _ in range(WARM + steps):
        plain.step(images, labels)
        packed.step(images, labels)
    assert packed.handle is not None
    report = packed.handle.report()
    plain_ms, policy_ms, ratio = compare(plain.times, packed.times)
    plain_cpu, policy_cpu, cpu_ratio = compare(plain.cpu, packed.cpu)
    return {
        "model": name,
        "batch": batch,
        "image": side,
        "policy": policy,
        "plain_ms": plain_ms,
        "policy_ms": policy_ms,
        "ratio": ratio,
        "ratio_of_fastest": round(min(packed.times[WARM:]) / min(plain.times[WARM:]), 3),
        "plain_cpu_ms": plain_cpu,
        "policy_cpu_ms": policy_cpu,
        "cpu_ratio": cpu_ratio,
        "saved_mb": round(report.saved_bytes / 1e6, 1),
        "packed_mb": round(report.packed_bytes / 1e6, 1),
        "steps": steps,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=["default"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = []
    for case, policy in itertools.product(CASES, args.policy):
        row = measure(*case, policy, args.steps)
        rows.append(row)
        print(
            f"{row['model']:9} {row['batch']:4} x {row['image']:3}  plain {row['plain_ms']:7} ms  "
            f"{policy} {row['policy_ms']:7} ms  {row['ratio']:.2f}x (fastest {row['ratio_of_fastest']:.2f}x, "
            f"processor time {row['cpu_ratio']:.2f}x)",
            flush=True,
        )
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
