"""Many trainings, one table: each (method, seed) runs in its own process, and each result is appended to a CSV.

accuracy_cifar.py and accuracy_gpt.py define the training; here are methods, schedule and table, in pairs.py the
statistics.
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

from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pairs import Summary, interval, show, summarise  # noqa: E402

import encke  # noqa: E402
from encke.api import Handle  # noqa: E402
from encke.bench.methods import POLICIES  # noqa: E402
from encke.tools.provenance import command_line, core_count  # noqa: E402
from encke.tools.units import duration  # noqa: E402

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
    """Return `plain:0-4` or `careful:0,2` as (method, seed), each once, seed by seed so that pairs end together."""
    runs = []
    for text in texts:
        method, _, seeds = text.rpartition(":")
        if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", seeds):
            raise ValueError(f"a run is METHOD:SEEDS such as 'plain:0-4' or 'group2:0,2', got {text!r}")
        check_method(method)
        for part in seeds.split(","):
            first, _, last = part.partition("-")
            runs += [(method, seed) for seed in range(int(first), int(last or first) + 1)]
    return sorted(dict.fromkeys(runs), key=lambda run: run[1])


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
        self.waiting: list[Job] = []
        self.running: list[Worker] = []
        self.failed: list[Job] = []
        self.started = time.monotonic()
        self.durations: dict[str, list[float]] = {}
        for row in table.rows():
            if row["workers"] == str(workers):
                self.durations.setdefault(row["method"], []).append(float(row["run_seconds"]))

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """Run what fits into the time, in order; return the jobs that were not started."""
        waiting = self.waiting = list(jobs)
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

    def left(self, methods: Sequence[str]) -> str:
        """Return about how long runs of these methods will take, in words; empty before the first run has ended."""
        every = [seconds for some in self.durations.values() for seconds in some]
        known = [statistics.fmean(self.durations.get(method) or every) for method in methods if every]
        return duration(sum(known) / min(self.workers, len(known))) if known else ""

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
            methods = [other["method"] for other in [*self.waiting, *(worker.job for worker in self.running)]]
            left = f"; {len(methods)} runs to go, about {self.left(methods)}" if methods else ""
            print(f"{name}: {shown}, with start and end {seconds:.1f}{left}", flush=True)


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


def gradient_error(handle: Handle | None, gradient: Callable[[], Tensor]) -> dict[str, float]:
    """Detach, and return the column: |compressed - plain| / |plain| of one batch's gradient with the final weights.

    `gradient` computes the gradient of all weights, of the same batch and with the same dropout each time.
    """
    if handle is None:
        return {"gradient_error": 0.0}
    compressed = gradient()
    handle.detach()
    exact = gradient()
    return {"gradient_error": round(float((compressed - exact).norm() / exact.norm()), 4)}


def plot(summaries: Sequence[Summary], metric: str, path: Path) -> None:
    """Plot the difference to plain with its 95 % interval against the ratio; the grey line is the margin."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for summary in summaries:
        result, differences = summary.of(metric), summary.of(metric).differences
        middle, ends = statistics.fmean(differences) if differences else 0.0, interval(differences)
        bars = None if ends is None else [[middle - ends[0]], [ends[1] - middle]]
        label = f"{summary.method} ({summary.pairs or summary.seeds})"
        axes.errorbar(summary.of("ratio").mean, middle, yerr=bars, fmt="o", capsize=3, label=label)
        if summary.method == "plain" and (margin := result.quantity.margin):
            axes.axhline(-margin if result.quantity.higher_is_better else margin, color="0.6", linewidth=1, zorder=0)
    axes.legend(title="method (pairs)", bbox_to_anchor=(1.01, 1), loc="upper left", frameon=False)
    axes.set_xlabel("ratio: bytes saved by plain autograd / bytes held")
    unit = "%" if summaries[0].of(metric).quantity.relative else "points"
    axes.set_ylabel(f"{metric.replace('_', ' ')}: difference to plain, {unit}")
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
) -> int:
    """Run the main program of a script and return its exit status.

    Args:
        parser: The options, those of `parser_for` included.
        train: Trains one job and returns its row.
        settings: Options that define the training; they are columns of the table.
        prepare: Makes what the workers read from the data, in a folder, and returns its path.
        metric: The column to plot, and to show after each run.
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
            if left := scheduler.left([method for method, _ in waiting]):
                print(f"they will take about {left}, judged by the runs in {args.csv.name}", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                common = {**chosen, "device": args.device or default_device(), "history": args.history}
                common["data"] = prepare(args.data, Path(folder))
                unstarted = scheduler.run([{"method": m, "seed": s, **common} for m, s in waiting])
            failed = scheduler.failed
            print(f"{len(unstarted)} runs left for another call, {len(failed)} failed", flush=True)
    summaries = summarise(Table(args.summary or args.csv).rows())
    if summaries:
        print("\n" + show(summaries))
        if args.plot:
            plot(summaries, metric, args.plot)
    return 1 if failed else 0


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
