"""Batch norm on the GPU, torch's and ours: for the layers of ResNet-50, and for the instance norms of a 3-D U-Net.

Our backward reads codes ("fused"), or values in memory, over which it writes the gradient ("values"). The forward in
channels_last memory is a part of the encoder; here it is that of NCHW memory.

python3 benchmarks/fused_norm.py [--only resnet50 unet3d] --csv FILE
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.kernels import GroupFormat  # noqa: E402
from encke.kernels.formats import NORM_GROUP  # noqa: E402
from encke.kernels.gpu import group_plan, norm_backward, norm_planes, norm_values  # noqa: E402

MAPS = [
    (64, 112, 1), (64, 56, 6), (256, 56, 4), (128, 56, 1), (128, 28, 7), (512, 28, 5), (256, 28, 1), (256, 14, 11),
    (1024, 14, 7), (512, 14, 1), (512, 7, 5), (2048, 7, 4),
]  # fmt: skip
"""Channels and side of the maps, and how many batch norms of ResNet-50 at 224 x 224 have such an input."""
VOLUMES = [(32, 128, 4), (64, 64, 4), (128, 32, 4), (256, 16, 4), (320, 8, 2)]
"""Instance norms of the U-Net, for volumes of 128 x 128 x 128."""
SEED = 3
CASES = [
    ("resnet50", torch.float32, torch.contiguous_format),
    ("resnet50", torch.bfloat16, torch.channels_last),
    ("unet3d", torch.bfloat16, torch.contiguous_format),
]
Row = dict[str, str | float]


def milliseconds(function: Callable[[], object], rep: int = 40) -> float:
    return do_bench(function, warmup=8, rep=rep, return_mode="median")


def copy_bandwidth() -> float:
    """GB read and written in a second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) / 1e6


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference in units of what it is compared with, both as root mean squares."""
    return ((got.float() - expected.float()).norm() / expected.float().norm()).item()


def measure(size: tuple[int, ...], bits: int, dtype: torch.dtype, layout: torch.memory_format) -> Row:
    """Times and errors of one layer."""
    last, channels, side = layout == torch.channels_last, size[1], size[-1]
    scale = torch.rand(channels, *[1] * (len(size) - 2), device="cuda") + 0.5
    x = (torch.randn(size, device="cuda") * scale + scale / 3).to(dtype).contiguous(memory_format=layout)
    grad = torch.randn_like(x)
    weight, bias = torch.rand(channels, device="cuda"), torch.rand(channels, device="cuda")

    def forward() -> tuple[Any, ...]:
        return torch.ops.aten._batch_norm_impl_index(x, weight, bias, None, None, True, 0.1, 1e-5, True)

    expected_out, mean, invstd, reserve, implementation = forward()
    # Groups of a channel, or of a plane, as capture packs what a batch norm reads.
    planes = GroupFormat.in_rows(bits, NORM_GROUP, dtype, False, x.numel(), math.prod(size[2:]), 1)
    codes = group_plan(GroupFormat(bits, NORM_GROUP, dtype, channels) if last else planes, x.numel(), x.device)
    data, seed, nbytes = codes.encode(x, SEED), SEED, x.nbytes
    plan = norm_backward.norm_plan(size, codes.format, last, weight.dtype, x.device)
    values = norm_values.values_plan(size, dtype, last, weight.dtype, x.device)
    own = None if last else norm_planes.planes_forward(size, dtype, weight.dtype, x.device)
    assert plan is not None and values is not None
    out = torch.empty_like(x)

    def decode() -> torch.Tensor:
        return codes.decode_strided(data, seed, size, x.stride())

    def plain(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.ops.aten._batch_norm_impl_index_backward(
            implementation, x, grad, weight, None, None, mean, invstd, True, 1e-5, [True, True, True], reserve
        )

    def fused(apply: bool = True) -> tuple[torch.Tensor | None, ...]:
        return norm_backward.norm_backward(grad, data, mean, invstd, weight, plan, seed, apply)

    def from_values(x: torch.Tensor, out: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return norm_backward.norm_backward(grad, x, mean, invstd, weight, values, 0, out=out)

    expected = plain(decode())
    errors = [
        max(error(a, b), error(c, b)) for a, c, b in zip(fused(), from_values(decode(), None), expected, strict=True)
    ]
    row: Row = {
        "dtype": str(dtype).removeprefix("torch."),
        "channels": channels,
        "side": side,
        "torch_forward_ms": milliseconds(forward),
        "forward_ms": float("nan"),
        "cudnn_ms": milliseconds(lambda: plain(x)),
        "decode_ms": milliseconds(decode),
        "decode_cudnn_ms": milliseconds(lambda: plain(decode())),
        "values_ms": milliseconds(lambda: from_values(x, out)),
        "fused_sums_ms": milliseconds(lambda: fused(False)),
        "fused_ms": milliseconds(fused),
    }
    if own is not None:
        row["forward_ms"] = milliseconds(lambda: own.run(x, weight, bias, None, 0.1, 1e-5))
        errors.append(error(own.run(x, weight, bias, None, 0.1, 1e-5)[0], expected_out))
    row["fused_gbs"] = (3 * nbytes + 2 * data.nbytes) / float(row["fused_ms"]) / 1e6
    row["sums_gbs"] = (nbytes + data.nbytes) / float(row["fused_sums_ms"]) / 1e6
    row["error_x"], row["error_parameters"] = errors[0], max(errors[1:])
    return row


def rows(models: list[str], batch: int, bits: int) -> Iterator[Row]:
    """One row for each shape, and the sum over the whole network for each dtype."""
    copy = copy_bandwidth()
    for model, dtype, layout in CASES:
        if model not in models:
            continue
        total: Row = {"dtype": str(dtype).removeprefix("torch."), "channels": "all", "side": "", "layers": 0}
        for channels, side, count in VOLUMES if model == "unet3d" else MAPS:
            size = (1, 2 * channels, side, side, side) if model == "unet3d" else (batch, channels, side, side)
            row = measure(size, bits, dtype, layout) | {"layers": count, "copy_gbs": copy}
            yield row
            for name, value in row.items():
                if name.endswith("_ms") or name == "layers":
                    each = float(value) * (count if name != "layers" else 1)
                    total[name] = float(total.get(name, 0)) + each
        yield total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", help="also write the rows to this file")
    parser.add_argument("--only", nargs="+", choices=("resnet50", "unet3d"), default=["resnet50", "unet3d"])
    parser.add_argument("--batch", type=int, default=256, help="images of ResNet-50")
    parser.add_argument("--bits", type=int, default=2)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    found, names = [], []
    for row in rows(args.only, args.batch, args.bits):
        if not found:
            names = list(row)
            print(" ".join(f"{name:>16}" for name in names))
        found.append(row)
        cells = (row.get(name, "") for name in names)
        print(" ".join(f"{cell:16.4g}" if isinstance(cell, float) else f"{cell:>16}" for cell in cells), flush=True)
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main()
