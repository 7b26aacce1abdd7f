"""A U-Net of diffusers that learns to take noise off images (DDPM)."""

import argparse

import torch
from diffusers import DDPMScheduler, UNet2DModel

import encke

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--size", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = UNet2DModel(
    sample_size=options.size,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(options.width, 2 * options.width),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
).to(device)
scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

handle = encke.attach(model, optimizer=optimizer)  # <-- Encke

axis = torch.linspace(0, 6, options.size, device=device)
losses = []
for _ in range(options.steps):
    # Synthetic images: waves of any phase. Put your data loader here.
    phase = 6.3 * torch.rand(options.batch, 1, 1, 1, device=device)
    images = torch.sin(axis + phase) * torch.cos(axis[:, None] - phase)
    noise = torch.randn_like(images)
    times = torch.randint(1000, (options.batch,), device=device)
    found = model(scheduler.add_noise(images, noise, times), times).sample
    loss = torch.nn.functional.mse_loss(found, noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, ratio {handle.report().ratio:.1f}")
