"""Cost of the training program beside a loop written by hand: ResNet-18 on images like CIFAR-10's, the same policy.

python3 benchmarks/train_loop.py --epochs 4 --csv benchmarks/results/train_loop_h200.csv

The images are noise in CIFAR-10's python format: time does not depend on what they show. Both train by the recipe
resnet18-cifar10 with validation after every epoch; the first epoch is left out.
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.registry import build  # noqa: E402
from encke.train.settings import Model  # noqa: E402

BATCH = 256


def write_cifar(folder: Path) -> None:
    """Write 50,000 and 10,000 images of noise as CIFAR-10's pickles."""
    random = np.random.default_rng(0)
    names = {"batches.meta": None, **{f"data_batch_{i}": 10_000 for i in range(1, 6)}, "test_batch": 10_000}
    for name, count in names.items():
        content: dict[bytes, object] = {b"label_names": [f"class {i}".encode() for i in range(10)]}
        if count:
            labels = random.integers(0, 10, count).tolist()
            content = {b"data": random.integers(0, 256, (count, 3072), dtype=np.uint8), b"labels": labels}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def load(folder: Path, names: list[str], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
    images = torch.from_numpy(np.concatenate([part[b"data"] for part in parts])).view(-1, 3, 32, 32)
    return images.to(device), torch.tensor([label for part in parts for label in part[b"labels"]], device=device)


def by_hand(folder: Path, epochs: int, policy: str, device: str) -> float:
    """Return the seconds of an epoch of a plain loop, with crops and flips on the device, without the first one."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    images, labels = load(folder, [f"data_batch_{i}" for i in range(1, 6)], device)
    held_images, held_labels = load(folder, ["test_batch"], device)
    model = build(Model("resnet18", stem="cifar"), 10).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, fused=device == "cuda")
    steps = len(labels) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps)
    if policy != "none":
        encke.attach(model, optimizer=optimizer)
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.2470, 0.2435, 0.2616], device=device).view(1, 3, 1, 1)
    rows = torch.arange(32, device=device)
    begin = 0.0
    for epoch in range(epochs):
        if epoch == 1:
            synchronize(device)
            begin = time.perf_counter()
        order = torch.randperm(len(labels), device=device)
        losses = []
        for step in range(steps):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            x = F.pad((images[chosen].float() / 255 - mean) / std, (4, 4, 4, 4))
            top, left = torch.randint(9, (2, BATCH, 1), device=device)
            mirrored = torch.where(torch.rand(BATCH, 1, device=device) < 0.5, rows, 31 - rows)
            x = x.gather(2, (top + rows).view(BATCH, 1, 32, 1).expand(-1, 3, -1, 40))
            x = x.gather(3, (left + mirrored).view(BATCH, 1, 1, 32).expand(-1, 3, 32, -1))
            loss = F.cross_entropy(model(x), labels[chosen])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        torch.stack(losses).mean().item()
        model.eval()
        with torch.no_grad():
            parts = zip(held_images.split(BATCH), held_labels.split(BATCH), strict=True)
            right = sum((model((x.float() / 255 - mean) / std).argmax(1) == y).sum() for x, y in parts)
        int(right)
        model.train()
    synchronize(device)
    return (time.perf_counter() - begin) / (epochs - 1)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def by_recipe(folder: Path, epochs: int, policy: str, device: str, out: Path) -> float:
    """Return the seconds of an epoch of `encke train resnet18-cifar10`, without the first one."""
    words = ["train", "resnet18-cifar10", "--data.path", str(folder), "--epochs", str(epochs), "--policy", policy]
    words += ["--device", device, "--out", str(out), "--overwrite", "--data.augment", "crop"]
    subprocess.run([sys.executable, "-m", "encke", *words], check=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    ends = [line["seconds"] for line in lines if line["event"] == "epoch"]
    return (ends[-1] - ends[0]) / (epochs - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--csv", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "cifar-10-batches-py"
        folder.mkdir()
        write_cifar(folder)
        for number in range(options.rounds):
            for policy in ("none", "default"):
                hand = by_hand(folder, options.epochs, policy, device)
                recipe = by_recipe(folder, options.epochs, policy, device, Path(temporary) / "run")
                rows.append({"round": number, "policy": policy, "by_hand_s": hand, "recipe_s": recipe})
                print(
                    f"{policy}: by hand {hand:.2f} s an epoch, recipe {recipe:.2f} s, {recipe / hand:.3f}x", flush=True
                )
                write_csv(options.csv, [{**row, "ratio": row["recipe_s"] / row["by_hand_s"]} for row in rows])


if __name__ == "__main__":
    main()
