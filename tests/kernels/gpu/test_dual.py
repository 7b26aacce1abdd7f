"""Dual precision from Triton against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.dual import CONTENTS, SETTINGS, SHAPES, check
from tests.kernels.gpu.common import DEVICE, DTYPES, compile_for_hopper

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("content", ["relu", "specials"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decodes_to_the_values_of_the_reference(content: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for i, shape in enumerate(SHAPES[1:6]):
        check(gpu, DEVICE, CONTENTS[content](shape).to(dtype), *SETTINGS[i % 4])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference_on_every_content_and_shape(dtype: torch.dtype) -> None:
    """All pairs on a GPU. In the interpreter a third of them, with every content, shape and setting among them."""
    torch.manual_seed(3)
    for i, content in enumerate(CONTENTS):
        for j, shape in enumerate(SHAPES):
            if DEVICE == "cuda" or (i + j) % 3 == 0:
                check(gpu, DEVICE, CONTENTS[content](shape).to(dtype), *SETTINGS[(i // 3 + j) % 4])


def test_dividing_by_multiplication_is_exact_wherever_it_is_used() -> None:
    from encke.kernels.gpu.dual import reciprocal

    for height, width in [(1, 65535), (1600, 1600), (1023, 1025), (7, 7), (3, 3000), (1 << 20, 2)]:
        magic, divide = reciprocal(height, width)
        assert not divide and magic < 1 << 32
        i = torch.cat([torch.arange(height) * width + offset for offset in (0, width - 1)])
        assert torch.equal(i * magic >> 32, i // width)
    assert reciprocal(5, 1)[1] and reciprocal(1, 65536)[1]


COMPILE = """
from encke.kernels.gpu import dual
for dtype, name in TYPES.values():
    common = {"DTYPE": dtype, "BITS": 2, "TALL": 7, "WIDE": 8, "DIVIDE": dtype == tl.float64}
    pointers = {"data": "*u8", "x": name, "out": name}
    sizes = {"COLUMNS": 8, "P": 2, "TILES": 32, "BYTES": 512}
    build(dual.dp_encode_kernel, pointers, common | sizes | {"MASKED": dtype == tl.float32})
    build(dual.dp_decode_kernel, pointers, common | {"MASK": False, "P": 2, "BYTES": 512})
build(dual.dp_decode_kernel, pointers | {"out": "*u8"}, common | {"MASK": True, "P": 1, "BYTES": 1024})
build(dual.dp_mask_kernel, {"masks": "*u8", "out": "*u8"}, {"P": 2, "BYTES": 512})
"""


@pytest.mark.soak
def test_compiles_for_hopper() -> None:
    compile_for_hopper(COMPILE)
