"""Kernels of layer norm and RMS norm on a GPU beside torch's own: time, and share of a copy's bandwidth.

python3 benchmarks/row_norm.py [--bits 4] [--backward 512 1024 2048] [--csv FILE]

"torch" is `native_layer_norm` forward, and its backward from a decoded input. "again" computes the result once more
from codes. --backward: values that a program of our backward takes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from fused_norm import copy_bandwidth, milliseconds

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.kernels import GroupFormat  # noqa: E402
from encke.kernels.gpu import group_plan, row_norm  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402

SHAPES = (
    ("ViT-B/16, 128 images", 128, 197, 768, torch.float32, True),
    ("ViT-B/16, transposed rows", 128, 197, 768, torch.float32, True),
    ("BERT base, 32 x 512", 32, 512, 768, torch.float32, True),
    ("Llama, 4 x 4096", 4, 4096, 1024, torch.float32, False),
    ("8192 rows of 4096", 2, 4096, 4096, torch.bfloat16, False),
)
"""Name, sequences, tokens, width, dtype, and whether it is a layer norm or an RMS norm."""
SEED = 3
Row = dict[str, object]


def measure(
    name: str, batch: int, tokens: int, width: int, dtype: torch.dtype, centred: bool, bits: int, copy: float
) -> Row:
    """Return times of one shape in microseconds, and shares of a copy's bandwidth."""
    rows, size = batch * tokens, (batch, tokens, width)
    transposed = "transposed" in name
    x = torch.randn(rows * width, device="cuda").to(dtype)
    flat = x
    x = x.view(tokens, batch, width).transpose(0, 1) if transposed else x.view(size)
    weight, bias = torch.rand(width, device="cuda") + 0.5, torch.randn(width, device="cuda") if centred else None
    norm = row_norm.RowNorm(width, centred, 1e-6, 0.0, torch.float32, dtype)
    inner = batch if transposed else rows
    plan = row_norm.row_plan(norm, rows, inner, dtype, torch.float32, centred, 1, x.device)
    assert plan is not None
    _, mean, rstd = plan.forward(x, weight, bias)
    format = GroupFormat.in_rows(bits, 128, dtype, False, x.numel(), width, 1)
    codes = group_plan(format, x.numel(), x.device)
    data, grad = codes.encode(flat, SEED), torch.randn(size, device="cuda").to(dtype)
    decoded = torch.empty_like(flat)
    stride = x.stride() if transposed else None

    def again() -> object:
        return row_norm.normalise_again(
            data, SEED, format, dtype, size, mean if centred else None, rstd, weight, bias, 0.0, torch.bfloat16, inner
        )

    def backward() -> object:
        return plan.backward(grad, data, SEED, format, mean, rstd, weight, (True, True, centred), stride)

    def torch_backward() -> object:
        codes.decode_into(data, SEED, decoded)
        source = decoded.as_strided(size, x.stride())
        one = (batch, tokens, 1)
        mask, plain_weight = [True, True, True], weight.to(dtype)
        return torch.ops.aten.native_layer_norm_backward(
            grad, source, [width], mean.view(one), rstd.view(one), plain_weight, plain_weight, mask
        )

    def torch_forward() -> object:
        return torch.nn.functional.layer_norm(x, (width,), weight.to(dtype), weight.to(dtype))

    row: Row = {"shape": name, "dtype": str(dtype).removeprefix("torch."), "bits": bits}
    row |= {"backward_values": row_norm.BACKWARD, "copy_gbs": round(copy)}
    moved = {"forward": 2 * flat.nbytes, "backward": 2 * flat.nbytes + data.nbytes}
    moved["again"] = data.nbytes + 2 * flat.numel()
    functions = {"forward": lambda: plan.forward(x, weight, bias), "backward": backward, "again": again}
    for kind, function in functions.items():
        ms = milliseconds(function)
        row[f"{kind}_us"], row[f"{kind}_share"] = round(1e3 * ms, 1), round(moved[kind] / ms / 1e6 / copy, 3)
    row["torch_forward_us"] = round(1e3 * milliseconds(torch_forward), 1)
    row["torch_backward_us"] = round(1e3 * milliseconds(torch_backward), 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--backward", type=int, nargs="+", default=[row_norm.BACKWARD])
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    copy, found = copy_bandwidth(), []
    for values in args.backward:
        row_norm.BACKWARD = values
        row_norm.row_plan.cache_clear()
        for shape in SHAPES:
            row = measure(*shape, args.bits, copy)
            if not found:
                print(" ".join(row))
            print(" ".join(map(str, row.values())), flush=True)
            found.append(row)
    if args.csv:
        write_csv(args.csv, found)


if __name__ == "__main__":
    main()
