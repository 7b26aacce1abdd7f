"""Compiled kernels are cached on disk, and compiled again when any file that they depend on changes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

scalars = pytest.importorskip("encke.kernels.cpu.scalars", reason="needs numba")
PACKAGE = Path(__file__).resolve().parents[3] / "encke"
ENCODE = """
import torch
from encke.kernels import LogFormat, cpu
from encke.kernels.cpu import logs
data = cpu.log_encode(-torch.arange(100) / 7, LogFormat(0.1, 0.1, 0.0, torch.float32), 5)
print(sum(logs.log_encode_task.stats.cache_hits.values()), data.tolist())
"""


def test_without_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(function, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compiled(function, **options)

    compiled = scalars.numba.njit
    monkeypatch.setattr(scalars.numba, "njit", njit)
    assert scalars.jit(lambda x: x + 1)(1) == 2


@pytest.mark.parametrize(("module", "counted"), [("encke.kernels.cpu.none", 1), ("somebody.else", 0)])
def test_compilations_of_our_kernels_are_counted(module: str, counted: int) -> None:
    def kernel(x):
        return x + 1

    kernel.__module__ = module
    before = scalars.listener.waiting.count
    assert scalars.numba.njit(kernel)(1) == 2
    assert scalars.listener.waiting.count == before + counted and not scalars.listener.waiting.began


@pytest.mark.soak
def test_a_change_in_another_file_compiles_kernels_again(tmp_path: Path) -> None:
    """numba itself looks at a kernel's own file only."""
    shutil.copytree(PACKAGE, tmp_path / "encke", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def encode() -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", ENCODE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        hits, _, data = done.stdout.strip().partition(" ")
        return hits, data

    first, second = encode(), encode()
    assert first[0] == "0" and second == ("1", first[1])
    hash_file = tmp_path / "encke/kernels/cpu/scalars.py"
    source = hash_file.read_text()
    assert "0x846CA68B" in source
    hash_file.write_text(source.replace("0x846CA68B", "0x7FEB352D"))
    changed = encode()
    assert changed[0] == "0" and changed[1] != first[1]
