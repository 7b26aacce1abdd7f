"""Tables of the documentation, rendered from the files in results/.

python3 benchmarks/tables.py [--check]

A table stands between `<!-- table: NAME; SETTING -->` and `<!-- end -->`. This script writes all of them anew after a
file has changed; with --check it only tells which differ. tests/test_figures.py explains the markers.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
from pairs import summarise  # noqa: E402

import encke  # noqa: E402
from encke.policies.comet.allocate import BITS  # noqa: E402
from encke.policies.comet.policy import Comet  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
REGION = re.compile(r"<!-- table: ([\w-]+); (.*?) -->\n(.*?)<!-- end -->", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
GB = 1e9
TODAY = f"default: sigma {Comet().tolerance:g}, {'/'.join(map(str, BITS))} bits, version {encke.__version__}"
"""Today's default policy, as markers name it."""


@cache
def read(file: str) -> list[dict[str, str]]:
    """Return the rows of a file in results/."""
    with (RESULTS / file).open(newline="") as opened:
        return list(csv.DictReader(opened))


def values(file: str, column: str, **where: object) -> list[float]:
    """Return a column of the rows in which the other columns have these values; an error if there are none."""
    rows = [row for row in read(file) if all(row[name] == str(value) for name, value in where.items())]
    found = [float(row[column]) for row in rows if row[column]]
    if not found:
        raise ValueError(f"{file} has no {column} where {where}")
    return found


def median(file: str, column: str, **where: object) -> float:
    """Return the median of such values."""
    return statistics.median(values(file, column, **where))


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(re.sub(r" +", " ", f"| {' | '.join(cells)} |") + "\n" for cells in lines)


def span(found: Sequence[float], digits: int = 1) -> str:
    """Return the smallest and the largest value."""
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


STEPS = "readme_h200.csv"
CASES = {
    "ResNet-50, batch 256, fp32": {"model": "resnet50", "precision": "fp32", "batch": 256, "compile": False},
    "ResNet-50, batch 256": {"model": "resnet50", "precision": "bf16", "batch": 256, "compile": False},
    "ResNet-50, batch 64": {"model": "resnet50", "precision": "bf16", "batch": 64, "compile": False},
    "ResNet-50, batch 256, compiled": {"model": "resnet50", "precision": "bf16", "batch": 256, "compile": True},
    "Llama, 4 x 4096 tokens, compiled": {"model": "llama", "precision": "bf16", "batch": 4, "compile": True},
}
WIDE = 0.1
"""README shows the range of the rounds where it is wider than this part of the median."""


def measured(method: str) -> dict[str, dict[str, object]]:
    """Return the cases in which a method was measured."""
    return {name: case for name, case in CASES.items() if any(matches(r, method=method, **case) for r in read(STEPS))}


def readme() -> str:
    """Steps and peaks, plain beside the default policy."""
    cases = [(STEPS, name, case) for name, case in measured("default").items()]
    cases += [(OTHER_MODELS, name, {"model": model}) for model, name in MODEL_NAMES.items()]
    rows = [[name, *plain_beside_default(file, case)] for file, name, case in cases]
    return markdown(["", "step, plain", "step, Encke", "peak, plain", "peak, Encke"], rows)


def plain_beside_default(file: str, case: Mapping[str, object]) -> list[str]:
    """Return the cells of one case: times of a step, and peaks."""
    found = [values(file, "pipelined_ms", method=method, **case) for method in ("plain", "default")]
    steps = [statistics.median(each) for each in found]
    peaks = [median(file, "peak_bytes", method=method, **case) / GB for method in ("plain", "default")]
    wide = [f" ({span(each)})" if max(each) - min(each) > WIDE * min(each) else "" for each in found]
    cells = [f"{step:.1f} ms{range_}" for step, range_ in zip(steps, wide, strict=True)]
    cells += [f"{peak:.2f} GB" for peak in peaks]
    for pair in (cells[:2], cells[2:]):
        first = cells.index(pair[0])
        if float(pair[1].split()[0]) < float(pair[0].split()[0]):
            cells[first + 1] = f"**{pair[1]}**"
    return cells


def steps() -> str:
    """Every figure of readme_h200.csv that is published."""
    rows = []
    for name, case in measured("default").items():
        for method in ("plain", "default", *["bounded"] * (name in measured("bounded"))):
            times = values(STEPS, "pipelined_ms", method=method, **case)
            first, second = (median(STEPS, f"{n}_ms", method=method, **case) / 1e3 for n in ("first", "second"))
            collection = ""
            if method == "default":
                peak = median(STEPS, "peak_with_collection_bytes", method=method, **case) / GB
                collection = f"{median(STEPS, 'collection_ms', method=method, **case):.0f} ms, {peak:.2f} GB"
            rows.append(
                [
                    name if method == "plain" else "",
                    method,
                    f"{statistics.median(times):.1f} ms ({span(times)})",
                    f"{median(STEPS, 'peak_bytes', method=method, **case) / GB:.2f} GB",
                    f"{first:.1f} s, {second:.2f} s",
                    collection,
                ]
            )
    return markdown(["", "method", "step", "peak", "first two steps", "collection step"], rows)


OTHER_MODELS = "models_h200.csv"
MODEL_NAMES = {
    "efficientnet_b0": "EfficientNet-B0, batch 256",
    "vit_b_16": "ViT-B/16, batch 128",
    "unet3d": "3-D U-Net, 2 volumes of 128 x 128 x 128",
    "swin_t": "Swin-T, batch 128",
    "convnext_tiny": "ConvNeXt-T, batch 128",
}


def models() -> str:
    """Steps and peaks of other models."""
    rows = []
    for model, name in MODEL_NAMES.items():
        for method in ("plain", "default"):
            case = {"model": model, "method": method}
            times, peaks, hosts = (values(OTHER_MODELS, c, **case) for c in ("pipelined_ms", "peak_bytes", "host_ms"))
            low, high = min(peaks) / GB, max(peaks) / GB
            collected = method != "plain"
            rows.append(
                [
                    "" if collected else name,
                    method,
                    f"{statistics.median(times):.1f} ms ({span(times)})",
                    f"{statistics.median(hosts):.1f} ms ({span(hosts)})",
                    f"{low:.2f} to {high:.2f} GB" if collected else f"{high:.2f} GB",
                    f"{median(OTHER_MODELS, 'collection_ms', **case):.0f} ms" if collected else "",
                ]
            )
    return markdown(["", "method", "step", "host", "peak", "collection step"], rows)


TRANSFORMERS = "transformer_h200.csv"
TRANSFORMER_CASES = {
    "Llama, chunked loss": {"model": "llama", "compile": False, "chunked": True},
    "Llama": {"model": "llama", "compile": False, "chunked": False},
    "Llama, compiled, chunked loss": {"model": "llama", "compile": True, "chunked": True},
    "BERT base, chunked loss": {"model": "bert", "compile": False, "chunked": True},
    "BERT base, compiled, chunked loss": {"model": "bert", "compile": True, "chunked": True},
    "ViT-B/16, compiled": {"model": "vit_b_16", "compile": True, "chunked": False},
}
TRANSFORMER_METHODS = {
    "plain": "plain",
    "checkpoint": "checkpoint each block",
    "budget30": "activation memory budget 0.3",
    "default": "default",
    "checkpoint-packed": "default and checkpoint, inputs of blocks packed",
}


def transformers() -> str:
    """Steps, peaks and held bytes of transformers, each method beside plain."""
    rows = []
    for name, case in TRANSFORMER_CASES.items():
        plain: float | None = None
        for method, words in TRANSFORMER_METHODS.items():
            where = {"method": method, **case}
            if not any(matches(row, **where) for row in read(TRANSFORMERS)):
                continue
            times = values(TRANSFORMERS, "pipelined_ms", **where)
            found = [median(TRANSFORMERS, column, **where) for column in ("pipelined_ms", "peak_bytes", "held_bytes")]
            first, plain = plain is None, found[0] if method == "plain" else plain
            rows.append(
                [
                    name if first else "",
                    words,
                    f"{found[0]:.1f} ms ({span(times)})",
                    f"{found[0] / plain:.2f}" if plain else "",
                    f"{found[1] / GB:.2f} GB",
                    f"{found[2] / GB:.2f} GB",
                ]
            )
    return markdown(["", "method", "step", "over plain", "peak", "held"], rows)


def matches(row: dict[str, str], **where: object) -> bool:
    """Return whether the columns have these values."""
    return all(row[name] == str(value) for name, value in where.items())


GRAPHS = "4 (seeds by way of pinned memory)"


def cuda_graphs() -> str:
    """Steps of compiled ResNet-50 as CUDA graphs, each waited for, and the memory reserved."""
    rows = []
    for batch in (64, 256):
        cells = []
        for method in ("plain", "default"):
            where = {"code": GRAPHS, "batch": batch, "method": method}
            step, peak = (median("speed_h200.csv", column, **where) for column in ("step_ms", "reserved_bytes"))
            cells.append(f"{step:.1f} ms, {peak / GB:.2f} GB")
        rows.append([f"batch {batch}", *cells])
    return markdown(["", "plain", "Encke"], rows)


def graphs_or_not() -> str:
    """Steps of ResNet-50 at batch 64, eager and as CUDA graphs."""
    rows = []
    for name, code in (("eager", "4"), ("CUDA graphs", GRAPHS)):
        where = {"code": code, "batch": 64}
        cells = [
            f"{median('speed_h200.csv', 'step_ms', method=method, **where):.1f} ms" for method in ("plain", "default")
        ]
        rows.append([name, *cells])
    return markdown(["ResNet-50, bf16, 64 images", "plain", "with Encke"], rows)


def kernel_shares() -> str:
    """Share of a copy's bandwidth, encoding and decoding, for tensors of several shapes and sizes."""
    found = {(row["dtype"], row["what"], row["bits"], row["MiB"]): row for row in read("cliffs_h200.csv")}
    columns = [("2", "1"), ("2", "16"), ("2", "256"), ("3", "256"), ("4", "256"), ("8", "256")]
    rows = []
    for dtype, what in dict.fromkeys(key[:2] for key in found):
        shares = [
            " / ".join(
                f"{100 * float(found[dtype, what, *column][f'{way}_share']):.0f}" for way in ("encode", "decode")
            )
            for column in columns
        ]
        kind, _, rest = what.partition(" ")
        name = f"{'fp32' if dtype == 'float32' else 'bf16'}, {SHAPES[kind]}{rest and ' '}{rest}"
        rows.append([name, *(f"{share} %" for share in shares)])
    return markdown(["", *(f"{bits} bits, {mib} MiB" for bits, mib in columns)], rows)


SHAPES = {"flat": "flat", "planes": "NCHW planes of side", "channels_last": "channels_last, channels:"}
"""Kinds of tensors in cliffs_h200.csv, as the table names them."""


CODECS = {
    "`ErrorBounded`, nearest, COMET's bounds": "ErrorBounded nearest",
    "`ErrorBounded`, dithered, COMET's bounds": "ErrorBounded dithered",
    "SZ3, COMET's bounds": "SZ3",
    "SZ3 without prediction, COMET's bounds": "SZ3, no prediction",
    "zfp, COMET's bounds": "zfp",
    "order-0 entropy of the levels, COMET's bounds": "entropy of the levels",
    "`ErrorBounded`, nearest, bound of 2 bits": "ErrorBounded nearest, bound of 2 bits",
    "`ErrorBounded`, dithered, bound of 2 bits": "ErrorBounded dithered, bound of 2 bits",
    "`ErrorBounded`, dithered with signs, bound of 2 bits": "ErrorBounded dithered with signs, bound of 2 bits",
    "SZ3, bound of 2 bits": "SZ3, bound of 2 bits",
    "`GroupQuant`, 2 bits": "GroupQuant 2 bits",
    "`GroupQuant`, 3 bits": "GroupQuant 3 bits",
    "`GroupQuant`, 4 bits": "GroupQuant 4 bits",
}


def codecs() -> str:
    """Codecs on activations of a ResNet-18, on one thread."""
    rows = []
    for name, codec in CODECS.items():
        (row,) = (row for row in read("codec_activations_cpu.csv") if matches(row, tensor="all 26", codec=codec))
        cells = []
        for column, form in (("ratio", ".2f"), ("variance", ".3f"), ("encode_mb_s", ",.0f"), ("decode_mb_s", ",.0f")):
            cells.append(format(float(row[column]), form) if row[column] else "")
        rows.append([name, *cells])
    return markdown(["", "ratio", "variance", "encode MB/s", "decode MB/s"], rows)


STEP_POLICIES = {
    "default": "default policy",
    "variable": '`Comet(rounding="dithered")`',
    "group2": "`GroupQuant(bits=2)`",
    "dithered": '`ErrorBounded(0.1, "rel", "dithered")`, about the same variance',
    "nearest": '`ErrorBounded(0.1, "rel")`',
}


def cpu_step() -> str:
    """Time of a step over plain's in processor time, and bytes."""
    rows = []
    for row in sorted(read("cpu_step.csv"), key=lambda row: list(STEP_POLICIES).index(row["policy"])):
        name = f"{row['model']}, {row['batch']} images of {row['image']} pixels"
        sizes = [f"{float(row[column]):.1f} MB" for column in ("saved_mb", "packed_mb")]
        rows.append([name, STEP_POLICIES[row["policy"]], f"{float(row['cpu_ratio']):.2f}", *sizes])
    heads = ["model", "codec or policy", "time over plain", "saved by autograd", "kept"]
    return markdown(heads, sorted(rows, key=lambda cells: cells[0]))


STUDIED = {"resnet18": "ResNet-18", "vgg16": "VGG-16", "gpt": "GPT"}


def theory_errors() -> str:
    """Measured over predicted error of the gradient."""
    rows = []
    for model, name in STUDIED.items():
        file = f"study_{model}_gradients.csv"
        for bound in (0.05, 0.2, 1.0):
            columns = [("stochastic", "measured_over_exact"), ("stochastic", "measured_over_certain")]
            columns += [("nearest", f"{end}") for end in ("measured_over_exact", "measured_over_paper")]
            columns += [("nearest", "loop_measured_over_target")]
            found = [values(file, column, rounding=way, bound_over_rms=bound) for way, column in columns]
            label = f"{name} ({len(found[0])})" if bound == 0.05 else ""
            rows.append([label, f"{bound:g}", *(span(each, 2) for each in found)])
    heads = ["model (layers)", "bound", "stochastic", "... deterministic part exact", "nearest"]
    return markdown([*heads, "nearest, COMET's formula", "nearest, closed loop"], rows)


def theory_zeros() -> str:
    """Error of the gradient with exact zeros and without."""
    rows = []
    for model, name in STUDIED.items():
        for inputs, words in (("alone", "one input lossy"), ("together", "all of them, no norms")):
            found = [values(f"study_{model}_zeros.csv", f"{inputs}_{zeros}") for zeros in ("zeros", "no_zeros")]
            rows.append([f"{name}, {words}", *(span(each, 2) for each in found)])
    return markdown(["error over gradient, rms", "with exact zeros", "without"], rows)


def compatibility(library: str) -> str:
    """Models of one library."""
    rows = [row for row in read("compatibility_cpu.csv") if row["library"] == library]
    cells = [
        [f"{float(row['ratio']):.1f}", f"{float(row['gradient_error']):.2f}"] if row["ratio"] else ["", ""]
        for row in rows
    ]
    return markdown(
        ["model", "ratio", "error", "verdict"],
        ([row["model"], *figures, row["verdict"]] for row, figures in zip(rows, cells, strict=True)),
    )


def evidence(file: str, method: str, label: str, left_out: Sequence[str] = ()) -> str:
    """One method against plain, with the verdict of docs/evidence.md."""
    (summary,) = (each for each in summarise(read(file)) if each.method == method)
    rows = [c.cells() for c in summary.comparisons if c.quantity.column not in left_out]
    heads = [f"n = {summary.pairs} pairs", "plain", label, "difference", "95 % interval", "margin", "verdict"]
    return markdown(heads, rows)


def evidence_together(file: str, methods: Mapping[str, str]) -> str:
    """Several methods against plain, a row each; `methods` has their labels."""
    rows = []
    for summary in summarise(read(file)):
        if summary.method in methods:
            cells = {column: summary.of(column).cells() for column in ("accuracy", "train_loss")}
            differences = [f"{found[3]} ({found[4]})" for found in cells.values()]
            kept = [summary.of(column).cells()[2] for column in ("ratio_fp32", "gradient_error", "peak_bytes")]
            rows.append([methods[summary.method], str(summary.pairs), *differences, *kept, summary.verdict])
    heads = ["method", "pairs", "accuracy, points", "training loss", "ratio fp32", "gradient error", "peak, GB"]
    return markdown([*heads, "verdict"], rows)


def scaling() -> str:
    """Ranks of a data-parallel training: the broadcast of the decisions beside a step."""
    rows = []
    for row in read("scaling_cpu.csv"):
        times = [f"{float(row[f'{name}_cpu_ms']):.1f} ms" for name in ("step", "collection", "share")]
        agree = "yes" if row["same_settings"] == "True" else "NO"
        rows.append([row["ranks"], agree, *times, f"{float(row['share_ms']):.0f} ms", f"{int(row['share_bytes']):,}"])
    heads = ["ranks", "same settings", "ordinary step", "collection step", "broadcast", "... until it is through"]
    return markdown([*heads, "bytes"], rows)


def same_memory(*files: str) -> str:
    """Each method at its largest batch under a cap."""
    rows = []
    for row in (row for file in files for row in read(file)):
        name = f"{row['model']}, {int(row['cap_bytes']) / 2**20:g} MiB"
        speed, over = float(row["per_second"]), float(row["throughput_over_plain"])
        rows.append([name, row["method"], row["largest_batch"], f"{speed:.0f}", f"{over:.2f}"])
    return markdown(["model, cap", "method", "largest batch", "images a second", "over plain's"], rows)


def time_to_accuracy() -> str:
    """Small trainings at the largest batch under a cap."""
    rows = []
    for method in dict.fromkeys(row["method"] for row in read(ACCURACY)):
        mine = [row for row in read(ACCURACY) if row["method"] == method]
        reached = [row for row in mine if row["status"] == "ok"]
        seconds, epochs = (
            f"{statistics.median(float(row[column]) for row in reached):.0f}" if reached else ""
            for column in ("seconds", "epochs")
        )
        best = max(float(row["best_accuracy"]) for row in mine)
        rows.append([method, mine[0]["batch"], f"{len(reached)} of {len(mine)}", epochs, seconds, f"{best:.1f} %"])
    return markdown(["method", "batch", "reached", "epochs", "seconds", "best accuracy"], rows)


def estimates() -> str:
    """Expected and measured peaks, plain and with Encke."""
    rows = []
    for name in dict.fromkeys(row["model"] for row in read(ESTIMATES)):
        mine = [row for row in read(ESTIMATES) if row["model"] == name]
        sizes = [f"{int(row[column]) / 1e6:.1f} MB" for row in mine for column in ("expected_bytes", "peak_bytes")]
        offs = [f"{float(row['off_percent']):+.1f} %" for row in mine]
        rows.append([f"{name}, {mine[0]['batch']} x {mine[0]['size']}", *sizes[:2], offs[0], *sizes[2:], offs[1]])
    heads = ["", "plain, expected", "measured", "off by", "Encke, expected", "measured", "off by"]
    return markdown(heads, rows)


ESTIMATES = "estimate_cpu.csv"
ACCURACY = "same_memory_accuracy_cpu.csv"
SAME = ("same_memory_cpu.csv", "same_memory_small_cpu.csv")


@dataclass(frozen=True)
class Table:
    """A published table: the files that it is made of, and the function that renders it."""

    files: tuple[str, ...]
    render: Callable[[], str]


CIFAR = "accuracy_cifar_bf16_h200.csv"
OTHERS = {
    "careful": "`careful`, sigma 0.05",
    "comet": "`comet`, COMET as published",
    "dithered": '`Comet(rounding="dithered")`',
    "group4": "`Fixed(GroupQuant(bits=4))`",
}
"""Labels of settings that were measured in three pairs."""
STUDIES = tuple(f"study_{model}" for model in STUDIED)
TABLES = {
    "readme": Table((STEPS, OTHER_MODELS), readme),
    "steps": Table((STEPS,), steps),
    "models": Table((OTHER_MODELS,), models),
    "transformers": Table((TRANSFORMERS,), transformers),
    "cuda-graphs": Table(("speed_h200.csv",), cuda_graphs),
    "graphs-or-not": Table(("speed_h200.csv",), graphs_or_not),
    "kernel-shares": Table(("cliffs_h200.csv",), kernel_shares),
    "codecs": Table(("codec_activations_cpu.csv",), codecs),
    "cpu-step": Table(("cpu_step.csv",), cpu_step),
    "evidence-gpt": Table(
        ("gpt_cpu.csv",), lambda: evidence("gpt_cpu.csv", "default", "default", ("peak_bytes", "seconds"))
    ),
    "evidence-gpt-h200": Table(("gpt_h200.csv",), lambda: evidence("gpt_h200.csv", "default", "default", ("seconds",))),
    "evidence-cifar": Table((CIFAR,), lambda: evidence(CIFAR, "default", "default", ("seconds",))),
    "evidence-cifar-aggressive": Table((CIFAR,), lambda: evidence(CIFAR, "aggressive", "aggressive", ("seconds",))),
    "evidence-cifar-others": Table((CIFAR,), lambda: evidence_together(CIFAR, OTHERS)),
    "evidence-cifar-earlier": Table(
        ("accuracy_cifar_h200.csv",), lambda: evidence("accuracy_cifar_h200.csv", "default", "`Comet(sigma=0.3)`")
    ),
    "estimates": Table((ESTIMATES,), estimates),
    "scaling": Table(("scaling_cpu.csv",), scaling),
    "same-memory": Table(SAME, lambda: same_memory(*SAME)),
    "time-to-accuracy": Table((ACCURACY,), time_to_accuracy),
    "theory-errors": Table(tuple(f"{study}_gradients.csv" for study in STUDIES), theory_errors),
    "theory-zeros": Table(tuple(f"{study}_zeros.csv" for study in STUDIES), theory_zeros),
    **{
        f"compatibility-{library}": Table(("compatibility_cpu.csv",), lambda library=library: compatibility(library))
        for library in ("transformers", "timm", "diffusers", "torch_geometric")
    },
}
"""Every rendered table by the name in its marker."""


def updated(text: str) -> str:
    """Return a page with its tables rendered anew."""

    def replace(region: re.Match[str]) -> str:
        new = TABLE.sub(lambda _: TABLES[region[1]].render(), region[3], count=1)
        return region[0].replace(region[3], new)

    return REGION.sub(replace, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    differing = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        if (new := updated(text)) != text:
            differing.append(page.name)
            if not check:
                page.write_text(new)
    print(f"{'differ' if check else 'written'}: {', '.join(differing) or 'none'}")
    return int(check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
