"""Cost of `encke data lmdb`: its time beside that of a plain loop that only decodes the same files.

python3 benchmarks/lmdb_speed.py [--images 20000] [--rounds 5] [--csv benchmarks/results/lmdb_cpu.csv]

The loop is one process that opens each file with Pillow and converts it to RGB. Both read files that were read before,
and take turns; each round is a row, with the machine's load before it, because other work on it counts twice: it takes
cores from the tool that the loop does not use. The time includes everything but the start of Python and its imports.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.tools.provenance import version, write_csv  # noqa: E402
from encke.train.data.lmdb import lmdb  # noqa: E402


def generate(root: Path, images: int, side: int, classes: int = 20) -> list[Path]:
    """JPEGs with large shapes and some grain, about 4 kB each at 96 pixels."""
    rng = np.random.default_rng(0)
    files = []
    for i in range(images):
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)).astype(np.int16)
        grain = rng.integers(-12, 13, (side, side, 1), dtype=np.int16)
        file = root / f"class{i % classes:02}" / f"{i:06}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8)).save(file, quality=85)
        files.append(file)
    return files


def decode(files: list[Path]) -> None:
    for file in files:
        with Image.open(file) as image:
            image.convert("RGB")


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--side", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, help="processes of encke data lmdb; by default one for each core")
    parser.add_argument("--folder", type=Path, help="where images and LMDB are made and removed")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        src, dst = Path(folder) / "images", Path(folder) / "lmdb"
        files = generate(src, args.images, args.side)
        size = statistics.mean(file.stat().st_size for file in files)
        decode(files)
        settings = {"images": args.images, "side": args.side, "mean_bytes": round(size)}
        settings |= {
            "workers": args.workers or "one for each core",
            "pillow": version("pillow"),
            "lmdb": version("lmdb"),
        }
        rows = []
        for number in range(args.rounds):
            load = round(os.getloadavg()[0], 1)
            loop = seconds(lambda: decode(files))
            tool = seconds(lambda: lmdb(src, dst, args.workers))
            shutil.rmtree(dst)
            times = {
                "loop_seconds": round(loop, 2),
                "lmdb_seconds": round(tool, 2),
                "lmdb_over_loop": round(tool / loop, 3),
            }
            rows.append(settings | {"round": number + 1, "load": load} | times)
            print(f"loop {loop:.2f} s, lmdb {tool:.2f} s, {tool / loop:.2f} times the loop, load {load}", flush=True)
    print(f"median: {statistics.median(row['lmdb_over_loop'] for row in rows):.2f} times the loop")
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
