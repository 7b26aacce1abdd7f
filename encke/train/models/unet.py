"""U-Nets for the segmentation of images and volumes: an encoder, a decoder, and connections across."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTHS_2D = (32, 64, 128, 256, 512)
WIDTHS_3D = (32, 64, 128, 256, 320)


class UNet(nn.Module):
    """U-Net that returns scores for each pixel, or for each voxel.

    In two dimensions it has batch norm and ReLU, in three instance norm and leaky ReLU, as is usual for volumes. Each
    level but the first halves the input, by default four times.

    Args:
        classes: Number of classes.
        channels: Channels of the input.
        dimensions: 2 or 3.
        widths: Channels at each level; None for the usual widths.
    """

    def __init__(
        self, classes: int, channels: int = 3, dimensions: int = 2, widths: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        convolution, transposed, pool = LAYERS[dimensions]
        widths = widths or (WIDTHS_2D if dimensions == 2 else WIDTHS_3D)

        def block(inputs: int, outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for width in (inputs, outputs):
                layers.append(convolution(width, outputs, 3, padding=1, bias=False))
                if dimensions == 2:
                    layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                else:
                    layers += [nn.InstanceNorm3d(outputs, affine=True), nn.LeakyReLU(0.01, inplace=True)]
            return nn.Sequential(*layers)

        pairs = list(zip(widths, widths[1:], strict=False))
        self.first = block(channels, widths[0])
        self.pool = pool(2)
        self.down = nn.ModuleList(block(upper, lower) for upper, lower in pairs)
        self.rise = nn.ModuleList(transposed(lower, upper, 2, stride=2) for upper, lower in reversed(pairs))
        self.up = nn.ModuleList(block(2 * upper, upper) for upper, _ in reversed(pairs))
        self.head = convolution(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of shape (batch, classes, ...), with the spatial size of the input."""
        across = [self.first(x)]
        for block in self.down:
            across.append(block(self.pool(across[-1])))
        x = across.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat((rise(x), across.pop()), 1))
        return self.head(x)


LAYERS: dict[int, tuple[Any, Any, Any]] = {
    2: (nn.Conv2d, nn.ConvTranspose2d, nn.MaxPool2d),
    3: (nn.Conv3d, nn.ConvTranspose3d, nn.MaxPool3d),
}
"""Convolution, transposed convolution and pooling, by the number of dimensions."""
