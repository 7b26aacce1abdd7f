"""The dual-precision kernels against the reference: the same bytes from numba, the same values from Triton."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from encke.kernels import dp_sizes, implementation, reference

ROOT = Path(__file__).resolve().parents[3]
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DEVICE = {"cpu": "cpu", "gpu": "cuda" if torch.cuda.is_available() else "cpu"}
SEED = 0x9E3779B97F4A7C15 >> 1
# Planes, height, width: full and partial tiles, planes smaller than a tile, single rows and columns, odd numbers.
SHAPES = [(3, 8, 8), (33, 7, 7), (5, 14, 14), (2, 1, 40), (3, 19, 1), (6, 5, 19), (2, 33, 9), (1, 40, 71), (2, 16, 17)]
SETTINGS = [(8, 2, False), (8, 2, True), (2, 4, True), (5, 8, False)]


def specials(shape: tuple[int, int, int]) -> torch.Tensor:
    x = torch.randn(shape, dtype=torch.float64)
    x[0].view(-1)[7::97] = math.nan
    x[1 % shape[0], 0, 0] = -math.inf
    x[-1, -1, -1] = -0.0
    return x


CONTENTS = {
    "normal": lambda shape: torch.randn(shape),
    "relu": lambda shape: torch.randn(shape).relu(),
    "zeros": lambda shape: torch.zeros(shape),
    "negative zeros": lambda shape: -torch.zeros(shape),
    "constant": lambda shape: torch.full(shape, -3.7),
    "far from zero": lambda shape: 1e4 + torch.rand(shape, dtype=torch.float64),
    "denormals": lambda shape: torch.randn(shape, dtype=torch.float64) * 1e-41,
    "huge": lambda shape: torch.randn(shape, dtype=torch.float64) * 1e37,
    "largest": lambda shape: torch.randn(shape).sign().double() * 3.4028234663852886e38,
    "specials": specials,
}


def plain_nan(t: torch.Tensor) -> torch.Tensor:
    """The bits, the same for all NaNs."""
    return torch.where(torch.isnan(t), torch.tensor(math.nan, dtype=t.dtype), t).view(torch.uint8)


def check(name: str, x: torch.Tensor, block: int, bits: int, masked: bool) -> None:
    """The implementation stores what the reference stores, and decodes it to the same values."""
    module, device = implementation({"cpu": "cpu", "gpu": "cuda"}[name]), DEVICE[name]
    shape, flat, dtype = tuple(x.shape[1:]), x.reshape(-1), x.dtype
    about = (tuple(x.shape), dtype, block, bits, masked)
    theirs = reference.dp_encode(flat, *shape, block, bits, masked, SEED)
    ours = module.dp_encode(flat.to(device), *shape, block, bits, masked, SEED)
    assert ours.numel() == dp_sizes(flat.numel(), *shape, block, bits, masked, dtype)[4], about
    if name == "cpu":
        assert torch.equal(ours, theirs), about
    for mask in (False, True):
        settings = (flat.numel(), *shape, block, bits, masked, dtype, mask)
        expected = reference.dp_decode(theirs, *settings)
        for data in (ours, theirs.to(device)):
            decoded = module.dp_decode(data, *settings).cpu()
            assert decoded.dtype == expected.dtype and torch.equal(plain_nan(decoded), plain_nan(expected)), about
        if mask and masked:
            assert torch.equal(expected, flat != 0), about


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("content", CONTENTS)
def test_cpu_stores_the_bytes_of_the_reference(content: str, dtype: torch.dtype) -> None:
    pytest.importorskip("numba")
    torch.manual_seed(1)
    for i, shape in enumerate(SHAPES):
        x = CONTENTS[content](shape).to(dtype)
        for settings in SETTINGS if content == "relu" else (SETTINGS[i % 4], SETTINGS[(i + 1) % 4]):
            check("cpu", x, *settings)


def test_cpu_shares_planes_out_among_threads() -> None:
    pytest.importorskip("numba")
    check("cpu", torch.randn(700, 13, 31), 8, 2, True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("content", ["relu", "specials"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpu_decodes_to_the_values_of_the_reference(content: str, dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(2)
    for i, shape in enumerate(SHAPES[1:6]):
        check("gpu", CONTENTS[content](shape).to(dtype), *SETTINGS[i % 4])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_equals_reference_on_every_content_and_shape(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(3)
    for i, content in enumerate(CONTENTS):
        for j, shape in enumerate(SHAPES):
            check("gpu", CONTENTS[content](shape).to(dtype), *SETTINGS[(i + j) % 4])


@pytest.mark.parametrize("block", [2, 8])
@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (2, 3, 13, 19), (1, 2, 5, 40)])
def test_averages_are_those_of_pooling(block: int, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) + 3
    height, width = shape[-2:]
    kernel = (min(block, height), min(block, width))
    expected = F.avg_pool2d(x.double(), kernel, kernel, ceil_mode=True, count_include_pad=False)
    _, at_low, at_codes, _, _ = dp_sizes(x.numel(), height, width, block, 2, False, x.dtype)
    kept = reference.dp_encode(x.view(-1), height, width, block, 2, False, 0)[at_low:at_codes].view(torch.bfloat16)
    assert torch.allclose(kept.double(), expected.view(-1), rtol=2**-8, atol=0)
    assert not torch.allclose(kept.double(), expected.view(-1), rtol=2**-12, atol=0)  # bf16 it is


def test_dividing_by_multiplication_is_exact_wherever_it_is_used() -> None:
    pytest.importorskip("triton")
    gpu = implementation("cuda")
    for height, width in [(1, 65535), (1600, 1600), (1023, 1025), (7, 7), (3, 3000), (1 << 20, 2)]:
        magic, divide = gpu._reciprocal(height, width)
        assert not divide and magic < 1 << 32
        i = torch.cat([torch.arange(height) * width + offset for offset in (0, width - 1)])
        assert torch.equal(i * magic >> 32, i // width)
    assert gpu._reciprocal(5, 1)[1] and gpu._reciprocal(1, 65536)[1]


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from encke.kernels.gpu import dual

def build(kernel, pointers, constants):
    types = {p.name: pointers.get(p.name, p.annotation_type) for p in kernel.params}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False})

for dtype, name in ((tl.float32, "*fp32"), (tl.bfloat16, "*i16"), (tl.float16, "*fp16"), (tl.float64, "*fp64")):
    common = {"DTYPE": dtype, "BITS": 2, "TALL": 7, "WIDE": 8, "DIVIDE": dtype == tl.float64}
    pointers = {"data": "*u8", "x": name, "out": name}
    sizes = {"COLUMNS": 8, "P": 2, "TILES": 32, "BYTES": 512}
    build(dual.dp_encode_kernel, pointers, common | sizes | {"MASKED": dtype == tl.float32})
    build(dual.dp_decode_kernel, pointers, common | {"MASK": False, "P": 2, "BYTES": 512})
build(dual.dp_decode_kernel, pointers | {"out": "*u8"}, common | {"MASK": True, "P": 1, "BYTES": 1024})
build(dual.dp_mask_kernel, {"masks": "*u8", "out": "*u8"}, {"P": 2, "BYTES": 512})
"""


@pytest.mark.slow
def test_compiles_for_hopper() -> None:
    """The interpreter takes what the compiler refuses; no GPU is needed to compile."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
