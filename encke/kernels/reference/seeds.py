"""Seeds of all sites of a forward pass, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from encke.kernels.formats import mix


def site_seeds(sites: tuple[int, ...], salts: tuple[int, ...], step: int, rank: int, device: torch.device) -> Tensor:
    """Return mix(salt, mix(step, site, rank)) for each site and its salt, as int64 on the device."""
    seeds = [mix(salt, mix(step, site, rank)) for site, salt in zip(sites, salts, strict=True)]
    return torch.tensor(seeds, dtype=torch.int64, device=device)
