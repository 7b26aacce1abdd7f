"""Cliffs of the GPU kernels: share of a copy's bandwidth that encoding and decoding reach, for sizes and shapes of any
kind.

python3 benchmarks/kernel_cliffs.py [--sizes 1 4 16 64 256] [--csv benchmarks/results/cliffs_h200.csv]

Flat and channels_last tensors have the format that `GroupQuant` chooses for them, planes in NCHW memory that of a batch
norm's input. The share is bytes read and written in a second over those of a copy of the same tensor, timed in the same
way: CUDA events, with the L2 cache cleared before each call. Kernels are compiled first, by several processes. Prints a
Markdown table, lowest shares first.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.codecs import GroupQuant  # noqa: E402
from encke.codecs.base import operations  # noqa: E402
from encke.codecs.groupquant import GroupQuantPacked  # noqa: E402
from encke.kernels import GroupFormat  # noqa: E402
from encke.tools.provenance import core_count, write_csv  # noqa: E402

MIB = 1 << 20
SEED = 0x1234567890ABCDEF
BITS = (2, 3, 4, 8)
GROUP = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PLANES = (7, 14, 28, 56)
CHANNELS = (24, 64, 96, 100, 256)
ODD = 77
"""Values by which a flat tensor is short of a whole number of groups."""
WORKERS = 12
"""Processes that compile."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A tensor: its size in memory, type, shape and memory format."""

    mib: int
    dtype: str
    what: str

    def tensor(self, device: str) -> Tensor:
        """Return ReLU of normal noise of about that size."""
        dtype, (kind, *given) = DTYPES[self.dtype], self.what.split()
        count = self.mib * MIB // dtype.itemsize
        if kind == "flat":
            size: tuple[int, ...] = (count - ODD if given else count,)
        else:
            channels, side = (int(given[0]), 28) if kind == "channels_last" else (64, int(given[0]))
            size = (max(1, count // (channels * side * side)), channels, side, side)
        x = torch.randn(size, device=device).relu_().to(dtype)
        return x.to(memory_format=torch.channels_last) if kind == "channels_last" else x


def cases(sizes: Sequence[int]) -> list[Case]:
    """Return every case: flat tensors, planes in NCHW memory, channels in channels_last memory."""
    shapes = ["flat", "flat odd", *(f"planes {side}" for side in PLANES), *(f"channels_last {n}" for n in CHANNELS)]
    return [Case(mib, dtype, what) for dtype in DTYPES for what in shapes for mib in sizes]


def calls(case: Case, bits: int, device: str) -> tuple[Tensor, int, Callable[[], Tensor], Callable[[], Tensor]]:
    """Return the tensor, its packed size, and functions that encode and decode its memory."""
    x = case.tensor(device)
    if case.what.startswith("planes"):
        rows = GroupFormat.in_rows(bits, GROUP, x.dtype, False, x.numel(), x.shape[2] * x.shape[3], 1)
        plan = operations(x).group_plan(rows, x.numel(), x.device)
    else:
        packed = GroupQuant(bits=bits, group=GROUP).encode(x)
        assert isinstance(packed, GroupQuantPacked)
        plan = packed.plan
    memory = x.permute(0, 2, 3, 1).flatten() if case.what.startswith("channels_last") else x.flatten()
    data = plan.encode(memory, SEED)
    return x, len(data), lambda: plan.encode(memory, SEED), lambda: plan.decode(data, SEED)


def seconds(function: Callable[[], object], device: str) -> float:
    """Return the median time of a call."""
    if device == "cuda":
        from triton.testing import do_bench

        return do_bench(function, warmup=2, rep=8, return_mode="median") / 1e3
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(some: Sequence[Case], device: str) -> Iterator[Row]:
    """Measure each case with every number of bits, beside a copy of the same tensor."""
    for case in some:
        x = case.tensor(device)
        target = torch.empty_like(x)
        copy = 2 * x.nbytes / seconds(lambda x=x, target=target: target.copy_(x), device)  # type: ignore[misc]
        for bits in BITS:
            x, size, encode, decode = calls(case, bits, device)
            row: Row = {"MiB": case.mib, "dtype": case.dtype, "what": case.what, "bits": bits}
            row |= {"shape": "x".join(map(str, x.shape)), "ratio": round(x.nbytes / size, 2)}
            for name, function in (("encode", encode), ("decode", decode)):
                taken = seconds(function, device)
                row[f"{name}_gb_s"] = round(x.nbytes / taken / 1e9, 1)
                row[f"{name}_share"] = round((x.nbytes + size) / taken / copy, 3)
            yield row


def compile_part(number: int, of: int, sizes: Sequence[int], device: str) -> None:
    """Run every `of`-th case once, so that its kernels are in Triton's cache on the disk."""
    for case in cases(sizes)[number::of]:
        for bits in BITS:
            _, _, encode, decode = calls(case, bits, device)
            encode(), decode()


def compile_all(sizes: Sequence[int]) -> None:
    """Compile all kernels in several processes; an error in one of them is one here."""
    of = max(1, min(WORKERS, core_count() - 2))
    given = [str(size) for size in sizes]
    command = [sys.executable, str(Path(__file__).resolve()), "--sizes", *given, "--part"]
    started = [subprocess.Popen([*command, f"{number}/{of}"]) for number in range(of)]
    if any([process.wait() for process in started]):
        raise SystemExit("a process that compiles kernels has failed; its error stands above")


def markdown(rows: Sequence[Row]) -> str:
    """Return shares in per cent, encode / decode, for every number of bits; lowest first."""
    groups: dict[tuple[str, str, int], dict[int, Row]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["what"], row["MiB"]), {})[row["bits"]] = row

    def least(group: dict[int, Row]) -> float:
        return min(min(row["encode_share"], row["decode_share"]) for row in group.values())

    heads = ["dtype", "what", "MiB", *(f"{bits} bits" for bits in BITS)]
    lines = [heads, ["---"] * len(heads)]
    for key, group in sorted(groups.items(), key=lambda item: least(item[1])):
        shares = [f"{100 * row['encode_share']:.0f} / {100 * row['decode_share']:.0f} %" for row in group.values()]
        lines.append([*map(str, key), *shares])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 4, 16, 64, 256], help="MiB of input")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/cliffs_h200.csv"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.part:
        compile_part(*map(int, args.part.split("/")), args.sizes, device)
        return
    start = time.monotonic()
    if device == "cuda":
        compile_all(args.sizes)
        print(f"kernels compiled after {time.monotonic() - start:.0f} s", flush=True)
    rows: list[Row] = []
    for case in cases(args.sizes):
        rows += measure([case], device)
        if case.mib == args.sizes[-1]:
            print(f"{case.dtype}, {case.what}: after {time.monotonic() - start:.0f} s", flush=True)
            write_csv(args.csv, rows)
    print(markdown(rows))
    shares = [row[f"{way}_share"] for row in rows for way in ("encode", "decode")]
    print(f"\nmedian {100 * statistics.median(shares):.0f} %, least {100 * min(shares, default=math.nan):.0f} %")
    print(f"wrote {args.csv}")


if __name__ == "__main__":
    main()
