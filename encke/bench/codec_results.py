"""Ratio, throughput and error of codecs and their peers on the same data."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from encke.bench.contenders import Contender, squared_error
from encke.bench.data import Sample
from encke.codecs import GroupQuant

ROUNDS = 3
"""Number of turns of each contender, so that a busy spell of the machine does not affect only one of them."""


@dataclass(frozen=True)
class Result:
    """One contender on one sample, or on all samples of one kind of data. Times are in seconds; None: not measured."""

    data: str
    tensor: str
    codec: str
    family: str
    bounded: bool
    dtype: str
    device: str
    threads: int | None
    mode: str
    bound: float | None
    input_bytes: int
    packed_bytes: float
    encode_seconds: float | None
    decode_seconds: float | None
    error: float | None
    """The largest error of any finite value, in units of the bound; infinite if a NaN or an infinity was lost."""
    variance: float | None = None
    """Mean squared error over that of `GroupQuant(bits=2)` on the same tensor."""
    series: str = ""
    """Codec, without its setting where several were measured."""

    @property
    def ratio(self) -> float:
        """Bytes of input over packed bytes."""
        return self.input_bytes / self.packed_bytes if self.packed_bytes else math.inf

    @property
    def encode_rate(self) -> float | None:
        """Bytes of input encoded per second."""
        return self.input_bytes / self.encode_seconds if self.encode_seconds else None

    @property
    def decode_rate(self) -> float | None:
        """Bytes of input decoded per second."""
        return self.input_bytes / self.decode_seconds if self.decode_seconds else None

    def row(self) -> dict[str, object]:
        """Return the columns of codec.csv; rates in MB/s."""

        def rounded(value: float | None, digits: int) -> float | str:
            return "" if value is None else float(f"{value:.{digits}g}")

        names = ("data", "tensor", "codec", "dtype", "device", "threads", "mode", "bound", "input_bytes")
        return {
            **{name: "" if (value := getattr(self, name)) is None else value for name in names},
            "packed_bytes": round(self.packed_bytes),
            "ratio": rounded(self.ratio, 5),
            "encode_mb_s": rounded(self.encode_rate and self.encode_rate / 1e6, 5),
            "decode_mb_s": rounded(self.decode_rate and self.decode_rate / 1e6, 5),
            "error": rounded(self.error, 6),
            "variance": rounded(self.variance, 4),
        }


def seconds(run: Callable[[], Any], repeat: int, device: str) -> list[float]:
    """Time `repeat` single calls; on a GPU with its own clock, including launches.

    On a CPU with one thread this is the time of that thread, which other work on the machine disturbs less.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times = []
    for _ in range(repeat):
        if device == "cpu":
            start = clock()
            run()
            times.append(clock() - start)
        else:
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after) / 1e3)
    return times


def largest_error(source: Tensor, decoded: Tensor, bound: float) -> float:
    """Return the largest error of a finite value in units of the bound; infinite if a NaN or an infinity was lost."""
    a, b = source.double(), decoded.view(source.shape).double()
    finite = torch.isfinite(a)
    same = (a == b) | (a.isnan() & b.isnan())
    if not same[~finite].all() or not torch.isfinite(b[finite]).all():
        return math.inf
    error = (a - b)[finite].abs().max().item() if finite.any() else 0.0
    return error / bound if bound else (0.0 if error == 0 else math.inf)


def entropy_bytes(x: Tensor, bound: float) -> float:
    """Return the bytes of an ideal order-0 coder for the levels sign(x) * ceil(|x| / 2 bound), without a table."""
    finite = x[torch.isfinite(x)].double()
    levels = (finite.sign() * (finite.abs() / (2 * bound)).ceil()).long()
    counts = torch.unique(levels, return_counts=True)[1].double()
    return float((counts * -(counts / counts.sum()).log2()).sum()) / 8


def measure(sample: Sample, entrants: Sequence[Contender], repeat: int) -> Iterator[Result]:
    """Measure every contender on one sample, in turn; then the entropy limit."""
    x, bound = sample.tensor, sample.absolute
    device = x.device.type
    dtype = str(x.dtype).removeprefix("torch.")
    limit = Result(
        sample.data, sample.name, "entropy of the levels", "limit", True, dtype, device, None, sample.mode,
        sample.bound, x.nbytes, entropy_bytes(x, bound), None, None, None,
    )  # fmt: skip
    points = [contender.under(sample) for contender in entrants]
    trials = [contender.trial(point) for contender, point in zip(entrants, points, strict=True)]
    packed = [trial.encode() for trial in trials]
    encode: list[list[float]] = [[] for _ in trials]
    decode: list[list[float]] = [[] for _ in trials]
    share = -(-repeat // ROUNDS)
    for _ in range(ROUNDS):
        for i, trial in enumerate(trials):
            encode[i] += seconds(trial.encode, 1 + share, device)[1:]
            decode[i] += seconds(partial(trial.decode, packed[i]), 1 + share, device)[1:]
    unit = squared_error(x, GroupQuant(bits=2).encode(x).decode())
    for i, (contender, trial) in enumerate(zip(entrants, trials, strict=True)):
        decoded = torch.as_tensor(trial.decode(packed[i]), device=x.device)
        yield replace(
            limit,
            codec=contender.name,
            family=contender.family,
            bounded=contender.bounded,
            series=contender.series or contender.name,
            threads=contender.threads,
            mode=points[i].mode,
            bound=points[i].bound,
            input_bytes=trial.source.nbytes,
            packed_bytes=trial.nbytes(packed[i]),
            encode_seconds=statistics.median(encode[i]),
            decode_seconds=statistics.median(decode[i]),
            error=largest_error(trial.source, decoded, points[i].absolute),
            variance=squared_error(x, decoded.view(x.shape)) / unit if unit and trial.source is x else None,
        )
    yield limit


def totals(results: Sequence[Result]) -> list[Result]:
    """Merge the results of each codec and kind of data: bytes and times added up, the largest error."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.data, result.codec), []).append(result)

    def same(values: set[Any], otherwise: Any) -> Any:
        return values.pop() if len(values) == 1 else otherwise

    def added(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    def weighted(pairs: list[tuple[float | None, int]]) -> float | None:
        known = [(value, weight) for value, weight in pairs if value is not None]
        return sum(value * weight for value, weight in known) / sum(w for _, w in known) if known else None

    return [
        replace(
            rs[0],
            tensor=rs[0].tensor if len(rs) == 1 else f"all {len(rs)}",
            dtype=same({r.dtype for r in rs}, "mixed"),
            mode=same({r.mode for r in rs}, "mixed"),
            bound=same({r.bound for r in rs}, None),
            input_bytes=sum(r.input_bytes for r in rs),
            packed_bytes=sum(r.packed_bytes for r in rs),
            encode_seconds=added([r.encode_seconds for r in rs]),
            decode_seconds=added([r.decode_seconds for r in rs]),
            error=max((r.error for r in rs if r.error is not None), default=None),
            variance=weighted([(r.variance, r.input_bytes) for r in rs]),
        )
        for rs in groups.values()
    ]
