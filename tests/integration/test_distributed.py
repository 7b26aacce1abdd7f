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
import encke
from tests.models import resnet
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model, _ = resnet()
plain = DDP(copy.deepcopy(model))
outside, inside = DDP(copy.deepcopy(model)), copy.deepcopy(model)
exact = encke.policies.Fixed(encke.codecs.ErrorBounded(0))
handle = encke.attach(outside, exact)
encke.attach(inside, exact)
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
assert not any(row.layer.startswith("module") for row in handle.report().sites)
m = copy.deepcopy(model)
encke.attach(m, encke.policies.Fixed(encke.codecs.GroupQuant(bits=2)))
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


COMET = """
import copy, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import encke
from tests.policies.comet.trainings import WEIGHTS, net
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.set_num_threads(1)

def train(rounding, order, given):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9)
    policy = encke.policies.Comet(0.1 if rounding == "stochastic" else None, every=4, rounding=rounding)
    if order == "attach first":
        handle = encke.attach(model, policy, optimizer if given else None)
        model = DDP(model)
    else:
        model = DDP(model)
        handle = encke.attach(model, policy, optimizer if given else None)
    for step in range(14):
        # Different data, and much larger on the second rank.
        x = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + 2 * rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), torch.arange(32) % 10)
        if step == 7 and rank == 1:
            loss = loss * float("inf")
        loss.backward()
        if step == 7:
            # The sum over ranks is not finite anywhere: all leave this step out.
            for p in model.parameters():
                p.grad.zero_()
        optimizer.step()
    return model, handle

for rounding in ("stochastic", "nearest"):
    for given in (True, False):
        found = []
        for order in ("attach first", "DDP first"):
            model, handle = train(rounding, order, given)
            decided = handle.policy.decisions()
            everyone = [None, None]
            dist.all_gather_object(everyone, (decided["settings"], decided["history"], decided["turn"]))
            assert everyone[0] == everyone[1] and len(decided["settings"]) == 5, (rounding, given, order)
            rows = [row for row in handle.history if "predicted" in row]
            assert {row["layer"] for row in rows} == set(WEIGHTS)
            steps = sorted({row["step"] for row in rows})
            assert steps == [4, 9, 12] if given else steps[0] == 4 and steps[-1] == 12, steps
            # The average over two ranks halves the error's variance; without the optimizer gradients are a rank's own.
            sigma = 0.1 if rounding == "stochastic" else 0.01
            for row in rows:
                ratio = row["tolerated"] / (sigma * row["momentum"])
                assert abs(ratio / (2**0.5 if given else 1.0) - 1) < 1e-3, (row["layer"], row["step"], ratio)
            found.append(rows)
            for p in model.parameters():
                other = [torch.empty_like(p) for _ in range(2)]
                dist.all_gather(other, p.detach())
                assert torch.equal(other[0], other[1])
        # Whichever way round: the same decisions.
        assert found[0] == found[1], (rounding, given)
print("ok", flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("worker", [WORKER, COMET], ids=["gradients", "comet"])
def test_two_processes(worker: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(worker)
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=root)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.count("ok") == 2
