"""Time and memory of a transformer's training step: plain, default, checkpointing, both, and the compiler's budget.

python3 benchmarks/transformer_table.py [--together 6] [--csv benchmarks/results/transformers_h200.csv]
python3 benchmarks/transformer_table.py --models llama_small --tokens 128 --rounds 1      # a quick run on any machine

Llama (12 layers of width 1024, vocabulary 32,000) on 4 x 4096 tokens and BERT base on 32 x 512, both of transformers,
and ViT-B/16 of torchvision on 128 images, with bf16 autocast. With "chunked loss" every method computes logits and loss
in chunks (encke.integrations.chunk_loss), plain too; a compiled model is then compiled up to the output layer. The
methods of a table take turns, round by round. Prints a Markdown table of medians; the CSV has every round. A method
that fails is a row that says why. An interrupted call goes on when it is given again.
"""

from __future__ import annotations

from pathlib import Path

from step_table import Case, parser_for, run

LENGTHS = {"llama": 4096, "bert": 512}


def cases(model: str) -> list[Case]:
    """Return the cases of a model."""
    length = LENGTHS.get(model)
    if not model.startswith("llama"):
        return [Case(model, chunked=length is not None, tokens=length, compile=compiled) for compiled in (False, True)]
    eager = ("plain", "checkpoint", "default", "checkpoint-packed")
    return [
        Case(model, eager, chunked=True, tokens=length),
        Case(model, tokens=length),
        Case(model, ("plain", "budget30", "default"), compile=True, chunked=True, tokens=length),
    ]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", default=["llama", "bert", "vit_b_16"])
    args = parser.parse_args()
    args.csv = args.csv or Path("benchmarks/results/transformers_h200.csv")
    run([case for model in args.models for case in cases(model)], args)


if __name__ == "__main__":
    main()
