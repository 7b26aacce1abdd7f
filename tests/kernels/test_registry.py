"""The operators: schema, fake and implementations agree (torch.library.opcheck), and the fast ones are found."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from encke import kernels

X = torch.randn(3000)
META, PAYLOAD = torch.ops.encke.eb_encode(X, 0.1, math.inf, False, 0, True, -1)
DATA = torch.ops.encke.gq_encode(X, 2, 256, 7)
DUAL = torch.ops.encke.dp_encode(X, 20, 25, 8, 2, True, 7)
LOGS = torch.ops.encke.lp_encode(-X.abs(), 0.1, 0.1, 7)
BITS = torch.ops.encke.bits_encode((X > 0).to(torch.uint8), 1)

SAMPLES = {
    "eb_encode": (X, 0.1, math.inf, False, 0, True, -1),
    "eb_decode": (META, PAYLOAD, 3000, torch.float32, False),
    "gq_encode": (X, 2, 256, 7),
    "gq_decode": (DATA, 3000, 2, 256, torch.float32, True, 7),
    "dp_encode": (X, 20, 25, 8, 2, True, 7),
    "dp_decode": (DUAL, 3000, 20, 25, 8, 2, True, torch.float32, False),
    "lp_encode": (-X.abs(), 0.1, 0.1, 7),
    "lp_decode": (LOGS, 0.1, 0.1, 0.001, 7, torch.float32),
    "bits_encode": ((X > 0).to(torch.uint8), 1),
    "bits_decode": (BITS, 1, 3000),
}


@pytest.mark.parametrize("name", kernels.SCHEMAS)
def test_operator(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.encke, name).default, SAMPLES[name])


def test_fast_implementations_serve_where_their_compilers_are_installed() -> None:
    assert kernels.implementation("cpu").__name__ == "encke.kernels.cpu.launch"
    assert kernels.implementation("cuda").__name__ == "encke.kernels.gpu.launch"
    assert kernels.implementation("mps").__name__ == "encke.kernels.reference"


def test_plain_torch_serves_without_numba() -> None:
    code = """
import sys
sys.modules["numba"] = None
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "numba" else find(name, *a)
import torch, encke
x = torch.randn(2000)
assert (encke.codecs.ErrorBounded(0.1).encode(x).decode() - x).abs().max() <= 0.1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
