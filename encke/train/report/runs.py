"""Reading run folders, also while a training still runs or after it was killed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from encke.tools.errors import UsageError
from encke.train import settings
from encke.train.checkpoint import ENVIRONMENT, MEMORY, METRICS, OLD_SITES, RESULT, SITES

A_RUN_FOLDER = "a run folder is what `encke train` writes: settings.yaml, metrics.jsonl and more"
MOST_FORWARDS = 100
"""Forward passes of a long sites.jsonl that are kept: at least this many, at most twice as many."""
POLICY = ("sigma", "rounding", "bits", "block", "bound", "mode")
"""Settings of a policy, in display order."""
DATA_LOCATION = ("data.path", "data.validation", "data.workers", "data.augment")
"""Settings in which runs on the same data may differ: location and reading."""
NOT_COMPARED = ("out", "device", "save", "metrics", "sites", "table", "ratios", "log", "data.workers")
"""Settings that do not change the training; the device itself is in environment.json."""


@dataclass(frozen=True)
class Run:
    """One training: its settings, its figures, and warnings about it."""

    name: str
    folder: Path
    settings: dict[str, Any]
    """Settings by dotted name."""
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    forwards: list[dict[str, Any]]
    """Lines of sites.jsonl, evenly thinned if there are very many."""
    result: dict[str, Any]
    memory: dict[str, Any] = field(default_factory=dict)
    """Memory through one step, the content of memory.json."""
    resumed: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def plain(self) -> bool:
        return self.settings.get("policy.name") == "none"

    @property
    def ended(self) -> bool:
        """Whether the training reached its end."""
        return self.result.get("finished") is True and self.result.get("reason", "done") == "done"

    @property
    def on_cpu(self) -> bool:
        named = str(self.environment.get("device", "")).lower().startswith("cpu")
        return named or self.environment.get("cuda") is False

    @property
    def unit(self) -> str:
        """Unit of the throughput."""
        kind = self.environment.get("kind")
        return kind if kind in ("images", "tokens") else "samples"

    @property
    def policy(self) -> str:
        """The policy with those of its settings that differ from its defaults."""
        name = str(self.settings.get("policy.name", "not known"))
        given = {key.removeprefix("policy."): value for key, value in self.settings.items() if value is not None}
        words = [
            f"{given[key]}" if key in ("rounding", "mode") else f"{key} {given[key]}" for key in POLICY if key in given
        ]
        return ", ".join([name, *words])

    @property
    def model(self) -> str:
        return str(self.settings.get("model.name", "not known"))

    @property
    def data(self) -> str:
        kind = str(self.settings.get("data.kind", "not known"))
        named = kind in ("folder", "lmdb", "text") and self.settings.get("data.path")
        # /data/imagenet/train is imagenet.
        names = [part for part in Path(str(named)).parts if part not in ("train", "training")]
        return f"{kind} {names[-1]}" if named and names else kind

    @property
    def sites(self) -> list[dict[str, Any]]:
        """Sites of the last forward pass: rows of the report, or of the last line of sites.jsonl."""
        report = self.result.get("report")
        # Runs of release 0.1 have them under "layers".
        rows = report.get("sites", report.get("layers")) if isinstance(report, dict) else None
        if not isinstance(rows, list):
            rows = self.forwards[-1]["sites"] if self.forwards else []
        return [row for row in rows if isinstance(row, dict)]

    @cached_property
    def figures(self) -> dict[str, float | None]:
        """Figures of result.json; for an unfinished run, figures from the lines it has written."""
        last: dict[str, Any] = {}
        for line in sorted([*self.steps, *self.epochs], key=itemgetter("step")):
            last |= {key: value for key, value in line.items() if value is not None}
        found: dict[str, Any] = {
            "steps": last.get("step"),
            "epochs": last.get("epoch"),
            "validation_accuracy": last.get("validation_accuracy"),
            "best_validation_accuracy": max(known(self.epochs, "validation_accuracy"), default=None),
            "validation_loss": last.get("validation_loss"),
            "best_validation_loss": min(known(self.epochs, "validation_loss"), default=None),
            "train_loss": last.get("train_loss", last.get("loss")),
            "seconds": last.get("seconds"),
            "step_seconds": median(self.steps, "step_seconds"),
            "per_second": median(self.steps, "per_second"),
            **{key: last.get(key) for key in ("peak_bytes", "memory_before_bytes", "held_bytes")},
            **{key: last.get(key) for key in ("saved_bytes", "packed_bytes")},
            "step_peak_bytes": self.memory.get("peak_bytes"),
        }
        if found["saved_bytes"] is None and self.forwards:
            found |= {key: self.forwards[-1].get(key) for key in ("saved_bytes", "packed_bytes")}
        found |= {key: self.result[key] for key in found if self.result.get(key) is not None}
        figures = {key: number(value) for key, value in found.items()}
        peak, before = figures["peak_bytes"], figures["memory_before_bytes"]
        above = number(self.result.get("peak_above_bytes"))
        if above is None and peak is not None and before is not None:
            above = peak - before
        saved, packed = figures["saved_bytes"], figures["packed_bytes"]
        return {**figures, "peak_above_bytes": above, "ratio": saved / packed if saved and packed else None}


@dataclass(frozen=True)
class Pair:
    """A compressed run beside a plain one of the same model and data."""

    plain: Run
    compressed: Run
    differences: tuple[str, ...]
    """Differences besides the policy, as text."""


def read_all(folders: Sequence[Path]) -> list[Run]:
    """Read the runs in the given order, each once, under distinct names."""
    once: dict[Path, Path] = {}
    for folder in folders:
        once.setdefault(folder.resolve(), folder)
    resolved = list(once)
    depth = 1
    names = [path.name for path in resolved]
    while len(set(names)) < len(names) and depth < max(len(path.parts) for path in resolved):
        depth += 1
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for path, name in zip(resolved, names, strict=True)
        ]
    return [read(path, name) for path, name in zip(once.values(), names, strict=True)]


def read(folder: Path, name: str) -> Run:
    """Read a run folder; raise UsageError if it is not one, or if a file in it is broken."""
    check_folder(folder)
    cut: list[str] = []
    steps, epochs, resumed = read_metrics(folder / METRICS, cut)
    run = Run(
        name=name,
        folder=folder,
        settings=settings.load(folder / settings.SETTINGS),
        environment=read_environment(folder / ENVIRONMENT),
        steps=steps,
        epochs=epochs,
        forwards=read_forwards(folder / (SITES if (folder / SITES).exists() else OLD_SITES), cut),
        result=read_object(folder / RESULT),
        memory=read_memory(folder / MEMORY),
        resumed=resumed,
    )
    run.warnings.extend(complaints(run))
    run.warnings.extend(f"The last line of {file} is not complete; it is left out." for file in cut)
    return run


def check_folder(folder: Path) -> None:
    if not folder.exists():
        raise UsageError(f"{folder} does not exist; {A_RUN_FOLDER}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; {A_RUN_FOLDER}")
    for needed in (settings.SETTINGS, METRICS):
        if not (folder / needed).is_file():
            if needed == METRICS and (folder / ENVIRONMENT).is_file():
                raise without_step(folder / METRICS)
            inside = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
            hint = f" (it holds run folders: give {' '.join(map(str, inside[:3]))})" if inside else ""
            raise UsageError(f"{folder} is no run folder: it has no {needed}{hint}; {A_RUN_FOLDER}")


def without_step(path: Path) -> UsageError:
    """Return an error about the metrics of a training without a completed step."""
    return UsageError(f"{path} has no line of a step yet: the training has just begun, or ended before it")


def read_environment(path: Path) -> dict[str, Any]:
    """Read environment.json; in runs of release 0.1 the package is called halley."""
    found = read_object(path)
    return {"encke" if name == "halley" else name: value for name, value in found.items()}


def read_memory(path: Path) -> dict[str, Any]:
    """Read the memory through one step; empty if there is no such file."""
    found = read_object(path)
    figures = [found.get(name) for name in ("step", "seconds", "forward_seconds", "resting_bytes", "peak_bytes")]
    points = found.get("bytes")
    if found and not (isinstance(points, list) and points and all(map(is_finite, (*figures, *points)))):
        raise UsageError(f"{path}: not the memory of a step: a figure is missing, or is no number")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Read a file with one JSON object; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: not JSON") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: must hold a JSON object, not a {type(found).__name__}")
    return found


def read_lines(path: Path, cut: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and object of each line of JSON. A broken line is an error, the last one goes to `cut`."""
    broken: tuple[int, str] | None = None
    with path.open("rb") as file:
        for count, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if broken is not None:
                raise UsageError(f"{path}, line {broken[0]}: {broken[1]}")
            try:
                found = json.loads(line)
            except (ValueError, RecursionError) as error:
                broken = (count, f"not JSON: {getattr(error, 'msg', 'cannot be read')}")
                continue
            if isinstance(found, dict) and is_finite(found.get("step")):
                yield count, found
            else:
                broken = (count, "not an object with a step")
    if broken is not None:
        cut.append(path.name)


def read_metrics(path: Path, cut: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """Return lines of steps, lines of epochs, and the number of times that the training was resumed."""
    steps: list[dict[str, Any]] = []
    epochs: list[dict[str, Any]] = []
    resumed = 0
    for _, line in read_lines(path, cut):
        event, step = line.get("event"), line["step"]
        if event == "resume":
            resumed += 1
            drop_from(steps, step + 1)
            drop_from(epochs, step + 1)
        elif event in ("step", "epoch"):
            lines = steps if event == "step" else epochs
            drop_from(lines, step)
            lines.append(line)
    if not steps and not epochs:
        raise without_step(path)
    return steps, epochs, resumed


def read_forwards(path: Path, cut: list[str]) -> list[dict[str, Any]]:
    """Read the lines of sites.jsonl; of very many only every second, fourth, ... and the last."""
    kept: list[dict[str, Any]] = []
    last: dict[str, Any] | None = None
    every = 1
    for seen, (count, line) in enumerate(read_lines(path, cut) if path.exists() else ()):
        if "layers" in line:  # a run of release 0.1
            line["sites"] = line.pop("layers")
        rows = line.get("sites")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise UsageError(f"{path}, line {count}: has no list of sites")
        drop_from(kept, line["step"])
        last = line
        if seen % every == 0:
            kept.append(line)
        if len(kept) > 2 * MOST_FORWARDS:
            kept, every = kept[::2], 2 * every
    return kept if last is None or (kept and kept[-1] is last) else [*kept, last]


def drop_from(lines: list[dict[str, Any]], step: float) -> None:
    """Remove the lines of a step and all later ones, which a resumed training writes again."""
    while lines and lines[-1]["step"] >= step:
        lines.pop()


def complaints(run: Run) -> Iterator[str]:
    """Yield warnings that a reader needs before trusting the figures."""
    figures = run.figures
    total = number(run.settings.get("epochs"))
    where = f"step {figures['steps'] or 0:g}"
    if figures["epochs"] is not None:
        where += f", epoch {figures['epochs']:.3g}" + (f" of {total:g}" if total is not None else "")
    if not run.result:
        yield f"It has not ended: still running, or killed. Its figures are those of its last lines ({where})."
    elif not run.ended:
        yield f"It did not train to its end ({run.result.get('reason', 'interrupted')} at {where})."
    for line in run.steps:
        if not is_finite(line.get("loss", 0.0)):
            yield f"The loss is not finite from step {line['step']:g} on."
            break
    else:
        for line in run.epochs:
            if any(isinstance(value, float) and not math.isfinite(value) for value in line.values()):
                yield f"A figure of the epoch that ends at step {line['step']:g} is not finite."
                break
    if run.resumed:
        yield f"It was resumed {'once' if run.resumed == 1 else f'{run.resumed} times'}."
    if not run.epochs:
        yield "There has been no validation yet."
    if not run.environment:
        yield "There is no environment.json: device, versions and the number of validation samples are not known."
    if not run.plain and not run.forwards and run.settings.get("sites") != 0:
        yield "There is no sites.jsonl: ratio and bound over time are not known."


def pairs(runs: Sequence[Run]) -> list[Pair]:
    """Return each compressed run with the plain run of the same model and data whose other settings differ least."""
    found = []
    for run in runs:
        mates = [other for other in runs if other.plain and same_experiment(run, other)]
        if run.plain or not mates:
            continue
        mate = min(mates, key=lambda other: len(differences(other, run)))
        found.append(Pair(mate, run, tuple(differences(mate, run))))
    return found


def same_experiment(one: Run, other: Run) -> bool:
    """Return whether two runs have the same model and data."""

    def identity(run: Run) -> dict[str, Any]:
        parts = {key: value for key, value in run.settings.items() if key.startswith(("model.", "data."))}
        return {key: value for key, value in parts.items() if key not in DATA_LOCATION} | {"data": run.data}

    return identity(one) == identity(other)


def differences(plain: Run, compressed: Run) -> list[str]:
    """Return the differences between two runs besides the policy and the folder."""
    found = []
    for name in dict.fromkeys((*plain.settings, *compressed.settings)):
        one, other = plain.settings.get(name), compressed.settings.get(name)
        if one != other and name not in NOT_COMPARED and not name.startswith("policy."):
            found.append(f"{name} ({shown(one)}, {shown(other)})")
    for name in ("device", "world", "threads", "torch", "train_samples", "validation_samples"):
        a, b = plain.environment.get(name), compressed.environment.get(name)
        if a != b and a is not None and b is not None:
            found.append(f"{name} ({shown(a)}, {shown(b)})")
    return found


def shown(value: Any) -> str:
    """Format a setting roughly as in YAML."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def margin_of_error(one: float, other: float, samples: float) -> float:
    """Return two standard deviations of the difference of two accuracies.

    One right and one wrong answer are added to each (Agresti and Caffo), so that 100 % has a margin too.
    """

    def variance(accuracy: float) -> float:
        share = (accuracy * samples + 1) / (samples + 2)
        return share * (1 - share) / (samples + 2)

    return 2 * math.sqrt(variance(one) + variance(other))


def is_number(value: Any) -> bool:
    """Return whether a value is a number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:
        return False


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else."""
    return value if is_finite(value) else None


def known(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return the finite values of a figure."""
    return [value for line in lines if (value := number(line.get(key))) is not None]


def median(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the median of a figure."""
    return statistics.median(known(lines, key)) if known(lines, key) else None
