"""Host microseconds of one saved tensor on its way through capture: passed through, and packed without waiting (GPU).

python3 benchmarks/host_cost.py [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.capture.hooks import Capture  # noqa: E402
from encke.capture.modules import Layer  # noqa: E402
from encke.codecs import ErrorBounded, GroupQuant  # noqa: E402
from encke.codecs.base import EncoderState  # noqa: E402
from encke.codecs.layout import flatten  # noqa: E402
from encke.policies import Fixed  # noqa: E402


def microseconds(function: Callable[[], object], calls: int = 500, rounds: int = 15) -> float:
    """Median over rounds of the mean time of a call, without waiting for a GPU inside a round."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls * 1e6)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return round(statistics.median(times[2:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    capture = Capture(Fixed(GroupQuant()), None)
    capture.passes.begin(Layer("", None, None, True))
    torch._C._autograd._pop_saved_tensors_default_hooks()
    small, parameter = torch.randn(64, device=device), nn.Parameter(torch.randn(64, device=device))
    rows = {
        "small tensor passes through": microseconds(lambda: capture.pack(small)),
        "parameter passes through": microseconds(lambda: capture.pack(parameter)),
    }
    flat, layout = flatten(torch.randn(65536, device=device))
    hint = EncoderState()
    for codec in (ErrorBounded(0.1), ErrorBounded(0.01, "rel"), GroupQuant(bits=2)):
        rows[f"{codec!r} packs 256 KiB"] = microseconds(lambda c=codec: c.encode_flat(flat, layout, 0, hint), calls=100)
    codec = GroupQuant(bits=2)
    packed = codec.encode_flat(flat, layout, 0, hint)
    rows["allocate 100 kB"] = microseconds(lambda: torch.empty(100_000, dtype=torch.uint8, device=device))
    rows[f"{codec!r} unpacks 256 KiB"] = microseconds(packed.decode_flat, calls=100)
    machine = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    table = [
        {"what": what, "microseconds": value, "machine": machine, "torch": torch.__version__}
        | {"date": time.strftime("%Y-%m-%d"), "command": "python3 benchmarks/host_cost.py"}
        for what, value in rows.items()
    ]
    for row in table:
        print(f"{row['what']:55} {row['microseconds']:8.2f}")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, table[0])
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
