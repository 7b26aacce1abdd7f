"""Figures of a training."""

from __future__ import annotations

import torch
from torch import nn

import encke
from encke.train.metrics import convolutions


def test_a_convolution_that_shares_its_input_with_the_layer_before_has_a_ratio_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3))
    with encke.attach(model) as handle:
        for _ in range(2):
            model(torch.randn(8, 3, 24, 24)).sum().backward()
        report = handle.report()
    (shared,) = [row for row in report.sites if row.shared]
    assert (shared.layer, shared.operation, shared.shared) == ("1", "Relu", ("2 Convolution.input",))
    found = convolutions(report)
    assert list(found) == ["0", "2", "4"] and found["2"] == shared.ratio
    assert all(ratio > 3 for ratio in found.values())
