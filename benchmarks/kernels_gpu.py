"""Checks the Triton kernels against the reference on the GPU, then measures them.

python3 benchmarks/kernels_gpu.py --csv FILE
python3 benchmarks/kernels_gpu.py --only planes --sizes 512    planes of a ResNet-50 in NCHW memory, beside a copy
python3 benchmarks/kernels_gpu.py --only "eb nearest rel" --check float32 bfloat16 --sizes 512    one setting, quickly
python3 benchmarks/kernels_gpu.py --only "eb dithered" --check --sizes 512 --registers 96    another encoder
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.codecs.errorbounded import KINDS  # noqa: E402
from encke.kernels import BoundedFormat, GroupFormat, gpu, reference  # noqa: E402
from encke.kernels.gpu import bounded, norm_backward  # noqa: E402
from encke.kernels.gpu.launch import seed_arguments  # noqa: E402

INF = float("inf")
SEED = 0x1234567890ABCDEF
MIB = 1 << 20
PLANES = (56 * 56, 28 * 28, 14 * 14, 7 * 7)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
EB_SETTINGS = [
    ("nearest", "abs", 0.01), ("nearest", "rel", 0.01), ("nearest", "abs", 0.05), ("nearest", "abs", 0.001),
    ("stochastic", "abs", 0.01), ("dithered", "abs", 0.01), ("dithered", "abs", 0.05),
    ("dithered with signs", "abs", 0.01), ("dithered with signs", "abs", 0.05),
]  # fmt: skip
"""Rounding, kind of bound, and the bound as a share of the range; the bounds that COMET chooses are about 0.01."""
Row = dict[str, str | float]


def noise(kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal noise, its ReLU, or a mixture with everything that is hard to store."""
    x = torch.randn(numel, device="cuda", dtype=torch.float32)
    if kind == "relu":
        x.relu_()
    elif kind == "hard":
        x[numel // 2 :].relu_()
        x[numel // 4 : numel // 3] += 1e4
        x[::9973], x[5::7001], x[6::7919] = float("nan"), INF, -0.0
        x[::1021] *= 1e4
    return x.to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def eb_name(rounding: str, mode: str, share: float) -> str:
    return f"eb {rounding} {mode} {share:g}"


def check(dtype: torch.dtype, only: str) -> Iterator[str]:
    """Return the differences from the reference on about a million values; none if all is well."""
    numel = MIB + 321
    x = noise("hard", numel, dtype)
    for rounding, mode in dict.fromkeys(setting[:2] for setting in EB_SETTINGS if only in eb_name(*setting)):
        for bound, rel in ((INF, 1e-4), (0.02, 0.1)) if mode == "rel" else ((0.02, INF), (0.0, INF)):
            format = BoundedFormat(bound, rel, KINDS[rounding], dtype)
            theirs, ours = (each.bounded_encode(x, format, SEED) for each in (reference, gpu))
            for flag in (False, True):
                expected = reference.bounded_decode(*theirs, format, numel, flag)
                if not all(same(gpu.bounded_decode(*kept, format, numel, flag), expected) for kept in (theirs, ours)):
                    yield f"eb {dtype} {rounding} bound={bound} rel={rel} mask={flag}"
            if len(theirs[1]) != len(ours[1]):
                yield f"eb {dtype} {rounding} bound={bound} rel={rel}: {len(ours[1])} bytes, not {len(theirs[1])}"
    if only.startswith("eb"):
        return
    formats = [GroupFormat(b, 128, dtype, s) for b in (2, 4, 8) for s in (1, 3, 24, 192)]
    formats += [GroupFormat(3, 128, dtype, 1), GroupFormat(3, 128, dtype, 24), GroupFormat(3, 128, dtype, 6, row=49)]
    formats += [GroupFormat(b, 128, dtype, row=r) for b in (2, 3, 4) for r in (3136, 3137, 49)]
    for grouped in formats:
        part = x[: numel - numel % (grouped.stride * (grouped.row or 1))]
        theirs, ours = (backend.group_plan(grouped, len(part), x.device) for backend in (reference, gpu))
        data = theirs.encode(part, SEED)
        expected = theirs.decode(data, SEED)
        for kept in (data, ours.encode(part, SEED)):
            if not torch.equal(ours.decode(kept, SEED).nan_to_num(7.0), expected.nan_to_num(7.0)):
                yield f"gq {dtype} {grouped.bits} bits, stride {grouped.stride}, row {grouped.row}"
    for bits in (1, 2, 4):
        small = torch.randint(0, 1 << bits, (numel,), dtype=torch.uint8, device="cuda")
        data = gpu.bits_encode(small, bits)
        if not (same(data, reference.bits_encode(small, bits)) and same(gpu.bits_decode(data, bits, numel), small)):
            yield f"bits {bits}"


def seconds(function: Callable[[], object]) -> float:
    return do_bench(function, warmup=10, rep=50, return_mode="median") / 1e3


def counters(x: torch.Tensor) -> torch.Tensor:
    """Return the words that an encoder counts in, zero."""
    return torch.zeros(8, dtype=torch.int64, device=x.device)


def eb_rows(x: torch.Tensor, only: str) -> Iterator[tuple[str, float, int, Callable, Callable]]:
    """Name, ratio, bytes moved, encode and decode."""
    spread = (x.max() - x.min()).item()
    for rounding, mode, share in EB_SETTINGS:
        if only not in eb_name(rounding, mode, share):
            continue
        bounds = (share * spread, INF) if mode == "abs" else (INF, share)
        format = BoundedFormat(*bounds, KINDS[rounding], x.dtype)
        meta, payload = gpu.bounded_encode(x, format, SEED)
        capacity, size = len(payload) + 1024, len(meta) + len(payload)
        yield (
            eb_name(rounding, mode, share),
            x.nbytes / size,
            x.nbytes + size,
            lambda f=format, c=capacity: gpu.bounded_encode_within(x, f, SEED, c, counters(x)),
            lambda f=format, a=meta, p=payload: gpu.bounded_decode(a, p, f, x.numel(), False),
        )


def gq_rows(x: torch.Tensor) -> Iterator[tuple[str, float, int, Callable, Callable]]:
    for bits, stride in ((2, 1), (3, 1), (4, 1), (8, 1), (2, 64), (3, 64), (2, 256), (2, 2048), (4, 256)):
        plan = gpu.group_plan(GroupFormat(bits, 128, x.dtype, stride), x.numel(), x.device)
        data = plan.encode(x, SEED)
        yield (
            f"gq {bits} bits" + (f", channels_last {stride}" if stride > 1 else ""),
            x.nbytes / len(data),
            x.nbytes + len(data),
            lambda p=plan: p.encode(x, SEED),
            lambda p=plan, d=data: p.decode(d, SEED),
        )
    for stride in (1, 256):
        plan = gpu.group_plan(GroupFormat(2, 128, x.dtype, stride), x.numel(), x.device)
        data = plan.encode(x, SEED)
        yield (
            "gq 2 bits, mask" + (f", channels_last {stride}" if stride > 1 else ""),
            8 * x.numel() / len(data),
            x.numel() + len(data),
            lambda p=plan: p.encode(x, SEED),
            lambda p=plan, d=data: p.mask(d),
        )


def planes_rows(x: torch.Tensor) -> Iterator[tuple[str, float, int, Callable, Callable]]:
    """Encode and decode planes of 64 channels in NCHW memory; then ReLU's and batch norm's backward from the codes.

    A backward is measured in both columns. Up to 0.6 % of `x` is left over.
    """
    ones, sums = torch.ones(64, device=x.device), torch.zeros(5, 64, device=x.device)
    for bits, plane in ((b, p) for b in (2, 3, 4) for p in (112 * 112, *PLANES)):
        part = x[: x.numel() // (64 * plane) * 64 * plane].view(-1, 64, plane, 1)
        format = GroupFormat.in_rows(bits, 128, x.dtype, False, part.numel(), plane, 1)
        plan = gpu.group_plan(format, part.numel(), x.device)
        norm = norm_backward.norm_plan(tuple(part.shape), format, False, torch.float32, x.device)
        assert norm is not None
        data, out = plan.encode(part, SEED), torch.empty_like(part)
        seeds, low, high = seed_arguments(SEED, data)
        ratio, read = part.nbytes / len(data), part.nbytes + len(data)
        name = f"planes {plane}, {bits} bits"
        yield name, ratio, read, partial(plan.encode, part, SEED), partial(plan.decode, data, SEED)
        gate = partial(plan.gate_into, data, part, out)
        reduce = partial(norm.sum_up, part, data, ones, (seeds, low, high))
        write = partial(norm.write, (part, data, sums, out, seeds), (*norm.numbers[1], low, high))
        yield f"{name}, gate", ratio, read + part.nbytes, gate, gate
        yield f"{name}, norm's sums", ratio, read, reduce, reduce
        yield f"{name}, norm's gradient", ratio, read + part.nbytes, write, write


def bits_rows(size: int) -> Iterator[tuple[str, float, int, Callable, Callable]]:
    for bits in (1, 2, 4):
        x = torch.randint(0, 1 << bits, (size,), dtype=torch.uint8, device="cuda")
        data = gpu.bits_encode(x, bits)
        yield (
            f"bits {bits}",
            8 / bits,
            x.nbytes + len(data),
            lambda x=x, b=bits: gpu.bits_encode(x, b),
            lambda d=data, b=bits: gpu.bits_decode(d, b, size),
        )


def copy_bandwidth(size: int) -> float:
    """Bytes read and written in a second."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def measure(mib: int, only: str) -> Iterator[Row]:
    """GB/s of input, and the share of the copy bandwidth that all bytes moved make."""
    size = mib * MIB
    copy = copy_bandwidth(size)
    yield {"MiB": mib, "dtype": "", "content": "", "what": "copy (read + written)", "ratio": 1, "encode": copy / 1e9}
    cases = [("bits", "uint8", "random", bits_rows(size))]
    for dtype in ("float32", "bfloat16"):
        for kind in ("relu", "normal"):
            x = noise(kind, size // DTYPES[dtype].itemsize, DTYPES[dtype])
            cases.append(("eb", dtype, kind, eb_rows(x, only)))
            if kind == "relu":
                cases += [("gq", dtype, kind, gq_rows(x)), ("planes", dtype, kind, planes_rows(x))]
    families = {case[0] for case in cases}
    for family, dtype, kind, rows in cases:
        if only.split(" ")[0] in families - {family}:
            continue
        for what, ratio, moved, encode, decode in rows:
            if only not in what:
                continue
            row: Row = {"MiB": mib, "dtype": dtype, "content": kind, "what": what, "ratio": ratio}
            for name, function in (("encode", encode), ("decode", decode)):
                time_taken = seconds(function)
                row[name], row[f"{name} share"] = size / time_taken / 1e9, moved / time_taken / copy
            yield row


def host_rows() -> Iterator[Row]:
    """Microseconds of host time for a call on a small tensor."""
    x = noise("relu", 65536, torch.float32)
    nearest = KINDS["nearest"]
    absolute, relative = BoundedFormat(0.04, INF, nearest, x.dtype), BoundedFormat(INF, 0.01, nearest, x.dtype)
    encoded = gpu.bounded_encode(x, absolute, SEED)
    plan = gpu.group_plan(GroupFormat(2, 128, x.dtype), x.numel(), x.device)
    data = plan.encode(x, SEED)
    calls = {
        "eb abs": lambda: gpu.bounded_encode_within(x, absolute, SEED, 1 << 18, counters(x)),
        "eb rel": lambda: gpu.bounded_encode_within(x, relative, SEED, 1 << 18, counters(x)),
        "eb decode": lambda: gpu.bounded_decode(*encoded, absolute, 65536, False),
        "gq encode": lambda: plan.encode(x, SEED),
        "gq decode": lambda: plan.decode(data, SEED),
    }
    for name, call in calls.items():
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            call()
        taken = (time.perf_counter() - start) / 300
        torch.cuda.synchronize()
        yield {"what": f"host microseconds: {name}", "encode": taken * 1e6}


def show(row: Row) -> None:
    cells = [f"{row[k]:.2f}" if isinstance(row.get(k), float) else str(row.get(k, "")) for k in COLUMNS]
    widths = (4, 9, 8, 36, 6, 8, 6, 8, 6)
    print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)), flush=True)


COLUMNS = ("MiB", "dtype", "content", "what", "ratio", "encode", "encode share", "decode", "decode share")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, help="also write the table there")
    parser.add_argument("--check", nargs="*", default=list(DTYPES), choices=list(DTYPES), help="dtypes to check first")
    parser.add_argument("--only", default="", help="measure only what has this in its name")
    parser.add_argument("--sizes", nargs="*", type=int, default=[512, 16], help="MiB of input to measure")
    parser.add_argument(
        "--registers", type=int, help="of a thread that encodes error-bounded values, for all roundings"
    )
    args = parser.parse_args()
    if args.registers is not None:
        bounded.ENCODE_REGISTERS = bounded.MORE_REGISTERS = args.registers
    wrong = [message for dtype in args.check for message in check(DTYPES[dtype], args.only)]
    print(
        "\n".join(["differs from the reference:", *wrong]) if wrong else f"as the reference: {args.check}", flush=True
    )
    rows = []
    host = host_rows() if args.sizes and not args.only else ()
    for source in [*(measure(size, args.only) for size in args.sizes), host]:
        for row in source:
            show(row)
            rows.append(row)
    if args.csv:
        args.csv.parent.mkdir(parents=True, exist_ok=True)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
