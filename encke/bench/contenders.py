"""The contenders of `encke bench codec`, under one interface: our codecs, other compressors and a plain copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from encke.bench.data import Sample
from encke.codecs import Codec, ErrorBounded, GroupQuant, Lossless
from encke.tools.extras import install_hint, installed


@dataclass(frozen=True)
class Trial:
    """A contender on one sample. `encode` and `decode` are timed; `decode` returns an array or tensor like `source`."""

    source: Tensor
    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    nbytes: Callable[[Any], int]


@dataclass(frozen=True)
class Contender:
    """One row of the table. `bounded`: it guarantees the bound. `threads`: None on a GPU."""

    name: str
    family: str
    threads: int | None
    bounded: bool
    trial: Callable[[Sample], Trial]
    series: str = ""
    """Contenders of one series are joined in the plot: the same codec at several settings."""
    under: Callable[[Sample], Sample] = lambda sample: sample
    """Returns the sample with the bound for this contender."""


def _trial(codec: Codec, source: Tensor) -> Trial:
    return Trial(source, lambda: codec.encode(source), lambda packed: packed.decode(), lambda packed: packed.nbytes)


def squared_error(x: Tensor, decoded: Tensor) -> float:
    """Return the mean squared error of the finite values."""
    finite = torch.isfinite(x) & torch.isfinite(decoded)
    return float((decoded[finite].double() - x[finite].double()).square().mean()) if finite.any() else 0.0


def bound_of_two_bits(x: Tensor) -> float:
    """Return the bound at which an error that is uniform within it has the variance of `GroupQuant(bits=2)`."""
    nonzero = float((x != 0).double().mean())  # zeros have no error
    return (3 * squared_error(x, GroupQuant(bits=2).encode(x).decode()) / nonzero) ** 0.5 if nonzero else 0.0


def at_several_bounds(contender: Contender) -> list[Contender]:
    """Return a contender under the bound of the sample, and under the bound of 2 bits and half of it."""

    def wider(share: float) -> Callable[[Sample], Sample]:
        # If 2 bits are exact there is no such bound.
        return lambda s: replace(s, bound=share * bound_of_two_bits(s.tensor) or s.absolute, mode="abs")

    name = contender.name
    points = {f"{name}, half the bound of 2 bits": 0.5, f"{name}, bound of 2 bits": 1.0}
    others = [replace(contender, name=each, under=wider(share)) for each, share in points.items()]
    return [replace(each, series=name) for each in (contender, *others)]


def ours(threads: int | None) -> list[Contender]:
    """Return Encke's codecs, with the settings that are worth comparing."""

    def bounded(rounding: Any, signs: bool = False) -> Contender:
        def trial(s: Sample) -> Trial:
            return _trial(ErrorBounded(s.bound, mode=s.mode, rounding=rounding, signs=signs), s.tensor)

        return Contender(f"ErrorBounded {rounding}" + " with signs" * signs, "encke", threads, True, trial)

    def fixed(bits: int) -> Contender:
        name, codec = f"GroupQuant {bits} bits", GroupQuant(bits=bits)
        return Contender(name, "encke", threads, False, lambda s: _trial(codec, s.tensor), "GroupQuant 2, 3, 4, 8 bits")

    return [
        *at_several_bounds(bounded("nearest")),
        bounded("stochastic"),
        *at_several_bounds(bounded("dithered")),
        *at_several_bounds(bounded("dithered", signs=True)),
        *(fixed(bits) for bits in (2, 3, 4, 8)),
        Contender("Lossless (mask x != 0)", "mask", threads, True, lambda s: _trial(Lossless(), s.tensor != 0)),
    ]


def copy(threads: int | None) -> Contender:
    """Return the limit of throughput: a copy of the input into allocated memory."""

    def trial(sample: Sample) -> Trial:
        x, there = sample.tensor, torch.empty_like(sample.tensor)
        return Trial(x, lambda: there.copy_(x), lambda packed: there.copy_(x), lambda packed: x.nbytes)

    return Contender("copy", "limit", threads, True, trial)


def rows(x: Tensor) -> Any:
    """Return the layout for CPU peers: all dimensions but the last as one. Within 3 % of the best of five layouts."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1).numpy()


def sz3(prediction: bool) -> Contender:
    """Return SZ3 through `pysz`: its default, or without prediction. Its wheels have no OpenMP: one thread."""
    import pysz

    def trial(sample: Sample) -> Trial:
        x = rows(sample.tensor)
        config = pysz.szConfig()
        if not prediction:
            config.cmprAlgo = pysz.szAlgorithm.NOPRED
        if sample.mode == "abs":
            config.errorBoundMode, config.absErrorBound = pysz.szErrorBoundMode.ABS, sample.bound
        else:
            config.errorBoundMode, config.relErrorBound = pysz.szErrorBoundMode.REL, sample.bound
        return Trial(
            sample.tensor,
            lambda: pysz.sz.compress(x, config)[0],
            lambda packed: pysz.sz.decompress(packed, x.dtype, x.shape)[0],
            lambda packed: packed.nbytes,
        )

    return Contender("SZ3" if prediction else "SZ3, no prediction", "peer", 1, True, trial)


def zfp() -> Contender:
    """Return zfp through `zfpy`, fixed-accuracy mode, one thread."""
    import zfpy

    def trial(sample: Sample) -> Trial:
        x, bound = rows(sample.tensor), sample.absolute
        return Trial(sample.tensor, lambda: zfpy.compress_numpy(x, tolerance=bound), zfpy.decompress_numpy, len)

    return Contender("zfp", "peer", 1, True, trial)


def bitcomp(sparse: bool) -> Contender:
    """Return nvCOMP's lossy Bitcomp: the error is at most delta / 2; it rounds delta down to a power of two."""
    from nvidia import nvcomp

    def trial(sample: Sample) -> Trial:
        x = sample.tensor
        kind = f"<f{x.element_size()}"
        codec = nvcomp.Codec(
            algorithm="Bitcomp",
            algorithm_type=int(sparse),
            data_type=kind,
            mode=nvcomp.BitcompMode.BITCOMP_LOSSY_FP_TO_SIGNED,
            delta=2 * sample.absolute,
            cuda_stream=torch.cuda.current_stream().cuda_stream,
        )
        array = nvcomp.as_array(x.view(-1))
        return Trial(
            x,
            lambda: codec.encode(array),
            lambda packed: codec.decode(packed, data_type=kind),
            lambda packed: packed.buffer_size,
        )

    return Contender("nvCOMP Bitcomp, sparse" if sparse else "nvCOMP Bitcomp", "peer", None, True, trial)


def failure(contender: Contender, sample: Sample) -> str | None:
    """Return the message of the error that a contender raises on a sample; None if it works."""
    try:
        trial = contender.trial(contender.under(sample))
        trial.decode(trial.encode())
    except Exception as error:  # other people's code, which may raise anything; the run goes on without it
        return f"{type(error).__name__}: {error}"
    return None


def contenders(samples: Sequence[Sample]) -> tuple[list[Contender], list[str]]:
    """Return the contenders that can run on these samples, and one line for each peer that is left out."""
    device, dtypes = samples[0].tensor.device.type, {sample.tensor.dtype for sample in samples}
    threads = torch.get_num_threads() if device == "cpu" else None
    chosen, left_out = [copy(threads), *ours(threads)], []
    names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
    if device == "cpu":
        peers: list[tuple[str, str, list[Callable[[], Contender]]]] = [
            ("pysz", install_hint("pysz"), [lambda: sz3(True), lambda: sz3(False)]),
            ("zfpy", install_hint("zfpy"), [lambda: zfp()]),
        ]
        supported = {torch.float32, torch.float64}
    else:
        hint = "pip install nvidia-nvcomp-cu12 or nvidia-nvcomp-cu13"
        peers = [("nvidia.nvcomp", hint, [lambda: bitcomp(False), lambda: bitcomp(True)])]
        supported = {torch.float16, torch.float32, torch.float64}
    for module, hint, makers in peers:
        if not installed(module):
            left_out.append(f"{module} is left out: not installed ({hint})")
        elif not dtypes <= supported:
            left_out.append(f"{module} is left out: it does not take {names}")
        else:
            for peer in [each for make in makers for each in at_several_bounds(make())]:
                problem = failure(peer, samples[0])
                if problem is None:
                    chosen.append(peer)
                else:
                    left_out.append(f"{peer.name} is left out: {problem}")
    return chosen, left_out
