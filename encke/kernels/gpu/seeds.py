"""Seeds of all sites of a forward pass, computed on the GPU: a captured CUDA graph reads new seeds in every step."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from encke.kernels import formats
from encke.kernels.gpu.launch import launch_kernel

START = tl.constexpr(formats.START)
SIZE = 128  # seeds that a program computes


@triton.jit
def splitmix64_finish(h):
    """Apply the final steps of splitmix64."""
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9
    h = (h ^ (h >> 27)) * 0x94D049BB133111EB
    return h ^ (h >> 31)


@triton.jit(do_not_specialize=["count", "step", "rank"])
def seeds_kernel(
    sites, salts, seeds, count: tl.int32, step: tl.int64, rank: tl.int64, SIZE: tl.constexpr
):  # fmt: skip
    """Compute mix(salt, mix(step, site, rank)) of formats.py for each site and its salt."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    here = i < count
    site = tl.load(sites + i, mask=here, other=0).to(tl.uint64)
    salt = tl.load(salts + i, mask=here, other=0).to(tl.uint64)
    zero = tl.zeros_like(site)
    first = (zero + step.to(tl.uint64)) * 0xD1342543DE82EF95 + site + START
    inner = splitmix64_finish(first * 0xD1342543DE82EF95 + (zero + rank.to(tl.uint64)) + 0x9E3779B97F4A7C15)
    seed = splitmix64_finish(salt * 0xD1342543DE82EF95 + inner + START)
    tl.store(seeds + i, seed.to(tl.int64, bitcast=True), mask=here)


def site_seeds(sites: tuple[int, ...], salts: tuple[int, ...], step: int, rank: int, device: torch.device) -> Tensor:
    """Return mix(salt, mix(step, site, rank)) for each site and its salt, as int64 on the device."""
    seeds, count = torch.empty(len(sites), dtype=torch.int64, device=device), len(sites)
    if count:
        tensors = (*on_device(sites, salts, device), seeds)
        launch_kernel(seeds_kernel, -(-count // SIZE), tensors, (count, step, rank), (SIZE,), 1, specialised=0)
    return seeds


@functools.lru_cache(maxsize=256)
def on_device(sites: tuple[int, ...], salts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sites and salts on the device. They are cached, so that later steps need no copy."""
    both = torch.tensor((sites, salts), dtype=torch.int64, device=device)
    return both[0], both[1]
