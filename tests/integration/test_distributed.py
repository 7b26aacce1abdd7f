"""Two real gloo processes, data parallel (DDP) or sharded (FSDP2), attached first or last, train as plain ones do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = """
import os, runpy, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.set_num_threads(1)
for part in sys.argv[1:]:
    runpy.run_path(part)
    print(os.path.basename(part), flush=True)
dist.barrier()
# gloo's threads sometimes abort an ordinary exit, after everything is done.
os._exit(0)
"""
"""Runs every part in the same two processes: starting them takes longer than a part."""


GRADIENTS = """
import copy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import encke
from tests.models import resnet
rank = dist.get_rank()
torch.manual_seed(0)
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
"""


COMET = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import encke
from tests.policies.comet.trainings import WEIGHTS, net
rank = dist.get_rank()

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
            assert steps == [1, 4, 9, 12] if given else steps[:2] == [1, 4] and steps[-1] == 12, steps
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
"""


SHARDED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import encke
from encke.codecs import ErrorBounded, GroupQuant
from encke.policies import Comet, Fixed
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
FORMS = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "whole": {"reshard_after_forward": False},
}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

def train(form, policy=None, attach_first=False, steps=3):
    torch.manual_seed(0)
    # The head's seven rows are shared unevenly: four and three.
    model = nn.Sequential(nn.Linear(64, 64), Block(), nn.LayerNorm(64), Block(), nn.Linear(64, 7))
    if policy is not None and attach_first:
        handle = encke.attach(model, policy)
    for module in (model[1], model[3], model):
        fully_shard(module, mesh=mesh, **FORMS[form])
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    if policy is not None and not attach_first:
        handle = encke.attach(model, policy, optimizer)
    gradients = []
    for step in range(steps):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        gradients += [p.grad.to_local().clone() for p in model.parameters()] + [x.grad]
        optimizer.step()
    return gradients, (handle if policy is not None else None), model, optimizer

def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

ORDERS = {"fp32": (True, False), "bf16": (True,), "whole": (False,)}
for form, orders in ORDERS.items():
    plain = train(form)[0]
    for attach_first in orders:
        assert same(plain, train(form, Fixed(ErrorBounded(0)), attach_first)[0]), (form, attach_first)
        handle = train(form, Fixed(GroupQuant(bits=2)), attach_first, steps=2)[1]
        packed = [row for row in handle.report().sites if row.codec != "kept"]
        assert len(packed) > 6 and not any(row.slot in ("mat2", "weight") for row in packed), handle.report()
        if form == "fp32":
            handle, model, optimizer = train(form, Comet(every=2), attach_first, steps=6)[1:]
            everyone = [None, None]
            dist.all_gather_object(everyone, handle.policy.decisions())
            assert everyone[0] == everyone[1]
            rows = [row for row in handle.history if "predicted" in row]
            assert {row["layer"] for row in rows} >= {"1.up", "1.down", "3.up", "3.down"}, rows
            if not attach_first:
                # After the last step the buffers are still those that the last decision was made with.
                for row in [row for row in rows if row["step"] == 6]:
                    weight = model.get_submodule(row["layer"]).weight
                    # The average of six gradients is larger than that of many will be.
                    seen = (0.9**5 * 0.1 + 1 - 0.9**5) / (1 - 0.9**6)
                    momentum = optimizer.state[weight]["momentum_buffer"].full_tensor().abs().mean().item() / seen
                    assert abs(row["momentum"] / momentum - 1) < 1e-5, (row, momentum)
"""


PARTS = {"gradients": GRADIENTS, "comet": COMET, "sharded": SHARDED}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder, root = tmp_path_factory.mktemp("parts"), Path(__file__).parents[2]
    for name, script in {"run": RUN, **PARTS}.items():
        (folder / name).write_text(script)
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(folder / name) for name in ("run", *PARTS)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=root)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_two_processes(part: str, ended: subprocess.CompletedProcess[str]) -> None:
    """A part that fails ends the processes, and those after it fail, too."""
    # Lines of the two may run into each other.
    assert ended.stdout.count(part) == 2, ended.stderr[-2000:]
