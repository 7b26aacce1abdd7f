"""Bytes that small transformers hold between forward and backward on the CPU, site by site, and the gradient's error.

A model of transformers with random weights is trained for a few steps on random data with the default policy. The table
adds up the sites of all layers. For Llama it is followed by the four ways to save memory: keep everything, compress,
checkpoint every block, and both, where the blocks' inputs are packed with 8 bits. Copies of weights that autocast makes
are left out of all figures. The error is |g - plain| / |plain| over all parameters, for one batch and fixed weights.

python3 benchmarks/transformer_memory.py [llama bert vit] [--precision bf16 fp32] [--ways] [--csv FILE]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# CPUs with matrix units compute bf16 products in another order each time.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import encke  # noqa: E402
from encke.tools.provenance import write_csv  # noqa: E402
from encke.tools.units import size  # noqa: E402
from encke.train.models.vision import torchvision_models  # noqa: E402

STEPS, DRAWS, VOCABULARY = 13, 1, 2000
COPIES = "(copies of weights)"
Batch = dict[str, Tensor]


def build(name: str) -> tuple[nn.Module, Callable[[], Batch]]:
    """Return a model with 4 layers of width 512, without dropout, and a source of batches."""
    torchvision_models()  # declares what transformers needs of it
    import transformers

    torch.manual_seed(0)
    common: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    generator = torch.Generator().manual_seed(1)

    def tokens() -> Batch:
        drawn = torch.randint(VOCABULARY, (4, 256), generator=generator)
        return {"input_ids": drawn, "labels": drawn}

    def images() -> Batch:
        labels = torch.randint(10, (4,), generator=generator)
        return {"pixel_values": torch.randn(4, 3, 128, 128, generator=generator), "labels": labels}

    if name == "llama":
        config = transformers.LlamaConfig(**common, intermediate_size=1376, vocab_size=VOCABULARY)
        return transformers.LlamaForCausalLM(config).train(), tokens
    if name == "bert":
        config = transformers.BertConfig(**common, **off, intermediate_size=2048, vocab_size=VOCABULARY)
        return transformers.BertForMaskedLM(config).train(), tokens
    config = transformers.ViTConfig(
        **common, **off, intermediate_size=2048, image_size=128, patch_size=8, num_labels=10
    )
    return transformers.ViTForImageClassification(config).train(), images


class Measured:
    """One training: the report of its last step, and the gradient's error."""

    def __init__(self, name: str, precision: str, checkpoint: bool = False, policy: Any = "default") -> None:
        model, data = build(name)
        if checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def gradient(batch: Batch) -> Tensor:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**batch).loss
            loss.backward()
            return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

        handle = encke.attach(model, policy, optimizer=optimizer)
        for _ in range(STEPS):
            gradient(data())
            optimizer.step()
        batch = data()
        draws = [gradient(batch) for _ in range(DRAWS)]
        self.report = handle.report()
        handle.detach()
        exact = gradient(batch)
        self.error = float(sum((each - exact).norm() for each in draws) / DRAWS / exact.norm())
        rows = [row for row in self.report.sites if row.operation != COPIES]
        self.rows = rows
        self.saved, self.packed = sum(r.saved_bytes for r in rows), sum(r.packed_bytes for r in rows)

    def table(self) -> list[tuple[str, str, str, int, int]]:
        """Return (layer and site, codecs, number, bytes saved, bytes held), summed over layers of one name."""
        groups: dict[str, list[Any]] = {}
        for row in self.rows:
            layer = ".".join("*" if part.isdigit() else part for part in row.layer.split("."))
            site = f"{row.operation}.{row.slot}" if row.slot else row.operation
            groups.setdefault(f"{layer or '-'}  {site}", []).append(row)
        return [
            (
                name,
                ", ".join(sorted({" ".join(filter(None, (r.codec, r.bound))) for r in rows})),
                str(len(rows)),
                sum(r.saved_bytes for r in rows),
                sum(r.packed_bytes for r in rows),
            )
            for name, rows in groups.items()
        ]


def ways(name: str, precision: str) -> list[dict[str, str | float]]:
    """Return one row for each way to save memory."""
    compress = Measured(name, precision)
    checkpoint = Measured(name, precision, checkpoint=True)
    encke.register_reader("Checkpoint", "input", "smooth")
    both = Measured(name, precision, checkpoint=True)
    encke.register_reader("Checkpoint", "input", "exact")
    rows = [("keep", compress.saved, 0.0), ("compress", compress.packed, compress.error)]
    rows += [("checkpoint", checkpoint.saved, 0.0), ("both, inputs kept", checkpoint.packed, checkpoint.error)]
    rows += [("both, inputs packed", both.packed, both.error)]
    setting: dict[str, str | float] = {"model": name, "precision": precision}
    return [setting | {"way": way, "held_bytes": held, "error": round(error, 4)} for way, held, error in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["llama", "bert", "vit"])
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--ways", action="store_true", help="compare keep, compress, checkpoint and both instead")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, str | float]] = []
    for name in args.models:
        if name not in ("llama", "bert", "vit"):
            raise SystemExit(f"there is no model {name!r}: take llama, bert or vit")
        for precision in args.precision:
            if args.ways:
                rows += ways(name, precision)
                for row in rows[-5:]:
                    print(row, flush=True)
                continue
            measured = Measured(name, precision)
            print(f"\n{name}, {precision}: layer and site, codec, number, saved, held")
            for site, codecs, number, saved, packed in measured.table():
                print(f"  {site:64} {codecs:34} {number:>3} {size(saved):>9} {size(packed):>9}")
            row = {"model": name, "precision": precision, "saved_bytes": measured.saved, "held_bytes": measured.packed}
            row |= {"ratio": round(measured.saved / measured.packed, 2), "error": round(measured.error, 4)}
            print(row, flush=True)
            rows.append(row)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
