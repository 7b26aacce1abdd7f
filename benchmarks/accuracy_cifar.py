"""Accuracy with compression: ResNet-18 on CIFAR-10, 15 epochs, one-cycle, many seeds, each method beside plain.

Other models and packs of other images are options; docs/evidence.md has the commands.

python3 benchmarks/accuracy_cifar.py --data cifar10.npz --workers 5 --csv accuracy.csv     # plain, default; 5 seeds
python3 benchmarks/accuracy_cifar.py --data cifar10.npz --run plain:0-4 --run careful:0-4 --csv accuracy.csv
python3 benchmarks/accuracy_cifar.py --summary accuracy.csv --plot accuracy.png

An interrupted call goes on when it is given again: runs that are in the CSV are not repeated. Prints each quantity
beside plain's, its difference with a 95 % interval, and the verdict by the rule of docs/evidence.md.

Runs with the same seed are pairs: the same initial weights, order and augmentation whatever the method. `ratio` is over
what autograd saves in the precision of the run, `ratio_fp32` over what it saves in fp32.
"""

from __future__ import annotations

import argparse
import functools
import io
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.report import peak_bytes  # noqa: E402
from encke.train.models.registry import OURS, build  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402
from encke.train.settings import Model  # noqa: E402
from runs import Job, Ratios, attach_method, conduct, gradient_error, origin, parser_for, write_history  # noqa: E402

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PAD = 4
SETTINGS = ("model", "precision", "epochs", "batch", "lr", "limit", "channels_last")
SMALL = 64
"""Images below this size have a network with the stem for CIFAR."""


def read_pack(path: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, S, S, 3) and labels of an image pack: `y_SPLIT` beside SPLIT or SPLIT0, SPLIT1, ..., encoded mosaics
    of S x S tiles; `meta` holds S, the tiles in a row and the tiles in a mosaic."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    with np.load(path) as pack:
        size, columns, count = map(int, pack["meta"][:3])
        numbered = [f"{split}{i}" for i in range(len(pack.files)) if f"{split}{i}" in pack.files]
        encoded = [pack[name].tobytes() for name in numbered or [split]]
        labels = pack[f"y_{split}"]

    def decode(data: bytes) -> np.ndarray:
        with Image.open(io.BytesIO(data)) as image:
            mosaic = np.asarray(image.convert("RGB"))
        rows = mosaic.shape[0] // size
        tiles = mosaic.reshape(rows, size, columns, size, 3).swapaxes(1, 2).reshape(rows * columns, size, size, 3)
        return tiles[:count]

    with ThreadPoolExecutor() as pool:  # decoders release the interpreter's lock
        return np.concatenate(list(pool.map(decode, encoded)))[: len(labels)], labels


def prepare(data: str, folder: Path) -> str:
    """Decodes the pack once; the workers map the arrays."""
    for split in ("train", "test"):
        images, labels = read_pack(data, split)
        np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_labels.npy", labels.astype(np.int64))
    return str(folder)


def load(folder: str, split: str, limit: int, device: str) -> tuple[Tensor, Tensor]:
    """The first `limit` images (0: all) as uint8, and their labels, on the device."""
    images, labels = (np.load(Path(folder) / f"{split}_{kind}.npy", mmap_mode="r") for kind in ("images", "labels"))
    end = limit or len(labels)
    return torch.from_numpy(images[:end].copy()).to(device), torch.from_numpy(labels[:end].copy()).to(device)


@functools.cache
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the pixels, made once: copying them to the GPU waits for it."""
    mean, std = (torch.tensor(v, device=device) * 255 for v in (MEAN, STD))
    return mean, std


def normalise(images: Tensor, channels_last: bool) -> Tensor:
    """uint8 (N, S, S, 3) to normalised fp32 (N, 3, S, S)."""
    mean, std = constants(images.device)
    x = ((images.float() - mean) / std).permute(0, 3, 1, 2)
    return x if channels_last else x.contiguous()


def reflect(images: Tensor) -> Tensor:
    """The images with PAD reflected pixels on each side."""
    size = images.shape[1]
    index = torch.arange(-PAD, size + PAD, device=images.device).abs()
    index = torch.where(index < size, index, 2 * (size - 1) - index)
    return images[:, index][:, :, index]


def crop(padded: Tensor, index: Tensor, offset: Tensor, flip: Tensor) -> Tensor:
    """The images `index`, each cut at its own offset (row, column) and mirrored where `flip` is 1, in one gather."""
    span = torch.arange(padded.shape[1] - 2 * PAD, device=padded.device)
    rows = offset[:, :1] + span
    columns = offset[:, 1:] + torch.where(flip[:, None] == 1, span.flip(0), span)
    return padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]


def network(name: str, classes: int, side: int) -> nn.Module:
    """Build a model of the registry, or `vit`: 6 layers of width 192 over 8 x 8 patches."""
    if name == "vit":
        transformer = torchvision_models().VisionTransformer
        return transformer(side, side // 8, num_layers=6, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=classes)
    stem: Literal["cifar", "imagenet"] = "cifar" if side < SMALL and name not in OURS else "imagenet"
    return build(Model(name, stem=stem), classes, side=side)


def optimizer_for(model: nn.Module, name: str, lr: float) -> torch.optim.Optimizer:
    """Return AdamW for a transformer, otherwise SGD with momentum."""
    if name.startswith("vit"):
        return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=5e-4)


class Epoch:
    """Images and labels of one epoch, shuffled, cut and mirrored, in memory of its own: a step only takes its part."""

    PIECE = 5000
    """Images that are cut at once."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.padded, self.all_labels = reflect(images), labels
        self.images, self.labels = torch.empty_like(images), torch.empty_like(labels)

    def draw(self, generator: torch.Generator) -> None:
        """Draw order, offsets and mirroring of the next epoch."""
        count, device = len(self.labels), self.labels.device
        order = torch.randperm(count, generator=generator).to(device)
        offsets = torch.randint(2 * PAD + 1, (count, 2), generator=generator).to(device)
        flips = torch.randint(2, (count,), generator=generator).to(device)
        for piece in (slice(start, start + self.PIECE) for start in range(0, count, self.PIECE)):
            self.images[piece] = crop(self.padded, order[piece], offsets[piece], flips[piece])
        torch.index_select(self.all_labels, 0, order, out=self.labels)


def saved_bytes(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that plain autograd saves for a loss, each storage once, without weights."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept[address] = tensor  # alive until the end, so that no address comes again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, channels_last: bool) -> float:
    """Per cent of the images that the model gets right."""
    model.eval()
    torch.backends.cudnn.benchmark = False  # trying algorithms for ten batches takes longer than they do
    right = torch.zeros((), dtype=torch.long, device=labels.device)
    for x, y in zip(images.split(1000), labels.split(1000), strict=True):
        right += (model(normalise(x, channels_last)).argmax(1) == y).sum()
    model.train()
    return 100 * right.item() / len(labels)


def train(job: Job) -> dict[str, Any]:
    """One run; returns its row of the table."""
    device, batch, epochs, last = job["device"], job["batch"], job["epochs"], job["channels_last"]
    # Under bf16 cuDNN's own choice is about as good; runs that try algorithms side by side would disturb each other.
    torch.backends.cudnn.benchmark = job["precision"] == "fp32"
    torch.set_float32_matmul_precision("high")
    images, labels = load(job["data"], "train", job["limit"], device)
    tests, test_labels = load(job["data"], "test", job["limit"], device)
    drawn = Epoch(images, labels)
    data_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0

    torch.manual_seed(job["seed"])
    model = network(job["model"], int(labels.max()) + 1, tests.shape[1]).to(device)
    if last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = optimizer_for(model, job["model"], job["lr"])
    steps = len(labels) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, job["lr"], total_steps=max(2, epochs * steps), pct_start=0.3, cycle_momentum=False
    )
    handle = attach_method(job["method"], model, optimizer)
    ratios, seconds, loss_mean = Ratios(handle), [], float("nan")
    # On the CPU and apart from the model's: a method can neither use nor move it.
    generator = torch.Generator().manual_seed(1000 + job["seed"])

    def loss_of(x: Tensor, y: Tensor, half: bool = job["precision"] == "bf16") -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=half):
            return nn.functional.cross_entropy(model(x), y)

    for epoch in range(epochs):
        start = time.perf_counter()
        drawn.draw(generator)
        total = torch.zeros((), device=device)
        for step in range(steps):
            part = slice(step * batch, (step + 1) * batch)
            loss = loss_of(normalise(drawn.images[part], last), drawn.labels[part])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.detach()
            if device == "cuda" and epoch == 0 and step == 2:
                torch.cuda.reset_peak_memory_stats()  # cuDNN has tried its algorithms
        loss_mean = total.item() / steps
        seconds.append(time.perf_counter() - start)
        ratio = ratios.take()
        print(f"epoch {epoch + 1}: train loss {loss_mean:.4f}, ratio {ratio:.2f}, {seconds[-1]:.1f} s", flush=True)

    peak = peak_bytes(torch.device(device)) - data_bytes
    result = accuracy(model, tests, test_labels, last)
    write_history(handle, job)

    def batch_loss(*half: bool) -> Tensor:
        torch.manual_seed(0)  # the same dropout each time
        return loss_of(normalise(images[:batch], last), labels[:batch], *half)

    def gradient() -> Tensor:
        model.zero_grad()
        batch_loss().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    error = gradient_error(handle, gradient)  # detaches
    fp32_bytes = saved_bytes(model, lambda: batch_loss(False))
    held_bytes = ratios.columns["packed_bytes"] or saved_bytes(model, batch_loss)
    rate = steps / statistics.median(seconds)
    print(f"accuracy {result:.2f}, ratio {ratios.row()['ratio']:.2f}, {rate:.1f} steps/s", flush=True)
    return {
        "method": job["method"],
        "policy": repr(handle.policy) if handle else "",
        "seed": job["seed"],
        **{name: job[name] for name in SETTINGS},
        "accuracy": round(result, 3),
        "train_loss": round(loss_mean, 5),
        **ratios.row(),
        "ratio_fp32": round(fp32_bytes / held_bytes, 3),
        **error,
        "peak_bytes": peak,
        "seconds": round(sum(seconds), 2),
        "steps_per_s": round(rate, 2),
        **origin(device),
    }


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="resnet18", help="a model of `encke train`, or vit (a small one)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2, help="the largest learning rate of the cycle")
    parser.add_argument("--limit", type=int, default=0, help="train and test with the first LIMIT images only")
    parser.add_argument("--channels-last", action=argparse.BooleanOptionalAction, default=True)
    return conduct(parser, train, SETTINGS, prepare, metric="accuracy")


if __name__ == "__main__":
    sys.exit(main())
