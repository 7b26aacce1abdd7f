"""ResNet-164 for small images: 18 pre-activation bottlenecks in each of three stages."""

from __future__ import annotations

from torch import Tensor, nn

WIDTHS = (16, 32, 64)
EXPANSION = 4


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each after a batch norm and a ReLU, on a residual branch."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(x))
        beside = x if self.shortcut is None else self.shortcut(y)
        y = self.relu(self.norm2(self.conv1(y)))
        y = self.relu(self.norm3(self.conv2(y)))
        return beside + self.conv3(y)


class ResNet164(nn.Module):
    """`blocks` bottlenecks a stage: 9 * 18 + 2 = 164 layers with weights."""

    def __init__(self, classes: int = 10, channels: int = 3, blocks: int = 18) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False)
        layers: list[nn.Module] = []
        inputs = WIDTHS[0]
        for stage, width in enumerate(WIDTHS):
            for block in range(blocks):
                layers.append(Bottleneck(inputs, width, stride=2 if stage and not block else 1))
                inputs = EXPANSION * width
        self.blocks = nn.Sequential(*layers)
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.blocks(self.conv(x))))
        return self.head(self.pool(x).flatten(1))
