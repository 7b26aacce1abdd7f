"""U-Nets: shapes, and the same gradients at bound 0."""

from __future__ import annotations

import pytest
import torch

import encke
from encke.codecs import ErrorBounded
from encke.policies import Fixed
from encke.train.models.unet import UNet


@pytest.mark.parametrize("dimensions", [2, 3])
def test_every_pixel_has_scores_and_the_gradient_of_plain_training_at_bound_0(dimensions):
    torch.manual_seed(0)
    model = UNet(3, 1, dimensions, widths=(8, 16, 16))
    x = torch.randn(1, 1, *[16] * dimensions)
    labels = torch.randint(3, (1, *x.shape[2:]))

    def gradients():
        model.zero_grad()
        scores = model(x)
        assert scores.shape == (1, 3, *x.shape[2:])
        torch.nn.functional.cross_entropy(scores, labels).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with encke.attach(model, Fixed(ErrorBounded(0))):
        for _ in range(2):
            assert all(map(torch.equal, gradients(), plain))
