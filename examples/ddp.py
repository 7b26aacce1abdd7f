"""Data parallel training: torchrun --nproc-per-node 2 examples/ddp.py. All processes make the same choices."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import encke

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=64, help="images of each process")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, stride=2, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(4),
    nn.Flatten(),
    nn.Linear(64 * 16, 10),
).to(device)
patterns = torch.randn(10, 3, 32, 32, device=device)
model = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

handle = encke.attach(model, optimizer=optimizer)  # <-- Encke

torch.manual_seed(rank + 1)  # other data in each process
losses = []
for _ in range(options.steps):
    labels = torch.randint(10, (options.batch,), device=device)
    images = patterns[labels] + torch.randn(options.batch, 3, 32, 32, device=device)
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if rank == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {handle.report().ratio:.1f}", flush=True)
dist.destroy_process_group()
