"""Convolutions of one pixel in channels_last memory, by cuDNN and as matrix products: time, host time and memory.

python3 benchmarks/pointwise.py [--batch 256] [--csv FILE]

For each different one of ResNet-50 and EfficientNet-B0, in bf16: the forward pass and the gradients of input and weight.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.tools.provenance import write_csv  # noqa: E402

SHAPES = (
    (64, 64, 56), (64, 256, 56), (256, 64, 56), (256, 128, 56), (128, 512, 28), (512, 128, 28), (512, 256, 28),
    (256, 1024, 14), (1024, 256, 14), (1024, 512, 14), (512, 2048, 7), (2048, 512, 7),
    (32, 16, 112), (16, 96, 112), (96, 24, 56), (24, 144, 56), (144, 40, 28), (240, 80, 14), (672, 112, 14),
    (1152, 192, 7), (320, 1280, 7),
)  # fmt: skip
"""Channels of input and result, and pixels along a side."""
GEOMETRY = ((1, 1), (0, 0), (1, 1))
ROUNDS = 12


def figures(run: Callable[[], object]) -> tuple[float, float, float]:
    """Return milliseconds on the GPU, microseconds of the host, and the most MB allocated meanwhile."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    run()
    host = time.perf_counter() - start
    memory = torch.cuda.max_memory_allocated() - before
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        start = time.perf_counter()
        run()
        host = min(host, time.perf_counter() - start)
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times), 1e6 * host, memory / 1e6


def rows_of(x: Tensor) -> Tensor:
    """Return the pixels of a tensor in channels_last memory as rows."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    table = []
    for inputs, outputs, side in SHAPES:
        x, grad = (
            torch.randn(args.batch, channels, side, side, device="cuda", dtype=torch.bfloat16).contiguous(
                memory_format=torch.channels_last
            )
            for channels in (inputs, outputs)
        )
        weight = torch.randn(outputs, inputs, 1, 1, device="cuda", dtype=torch.bfloat16)
        matrix = weight.view(outputs, inputs)

        def backward(which: tuple[bool, bool, bool], x=x, grad=grad, weight=weight) -> object:  # type: ignore[no-untyped-def]
            return torch.ops.aten.convolution_backward(
                grad, x, weight, None, *GEOMETRY, False, (0, 0), 1, which
            )  # fmt: skip

        def shaped(y: Tensor, channels: int, side: int = side) -> Tensor:
            return y.view(args.batch, side, side, channels).permute(0, 3, 1, 2)

        runs = {
            "forward": (
                lambda x=x, w=weight: torch.convolution(x, w, None, *GEOMETRY, False, (0, 0), 1),
                lambda x=x, m=matrix, n=outputs: shaped(torch.mm(rows_of(x), m.t()), n),
            ),
            "gradient of the input": (
                lambda b=backward: b((True, False, False)),
                lambda g=grad, m=matrix, n=inputs: shaped(torch.mm(rows_of(g), m), n),
            ),
            "gradient of the weight": (
                lambda b=backward: b((False, True, False)),
                lambda x=x, g=grad: torch.mm(rows_of(g).t(), rows_of(x)),
            ),
        }
        for what, (convolution, product) in runs.items():
            row: dict[str, object] = {
                "inputs": inputs,
                "outputs": outputs,
                "side": side,
                "batch": args.batch,
                "what": what,
            }
            for name, run in (("convolution", convolution), ("product", product)):
                ms, host, memory = figures(run)
                row |= {f"{name}_ms": round(ms, 4), f"{name}_host_us": round(host, 1), f"{name}_mb": round(memory, 1)}
            table.append(row)
            print(*row.values(), flush=True)
    for what in runs:
        some = [row for row in table if row["what"] == what]
        for first, last in ((0, 12), (12, None)):
            sums = [sum(float(row[f"{name}_ms"]) for row in some[first:last]) for name in ("convolution", "product")]  # type: ignore[arg-type]
            print(f"{what}: {sums[0]:.3f} ms by cuDNN, {sums[1]:.3f} ms as products")
    if args.csv:
        write_csv(args.csv, table)


if __name__ == "__main__":
    main()
