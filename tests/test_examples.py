"""The programs in examples/ run in small: the loss falls and memory is saved."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.common import needs

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
ARGUMENTS = {
    "ddp.py": "--steps 8 --batch 16",
    "diffusion_unet.py": "--steps 6 --batch 4 --size 16 --width 16",
    "fsdp2.py": "--steps 8 --batch 4 --width 64 --layers 1",
    "graph_network.py": "--steps 8 --nodes 500 --width 64",
    "lightning_trainer.py": "--epochs 1 --samples 256 --batch 32",
    "plain_loop.py": "--steps 8 --batch 32",
    "quickstart.ipynb": "",
    "segmentation_unet.py": "--steps 8 --batch 4 --size 32 --width 8",
    "sft_lora.py": "--steps 8 --batch 4 --width 64 --layers 1 --dora",
    "transformers_trainer.py": "--steps 8 --batch 4 --width 64 --layers 1",
}
"""Settings that make each example small."""
TWO_PROCESSES = {"ddp.py", "fsdp2.py"}
LONG = {"diffusion_unet.py", "fsdp2.py"}
"""Run at length. tests/integration/test_distributed.py trains sharded models in two processes."""
LEAST_RATIO = {"graph_network.py": 1.2, "sft_lora.py": 2.5}
"""Smallest ratio that counts, where it is below 3: inputs of a maximum stay exact, and LoRA saves little."""
RUN_AND_LEAVE = """
import os, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)  # gloo's threads sometimes abort an ordinary exit (docs/troubleshooting.md)
"""
"""Program that runs an example, in which an error is still one."""
LIBRARIES = {"diffusers", "lightning", "peft", "torch_geometric", "transformers", "trl"}


def source_of(name: str) -> str:
    """Return the program; of a notebook the code cells, with fewer steps."""
    text = (EXAMPLES / name).read_text()
    if not name.endswith(".ipynb"):
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    code = "\n\n".join("".join(cell["source"]) for cell in cells)
    return code.replace("STEPS, BATCH = 30, 64", "STEPS, BATCH = 8, 16")


def libraries_of(source: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[0] for module in modules} & LIBRARIES


def test_every_example_is_run_and_listed() -> None:
    found = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    listed = set(re.findall(r"\]\((\w+\.(?:py|ipynb))\)", (EXAMPLES / "README.md").read_text()))
    assert found == set(ARGUMENTS) == listed


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in ARGUMENTS])
def test_example(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], one_thread: None
) -> None:
    source, program = source_of(name), tmp_path / Path(name).with_suffix(".py").name
    program.write_text(source)
    needs(*libraries_of(source))
    monkeypatch.chdir(tmp_path)
    if name in TWO_PROCESSES:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        runner = tmp_path / "run_and_leave.py"
        runner.write_text(RUN_AND_LEAVE)
        subprocess.run([*launch, runner, program, *ARGUMENTS[name].split()], env=env, timeout=600, check=True)
    else:
        # In this process: importing the libraries takes longer than the examples.
        monkeypatch.setattr(sys, "argv", [str(program), *ARGUMENTS[name].split()])
        runpy.run_path(str(program), run_name="__main__")
    printed = capfd.readouterr().out
    last = re.search(r"loss ([\d.]+) -> ([\d.]+), ratio ([\d.]+)\s*$", printed)
    assert last is not None, printed[-1000:]
    before, after, ratio = map(float, last.groups())
    assert after < before and ratio > LEAST_RATIO.get(name, 3)
    if name == "quickstart.ipynb":
        assert "bound 0 equals plain: True" in printed
