"""`encke bench memory`: what a training step of every method takes in memory, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from encke.bench import plots
from encke.bench.training import (
    Device,
    Precision,
    Row,
    checked,
    conclude,
    groups,
    lines_of,
    measure_all,
    peak_of,
    plain_of,
    title_of,
    unit_of,
)
from encke.tools.terminal import note, number, table, times
from encke.tools.units import size_in

COLUMNS = (
    "held: after the forward pass less before it. Peak: of ordinary steps. Collecting: the peak with collection steps.",
    "first: with the very first steps. Above: the peak less what there was before the first step. Total: the papers'",
    "older measure, what there is before backward and what backward leaves; what they call activation is held.",
)


def memory(
    models: tuple[str, ...] = (),
    batch: tuple[int, ...] = (),
    methods: tuple[str, ...] = (),
    precision: tuple[Precision, ...] = ("fp32",),
    compile: bool = False,
    graphs: bool = False,
    image: int | None = None,
    tokens: int | None = None,
    steps: int = 5,
    memory: str | None = None,
    device: Device | None = None,
    out: Path = Path("runs/bench"),
) -> None:
    """Memory of a training step: plain, Encke's policies and the alternatives, each in a process of its own.

    Prints a table and writes memory.csv and memory.png (peak against time). Without a GPU it measures the memory of
    the process. docs/bench.md explains the columns.

    Args:
        models: resnet18, resnet50, wide_resnet50_2, vgg16, densenet161, efficientnet_b0, vit_b_16, gpt2, gpt_mini.
            By default resnet50, without a GPU resnet18.
        batch: Images or sequences in a step; several are measured one after the other.
        methods: plain, default, comet-nearest, division, group2, group4, bounded, checkpoint, selective, save-on-cpu,
            offload, and with --compile budget50, budget20. By default all.
        precision: fp32 (with tf32 on a GPU), or bf16: autocast, and channels_last for images.
        compile: Compile the model with torch.compile, then attach.
        graphs: The same with mode="reduce-overhead": the GPU replays CUDA graphs.
        image: Pixels along an image's side; by default 224, without a GPU 64.
        tokens: Tokens in a sequence; by default 1024, without a GPU 128.
        steps: Steps that are timed; the median counts.
        memory: A cap on memory, such as 16GiB or 900MiB.
        device: cpu or cuda; by default a GPU if there is one.
        out: The folder for the CSV and the plot.
    """
    options = checked(models, batch, methods, precision, compile, graphs, image, tokens, steps, memory, device, out)
    rows = measure_all(options, out / "memory.csv")
    for part in groups(rows).values():
        show(part)
    note()
    for line in COLUMNS:
        note(line)
    conclude(rows, [out / "memory.csv", *plots.memory_against_time(rows, out / "memory.png")])


def show(rows: Sequence[Row]) -> None:
    """One table."""
    plain = plain_of(rows)
    name, unit = unit_of(rows)

    def cells(row: Row) -> list[str]:
        columns = ("held", "peak", "peak_with_collection", "peak_run", "peak_above", "reserved", "papers_total")
        values = [row[f"{column}_bytes"] for column in columns]
        found = [size_in(value, unit) for value in values]
        held, peak = times(plain.get("held_bytes"), row["held_bytes"]), times(peak_of(plain), peak_of(row))
        return [found[0], held, *found[1:5], peak, *found[5:], number(row["pipelined_ms"])]

    heads = ["method", f"held {name}", "less", f"peak {name}", "collecting", "first", "above", "less"]
    table(title_of(rows[0]), [*heads, "reserved", "total", "step ms"], lines_of(rows, cells))
