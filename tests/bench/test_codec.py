"""`encke bench codec`: what it measures and writes, on small tensors."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from encke.bench import contenders as peers
from encke.bench.codec_results import Result, entropy_bytes, largest_error, measure, totals
from encke.bench.contenders import contenders
from encke.bench.data import Sample, from_file, generated
from encke.cli import main

OURS = [
    "ErrorBounded nearest",
    "ErrorBounded nearest, half the bound of 2 bits",
    "ErrorBounded nearest, bound of 2 bits",
    "ErrorBounded stochastic",
    "ErrorBounded dithered",
    "ErrorBounded dithered, half the bound of 2 bits",
    "ErrorBounded dithered, bound of 2 bits",
    "ErrorBounded dithered with signs",
    "ErrorBounded dithered with signs, half the bound of 2 bits",
    "ErrorBounded dithered with signs, bound of 2 bits",
    "GroupQuant 2 bits",
    "GroupQuant 3 bits",
    "GroupQuant 4 bits",
    "GroupQuant 8 bits",
    "Lossless (mask x != 0)",
]


NOISE = Sample("noise", "x", torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), 0.02, "abs")


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_generated_data_give_a_table_a_csv_and_a_plot(tmp_path, capsys):
    main(["bench", "codec", "--size", "0.1", "--repeat", "1", "--out", str(tmp_path)])
    rows = rows_of(tmp_path / "codec.csv")
    assert {row["data"] for row in rows} == {"relu", "normal", "smooth"}
    for data in ("relu", "normal", "smooth"):
        names = [row["codec"] for row in rows if row["data"] == data]
        assert [name for name in names if name in OURS] == OURS
        assert {"copy", "entropy of the levels"} <= set(names)
    for row in rows:
        assert row["date"] and row["command"] and row["cpu"] and row["torch"] and row["python"]
        if row["codec"].startswith("ErrorBounded"):
            assert float(row["error"]) <= 1
        if row["codec"] != "entropy of the levels":
            assert float(row["encode_mb_s"]) > 0 and float(row["decode_mb_s"]) > 0
    assert (tmp_path / "codec.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert all(name in shown for name in OURS)


def test_a_file_gives_totals_with_its_own_bounds(tmp_path):
    torch.manual_seed(0)
    tensors = {"a": torch.randn(64, 32).relu(), "b": torch.randn(8, 16, 16), "index": torch.arange(9)}
    meta = {"a": {"bound": 0.05}, "b": {"bound": 0.5}}
    save_file(tensors, tmp_path / "two.safetensors", metadata={"meta": json.dumps(meta)})
    main(["bench", "codec", "--data", str(tmp_path / "two.safetensors"), "--repeat", "1", "--out", str(tmp_path)])
    rows = [row for row in rows_of(tmp_path / "codec.csv") if row["codec"] == "ErrorBounded nearest"]
    assert [(row["tensor"], row["bound"], row["mode"]) for row in rows] == [
        ("all 2", "", "abs"),
        ("a", "0.05", "abs"),
        ("b", "0.5", "abs"),
    ]
    assert int(rows[0]["input_bytes"]) == int(rows[1]["input_bytes"]) + int(rows[2]["input_bytes"])
    assert int(rows[0]["packed_bytes"]) == int(rows[1]["packed_bytes"]) + int(rows[2]["packed_bytes"])


def test_a_tensor_without_a_bound_of_its_own_gets_the_given_one(tmp_path):
    save_file({"a": torch.randn(9), "b": torch.randn(9)}, tmp_path / "x", metadata={"meta": '{"a": {"bound": 0.5}}'})
    a, b = from_file(tmp_path / "x", 0.1, "rel", None, "cpu")
    assert (a.bound, a.mode) == (0.5, "abs")
    assert (b.bound, b.mode) == (0.1, "rel")


def test_generated_data_have_the_asked_size():
    for dtype in (torch.float32, torch.bfloat16):
        for sample in generated(3.0, 0.01, "rel", dtype, "cpu"):
            assert sample.tensor.nbytes == pytest.approx(3 * 2**20, rel=0.15)
    assert generated(None, 0.01, "rel", torch.float32, "cpu")[0].tensor.shape == (16, 64, 56, 56)


def test_a_relative_bound_ignores_what_is_not_finite():
    x = torch.tensor([1.0, 5.0, math.inf, math.nan])
    assert Sample("", "", x, 0.1, "rel").absolute == pytest.approx(0.4)


def test_peers_keep_the_bound_they_were_given():
    pytest.importorskip("pysz")
    pytest.importorskip("zfpy")
    torch.manual_seed(0)
    for mode in ("abs", "rel"):
        sample = Sample("noise", "x", torch.randn(6, 40, 30).relu(), 0.02, mode)
        found = {r.codec: r for r in measure(sample, contenders([sample])[0], 1)}
        for name in ("SZ3", "SZ3, no prediction", "zfp", "SZ3, bound of 2 bits", "zfp, bound of 2 bits"):
            assert 0 < found[name].error <= 1.0001
            assert found[name].ratio > 1
            assert found[name].threads == 1


def test_peers_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda module: False)
    found, left_out = contenders([NOISE])
    assert all(contender.family != "peer" for contender in found)
    assert [line.split()[0] for line in left_out] == ["pysz", "zfpy"]


def test_peers_that_do_not_take_a_dtype_are_named():
    found, left_out = contenders([replace(NOISE, tensor=NOISE.tensor.bfloat16())])
    assert all(contender.family != "peer" for contender in found)
    assert len(left_out) == 2


def test_a_peer_that_fails_is_named_and_left_out(monkeypatch):
    def broken(sample):
        raise RuntimeError("no driver")

    monkeypatch.setattr(peers, "zfp", lambda: peers.Contender("zfp", "peer", 1, True, broken))
    found, left_out = contenders([NOISE])
    assert "zfp" not in [contender.name for contender in found]
    names = ("zfp", "zfp, half the bound of 2 bits", "zfp, bound of 2 bits")
    assert left_out == [f"{name} is left out: RuntimeError: no driver" for name in names]


def test_entropy_of_equally_frequent_levels():
    x = torch.tensor([0.0, 0.1, -0.1, 0.3]).repeat(100)  # levels 0, 1, -1, 2 at bound 0.1
    assert entropy_bytes(x, 0.1) == pytest.approx(len(x) * 2 / 8)
    assert entropy_bytes(torch.zeros(10), 0.1) == 0


def test_largest_error_is_in_units_of_the_bound():
    x = torch.tensor([0.0, 1.0, math.inf])
    assert largest_error(x, torch.tensor([0.0, 1.5, math.inf]), 0.25) == 2
    assert largest_error(x, torch.tensor([0.0, 1.0, 3.0]), 0.25) == math.inf
    assert largest_error(x, torch.tensor([0.0, math.nan, math.inf]), 0.25) == math.inf
    assert largest_error(torch.tensor([math.nan]), torch.tensor([math.nan]), 0.25) == 0


def test_totals_add_bytes_and_times_and_keep_the_largest_error():
    def result(tensor: str, size: int, error: float) -> Result:
        return Result(
            data="d",
            tensor=tensor,
            codec="c",
            family="encke",
            bounded=True,
            dtype="float32",
            device="cpu",
            threads=2,
            mode="abs",
            bound=0.1,
            input_bytes=size,
            packed_bytes=size / 4,
            encode_seconds=2.0,
            decode_seconds=1.0,
            error=error,
        )

    (total,) = totals([result("a", 100, 0.5), result("b", 300, 0.25)])
    assert (total.tensor, total.ratio, total.encode_rate, total.decode_rate, total.error) == ("all 2", 4, 100, 200, 0.5)


def test_the_bound_of_two_bits_gives_their_variance():
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).relu()
    sample = Sample("noise", "x", x, 0.02, "abs")
    entrants, _ = contenders([sample])
    found = {r.codec: r.variance for r in measure(sample, [e for e in entrants if e.family == "encke"], 1)}
    assert found["GroupQuant 2 bits"] == pytest.approx(1, rel=0.03)
    assert found["ErrorBounded dithered, bound of 2 bits"] == pytest.approx(1, rel=0.03)
    assert found["ErrorBounded dithered, half the bound of 2 bits"] == pytest.approx(0.25, rel=0.03)


def test_where_two_bits_are_exact_the_bound_is_the_sample_s_own():
    constant = replace(NOISE, tensor=torch.full((20, 30), 0.7))
    for contender in contenders([constant])[0]:
        assert contender.under(constant).absolute == constant.absolute, contender.name
