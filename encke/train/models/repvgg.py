"""RepVGG-A0 in its training form: three branches with a batch norm each, summed before the ReLU."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = ((48, 2), (96, 4), (192, 14), (1280, 1))
"""Channels and blocks of each stage of RepVGG-A0; the first block of a stage halves the image."""


class RepBlock(nn.Module):
    """ReLU of the sum of a 3 x 3 and a 1 x 1 convolution and, if the shape is kept, the input, each normalised."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()

        def branch(kernel: int) -> nn.Sequential:
            convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
            return nn.Sequential(convolution, nn.BatchNorm2d(outputs))

        self.branches = nn.ModuleList([branch(3), branch(1)])
        if inputs == outputs and stride == 1:
            self.branches.append(nn.BatchNorm2d(inputs))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.branches[0](x)
        for branch in self.branches[1:]:
            out = out + branch(x)
        return self.relu(out)


class RepVgg(nn.Sequential):
    """RepVGG for images; by default RepVGG-A0.

    Args:
        classes: Outputs.
        channels: Channels of the images.
        stages: Channels and blocks of each stage.
    """

    def __init__(self, classes: int, channels: int = 3, stages: tuple[tuple[int, int], ...] = STAGES) -> None:
        layers: list[nn.Module] = [RepBlock(channels, stages[0][0], 2)]
        inputs = stages[0][0]
        for width, blocks in stages:
            for i in range(blocks):
                layers.append(RepBlock(inputs, width, 1 if i else 2))
                inputs = width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
