"""Sharded training with FSDP2: torchrun --nproc-per-node 2 examples/fsdp2.py. All processes make the same choices."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import encke

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--batch", type=int, default=16, help="sequences of each process")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--layers", type=int, default=4)
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
rank = dist.get_rank()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


torch.manual_seed(0)
blocks = [Block(options.width) for _ in range(options.layers)]
model = nn.Sequential(nn.Embedding(256, options.width), *blocks, nn.Linear(options.width, 256)).to(device)
mesh = init_device_mesh(device.type, (dist.get_world_size(),))
for block in blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

handle = encke.attach(model, optimizer=optimizer)  # <-- Encke

torch.manual_seed(rank + 1)  # other data in each process
losses = []
for _ in range(options.steps):
    starts = torch.randint(256, (options.batch, 1), device=device)
    tokens = (starts + torch.arange(129, device=device)) % 256
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

if rank == 0:
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {handle.report().ratio:.1f}", flush=True)
dist.destroy_process_group()
