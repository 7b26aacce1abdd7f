"""Bits a value against variance for other forms of group codes, on the tensors of a file, by arithmetic.

A dithered code of a group has the variance step^2 / 12 for each value that is not an exact zero. Dense codes are those
of `GroupQuant`: in groups without negative values one code stands for zero. The sparse form is a bitmap of the
non-zeros, where a tensor has zeros, and then codes for the non-zeros alone. Each group has 32 bits of scales. Variance
is relative to `GroupQuant(bits=2)`, tensor by tensor, and averaged over all values. `at_equal_variance` is the rate
over that of `GroupQuant` with groups of 128, whose rate between two numbers of bits is interpolated.

python3 benchmarks/group_forms.py FILE.safetensors [--csv FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.bench.data import from_file  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402

GROUPS = (64, 128, 256)
BITS = (2, 3, 4)
SCALES = 32
"""Bits of a group's smallest value and step."""


def in_groups(flat: Tensor, group: int) -> Tensor:
    """Return values in rows of groups; the last is filled with copies of the last value."""
    return torch.cat([flat, flat[-1:].expand(-flat.numel() % group)]).view(-1, group)


def dense(flat: Tensor, bits: int, group: int) -> tuple[float, float]:
    """Return bits and squared error of all values together."""
    rows = in_groups(flat, group)
    signed = (rows < 0).any(1)
    smallest = torch.where(signed, rows.amin(1), rows.where(rows > 0, math.inf).amin(1))
    step = (rows.amax(1) - smallest).clamp_min(0) / torch.where(signed, 2**bits - 1, 2**bits - 2)
    lossy = torch.where(signed, group, (rows != 0).sum(1))
    return rows.numel() * bits + len(rows) * SCALES, float((lossy * step.square() / 12).sum())


def sparse(flat: Tensor, bits: int, group: int) -> tuple[float, float]:
    """Return bits and squared error of all values together."""
    there = flat[flat != 0]
    bitmap = flat.numel() if there.numel() < flat.numel() else 0
    if not there.numel():
        return bitmap, 0.0
    rows = in_groups(there, group)
    step = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    return bitmap + rows.numel() * bits + len(rows) * SCALES, float((group * step.square() / 12).sum())


def rate_for(variance: float, frontier: list[tuple[float, float]]) -> float:
    """Return the rate at which a frontier of (rate, variance) has this variance: straight lines in the logarithm."""
    points = [(rate, math.log2(v)) for rate, v in frontier]
    low = sum(v > math.log2(variance) for _, v in points[1:-1])
    (rate, v), (next_rate, next_v) = points[low : low + 2]
    return rate + (math.log2(variance) - v) * (next_rate - rate) / (next_v - v)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    flats = [each.tensor.flatten() for each in from_file(args.file, 0.01, "rel", torch.float64, "cpu")]
    values = sum(flat.numel() for flat in flats)
    units = [dense(flat, 2, 128)[1] for flat in flats]
    frontier: list[tuple[float, float]] = []
    rows: list[dict[str, str | float]] = []
    for form, group in [(dense, 128), (dense, 64), (dense, 256), *[(sparse, group) for group in GROUPS]]:
        for bits in BITS:
            found = [form(flat, bits, group) for flat in flats]
            rate = sum(taken for taken, _ in found) / values
            relative = [error / unit * flat.numel() for (_, error), unit, flat in zip(found, units, flats, strict=True)]
            variance = sum(relative) / values
            if form is dense and group == 128:
                frontier.append((rate, variance))
            row: dict[str, str | float] = {"form": form.__name__, "group": group, "bits": bits}
            row |= {"bits_a_value": round(rate, 3), "variance": round(variance, 4)}
            rows.append(row)
    for row in rows:
        row["at_equal_variance"] = round(float(row["bits_a_value"]) / rate_for(float(row["variance"]), frontier), 3)
        print(row)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
