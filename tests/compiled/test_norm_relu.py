"""Encoders of ReLU's results compute batch norm's last step and ReLU."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton.jit when the kernels are imported

import encke
from encke.compiled import ops, writer
from encke.compiled.model import CompiledModel
from encke.compiled.names import name_of
from encke.kernels import GroupFormat
from encke.kernels.reference import group_plan
from tests.compiled.common import (
    LAST,
    TWO,
    as_inductor_gets_it,
    compile,
    constant_codecs,
    gradients,
    images,
    rewrite_everywhere,
    same,
)


class Blocks(nn.Module):
    """Residual blocks in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 1)
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(5))
        for norm in self.norms:
            nn.init.uniform_(norm.weight), nn.init.normal_(norm.bias)

    def body(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(x)) + self.norms[1](self.short(x)))
        y = torch.relu(self.norms[2](self.convs[0](x)))
        x = torch.relu(x + self.norms[3](self.convs[1](y)))
        return self.norms[4](self.convs[2](x))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.body(x)


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """Forward graphs as they are compiled; rewritten on this device too."""
    rewrite_everywhere(monkeypatch)
    found: list[Graph] = []
    inline = CompiledModel.inline

    def watched(self: CompiledModel, module: torch.fx.GraphModule, *rest: object) -> None:
        inline(self, module, *rest)
        found.append(module.graph)

    monkeypatch.setattr(CompiledModel, "inline", watched)
    return found


def calls(graph: Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if name_of(node.target) == name]


@pytest.mark.slow
@pytest.mark.parametrize("constant", [False, True])
def test_encoders_normalise_and_rectify(forward: list[Graph], monkeypatch: pytest.MonkeyPatch, constant: bool) -> None:
    if constant:
        constant_codecs(monkeypatch)
    x, found = images().to(memory_format=LAST), []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(writer, "find_norm_relu", lambda relu: None)
        torch.manual_seed(1)
        compiled = compile(Blocks().to(memory_format=LAST), backend=as_inductor_gets_it)
        handle = encke.attach(compiled, TWO)
        found.append(gradients(compiled, x))
        found[-1] += [torch.tensor([row.packed_bytes for row in handle.report().sites])]
        torch._dynamo.reset()
    # On a CPU the operators are what they stand for: the same bits.
    assert same(*found)
    name = "site_encode_norm_relu" if constant else "site_pack_norm_relu"
    # Those of residual sums stay as they are.
    assert len(calls(forward[0], "relu")) == 2 and len(calls(forward[1], "relu")) == 3
    assert len(calls(forward[0], name)) == 1 and not calls(forward[1], name)


class Read(Blocks):
    """The normalised values have another reader."""

    def body(self, x: Tensor) -> Tensor:
        y = self.norms[0](self.first(x))
        return self.convs[0](torch.relu(y)) + y


class Bare(Blocks):
    """Batch norm without weight and bias."""

    def body(self, x: Tensor) -> Tensor:
        y = nn.functional.batch_norm(self.first(x), None, None, training=True)
        return self.convs[0](torch.relu(y))


class Leaky(Blocks):
    """Another activation."""

    def body(self, x: Tensor) -> Tensor:
        return self.convs[0](nn.functional.leaky_relu(self.norms[0](self.first(x))))


@pytest.mark.slow
@pytest.mark.parametrize("model", [Read, Bare, Leaky])
def test_other_graphs_stay_as_they_are(forward: list[Graph], model: Callable[[], nn.Module]) -> None:
    compiled = compile(model().to(memory_format=LAST), backend=as_inductor_gets_it)
    encke.attach(compiled, TWO)
    gradients(compiled, images().to(memory_format=LAST))
    assert forward and not calls(forward[0], "site_pack_norm_relu")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_compute_what_the_operator_stands_for() -> None:
    """On a GPU, else in Triton's interpreter."""
    plans = pytest.importorskip("encke.kernels.gpu.plans")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(4, 24, 15, 17).to(device, torch.bfloat16).contiguous(memory_format=LAST)
    norm = tuple(torch.rand(24, device=device) for _ in range(4))
    format = GroupFormat(2, 128, x.dtype, 24)
    plan = plans.group_plan(format, x.numel(), x.device)
    data, y = ops.encode_normalised(plan, x, norm, 7)
    torch.testing.assert_close(y, ops.norm_relu(x, norm), rtol=2**-6, atol=2**-8)
    assert y.stride() == x.stride() and torch.equal(data, plan.encode(y, 7))
    assert ops.encode_normalised(group_plan(format, x.numel(), x.device), x, norm, 7) is None
