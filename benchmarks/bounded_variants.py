"""Times the kernels of ErrorBounded with several numbers of registers, after a check against the reference."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.kernels import BoundedFormat, gpu, reference  # noqa: E402
from encke.kernels.formats import DITHERED, NEAREST  # noqa: E402
from encke.kernels.gpu import bounded, launch  # noqa: E402

INF, SEED = float("inf"), 0x1234567890ABCDEF
start = time.time()


def noise(kind: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(numel, device="cuda")
    if kind == "relu":
        x.relu_()
    if kind == "hard":
        x[numel // 2 :].relu_()
        x[numel // 4 : numel // 3] += 1e4
        x[::9973], x[5::7001], x[6::7919] = float("nan"), INF, -0.0
        x[::1021] *= 1e4
    return x.to(dtype)


def check(format: BoundedFormat) -> None:
    for kind in ("hard", "relu"):
        x = noise(kind, (1 << 20) + 321, format.dtype)
        theirs, ours = (each.bounded_encode(x, format, SEED) for each in (reference, gpu))
        assert len(theirs[1]) == len(ours[1]), (format, kind, len(theirs[1]), len(ours[1]))
        for flag in (False, True):
            expected = reference.bounded_decode(*theirs, format, x.numel(), flag)
            for name, kept in (("theirs", theirs), ("ours", ours)):
                back = gpu.bounded_decode(*kept, format, x.numel(), flag)
                assert torch.equal(back.view(torch.uint8), expected.view(torch.uint8)), (format, kind, flag, name)


def measure(dtype: torch.dtype, rounding: int, bounds: tuple[float, float], registers: list[tuple[int, int]]) -> None:
    format = BoundedFormat(*bounds, rounding, dtype)
    for encode_registers, decode_registers in registers:
        bounded.ENCODE_REGISTERS, bounded.DECODE_REGISTERS = encode_registers, decode_registers
        launch._compiled.clear()
        check(format)
        for kind in ("relu", "normal"):
            x = noise(kind, (512 << 20) // dtype.itemsize, dtype)
            meta, payload = gpu.bounded_encode(x, format, SEED)
            sizes = torch.zeros(8, dtype=torch.int64, device="cuda")

            def encode(x=x, sizes=sizes, capacity=len(payload) + 1024):
                gpu.bounded_encode_within(x, format, SEED, capacity, sizes.zero_())

            def decode(x=x, meta=meta, payload=payload):
                gpu.bounded_decode(meta, payload, format, x.numel(), False)

            rates = [x.nbytes / do_bench(f, warmup=10, rep=40, return_mode="median") / 1e6 for f in (encode, decode)]
            print(
                f"{time.time() - start:5.0f} s {dtype} rounding {rounding} {bounds} {kind:6s} registers "
                f"{encode_registers:3d} {decode_registers:3d} ratio {x.nbytes / (len(meta) + len(payload)):.2f} "
                f"encode {rates[0]:.0f} decode {rates[1]:.0f} GB/s",
                flush=True,
            )


if __name__ == "__main__":
    x = noise("relu", 128 << 20, torch.float32)
    sizes = torch.zeros(8, dtype=torch.int64, device="cuda")
    kind = launch.TYPES[x.dtype]
    taken = do_bench(
        lambda: launch.launch_kernel(
            bounded.range_kernel, -(-x.numel() // bounded.RANGE_SIZE), (x, sizes), (x.numel(),),
            (kind, bounded.RANGE_SIZE), 8, specialised=1,
        )
    )  # fmt: skip
    print(f"range {x.nbytes / taken / 1e6:.0f} GB/s", flush=True)
    measure(torch.float32, NEAREST, (INF, 0.01), [(128, 80), (0, 0), (96, 64), (168, 96)])
    measure(torch.bfloat16, DITHERED, (0.05, INF), [(128, 80), (0, 0)])
