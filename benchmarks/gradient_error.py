"""Error of compressed gradients after the first steps of a training, model by model.

A model from torchvision is trained for a few steps on synthetic images with the default policy. Then, for one batch and
fixed weights, the whole gradient is computed three times compressed and once plain. Unbiased errors are smaller by
sqrt(3) in the mean of three. For comparison: the difference to another batch's gradient.

python3 benchmarks/gradient_error.py [MODEL ...] [--batch 32] [--size 96] [--steps 13] [--csv FILE]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402

MODELS = (
    "resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "mnasnet1_0", "regnet_x_400mf",
    "densenet121", "shufflenet_v2_x1_0", "squeezenet1_1", "convnext_tiny",
)  # fmt: skip
CLASSES, DRAWS = 10, 3


def without_dropout(model: nn.Module) -> nn.Module:
    """Return the model without dropout and stochastic depth."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    return model


def measure(name: str, batch: int, size: int, steps: int) -> dict[str, str | float]:
    torch.manual_seed(0)
    model = without_dropout(torchvision_models().get_model(name, num_classes=CLASSES)).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    handle = encke.attach(model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)

    def data() -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, CLASSES, (batch,), generator=generator)
        images = torch.randn(batch, 3, size, size, generator=generator)
        return images + 0.2 * (labels.view(-1, 1, 1, 1) - (CLASSES - 1) / 2), labels

    def gradient(images: Tensor, labels: Tensor) -> Tensor:
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    fixed_batch = data()
    for _ in range(steps):
        gradient(*data())
        optimizer.step()
    draws = [gradient(*fixed_batch) for _ in range(DRAWS)]
    ratio = handle.report().ratio
    handle.detach()
    exact, other = gradient(*fixed_batch), gradient(*data())

    def error(gradients: Tensor) -> float:
        return round(float((gradients - exact).norm() / exact.norm()), 3)

    errors = [error(draw) for draw in draws]
    row: dict[str, str | float] = {"model": name, "batch": batch, "size": size, "steps": steps}
    row |= {
        "least_error": min(errors),
        "largest_error": max(errors),
        "error_of_mean": error(torch.stack(draws).mean(0)),
    }
    return row | {"another_batch": error(other), "ratio": round(ratio, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.models:
        rows.append(measure(name, args.batch, args.size, args.steps))
        print(rows[-1], flush=True)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
