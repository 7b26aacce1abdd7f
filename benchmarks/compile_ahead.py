"""Kernels that a CNN requests ahead in its first pass, and the processor time to compile them, without a GPU.

python3 benchmarks/compile_ahead.py [--dtype bfloat16|float32] [--nchw]

The process that serves a training compiles for an H200, with an empty cache and at normal priority.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.fused.requests import BITS_IN_TURN  # noqa: E402
from encke.kernels import UsualUse  # noqa: E402
from encke.kernels.gpu.compiler import Compiler  # noqa: E402

HOPPER = {"backend": "cuda", "arch": 90, "warp_size": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--nchw", action="store_true", help="contiguous images, else channels_last")
    args = parser.parse_args()
    usual = UsualUse(getattr(torch, args.dtype), True, not args.nchw)
    wanted = {"uses": [], "rows": [], "usual": [usual.numbers()], "rates": BITS_IN_TURN}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        done = Path(folder) / "done"
        start = time.perf_counter()
        compiler = Compiler(niceness=0)
        compiler.ask({**HOPPER, "marker": str(done), "wanted": wanted})
        compiler.wait()
        took = time.perf_counter() - start
        count = len(list(Path(folder).glob("*/*.cubin")))
        if not done.exists():
            raise SystemExit("a kernel was not compiled: is Triton installed?")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{count} kernels in {took:.1f} s, {used.ru_utime + used.ru_stime:.1f} s of processor time")


if __name__ == "__main__":
    main()
