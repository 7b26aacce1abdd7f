"""README's table: time and memory of a training step, plain, with the default policy and an error bound.

python3 benchmarks/readme_table.py [--rounds 3] [--csv benchmarks/results/readme_h200.csv]
python3 benchmarks/readme_table.py --models efficientnet_b0 convnext_tiny densenet121 swin_t unet3d vit_b_16

ResNet-50, and a compiled Llama whose logits and loss are computed in chunks. With --models it measures those instead,
plain and default with bf16 at their usual batch, by default into benchmarks/results/models_h200.csv. The methods of a
table take turns, round by round, each in a process of its own that stays alive. Prints a Markdown table of medians over
the rounds; the CSV has every round. An interrupted call goes on when it is given again.
"""

from __future__ import annotations

from pathlib import Path

from step_table import Case, parser_for, run

RESULTS = Path("benchmarks/results")
CASES = (
    Case("resnet50", batch=256),
    Case("resnet50", batch=64),
    Case("resnet50", batch=256, compile=True),
    Case("resnet50", ("plain", "default", "bounded"), "fp32", 256),
    Case("llama", compile=True, chunked=True, tokens=4096),
)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--models", nargs="+", help="measure these instead, plain and default, at their usual batch")
    args = parser.parse_args()
    args.csv = args.csv or RESULTS / ("models_h200.csv" if args.models else "readme_h200.csv")
    run([Case(model) for model in args.models] if args.models else CASES, args)


if __name__ == "__main__":
    main()
