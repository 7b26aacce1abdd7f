"""Many trainings, one table: each (method, seed) runs in its own process, and each result is appended to a CSV.

accuracy_cifar.py and accuracy_gpt.py define the training; here are methods, schedule, table and statistics.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.api import Handle  # noqa: E402
from encke.policies.presets import FIXED, PRESETS  # noqa: E402
from encke.tools.provenance import command_line, core_count  # noqa: E402

POLICIES = PRESETS | FIXED
METHODS = ("plain", *POLICIES)
PAIRS = [f"{method}:{seed}" for seed in range(5) for method in ("plain", "default")]
"""Runs if none is named: five pairs, pair by pair."""
RUN_HELP = f"methods: {', '.join(METHODS)}; by default plain and default with seeds 0 to 4, pair by pair"

Job = dict[str, Any]
"""A worker's task: method, seed, data, device, history and the settings of the training."""


def check_method(method: str) -> None:
    """Raise ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}; choose one of {', '.join(METHODS)}")


def attach_method(method: str, model: nn.Module, optimizer: Optimizer) -> Handle | None:
    """Attach the policy that is named; None for plain."""
    check_method(method)
    return None if method == "plain" else encke.attach(model, POLICIES[method], optimizer=optimizer)


def parse_runs(texts: Iterable[str]) -> list[tuple[str, int]]:
    """Return `plain:0-4` or `careful:0,2` as (method, seed), in the order given, each once."""
    runs = []
    for text in texts:
        method, _, seeds = text.rpartition(":")
        if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", seeds):
            raise ValueError(f"a run is METHOD:SEEDS such as 'plain:0-4' or 'group2:0,2', got {text!r}")
        check_method(method)
        for part in seeds.split(","):
            first, _, last = part.partition("-")
            runs += [(method, seed) for seed in range(int(first), int(last or first) + 1)]
    return list(dict.fromkeys(runs))


class Table:
    """A CSV that grows by one whole row at a time; a row that was cut off is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def rows(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        text = self.path.read_text()
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))

    def append(self, row: Mapping[str, object]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        present = self.path.read_bytes() if self.path.exists() else b""
        whole = present.rfind(b"\n") + 1
        buffer = io.StringIO()
        header = next(csv.reader([present.decode().partition("\n")[0]])) if whole else list(row)
        # Raises for a column that the table does not have.
        writer = csv.DictWriter(buffer, header, lineterminator="\n")
        if not whole:
            writer.writeheader()
        writer.writerow(row)
        with self.path.open("ab") as file:
            file.truncate(whole)
            file.write(buffer.getvalue().encode())
            file.flush()
            os.fsync(file.fileno())

    def check(self, settings: Mapping[str, object]) -> None:
        """Raise ValueError if the rows come from other settings: such figures do not belong together."""
        for row in self.rows():
            for name, value in settings.items():
                if row.get(name) != str(value):
                    raise ValueError(
                        f"{self.path} has runs with {name} {row.get(name)}, this call has {value}: name another --csv"
                    )


@dataclass(frozen=True)
class Worker:
    """A run under way."""

    process: subprocess.Popen[bytes]
    job: Job
    result: Path
    log: Path
    start: float


class Scheduler:
    """Runs jobs as `script --job JSON`, several at a time, and starts none that would end after the limit."""

    def __init__(
        self, script: Path, table: Table, workers: int, minutes: float | None, logs: Path, metric: str
    ) -> None:
        self.script = script
        self.table = table
        self.workers = workers
        self.limit = math.inf if minutes is None else 60 * minutes
        self.logs = logs
        self.metric = metric
        self.running: list[Worker] = []
        self.failed: list[Job] = []
        self.started = time.monotonic()
        self.durations: dict[str, list[float]] = {}
        for row in table.rows():
            if row["workers"] == str(workers):
                self.durations.setdefault(row["method"], []).append(float(row["run_seconds"]))

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """Run what fits into the time, in order; return the jobs that were not started."""
        waiting = list(jobs)
        self.logs.mkdir(parents=True, exist_ok=True)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            with tempfile.TemporaryDirectory() as folder:
                while True:
                    self.collect()
                    while len(self.running) < self.workers and (job := next(filter(self.fits, waiting), None)):
                        waiting.remove(job)
                        self.start(job, Path(folder))
                    if not self.running:
                        return waiting
                    time.sleep(0.05)
        finally:
            for worker in self.running:
                worker.process.terminate()
                worker.process.wait()
            signal.signal(signal.SIGTERM, before)

    def fits(self, job: Job) -> bool:
        """Return whether the job would end in time, judged by the longest run of its method, or of any method."""
        now = time.monotonic()
        known = self.durations.get(job["method"]) or [d for some in self.durations.values() for d in some]
        known = known + [now - worker.start for worker in self.running if worker.job["method"] == job["method"]]
        return now - self.started + max(known, default=0.0) <= self.limit

    def start(self, job: Job, folder: Path) -> None:
        name = file_name(job)
        result, log = folder / f"{name}.json", self.logs / f"{name}.log"
        threads = {"OMP_NUM_THREADS": str(max(1, core_count() // self.workers))}
        command = [sys.executable, str(self.script), "--job", json.dumps({**job, "result": str(result)})]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**threads, **os.environ})
        self.running.append(Worker(process, job, result, log, time.monotonic()))

    def collect(self) -> None:
        """Take the results of the runs that have ended."""
        for worker in [worker for worker in self.running if worker.process.poll() is not None]:
            self.running.remove(worker)
            job, seconds = worker.job, time.monotonic() - worker.start
            name = f"{job['method']}, seed {job['seed']}"
            if worker.process.returncode or not worker.result.exists():
                self.failed.append(job)
                tail = "\n".join(worker.log.read_text(errors="replace").splitlines()[-12:])
                print(
                    f"{name}: failed with exit status {worker.process.returncode}; {worker.log} ends:\n{tail}",
                    flush=True,
                )
                continue
            row = json.loads(worker.result.read_text())
            self.durations.setdefault(job["method"], []).append(seconds)
            self.table.append(
                {**row, "workers": self.workers, "run_seconds": round(seconds, 1), "command": command_line()}
            )
            columns = (self.metric, "train_loss", "ratio", "seconds")
            shown = ", ".join(f"{column.replace('_', ' ')} {row[column]}" for column in columns)
            print(f"{name}: {shown}, with start and end {seconds:.1f}", flush=True)


def file_name(job: Job) -> str:
    return f"{job['method'].replace(' ', '_')}-{job['seed']}"


def work(text: str, train: Callable[[Job], dict[str, Any]]) -> None:
    """Train in a worker process, then write the row where the parent looks for it."""
    job = json.loads(text)
    row = train(job)
    result = Path(job["result"])
    draft = result.with_suffix(".part")
    draft.write_text(json.dumps(row))
    draft.replace(result)


def origin(device: str) -> dict[str, str]:
    """Return the provenance columns of a row."""
    import torch

    gpu = torch.cuda.get_device_name() if device == "cuda" else "none (cpu)"
    return {"gpu": gpu, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}


def write_history(handle: Handle | None, job: Job) -> None:
    """Write the policy's decisions if `--history` asks for them."""
    history = getattr(handle, "history", None)
    if job["history"] and history is not None:
        folder = Path(job["history"])
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(entry, default=str) + "\n" for entry in history]
        (folder / f"{file_name(job)}.jsonl").write_text("".join(lines))


class Ratios:
    """Ratios from the reports of a run; a plain run has no handle and a ratio of 1."""

    def __init__(self, handle: Handle | None) -> None:
        self.handle = handle
        self.values: list[float] = []
        self.columns: dict[str, Any] = {"saved_bytes": "", "packed_bytes": ""}

    def take(self) -> float:
        if self.handle is None:
            self.values.append(1.0)
        else:
            report = self.handle.report()
            self.values.append(report.ratio)
            self.columns = {"saved_bytes": report.saved_bytes, "packed_bytes": report.packed_bytes}
        return self.values[-1]

    def row(self) -> dict[str, Any]:
        """Return the columns: the mean and the smallest ratio, and the bytes of the last report."""
        mean = round(statistics.fmean(self.values), 3)
        return {"ratio": mean, "smallest_ratio": round(min(self.values), 3), **self.columns}


# 97.5 % points of Student's t for 1 to 30 degrees of freedom.
T_POINTS = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def t_point(freedom: int) -> float:
    """Return half the width of a 95 % interval in standard errors."""
    if freedom <= len(T_POINTS):
        return T_POINTS[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Summary:
    """One method over its seeds. `difference` is to plain with the same seeds, `interval` half its 95 % interval."""

    method: str
    seeds: int
    mean: float
    std: float | None
    difference: float | None
    interval: float | None
    ratio: float


def summarise(rows: Iterable[Mapping[str, str]], metric: str) -> list[Summary]:
    """Summarise each method, in the order in which they first appear."""
    methods: dict[str, dict[str, float]] = {}
    ratios: dict[str, list[float]] = {}
    for row in rows:
        methods.setdefault(row["method"], {})[row["seed"]] = float(row[metric])
        ratios.setdefault(row["method"], []).append(float(row["ratio"]))
    plain = methods.get("plain", {})
    summaries = []
    for method, values in methods.items():
        paired = [value - plain[seed] for seed, value in values.items() if seed in plain and method != "plain"]
        interval = None
        if len(paired) > 1:
            interval = t_point(len(paired) - 1) * statistics.stdev(paired) / math.sqrt(len(paired))
        summaries.append(
            Summary(
                method=method,
                seeds=len(values),
                mean=statistics.fmean(values.values()),
                std=statistics.stdev(values.values()) if len(values) > 1 else None,
                difference=statistics.fmean(paired) if paired else None,
                interval=interval,
                ratio=statistics.fmean(ratios[method]),
            )
        )
    return summaries


def show(summaries: Sequence[Summary], metric: str, digits: int) -> str:
    """Return the summary as a table."""

    def text(value: float | None, sign: str = "") -> str:
        return "-" if value is None else f"{value:{sign}.{digits}f}"

    table = [("method", "seeds", metric, "std", "to plain", "95 % +-", "ratio")]
    for s in summaries:
        values = (text(s.mean), text(s.std), text(s.difference, "+"), text(s.interval), f"{s.ratio:.2f}")
        table.append((s.method, str(s.seeds), *values))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for method, *rest in table:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join([method.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def plot(summaries: Sequence[Summary], metric: str, path: Path) -> None:
    """Plot ratio against the metric; bars are one standard deviation over the seeds, the band is plain's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for s in summaries:
        if s.method == "plain":
            axes.axhline(s.mean, color="0.6", linewidth=1, zorder=0)
            if s.std:
                axes.axhspan(s.mean - s.std, s.mean + s.std, color="0.92", zorder=0)
        axes.errorbar(s.ratio, s.mean, yerr=s.std, fmt="o", capsize=3, label=f"{s.method} ({s.seeds})")
    axes.legend(title="method (seeds)", bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
    axes.set_xlabel("ratio: bytes saved by plain autograd / bytes held")
    axes.set_ylabel(metric)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the data to train with")
    parser.add_argument("--run", action="append", metavar="METHOD:SEEDS", help=RUN_HELP)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--csv", type=Path, help="the table; what is in it already is not run again")
    parser.add_argument("--minutes", type=float, help="starts no run that would end later than this")
    parser.add_argument("--logs", type=Path, default=Path("runs/logs"), help="a log file for each run")
    parser.add_argument("--history", help="folder for the decisions of adaptive policies, a JSON line each")
    parser.add_argument("--device", help="cuda or cpu; cuda where there is one")
    parser.add_argument("--summary", type=Path, metavar="CSV", help="shows this table and runs nothing")
    parser.add_argument("--plot", type=Path, help="PNG of ratio against the result")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser


def conduct(
    parser: argparse.ArgumentParser,
    train: Callable[[Job], dict[str, Any]],
    settings: Sequence[str],
    prepare: Callable[[str, Path], str],
    metric: str,
    digits: int,
) -> int:
    """Run the main program of a script and return its exit status.

    Args:
        parser: The options, those of `parser_for` included.
        train: Trains one job and returns its row.
        settings: Options that define the training; they are columns of the table.
        prepare: Makes what the workers read from the data, in a folder, and returns its path.
        metric: The column to summarise.
        digits: Digits of the metric.
    """
    args = parser.parse_args()
    if args.job:
        work(args.job, train)
        return 0
    failed: list[Job] = []
    if not args.summary:
        if not (args.data and args.csv):
            parser.error("--data and --csv are needed, or --summary CSV")
        table = Table(args.csv)
        chosen = {name: getattr(args, name) for name in settings}
        try:
            runs = parse_runs(args.run or PAIRS)
            table.check(chosen)
        except ValueError as error:
            parser.error(str(error))
        done = {(row["method"], int(row["seed"])) for row in table.rows()}
        waiting = [run for run in runs if run not in done]
        print(f"{len(waiting)} runs to do, {len(runs) - len(waiting)} in {args.csv.name} already", flush=True)
        if waiting:
            script = Path(sys.argv[0]).resolve()
            scheduler = Scheduler(script, table, args.workers, args.minutes, args.logs, metric)
            with tempfile.TemporaryDirectory() as folder:
                common = {**chosen, "device": args.device or default_device(), "history": args.history}
                common["data"] = prepare(args.data, Path(folder))
                left = scheduler.run([{"method": m, "seed": s, **common} for m, s in waiting])
            failed = scheduler.failed
            print(f"{len(left)} runs left for another call, {len(failed)} failed", flush=True)
    summaries = summarise(Table(args.summary or args.csv).rows(), metric)
    if summaries:
        print(show(summaries, metric.replace("_", " "), digits))
        if args.plot:
            plot(summaries, metric.replace("_", " "), args.plot)
    return 1 if failed else 0


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
