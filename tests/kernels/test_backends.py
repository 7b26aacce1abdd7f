"""Which backend serves which device, and what is said where a compiler is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from encke import kernels
from encke.kernels import backends

WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "numba" else find(name, *a)
import warnings, torch, encke
"""


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_fast_backends_serve_where_their_compilers_are_installed() -> None:
    assert kernels.backend_for("cpu").NAME == "numba"
    assert kernels.backend_for("cuda").NAME == "triton"
    assert kernels.backend_for("mps").NAME == "reference"


def test_the_choice_is_described() -> None:
    cpu, cuda = kernels.describe_backends()
    assert (cpu.device, cpu.name, cuda.device, cuda.name) == ("cpu", "numba", "cuda", "triton")
    assert str(cpu).startswith("CPU kernels: numba, version ") and str(cuda).startswith("GPU kernels: triton, version ")


def test_a_variable_asks_for_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENCKE_KERNELS", "reference")
    for choice in kernels.describe_backends():
        assert choice.name == "reference" and "ENCKE_KERNELS" in choice.reason


def test_the_reference_serves_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    assert [str(choice) for choice in kernels.describe_backends()] == [
        "CPU kernels: reference, install encke[cpu] for speed",
        "GPU kernels: reference, install triton for speed",
    ]


@pytest.mark.slow
def test_without_numba_a_hint_is_shown_once_and_for_large_tensors_only() -> None:
    code = (
        WITHOUT_NUMBA
        + """
small, large = torch.randn(2000), torch.randn(1 << 20)
with warnings.catch_warnings(record=True) as shown:
    warnings.simplefilter("always")
    assert (encke.codecs.ErrorBounded(0.1).encode(small).decode() - small).abs().max() <= 0.1
    assert not shown
    for _ in range(2):
        encke.codecs.GroupQuant(bits=2).encode(large)
print(*(w.message for w in shown), sep="|")
"""
    )
    assert run(code).strip() == "CPU kernels: reference, install encke[cpu] for speed"


@pytest.mark.slow
def test_nothing_is_said_where_the_reference_was_asked_for() -> None:
    code = "import warnings; warnings.simplefilter('error'); import torch, encke;"
    code += "encke.codecs.GroupQuant(bits=2).encode(torch.randn(1 << 20)); print(encke.kernels.backend_for('cpu').NAME)"
    assert run(code, ENCKE_KERNELS="reference").strip() == "reference"
