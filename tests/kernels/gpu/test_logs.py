"""Log-probabilities against the reference: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from encke.kernels import LogFormat, reference
from tests.kernels.gpu.common import DEVICE, INF, SEED, compile_for_hopper, same

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 0.1), (torch.float16, 0.08), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("numel", [0, 1, 4096, 5003])
def test_log_probabilities(numel, dtype, far):
    x = (-torch.rand(numel, generator=torch.Generator().manual_seed(3)).to(DEVICE) * 27).to(dtype)
    x[::97], x[5::301] = float("nan"), -INF
    format = LogFormat(0.1, far, 1e-3, dtype)
    data = gpu.log_encode(x, format, SEED)
    assert torch.equal(data, reference.log_encode(x, format, SEED))
    values, expected = (backend.log_decode(data, format, SEED) for backend in (gpu, reference))
    assert torch.equal(values.isnan(), x.isnan())
    assert same(values.nan_to_num(0.0), expected.nan_to_num(0.0))


COMPILE = """
from encke.kernels.gpu import logs
for dtype, name in (TYPES[each] for each in ("float32", "float16", "bfloat16")):
    pointers = {"data": "*u8", "x": name, "out": name}
    build(logs.lp_encode_kernel, pointers, {"DTYPE": dtype, "SIZE": 4096})
    build(logs.lp_decode_kernel, pointers, {"DTYPE": dtype, "SIZE": 4096})
"""


@pytest.mark.slow
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
