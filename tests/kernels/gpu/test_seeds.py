"""Seeds made on the device: on a GPU, else through Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from encke.kernels import mix, reference
from tests.kernels.gpu.common import DEVICE, compile_for_hopper

gpu = pytest.importorskip("encke.kernels.gpu", reason="needs triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("count", [0, 1, 128, 301])
def test_seeds_of_sites(count):
    chance = random.Random(count)
    sites, salts = (tuple(chance.randrange(-(1 << 63), 1 << 63) for _ in range(count)) for _ in range(2))
    for step, rank in ((0, 0), (1, 0), (1 << 40, 12), (-3, 1023)):
        expected = [mix(b, mix(step, a, rank)) for a, b in zip(sites, salts, strict=True)]
        for backend in (gpu, reference):
            assert backend.site_seeds(sites, salts, step, rank, torch.device(DEVICE)).tolist() == expected


COMPILE = """
from encke.kernels.gpu import seeds
build(seeds.seeds_kernel, dict.fromkeys(("sites", "salts", "seeds"), "*i64"), {"SIZE": 128})
"""


@pytest.mark.slow
def test_compiles_for_hopper():
    compile_for_hopper(COMPILE)
