"""`encke check`: versions, devices and kernels of this installation, and a first run of the kernels.

`python -m encke.check` prints a digest of every decoded case. With ENCKE_KERNELS=reference it prints the digests that
all kernels have to reproduce.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import textwrap
import time
from typing import Any

import torch

import encke
from encke import kernels
from encke.codecs import Codec, ErrorBounded, GroupQuant
from encke.policies.comet.allocate import BITS
from encke.tools.extras import PACKAGES, install_hint, installed
from encke.tools.process import environment
from encke.tools.provenance import core_count, cpu_name, version
from encke.tools.terminal import note

CASES: dict[str, Codec] = {
    **{f"{bits} bits": GroupQuant(bits=bits) for bits in BITS},
    "bounded": ErrorBounded(0.01, "rel"),
}
WIDTH = 80
"""Columns of the output."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check() -> None:
    """Show versions, devices and kernels, compile the kernels, and compare them with the reference.

    The first run compiles the kernels for the common formats and fills the kernel cache, so that the first training
    step does not have to. Exits with 1 if something does not work.
    """
    versions = [f"{name} {version(name) or 'missing'}" for name in ("torch", "numpy", "numba", "triton")]
    note(f"encke {encke.__version__}, Python {platform.python_version()}")
    note(", ".join(versions))
    devices = {"cpu": f"{cpu_name()}, {core_count()} cores"}
    if torch.cuda.is_available():
        devices["cuda"] = torch.cuda.get_device_name()
    note("\nDevices and kernels")
    for device, name in devices.items():
        note(f"  {device:6}{name}"[:WIDTH])
        note(f"  {'':6}{kernels.choose_backend(device)}")
    note("\nExtras")
    for extra in dict.fromkeys(PACKAGES.values()):
        missing = [package for package, its_extra in PACKAGES.items() if its_extra == extra and not installed(package)]
        words = f"missing {', '.join(missing)}: {install_hint(missing[0])}" if missing else "installed"
        note(textwrap.fill(f"  {extra:6}{words}", WIDTH, subsequent_indent=" " * 8))
    note("\nKernels: compile (once, a minute or more) or load, compare with the reference")
    if problems := first_runs(list(devices)):
        for problem in problems:
            note(f"  {problem}"[:WIDTH])
        note("\nSomething does not work. ENCKE_KERNELS=reference needs no compiler.")
        raise SystemExit(1)
    note("\nEverything works.")


def first_runs(devices: list[str]) -> list[str]:
    """Run every case on every device; return a description of each that fails or differs from the reference."""
    variables = {"ENCKE_KERNELS": "reference", "CUDA_VISIBLE_DEVICES": ""}
    reference = subprocess.Popen(
        [sys.executable, "-m", "encke.check"], env=environment() | variables, stdout=subprocess.PIPE, text=True
    )
    problems: list[str] = []
    decoded: dict[tuple[str, str], str] = {}
    for device in devices:
        for name, codec in CASES.items():
            started = time.perf_counter()
            for dtype in DTYPES:
                case = f"{name}, {dtype}"
                try:
                    decoded[device, case] = digest(codec, dtype, device)
                except Exception as error:  # a compiler or driver may raise anything
                    reason = " ".join(str(error).split())
                    problems.append(f"{device}, {case}: {type(error).__name__}: {reason}")
            note(f"  {device:6}{name:10}{', '.join(DTYPES):12}{time.perf_counter() - started:6.1f} s")
    if kernels.choose_backend("cuda").name == "triton" and "cuda" in devices:
        note("  cuda  kernels of usual models: compiling what is not in the cache ...")
        kernels.wait_for_kernels()
    output = reference.communicate()[0]
    if reference.returncode:
        return [*problems, f"the reference kernels fail with exit code {reference.returncode}, see above"]
    expected = json.loads(output)
    wrong = [(device, case) for (device, case), found in decoded.items() if found != expected[case]]
    return problems + [f"{device}, {case}: decoded values differ from the reference" for device, case in wrong]


def digest(codec: Codec, dtype: str, device: str) -> str:
    """Encode and decode a small tensor and return a digest of the decoded values."""
    x = torch.randn(4, 32, 24, 24, generator=torch.Generator().manual_seed(0)).relu()
    decoded: Any = codec.encode(x.to(device, DTYPES[dtype])).decode()
    return hashlib.sha256(decoded.float().cpu().numpy().tobytes()).hexdigest()


def digests() -> dict[str, str]:
    """Return the digest of every case on the CPU."""
    return {f"{name}, {dtype}": digest(codec, dtype, "cpu") for name, codec in CASES.items() for dtype in DTYPES}


if __name__ == "__main__":
    print(json.dumps(digests()))
