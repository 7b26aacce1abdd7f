"""Random small programs: the same seed gives the same program, plain or attached, as source to read and to run."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS = 4
ROWS, CHANNELS, SIDE = 6, 8, 5
STATEMENTS = (4, 10)

# `{a}` and `{b}` are results of earlier statements of the same shape, `{r}` one of rows, `{i}` one of images.
ANY = (
    "F.relu({a})",
    "self.relu({a})",
    "{a}.clone().relu_()",
    "F.relu({a} * {b}, inplace=True)",
    "F.leaky_relu({a}, 0.1)",
    "F.leaky_relu_({a} + 0.1, 0.2)",
    "F.gelu({a})",
    "F.gelu({a}, approximate='tanh')",
    "0.5 * {a} * (1 + torch.erf({a} / 2 ** 0.5))",
    "F.silu({a})",
    "F.mish({a})",
    "F.elu({a})",
    "F.softplus({a})",
    "F.hardtanh({a}, -0.5, 0.5)",
    "self.relu6({a})",
    "F.hardsigmoid({a})",
    "F.hardswish({a})",
    "F.rrelu({a}, training=True)",
    "F.prelu({a}, self.slope)",
    "{a}.sigmoid()",
    "{a}.tanh()",
    "({a} * 0.1).exp()",
    "{a}.sin()",
    "(30 * {a}).cos()",
    "{a}.abs()",
    "{a} ** 2",
    "{a}.tanh() ** 3",
    "({a}.abs() + 0.1) ** 0.5",
    "({a}.abs() + 0.1).rsqrt()",
    "({a}.square() + 1).log()",
    "{a} * {b}.tanh()",
    "{a} + {b}",
    "{a} - 0.5 * {b}",
    "{a} / (1 + {b}.square())",
    "1 / ({a}.abs() + 0.5)",
    "torch.where({a} > 0, {a}, {b})",
    "torch.maximum({a}, {b})",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.addcmul({a}, {b}.tanh(), {a}, value=0.5)",
    "torch.addcdiv({a}, {b}, {a}.square() + 1)",
    "torch.xlogy({a}.sigmoid(), {b}.sigmoid())",
    "torch.fmod({a}, 0.7)",
    "{a}.clamp(-1, 1)",
    "F.dropout({a}, 0.3)",
    "{a}.cumsum(1)",
    "{a}.sort(1).values",
    "{a}.flip(0)",
    "{a}.roll(1, 1)",
    "{a} - {a}.amax(1, keepdim=True)",
    "{a} * {a}.max()",
    "{a} / (1 + {a}.norm(dim=1, keepdim=True))",
    "{a} / {a}.std()",
    "torch.cat([{a}[:, 4:], {b}[:, :4]], 1)",
    "{a}.index_select(0, self.order)",
    "{a}.transpose(0, 1).contiguous().transpose(0, 1)",
    "torch.stack({a}.unbind(0)[::-1])",
    "F.softmax({a}, 1)",
    # NaN where all is masked; plain training has numbers beside it.
    "F.softmax({a}.masked_fill({b} > 0, -torch.inf), 1)",
    "F.log_softmax({a}, 1)",
    "{a} * {r}.mean() + {i}.mean()",
)
ROW = (
    "self.linear({a})",
    "self.norm({a})",
    "{a} @ self.weight",
    "{a} @ {b}.t() @ {a} / 8",
    "F.linear({a}, self.weight * self.keep)",
    "torch.einsum('ab,cb->ac', {a}, self.weight)",
    "torch.bmm({a}.unsqueeze(0), self.weight.unsqueeze(0)).squeeze(0)",
    "attend({a}, {b}, {a})",
    "self.embed(self.order) + {a}",
    "self.embed({a}.argmax(1)) * {b}",
    "F.rms_norm({a}, (CHANNELS,), self.slope)",
    "checkpoint(self.block, {a}, use_reentrant=False)",
    "low(self.linear, {a})",
    "low(self.block, {a})",
    "self.block({a})",
    "{i}.mean((2, 3))",
    "{i}.amax((2, 3))",
    "F.normalize({a}, dim=1)",
    "({a}.logsumexp(1, keepdim=True) - {b}) * 0.1",
)
IMAGE = (
    "self.conv({a})",
    "self.conv2({a})",
    "self.batch({a})",
    "F.relu(self.batch({a}))",
    "F.relu(self.batch({a}) + {b}, inplace=True)",
    # torch dies in backward where the input is in channels_last memory and needs no gradient.
    "self.group({a} + 0 * self.slope[0])",
    "self.pool({a})",
    "F.max_pool2d({a}, 3, 1, 1)",
    "F.max_pool2d(F.pad({a}, (1, 1, 1, 1)), 3, 1)",
    "F.max_pool2d({a}, 3, 1, padding=1, dilation=1)",
    "F.max_pool2d(F.pad({a}, (2, 2, 2, 2)), 3, 1, dilation=2)",
    "F.avg_pool2d({a}, 3, 1, 1)",
    "F.adaptive_avg_pool2d({a}, 1).expand_as({a})",
    "F.interpolate({a}, size=(SIDE, SIDE), mode='nearest') * {b}",
    "F.interpolate(F.adaptive_max_pool2d({a}, 2), size=(SIDE, SIDE), mode='bilinear')",
    "F.instance_norm({a})",
    "{a}.contiguous(memory_format=torch.channels_last)",
    "F.conv2d({a}, self.kernel.tanh(), padding=1)",
    "F.conv_transpose2d({a}, self.kernel, padding=1)",
    "self.up({a})",
    "checkpoint(self.inner, {a}, use_reentrant=False)",
    "self.inner({a})",
    "low(self.conv, {a})",
    "F.pad({a}[:, :, 1:], (0, 0, 0, 1))",
    "{r}[:, :, None, None] * {a}",
    "{r}[:, :, None, None].expand_as({a})",
    "F.grid_sample({a}, self.grid.expand(len({a}), -1, -1, -1), align_corners=False)",
    "torch.unbind({a}, 3)[2].unsqueeze(3) + {a}",
)
# On a result of its own, or on one that others may have saved: then plain training may refuse, and so must we.
IN_PLACE = (
    "{v}.mul_(0.5)",
    "{v}.add_({b})",
    "{v}[:, :4].tanh_()",
    "{v}.view(-1).sigmoid_()",
    "{v}.data.mul_(1)",
    "{v}.transpose(0, 1)[2:4].zero_()",
)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(t.view(1, 1, *t.shape) for t in (q, k, v)))[0, 0]


def low(function: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(x).float()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.conv(x))
        return y + (y * x).tanh()


class Model(nn.Module):
    """The layers that programs use, and a forward pass that runs the source of one step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stem = nn.Linear(CHANNELS, CHANNELS), nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.linear, self.norm = nn.Linear(CHANNELS, CHANNELS), nn.LayerNorm(CHANNELS)
        self.block = nn.Sequential(nn.Linear(CHANNELS, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, CHANNELS))
        self.embed = nn.Embedding(CHANNELS, CHANNELS)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False, groups=2)
        self.batch, self.group = nn.BatchNorm2d(CHANNELS), nn.GroupNorm(2, CHANNELS)
        self.up, self.pool = nn.ConvTranspose2d(CHANNELS, CHANNELS, 1), nn.MaxPool2d(3, 1, 1)
        self.relu, self.relu6, self.inner = nn.ReLU(), nn.ReLU6(), Inner()
        self.weight = nn.Parameter(torch.randn(CHANNELS, CHANNELS) / 3)
        self.kernel = nn.Parameter(torch.randn(CHANNELS, CHANNELS, 3, 3) / 9)
        self.slope = nn.Parameter(torch.full((CHANNELS,), 0.25))
        self.register_buffer("order", torch.tensor([2, 0, 1, 5, 3, 4]))
        self.register_buffer("keep", (torch.rand(CHANNELS, CHANNELS) > 0.3).float())
        self.register_buffer("grid", torch.rand(1, SIDE, SIDE, 2) * 1.8 - 0.9)
        self.body: Any = None

    def forward(self, rows: Tensor, images: Tensor) -> Tensor:
        return self.body(self, rows, images)


class Program:
    """A random program of a few steps; from one step to the next a statement or two may change."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        count = draw.randint(*STATEMENTS)
        changing = draw.random() < 0.5
        plan = [draw.getrandbits(32) for _ in range(count)]
        self.sources: list[str] = []
        for number in range(STEPS):
            if number and changing and draw.random() < 0.7:
                at = draw.randrange(len(plan))
                kind = draw.random()
                if kind < 0.6:
                    plan[at] = draw.getrandbits(32)
                elif kind < 0.8 and len(plan) > 2:
                    del plan[at]
                else:
                    plan.insert(at, draw.getrandbits(32))
            self.sources.append(source_of(plan))

    def __str__(self) -> str:
        """Show the steps; one that repeats the step before is left out."""
        parts = [f"# Program({self.seed})"]
        for number, source in enumerate(self.sources):
            repeated = number and source == self.sources[number - 1]
            parts.append(f"# step {number + 1}" + (": the same" if repeated else f"\n{source}"))
        return "\n".join(parts)

    def body(self, step: int) -> Any:
        """Return the forward pass of one step."""
        names = {"torch": torch, "F": F, "checkpoint": checkpoint, "attend": attend, "low": low}
        names |= {"SIDE": SIDE, "CHANNELS": CHANNELS}
        exec(self.sources[step], names)
        return names["body"]

    def inputs(self, step: int) -> tuple[Tensor, Tensor]:
        """Return rows and images of one step."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        rows = torch.randn(ROWS, CHANNELS, generator=generator)
        return rows, torch.randn(ROWS, CHANNELS, SIDE, SIDE, generator=generator)


def source_of(plan: list[int]) -> str:
    """Return the source of one step: each number of the plan gives a statement."""
    rows, images = ["r0", "rows"], ["i0", "images"]
    lines = ["def body(self, rows, images):", "    r0, i0 = self.first(rows), self.stem(images)"]
    for number, seed in enumerate(plan):
        draw = random.Random(seed)
        own, kinds = (rows, ROW) if draw.random() < 0.5 else (images, IMAGE)
        expression = draw.choice(ANY if draw.random() < 0.5 else kinds)
        names = {"a": draw.choice(own), "b": draw.choice(own), "r": draw.choice(rows), "i": draw.choice(images)}
        result = f"v{number}"
        lines.append(f"    {result} = {expression.format(**names)}")
        if draw.random() < 0.15:
            target = result if draw.random() < 0.8 else draw.choice(own)
            change = draw.choice(IN_PLACE).format(v=target, b=names["b"])
            lines.append(f"    {change}")
        own.append(result)
    used = [name for name in rows + images if name not in ("rows", "images")]
    total = " + ".join(f"{name}.tanh().mean()" for name in used)
    return "\n".join([*lines, f"    return {total}"])
