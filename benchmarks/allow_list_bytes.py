"""Bytes that the table of needs costs: operations that it does not list are kept exactly.

Each model trains a few steps twice, once as it is and once as if every operation that the table does not list were
listed as linear. No list of exceptions could hold less. Bytes are those that `report()` counts in the last step.

python3 benchmarks/allow_list_bytes.py [MODEL ...] [--policy default aggressive] [--steps 4] [--csv FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.capture import needs  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402


def images(name: str, batch: int, size: int, **settings: Any) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a model of torchvision and its loss on random images."""
    data, labels = torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))
    model = getattr(torchvision_models(), name)(**settings)
    return model, lambda model: nn.functional.cross_entropy(model(data), labels)


def llama() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    """Return a Llama of transformers with four layers, and its loss on random tokens."""
    torchvision_models()  # where torchvision is built for another torch, transformers needs this
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, num_key_value_heads=4, use_cache=False, **settings))
    tokens = torch.randint(4096, (4, 256))
    return model, lambda model: model(tokens, labels=tokens).loss


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {
    "resnet50": lambda: images("resnet50", 16, 96),
    "vit_b_16": lambda: images("vit_b_16", 4, 96, image_size=96),
    "llama": llama,
}


@contextmanager
def everything_listed() -> Iterator[set[str]]:
    """Take every reader that is not listed for a linear one; give the set of those that were met."""
    listed, met = needs.listed_need, set()

    def permissive(operation: str, slot: str, node_class: type | None = None) -> Any:
        need = listed(operation, slot, node_class)
        if need is None:
            met.add(f"{operation}.{slot}")
        return need or "linear"

    needs.listed_need = permissive  # type: ignore[assignment]
    try:
        yield met
    finally:
        needs.listed_need = listed


def held(name: str, policy: str, steps: int) -> tuple[int, int]:
    """Train; return the bytes saved and the bytes held in the last step."""
    torch.manual_seed(0)
    model, loss_of = MODELS[name]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    with encke.attach(model, policy, optimizer) as handle:
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        report = handle.report()
    return report.saved_bytes, report.packed_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS], metavar="MODEL")
    parser.add_argument("--policy", nargs="+", default=["default", "aggressive"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.models or MODELS:
        for policy in options.policy:
            saved, listed = held(name, policy, options.steps)
            with everything_listed() as met:
                _, least = held(name, policy, options.steps)
            rows.append({
                "model": name, "policy": policy, "saved_bytes": saved, "held_bytes": listed,
                "held_bytes_everything_listed": least, "growth_percent": round(100 * (listed / least - 1), 2),
                "not_listed": " ".join(sorted(met)),
            })  # fmt: skip
            print(rows[-1], flush=True)
    if options.csv:
        write_csv(options.csv, rows)


if __name__ == "__main__":
    main()
