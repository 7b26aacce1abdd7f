"""Values and the Triton compiler for the tests of the GPU kernels."""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
SEED = 0x9E3779B97F4A7C15 >> 1
# The interpreter is slow: all but the two most used dtypes are tested at length.
DTYPES = [
    torch.bfloat16,
    torch.float32,
    pytest.param(torch.float16, marks=pytest.mark.soak),
    pytest.param(torch.float64, marks=pytest.mark.soak),
]
# Compiling takes ten seconds for a dtype: the others are compiled at length.
COMPILED_DTYPES = [
    "float32",
    pytest.param("bfloat16", marks=pytest.mark.soak),
    pytest.param("float64", marks=pytest.mark.soak),
    pytest.param("float16", marks=pytest.mark.soak),
]


def in_pairs(*choices: Sequence[Any]) -> list[Any]:
    """Combine choices with a dtype each so that any two meet; the other combinations run at length."""
    cases = []
    for places in itertools.product(*(range(len(each)) for each in choices)):
        case = [each[place] for each, place in zip(choices, places, strict=True)]
        usual = (torch.float32, torch.bfloat16)[sum(places) % 2]
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            cases.append(pytest.param(*case, dtype, marks=[] if dtype == usual else [pytest.mark.soak]))
    return cases


def content(name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of one kind on the device."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    if name == "blocks":  # every form of a block: sparse, signed, wide, with escapes, constant, zero and raw
        parts = ("relu", "normal", "far", "sparse", "tail", "constant", "zeros", "special")
        return torch.cat([content(part, 700, dtype) for part in parts])[:numel]
    if name in ("special", "outlier") and numel:
        x[numel // 3] = 3e38 if dtype != torch.float16 else 6e4
        if name == "special":
            x[::97], x[5::301], x[6::300], x[::7] = float("nan"), INF, -INF, -0.0
    else:
        x = {
            "normal": x,
            "relu": x.relu(),
            "zeros": x * 0.0,
            "constant": x * 0.0 + 3.0,
            "negative": x * 0.0 - 1 / 3,
            "far": x + (1e4 if dtype == torch.float16 else 1e5),
            "sparse": torch.where(x > 1.3, x, 0.0),
            "tail": x.abs().pow(6) * 0.03,
            "denormal": x * {torch.float16: 1e-6, torch.float64: 1e-310}.get(dtype, 1e-41),
            "largest": x.sign() * torch.finfo(dtype).max,
        }[name]
    return x.to(dtype).to(DEVICE)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def compile_for_hopper(script: str, *arguments: str) -> None:
    """Run a script that compiles kernels with `build`: the interpreter takes what the compiler refuses.

    No GPU is needed to compile.
    """
    given, answers = compiler()
    print(json.dumps([BUILD + script, arguments]), file=given, flush=True)
    code, shown = json.loads(answers.readline())
    assert code == 0, shown[-3000:]


@functools.cache
def compiler() -> tuple[IO[str], IO[str]]:
    """Start a process that imports torch and Triton once, and forks for each script. It ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", FORK]
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert process.stdin is not None and process.stdout is not None
    return process.stdin, process.stdout


FORK = """
import json, os, sys, tempfile
import encke.kernels.gpu

for line in sys.stdin:
    script, arguments = json.loads(line)
    with tempfile.TemporaryFile("w+") as shown:
        if child := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            shown.seek(0)
            print(json.dumps([code, shown.read()]), flush=True)
            continue
        os.dup2(shown.fileno(), 1), os.dup2(shown.fileno(), 2)
        sys.argv[1:] = arguments
        exec(script, {"__name__": "__main__"})
        sys.exit()
"""


BUILD = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def build(kernel, pointers, constants, **options):
    types = {p.name: pointers.get(p.name, p.annotation_type) for p in kernel.params}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    options = {"num_warps": 4} | options | {"enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

TYPES = {
    "float32": (tl.float32, "*fp32"), "float64": (tl.float64, "*fp64"),
    "float16": (tl.float16, "*fp16"), "bfloat16": (tl.bfloat16, "*i16"),
}
"""
