"""Two real gloo processes: DistributedDataParallel, attached outside or inside, gives plain autograd's gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import copy, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import halley
from tests.models import resnet
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model, _ = resnet()
plain = DDP(copy.deepcopy(model))
outside, inside = DDP(copy.deepcopy(model)), copy.deepcopy(model)
exact = halley.policies.Fixed(halley.codecs.ErrorBounded(0))
handle = halley.attach(outside, exact)
halley.attach(inside, exact)
inside = DDP(inside)
for step in range(3):
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(10 * step + rank))
    grads = []
    for m in (plain, outside, inside):
        m.zero_grad()
        m(x).square().mean().backward()
        grads.append([p.grad.clone() for p in m.parameters()])
    for a, b, c in zip(*grads, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
assert not any(row.layer.startswith("module") for row in handle.report().layers)
m = copy.deepcopy(model)
halley.attach(m, halley.policies.Fixed(halley.codecs.GroupQuant(bits=2)))
x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(5))
m(x).sum().backward()
mine = m[0].weight.grad
other = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(other, mine)
# The same data, seed and step: only the rank makes the rounding differ, so that averaging over ranks helps.
assert not torch.equal(other[0], other[1])
print("ok", flush=True)
dist.barrier()
# gloo's threads sometimes abort an ordinary exit, after everything is done.
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=root)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("ok") == 2
