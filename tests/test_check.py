"""`encke check`: what it shows, and what it says when kernels fail or differ."""

from __future__ import annotations

import json

import pytest

from encke import check as module
from encke.check import CASES, DTYPES, check, digests
from encke.codecs import GroupQuant


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer cases; the child process runs all of them."""
    monkeypatch.setattr(module, "CASES", {"2 bits": CASES["2 bits"]})


def test_it_shows_versions_kernels_and_extras_in_80_columns(capsys):
    check()
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("encke 0", "torch 2", "numpy", "CPU kernels: ", "2 bits", "Extras"))
    assert shown.endswith("Everything works.\n")
    assert max(map(len, shown.splitlines())) <= 80


@pytest.fixture
def reference(monkeypatch):
    """Digests of the reference without a process for them."""

    class Ended:
        returncode = 0

        def __init__(self, command, **settings):
            assert command[1:] == ["-m", "encke.check"]

        def communicate(self):
            return [json.dumps({f"{case}, {dtype}": "as it should be" for case in CASES for dtype in DTYPES})]

    monkeypatch.setattr(module.subprocess, "Popen", Ended)


def test_values_that_differ_from_the_reference_are_named(reference, monkeypatch, capsys):
    monkeypatch.setattr(module, "digest", lambda codec, dtype, device: "something else")
    with pytest.raises(SystemExit) as end:
        check()
    assert end.value.code == 1
    shown = capsys.readouterr().out
    assert "cpu, 2 bits, bf16: decoded values differ from the reference" in shown and "works" not in shown


def test_kernels_that_fail_are_named(reference, monkeypatch, capsys):
    def broken(codec, dtype, device):
        raise RuntimeError("no compiler\nfound")

    monkeypatch.setattr(module, "digest", broken)
    with pytest.raises(SystemExit):
        check()
    assert "cpu, 2 bits, fp32: RuntimeError: no compiler found" in capsys.readouterr().out


def test_a_digest_is_made_of_every_case():
    assert list(digests()) == [f"2 bits, {dtype}" for dtype in DTYPES]


def test_every_number_of_bits_of_the_default_policy_is_compiled():
    assert {codec.bits for codec in CASES.values() if isinstance(codec, GroupQuant)} == {2, 3, 4, 8}
