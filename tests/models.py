"""Small models that between them use the operations and habits of real ones. Each builder gives (model, inputs)."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Residual(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(cout)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.short(x)
        return self.relu(out)


def resnet():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
        Residual(16, 16),
        Residual(16, 32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, (torch.randn(8, 3, 32, 32),)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 8 * i), nn.ReLU(inplace=True), nn.Conv2d(8 + 8 * i, 8, 3, padding=1))
            for i in range(4)
        )
        self.head = nn.Conv2d(40, 10, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(F.avg_pool2d(torch.cat(features, 1), 2)).mean((2, 3))


def densenet():
    return Dense(), (torch.randn(8, 8, 16, 16),)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 48, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(48, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def lstm():
    return Recurrent(), (torch.randint(0, 50, (16, 24)),)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(y)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.blocks = nn.Sequential(Block(48, 4), Block(48, 4))
        self.head = nn.Linear(48, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


def transformer():
    return Transformer(), (torch.randint(0, 64, (8, 40)),)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 3, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.norm(self.down1(x)))
        b = F.leaky_relu(self.down2(a), 0.1)
        c = F.interpolate(F.max_pool2d(b, 2), scale_factor=2, mode="bilinear")
        return self.out(torch.cat([a, self.up(b + c)], 1))


def unet():
    return UNet(), (torch.randn(4, 3, 32, 32),)


def grouped():
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=2, dilation=2, groups=4),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.Hardswish(),
        nn.Conv2d(16, 8, 1),
        nn.ReLU6(),
    )
    return model, (torch.randn(8, 8, 24, 24),)


class Shared(nn.Module):
    """One weight used by two layers, and one module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.twice = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(self.second(self.twice(F.relu(self.first(x)))))


def shared():
    return Shared(), (torch.randn(128, 64),)


class Normed(nn.Module):
    """Weights that are computed: weight norm and spectral norm, as modules and in functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv1d(16, 96, 5, padding=2))
        self.linear = parametrizations.weight_norm(nn.Linear(96, 96))
        self.spectral = parametrizations.spectral_norm(nn.Linear(96, 96))
        self.v, self.g = nn.Parameter(torch.randn(96, 96)), nn.Parameter(torch.ones(96, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = F.elu(self.conv(x)).transpose(1, 2)
        y = torch.sigmoid(self.spectral(F.relu(self.linear(y))))
        weight = torch._weight_norm(self.v, self.g, 0)
        return weight @ (y @ weight.t()).flatten(0, 1).t()


def normed():
    return Normed(), (torch.randn(8, 16, 32),)


class LowRank(nn.Module):
    """Frozen layers under autocast with small trainable ones beside them, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, padding=1)
        self.base, self.down, self.up = (
            nn.Linear(256, 256),
            nn.Linear(256, 8, bias=False),
            nn.Linear(8, 256, bias=False),
        )
        self.last = nn.Linear(256, 256)
        for layer in (self.conv, self.base, self.last):
            layer.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.conv(x * self.scale).flatten(2)
            y = self.base(y) + self.up(self.down(y))
            return self.last(F.gelu(y)).float()


def frozen():
    return LowRank(), (torch.randn(4, 3, 16, 16),)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(64, 3, 3, 3) / 5), nn.Parameter(torch.randn(100, 64) / 8)
        self.q = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(F.conv2d(x, self.w1, padding=1)), 2).flatten(2).transpose(1, 2)
        scores = torch.softmax((y @ self.q) @ y.transpose(1, 2) / 8, -1)
        return F.log_softmax(F.linear(F.dropout(scores @ y, 0.2), self.w2), -1).exp() * (y.pow(2).mean() + 1).sqrt()


def functional():
    return Functional(), (torch.randn(4, 3, 16, 16),)


class Changing(nn.Module):
    """Layers that change from step to step: random depth, random routing, another activation, another operation."""

    ACTIVATIONS = (F.relu, F.gelu, torch.tanh, torch.square, lambda x: x**3, F.silu, torch.exp, torch.sin)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), kind(), nn.Linear(64, 64))
            for kind in (nn.GELU, nn.ReLU, nn.Tanh, nn.Sigmoid)
        )
        self.mix = nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Linear(64, 8)
        self.step = 0
        """Seed of what this step does."""

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.step)
        for block in self.blocks:
            if draw.random() < 0.6:
                x = x + block(x)
        x = x + 0.1 * draw.choice(self.blocks)(x)
        x = draw.choice(self.ACTIVATIONS)(0.5 * x)
        if draw.random() < 0.5:
            x = F.max_pool1d(x, draw.choice((3, 5)), 1, 1)[..., :60]
        else:
            x = self.mix(x.unsqueeze(1)).squeeze(1)[..., :60]
        return self.head(F.pad(x, (0, 64 - x.shape[-1])))


MODELS = {
    f.__name__: f for f in (resnet, densenet, lstm, transformer, unet, grouped, shared, normed, frozen, functional)
}
