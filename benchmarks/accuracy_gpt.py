"""Validation loss of a small GPT with compression: characters of a text file, bf16 autocast, each method beside plain.

python3 benchmarks/accuracy_gpt.py --data tinyshakespeare.txt --run plain:0-2 --run group2:0-2 --csv gpt.csv
python3 benchmarks/accuracy_gpt.py --summary gpt.csv --plot gpt.png

An interrupted call goes on when it is given again: runs that are in the CSV are not repeated. Prints each quantity
beside plain's, its difference with a 95 % interval, and the verdict by the rule of docs/evidence.md.

The ratio is to what plain autograd saves under bf16 autocast. Runs with the same seed are pairs: the same initial
weights, batches and dropout whatever the method.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from encke.report import peak_bytes  # noqa: E402
from encke.train.models.gpt import Gpt  # noqa: E402
from runs import Job, Ratios, attach_method, conduct, gradient_error, origin, parser_for, write_history  # noqa: E402

SETTINGS = ("iterations", "every", "batch", "context", "layers", "heads", "width", "dropout", "lr")


def prepare(data: str, folder: Path) -> str:
    """Return the path itself: the workers read the text."""
    return data


def load(path: str) -> tuple[Tensor, Tensor, int]:
    """The text as tokens, a character each: 90 % to train, the rest to validate; and the size of the vocabulary."""
    text = Path(path).read_text(encoding="utf-8")
    characters, tokens = np.unique(np.array(list(text)), return_inverse=True)
    split = len(tokens) * 9 // 10
    return torch.from_numpy(tokens[:split]), torch.from_numpy(tokens[split:]), len(characters)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices; none for biases and norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2]}]


def factor(iteration: int, iterations: int) -> float:
    """Return the factor of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    warm = min(100, iterations // 10)
    if iteration < warm:
        return (iteration + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (iteration - warm) / max(1, iterations - warm))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = model(x)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: nn.Module, tokens: Tensor, context: int, batch: int) -> float:
    """The mean loss over all windows of the text, side by side: the same ones each time."""
    model.eval()
    count = (len(tokens) - 1) // context
    inputs, targets = (tokens[i : i + count * context].view(count, context) for i in (0, 1))
    total = torch.zeros((), device=tokens.device)
    for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
        total += loss_of(model, x, y) * len(x)
    model.train()
    return total.item() / count


def train(job: Job) -> dict[str, Any]:
    """One run; returns its row of the table."""
    device, batch, context, iterations = job["device"], job["batch"], job["context"], job["iterations"]
    torch.set_float32_matmul_precision("high")
    tokens, held_out, vocab = load(job["data"])
    if len(held_out) <= context:
        raise ValueError(f"the text is too short: a tenth of it has {len(held_out)} characters, a window {context + 1}")
    tokens, held_out = tokens.to(device), held_out.to(device)
    # On the CPU and apart from the model's: a method can neither use nor move it.
    generator = torch.Generator().manual_seed(1000 + job["seed"])
    starts = torch.randint(len(tokens) - context, (iterations, batch), generator=generator).to(device)
    window = torch.arange(context + 1, device=device)

    torch.manual_seed(job["seed"])
    model = Gpt(vocab, context, job["layers"], job["heads"], job["width"], job["dropout"]).to(device)
    optimizer = torch.optim.AdamW(groups(model), job["lr"], betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: factor(i, iterations))
    handle = attach_method(job["method"], model, optimizer)
    ratios, rates, losses, seconds = Ratios(handle), [], [], 0.0

    since, start = 0, time.perf_counter()
    total = torch.zeros((), device=device)
    for iteration in range(1, iterations + 1):
        chunk = tokens[starts[iteration - 1, :, None] + window]
        loss = loss_of(model, chunk[:, :-1], chunk[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.detach()
        if iteration % job["every"] and iteration < iterations:
            continue
        train_loss = total.item() / (iteration - since)  # waits for the GPU
        elapsed = time.perf_counter() - start
        seconds += elapsed
        rates.append((iteration - since) * batch * context / elapsed)
        ratio = ratios.take()
        losses.append(validate(model, held_out, context, batch))
        print(
            f"iteration {iteration}: train loss {train_loss:.4f}, validation loss {losses[-1]:.4f}, "
            f"ratio {ratio:.2f}, {rates[-1]:.0f} tokens/s",
            flush=True,
        )
        total.zero_()
        since, start = iteration, time.perf_counter()

    write_history(handle, job)
    peak = peak_bytes(torch.device(device))
    chunk = tokens[starts[0, :, None] + window]

    def gradient() -> Tensor:
        torch.manual_seed(0)  # the same dropout each time
        model.zero_grad()
        loss_of(model, chunk[:, :-1], chunk[:, 1:]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    rate = statistics.median(rates)
    print(f"best loss {min(losses):.4f}, ratio {ratios.row()['ratio']:.2f}, {rate:.0f} tokens/s", flush=True)
    return {
        "method": job["method"],
        "policy": repr(handle.policy) if handle else "",
        "seed": job["seed"],
        **{name: job[name] for name in SETTINGS},
        "best_loss": round(min(losses), 5),
        "final_loss": round(losses[-1], 5),
        "train_loss": round(train_loss, 5),
        **ratios.row(),
        **gradient_error(handle, gradient),
        "peak_bytes": peak,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(rate),
        **origin(device),
    }


def main() -> int:
    parser = parser_for(__doc__)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--every", type=int, default=250, help="iterations from one validation to the next")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=1e-3)
    return conduct(parser, train, SETTINGS, prepare, metric="best_loss")


if __name__ == "__main__":
    sys.exit(main())
