"""A U-Net for segmentation, whose skip connections hold large activations until the backward pass."""

import argparse

import torch
from torch import nn

import encke

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--size", type=int, default=128)
parser.add_argument("--width", type=int, default=32)
options = parser.parse_args()


def convolutions(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    def __init__(self, width, levels=3):
        super().__init__()
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(convolutions(a, b) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.merge = nn.ModuleList(convolutions(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)


def discs(count, size, device):
    """Return noisy images of a disc, and the masks that a network is to find. Put your data loader here."""
    axis = torch.arange(size, device=device)
    x, y, radius = (torch.rand(3, count, 1, 1, device=device) * 0.5 + 0.25) * size
    masks = ((axis[:, None] - x) ** 2 + (axis - y) ** 2 < (radius / 2) ** 2).float()[:, None]
    return masks + 0.5 * torch.randn_like(masks), masks


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = UNet(options.width).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

handle = encke.attach(model, optimizer=optimizer)  # <-- Encke

losses = []
for _ in range(options.steps):
    images, masks = discs(options.batch, options.size, device)
    loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {handle.report().ratio:.1f}")
