"""README's table: time and memory of a ResNet-50 training step, plain, with the default policy and checkpointing.

python3 benchmarks/readme_table.py [--rounds 3] [--csv benchmarks/results/readme_h200.csv]

The methods of a table take turns, round by round, each in a process of its own that stays alive. Prints a Markdown
table of medians over the rounds; the CSV has every round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.bench.options import Options  # noqa: E402
from encke.bench.rows import group_rows, measure_all, medians  # noqa: E402
from encke.bench.steps import Task  # noqa: E402
from encke.tools.units import GB  # noqa: E402

CASES = [
    ("fp32", 256, False, ("plain", "default", "checkpoint")),
    ("bf16", 256, False, ("plain", "default", "checkpoint")),
    ("bf16", 64, False, ("plain", "default")),
    ("bf16", 256, True, ("plain", "default")),
]
"""Precision, batch, whether it is compiled, methods."""
HEADS = ("ResNet-50", "method", "step", "of plain", "peak", "of plain", "first two steps", "collection step")


def tables(args: argparse.Namespace) -> list[list[Task]]:
    """Return the tasks of each case."""
    tasks = []
    for precision, batch, compiled, methods in CASES:
        settings = {"image": args.image, "steps": args.steps, "out": args.csv.parent}
        options = Options((args.model,), methods, (precision,), compiled, **settings)
        tasks += options.plan((args.batch or batch,)).tables()
    return tasks


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return medians over the rounds as a Markdown table."""
    lines = [HEADS, ("---",) * len(HEADS)]
    keys = ("precision", "batch", "compile")
    for (precision, batch, compiled), group in group_rows(medians(rows), keys).items():
        plain = next((row for row in group if row["method"] == "plain"), group[0])
        name = f"batch {batch}, {precision}{' compiled' if compiled else ''}"
        for row in group:
            if row["status"] != "ok":
                lines.append((name, row["method"], row["status"], *[""] * (len(HEADS) - 3)))
                continue
            times = [each["pipelined_ms"] for each in rows if same(each, row) and each["status"] == "ok"]
            spread = f" (n = {len(times)}, {min(times):.1f} to {max(times):.1f})"
            collection = row["collection_ms"]
            lines.append(
                (
                    name,
                    row["method"],
                    f"{row['pipelined_ms']:.1f} ms{spread}",
                    ratio(row["pipelined_ms"], plain["pipelined_ms"]),
                    f"{row['peak_bytes'] / GB:.2f} GB",
                    ratio(row["peak_bytes"], plain["peak_bytes"]),
                    f"{row['first_ms'] / 1e3:.1f} s, {row['second_ms'] / 1e3:.2f} s",
                    f"{collection:.0f} ms, {row['peak_with_collection_bytes'] / GB:.2f} GB" if collection else "",
                )
            )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def same(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two rows measure the same task."""
    return all(row[key] == other[key] for key in ("precision", "batch", "compile", "method"))


def ratio(value: float | None, plain: float | None) -> str:
    """Return a figure over plain's."""
    return f"{value / plain:.2f}x" if value and plain else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round")
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/results/readme_h200.csv"))
    parser.add_argument("--batch", type=int, help="use this batch for all cases, for a quick run")
    parser.add_argument("--image", type=int, help="pixels along an image's side; by default 224, without a GPU 64")
    parser.add_argument("--model", default="resnet50")
    args = parser.parse_args()
    rows = measure_all(tables(args), args.csv, args.rounds)
    print(markdown(rows))
    print(f"\nwrote {args.csv}")


if __name__ == "__main__":
    main()
