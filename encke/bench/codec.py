"""`encke bench codec`: ratio and throughput of every codec beside its peers, on the same data in the same run."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from encke.bench.contenders import Contender, contenders
from encke.bench.data import Mode, Sample, from_file, generated
from encke.tools.errors import UsageError
from encke.tools.provenance import write_csv

ROUNDS = 3
"""How often the contenders take turns, so that a busy spell of the machine does not hit one of them alone."""
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


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
    """The largest error of any finite value, in units of the bound; infinite where a NaN or an infinity was lost."""

    @property
    def ratio(self) -> float:
        return self.input_bytes / self.packed_bytes if self.packed_bytes else math.inf

    @property
    def encode_rate(self) -> float | None:
        """Bytes of input encoded in a second."""
        return self.input_bytes / self.encode_seconds if self.encode_seconds else None

    @property
    def decode_rate(self) -> float | None:
        """Bytes of input restored in a second."""
        return self.input_bytes / self.decode_seconds if self.decode_seconds else None

    def row(self) -> dict[str, object]:
        """The columns of codec.csv; rates in MB/s (10^6 bytes)."""

        def rounded(value: float | None, digits: int) -> float | str:
            return "" if value is None else float(f"{value:.{digits}g}")

        return {
            "data": self.data,
            "tensor": self.tensor,
            "codec": self.codec,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads or "",
            "mode": self.mode,
            "bound": "" if self.bound is None else self.bound,
            "input_bytes": self.input_bytes,
            "packed_bytes": round(self.packed_bytes),
            "ratio": rounded(self.ratio, 5),
            "encode_mb_s": rounded(self.encode_rate and self.encode_rate / 1e6, 5),
            "decode_mb_s": rounded(self.decode_rate and self.decode_rate / 1e6, 5),
            "error": rounded(self.error, 6),
        }


def seconds(run: Callable[[], Any], repeat: int, device: str) -> list[float]:
    """How long each of `repeat` calls took; on a GPU by its own clock, launches included."""
    times = []
    for _ in range(repeat):
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
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
    """The largest error over the finite values in units of the bound; infinite if anything else did not come back."""
    a, b = source.double(), decoded.view(source.shape).double()
    finite = torch.isfinite(a)
    same = (a == b) | (a.isnan() & b.isnan())
    if not same[~finite].all() or not torch.isfinite(b[finite]).all():
        return math.inf
    error = (a - b)[finite].abs().max().item() if finite.any() else 0.0
    return error / bound if bound else (0.0 if error == 0 else math.inf)


def entropy_bytes(x: Tensor, bound: float) -> float:
    """Bytes that an ideal order-0 coder needs for the levels sign(x) * ceil(|x| / 2 bound), without its table."""
    finite = x[torch.isfinite(x)].double()
    levels = (finite.sign() * (finite.abs() / (2 * bound)).ceil()).long()
    counts = torch.unique(levels, return_counts=True)[1].double()
    return float((counts * -(counts / counts.sum()).log2()).sum()) / 8


def measure(sample: Sample, entrants: Sequence[Contender], repeat: int) -> Iterator[Result]:
    """Every contender on one sample, taking turns; then the entropy limit."""
    x, bound = sample.tensor, sample.absolute
    device = x.device.type
    limit = Result(
        data=sample.data,
        tensor=sample.name,
        codec="entropy of the levels",
        family="limit",
        bounded=True,
        dtype=str(x.dtype).removeprefix("torch."),
        device=device,
        threads=None,
        mode=sample.mode,
        bound=sample.bound,
        input_bytes=x.nbytes,
        packed_bytes=entropy_bytes(x, bound),
        encode_seconds=None,
        decode_seconds=None,
        error=None,
    )
    trials = [contender.trial(sample) for contender in entrants]
    packed = [trial.encode() for trial in trials]
    encode: list[list[float]] = [[] for _ in trials]
    decode: list[list[float]] = [[] for _ in trials]
    share = -(-repeat // ROUNDS)
    for _ in range(ROUNDS):
        for i, trial in enumerate(trials):
            encode[i] += seconds(trial.encode, 1 + share, device)[1:]
            decode[i] += seconds(partial(trial.decode, packed[i]), 1 + share, device)[1:]
    for i, (contender, trial) in enumerate(zip(entrants, trials, strict=True)):
        decoded = torch.as_tensor(trial.decode(packed[i]), device=x.device)
        yield replace(
            limit,
            codec=contender.name,
            family=contender.family,
            bounded=contender.bounded,
            threads=contender.threads,
            input_bytes=trial.source.nbytes,
            packed_bytes=trial.nbytes(packed[i]),
            encode_seconds=statistics.median(encode[i]),
            decode_seconds=statistics.median(decode[i]),
            error=largest_error(trial.source, decoded, bound),
        )
    yield limit


def totals(results: Sequence[Result]) -> list[Result]:
    """One result for each codec and kind of data: bytes and times added up, the largest error."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.data, result.codec), []).append(result)

    def only(values: set[Any], otherwise: Any) -> Any:
        return values.pop() if len(values) == 1 else otherwise

    def added(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return [
        replace(
            rs[0],
            tensor=rs[0].tensor if len(rs) == 1 else f"all {len(rs)}",
            dtype=only({r.dtype for r in rs}, "mixed"),
            mode=only({r.mode for r in rs}, "mixed"),
            bound=only({r.bound for r in rs}, None),
            input_bytes=sum(r.input_bytes for r in rs),
            packed_bytes=sum(r.packed_bytes for r in rs),
            encode_seconds=added([r.encode_seconds for r in rs]),
            decode_seconds=added([r.decode_seconds for r in rs]),
            error=max((r.error for r in rs if r.error is not None), default=None),
        )
        for rs in groups.values()
    ]


def codec(
    data: Path | None = None,
    bound: float = 0.01,
    mode: Mode = "rel",
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None,
    size: float | None = None,
    repeat: int = 9,
    per_tensor: bool = False,
    out: Path = Path("runs/bench"),
) -> None:
    """Ratio and throughput of every codec, beside the other compressors that are installed.

    Prints a table and writes codec.csv and codec.png. Without --data it measures on generated data: ReLU of normal
    noise, normal noise and smooth fields. A copy and the order-0 entropy of the levels show the limits.

    Args:
        data: A safetensors file; its floating-point tensors are measured, with the absolute bounds in its metadata
            ("meta": {tensor: {"bound": 0.01}} as JSON) where it has them.
        bound: The largest error allowed, for tensors without a bound of their own.
        mode: What --bound means: an absolute error, or one relative to each tensor's range.
        device: Where to encode and decode.
        dtype: Convert the tensors to this dtype first. Generated data are float32 otherwise.
        size: MiB of each kind of generated data. By default its shape is (16, 64, 56, 56).
        repeat: How often each call is timed at least; the median counts.
        per_tensor: Also list every tensor of the file, not only the totals.
        out: The folder for codec.csv and codec.png.
    """
    from encke.bench import show

    if not (bound > 0 and math.isfinite(bound)):
        raise UsageError(f"--bound must be a positive number, got {bound}")
    if size is not None and not (size > 0 and math.isfinite(size)):
        raise UsageError(f"--size must be a positive number of MiB, got {size}")
    if repeat < 1:
        raise UsageError(f"--repeat must be at least 1, got {repeat}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA GPU is available to torch; use --device cpu")
    if data is not None and size is not None:
        raise UsageError(f"--size {size} is for generated data; leave it out with --data")
    if data is not None:
        samples = from_file(data, bound, mode, dtype and DTYPES[dtype], device)
    else:
        samples = generated(size, bound, mode, DTYPES[dtype or "float32"], device)
    flat = [sample.name for sample in samples if sample.absolute == 0]
    if flat:
        raise UsageError(f"{', '.join(flat)}: all values are equal, so a relative bound is zero; use --mode abs")

    entrants, left_out = contenders(samples)
    results: list[Result] = []
    for sample in show.progress(samples, f"{len(entrants)} codecs on {len(samples)} tensors"):
        results += measure(sample, entrants, repeat)
    overall = totals(results)
    shown = results if per_tensor else overall
    show.table(shown, left_out)
    several = len(results) > len(overall)
    write_csv(out / "codec.csv", [r.row() for r in (*overall, *(results if several else ()))])
    show.plot(overall, out / "codec.png")
    show.note(f"wrote {out / 'codec.csv'} and {out / 'codec.png'}")
