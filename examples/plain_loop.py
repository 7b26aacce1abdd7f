"""A training loop of your own: Encke is the one line that is marked."""

import argparse

import torch
from torch import nn

import encke

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=128)
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1, bias=False),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(64 * 16, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

handle = encke.attach(model, optimizer=optimizer)  # <-- Encke

# Synthetic images: each class has a pattern of its own under noise. Put your data loader here.
patterns = torch.randn(10, 3, 32, 32, device=device)
losses = []
for _ in range(options.steps):
    labels = torch.randint(10, (options.batch,), device=device)
    images = patterns[labels] + torch.randn(options.batch, 3, 32, 32, device=device)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

# To resume, save handle.state_dict() beside those of model and optimizer.
report = handle.report()
print(report)
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {report.ratio:.1f}")
handle.detach()
