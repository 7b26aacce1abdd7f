"""Models, inputs and comparisons that the tests of compiled models share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

from encke.capture.sites import Site
from encke.codecs import Codec, GroupQuant
from encke.compiled import model as model_module
from encke.compiled import rewrites
from encke.policies import Fixed, Policy

LAST = torch.channels_last

TWO = Fixed(GroupQuant(bits=2))

EIGHT = Fixed(GroupQuant(bits=8))


class Settable(Policy):
    """Gives every site the codec of the day."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def choose(self, site: Site) -> Codec:
        return self.codec


def net(channels: int = 16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 10),
    )


class Wrapped(nn.Module):
    """A forward of its own: `nn.Sequential.compile()` compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def images(batch: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, 24, 24, generator=torch.Generator().manual_seed(seed))


def compile(model: nn.Module, **options: object) -> nn.Module:
    return torch.compile(model, **({"backend": "aot_eager", "fullgraph": True} | options))


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(2)
    model(*inputs).float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def error(a: list[Tensor], b: list[Tensor]) -> float:
    """The largest relative error, beside the largest gradient: a bias before batch norm has none of its own."""
    top = max(x.norm() for x in a)
    return max(float((x - y).norm() / (x.norm() + 0.01 * top)) for x, y in zip(a, b, strict=True))


def constant_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make codecs constants of graphs, as in CUDA graphs, on this device too."""
    monkeypatch.setattr(model_module, "needs_constant_sizes", lambda t: True)


def as_inductor_gets_it(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
    """Backend that decomposes and partitions graphs as inductor does, and runs them without compiling them."""
    from torch._inductor.decomposition import select_decomp_table

    def run(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        return make_boxed_func(graph.forward)

    partition = min_cut_rematerialization_partition
    return aot_autograd(fw_compiler=run, decompositions=select_decomp_table(), partition_fn=partition)(graph, inputs)


def rewrite_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite graphs on a CPU too, whatever the size of tensors."""
    monkeypatch.setattr(rewrites, "NORMS_ON", {"cuda", "cpu"})
    monkeypatch.setattr(rewrites, "FUSE_MIN_BYTES", 1)
    monkeypatch.setattr(rewrites, "SPLIT_CONV_MIN_BYTES", 1)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]
