"""A network in the Trainer of Lightning: Encke is one callback."""

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn

from encke.integrations.lightning import EnckeCallback

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--samples", type=int, default=4096)
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--out", default="runs/lightning_trainer")
options = parser.parse_args()


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.GroupNorm(8, 32),
            nn.SiLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(8, 64),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(64 * 16, 10),
        )
        self.losses = []

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(0)
# Synthetic images: each class has a pattern of its own under noise. Put your data here.
labels = torch.randint(10, (options.samples,))
images = torch.randn(10, 3, 32, 32)[labels] + torch.randn(options.samples, 3, 32, 32)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), options.batch, shuffle=True)

model = Classifier()
callback = EnckeCallback()  # <-- Encke
trainer = Trainer(max_epochs=options.epochs, default_root_dir=options.out, log_every_n_steps=5, callbacks=[callback])
trainer.fit(model, loader)  # ckpt_path="last" continues, with the policy's state

print(f"loss {model.losses[0]:.3f} -> {model.losses[-1]:.3f}, ratio {callback.handle.report().ratio:.1f}")
