"""Gradients, records and errors that the tests of recomputed tensors compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Fixed

EXACT, FINE = Fixed(ErrorBounded(0)), Fixed(GroupQuant(8))
TOKENS, WIDTH = 128, 64


def batch(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(4, TOKENS // 4, WIDTH, generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, x: Tensor, autocast: bool = False) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def codecs(handle: encke.Handle) -> dict[str, str]:
    return {f"{row.layer}:{row.operation}.{row.slot}": row.codec for row in handle.report().sites}


def recomputed(handle: encke.Handle) -> set[str]:
    return {name for name, codec in codecs(handle).items() if codec == "recomputed"}


def error(a: list[Tensor], b: list[Tensor]) -> float:
    difference = sum(float((x - y).norm() ** 2) for x, y in zip(a[1:], b[1:], strict=True))
    return (difference / sum(float(y.norm() ** 2) for y in b[1:])) ** 0.5
