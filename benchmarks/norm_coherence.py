"""Error that a lossy batch norm input adds to the gradient of the convolution's weight in front of it.

The input's error e, normalised, adds e mean(g h) + h mean(g e) to the gradient that batch norm propagates. `Comet`
counts its share of the propagated gradient. The second term is small there, but its product with the convolution's
input does not cancel: h is a linear function of that input. Prints both relative errors, and what the second term alone
predicts for the weight, for random and for smooth images and an error as large as that of 2 bits.

python3 benchmarks/norm_coherence.py
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

POWER = 0.25
"""Mean square error of 2 bits over the variance: groups of 128 normally distributed values."""
PLANES = (0, 2, 3)


def measure(smooth: bool) -> dict[str, float]:
    """Return the relative errors of the propagated gradient and of the weight's gradient."""
    torch.manual_seed(0)
    x = torch.randn(16, 64, 16, 16)
    x = (F.avg_pool2d(x, 5, 1, 2) if smooth else x).relu()
    weight = torch.randn(64, 64, 3, 3) / 24
    y = F.conv2d(x, weight, padding=1)
    std = y.std(PLANES, keepdim=True)
    h, g, count = (y - y.mean(PLANES, keepdim=True)) / std, torch.randn_like(y), y.numel() // 64
    error = (torch.rand_like(h) - 0.5) * (12 * POWER) ** 0.5

    def propagated(h: Tensor) -> Tensor:
        return (g - g.mean(PLANES, keepdim=True) - h * (g * h).mean(PLANES, keepdim=True)) / std

    def of_weight(g: Tensor) -> Tensor:
        return conv2d_weight(x, weight.shape, g, padding=1)

    exact, lossy = propagated(h), propagated(h + error)
    right = of_weight(exact)
    variance = POWER * g.square().mean(PLANES) / count * of_weight(h / std).square().sum((1, 2, 3))
    return {
        "propagated": float((lossy - exact).norm() / exact.norm()),
        "weight": float((of_weight(lossy) - right).norm() / right.norm()),
        "predicted": float(variance.sum().sqrt() / right.norm()),
    }


if __name__ == "__main__":
    for smooth in (False, True):
        print("smooth" if smooth else "random", {name: round(value, 3) for name, value in measure(smooth).items()})
