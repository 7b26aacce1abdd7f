"""`encke bench speed`: how long a training step of every method takes, side by side, and what it does in a second."""

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


def speed(
    models: tuple[str, ...] = (),
    batch: tuple[int, ...] = (),
    methods: tuple[str, ...] = (),
    precision: tuple[Precision, ...] = ("fp32",),
    compile: bool = False,
    graphs: bool = False,
    image: int | None = None,
    tokens: int | None = None,
    steps: int = 8,
    memory: str | None = None,
    device: Device | None = None,
    out: Path = Path("runs/bench"),
) -> None:
    """Time of a training step: plain, Encke's policies and the alternatives, each in a process of its own.

    Prints a table and writes speed.csv (with the columns of memory.csv) and speed.png (peak against time); with
    several --batch, throughput over batch size as well. docs/bench.md explains the columns.

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
        out: The folder for the CSV and the plots.
    """
    options = checked(models, batch, methods, precision, compile, graphs, image, tokens, steps, memory, device, out)
    rows = measure_all(options, out / "speed.csv")
    for part in groups(rows).values():
        show(part)
    note()
    note(
        "step: median of whole steps, each waited for. Pipelined: several steps, waited for once; the throughput comes"
    )
    note("from it. Host: until everything is launched. Collecting: a step in which the policy collects.")
    written = [out / "speed.csv", *plots.memory_against_time(rows, out / "speed.png")]
    if len(options.batch) > 1:
        written += plots.throughput(rows, out / "throughput.png")
    conclude(rows, written)


def show(rows: Sequence[Row]) -> None:
    """One table."""
    plain = plain_of(rows)
    name, unit = unit_of(rows)

    def cells(row: Row) -> list[str]:
        found = [number(row[f"{column}_ms"]) for column in ("step", "pipelined", "host", "collection")]
        peak = peak_of(row)
        less = times(peak_of(plain), peak)
        time = times(row["pipelined_ms"], plain.get("pipelined_ms"))
        return [*found[:2], time, *found[2:], number(row["per_second"]), size_in(peak, unit), less]

    heads = ["method", "step ms", "pipelined", "of plain", "host", "collecting", f"{rows[0]['unit']}/s"]
    table(title_of(rows[0]), [*heads, f"peak {name}", "less"], lines_of(rows, cells))
