"""Data of the charts: curves, memory by layer, and every site over time."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from encke.train.report.runs import Run, number

MOST_POINTS = 400
"""Most points of a curve; longer curves are averaged."""
Site = tuple[str, str, str, int]
"""Layer, operation, slot, and an index among sites with equal names."""


def chart_data(run: Run) -> dict[str, Any]:
    """Return the data of the charts of a run."""
    steps = run.steps or [
        {**line, "loss": line.get("train_loss"), "accuracy": line.get("train_accuracy")} for line in run.epochs
    ]
    axes = ("epoch", "step", "seconds")
    return {
        "name": run.name,
        "plain": run.plain,
        "training": thinned(steps, axes, ("loss", "accuracy")),
        "validation": thinned(run.epochs, axes, ("validation_loss", "validation_accuracy")),
        "memory": memory_by_layer(run),
        "history": history(run),
    }


def thinned(lines: Sequence[dict[str, Any]], axes: Sequence[str], values: Sequence[str]) -> dict[str, list[Any]]:
    """Return columns of the lines; many lines are averaged in groups."""
    size = math.ceil(len(lines) / MOST_POINTS) or 1
    groups = [lines[i : i + size] for i in range(0, len(lines), size)]

    def mean(group: Sequence[dict[str, Any]], key: str) -> float | None:
        known = [value for line in group if (value := number(line.get(key))) is not None]
        return rounded(sum(known) / len(known)) if known else None

    columns: dict[str, list[Any]] = {key: [number(group[-1].get(key)) for group in groups] for key in axes}
    return columns | {key: [mean(group, key) for group in groups] for key in values} | {"each": [size]}


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def memory_by_layer(run: Run) -> list[dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for row in run.sites:
        name = str(row.get("layer") or "–")
        layer = layers.setdefault(name, {"layer": name, "saved": 0, "packed": 0})
        layer["saved"] += number(row.get("saved_bytes")) or 0
        layer["packed"] += number(row.get("packed_bytes")) or 0
    return list(layers.values())


def history(run: Run) -> dict[str, Any] | None:
    """Return ratio and setting of every packed site, forward pass by forward pass."""
    settings: dict[tuple[str, str], int] = {}
    columns: list[dict[Site, tuple[float | None, int]]] = []
    sites: dict[Site, float] = {}
    for line in run.forwards:
        column: dict[Site, tuple[float | None, int]] = {}
        seen: dict[tuple[str, ...], int] = {}
        for row in line["sites"]:
            if row.get("codec") == "kept":
                continue
            layer, operation, slot = (str(row.get(name) or "") for name in ("layer", "operation", "slot"))
            nth = seen[layer, operation, slot] = seen.get((layer, operation, slot), 0) + 1
            key = (layer, operation, slot, nth)
            setting = settings.setdefault((str(row.get("codec", "")), str(row.get("bound", ""))), len(settings))
            column[key] = (rounded(number(row.get("ratio"))), setting)
            sites[key] = number(row.get("saved_bytes")) or 0
        columns.append(column)
    if not sites:
        return None
    per_layer: dict[str, int] = {}
    for key in sites:
        per_layer[key[0]] = per_layer.get(key[0], 0) + 1
    return {
        "axis": "step",
        "steps": [line["step"] for line in run.forwards],
        "sites": [
            {"name": site_name(key, per_layer[key[0]] > 1), "layer": key[0], "saved": saved}
            for key, saved in sites.items()
        ],
        "settings": [{"codec": codec, "bound": bound} | parsed(bound) for codec, bound in settings],
        "ratio": [[column.get(key, (None, -1))[0] for column in columns] for key in sites],
        "setting": [[column.get(key, (None, -1))[1] for column in columns] for key in sites],
    }


def site_name(key: Site, crowded: bool) -> str:
    """Return the layer, with operation and slot if it has several sites."""
    layer, operation, slot, nth = key
    name = layer or "–"
    if crowded or not layer:
        name += " " + ".".join(filter(None, (operation, slot)))
    return name if nth == 1 else f"{name} ({nth})"


def parsed(bound: str) -> dict[str, float]:
    """Read the numbers of a bound as the report writes it: `0.01 abs, 0.1 rel`, or `2 bits`."""
    found = re.findall(r"([\d.]+(?:e[+-]?\d+)?) (bits|abs|rel)\b", bound)
    return {unit: float(value) for value, unit in found}
