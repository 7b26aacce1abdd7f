"""The benchmark of kernels at all sizes and shapes: its tensors are what it says, and the lowest shares come first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def cliffs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernel_cliffs  # type: ignore[import-not-found]

    return kernel_cliffs


def test_tensors_are_of_the_size_and_in_the_memory_format_that_a_case_names(cliffs):
    cases = cliffs.cases([1])
    assert len(cases) == len(set(cases)) == 22
    for case in cases:
        x = case.tensor("cpu")
        assert 0.7 * 2**20 < x.nbytes <= 2**20 and str(x.dtype) == f"torch.{case.dtype}"
        last = case.what.startswith("channels_last")
        assert x.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
        if case.what.startswith("flat"):
            assert (x.numel() % 128 > 0) == (case.what == "flat odd")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["flat odd", "planes 7", "channels_last 24"])
def test_what_is_timed_restores_the_tensor(cliffs, what):
    case = cliffs.Case(1, "float32", what)
    x, size, encode, decode = cliffs.calls(case, 8, "cpu")
    assert len(encode()) == size and 3 < x.nbytes / size < 4
    # Both work on memory, whatever its order.
    memory = x.permute(0, 2, 3, 1) if what.startswith("channels_last") else x
    assert (decode().flatten() - memory.flatten()).abs().max() < 0.05


def test_a_share_is_that_of_a_copy_in_the_same_time(cliffs, monkeypatch):
    monkeypatch.setattr(cliffs, "seconds", lambda function, device: 1e-3)
    (row, *_) = cliffs.measure([cliffs.Case(1, "float32", "flat")], "cpu")
    assert (row["bits"], row["shape"]) == (2, str(2**18))
    assert row["encode_share"] == row["decode_share"] == pytest.approx((1 + 1 / row["ratio"]) / 2, rel=0.01)


def test_the_lowest_share_comes_first(cliffs):
    def row(what: str, bits: int, share: float) -> dict:
        about = {"dtype": "float32", "what": what, "MiB": 1, "bits": bits}
        return about | {"encode_share": 0.9, "decode_share": share}

    shares = {"flat": (0.8, 0.7, 0.8, 0.8), "planes 7": (0.9, 0.9, 0.5, 0.9)}
    rows = [row(what, bits, s) for what, each in shares.items() for bits, s in zip((2, 3, 4, 8), each, strict=True)]
    lines = cliffs.markdown(rows).splitlines()
    assert lines[2] == "| float32 | planes 7 | 1 | 90 / 90 % | 90 / 90 % | 90 / 50 % | 90 / 90 % |"
    assert lines[3].startswith("| float32 | flat | 1 |")
