"""Inductor calls our functions: the same gradients, no dispatcher between, memory that it may call aligned."""

from __future__ import annotations

import functools
import re
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import encke
from encke.compiled import lowerings, rewrites
from encke.compiled.names import value
from tests.compiled.common import (
    TWO,
    compile,
    constant_codecs,
    error,
    gradients,
    images,
    net,
    rewrite_everywhere,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_compiler = pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"
)
pytestmark = [needs_compiler, pytest.mark.slow]
CALLED = {
    "run time": ("site_pack", "packed_decode", "packed_norm_sums", "packed_norm_apply"),
    "constant": ("site_encode", "site_decode", "norm_sums", "norm_apply"),
}


def model() -> nn.Module:
    return net().to(DEVICE, memory_format=torch.channels_last)


def code_and_gradients(**options: object) -> tuple[str, list[Tensor]]:
    compiled = compile(model(), backend="inductor", **options)
    encke.attach(compiled, TWO)
    x = images().to(DEVICE, memory_format=torch.channels_last)
    with torch._inductor.config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(lambda: gradients(compiled, x))
    return "\n".join(codes), found


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowerings, "DIRECT_ON", {"cuda", "cpu"})
    rewrite_everywhere(monkeypatch)


@pytest.mark.parametrize(
    ("dynamic", "codecs"),
    [(True, "run time"), *(pytest.param(False, codecs, marks=pytest.mark.soak) for codecs in ("run time", "constant"))],
)
def test_functions_take_the_place_of_operators(everywhere: None, monkeypatch, dynamic: bool, codecs: str) -> None:
    if codecs == "constant":
        constant_codecs(monkeypatch)
    reference = compile(model())
    encke.attach(reference, TWO)
    expected = gradients(reference, images().to(DEVICE, memory_format=torch.channels_last))
    torch._dynamo.reset()
    code, found = code_and_gradients(dynamic=dynamic)
    assert error(expected, found) < 1e-3
    for name in (*CALLED[codecs], "conv_input_grad"):
        assert f"extern_kernels.encke_{name}(" in code and f"torch.ops.encke.{name}.default(" not in code
    # The gradient that a batch norm reads twice is stored once.
    norms = [reads(line) for line in code.splitlines() if re.search(r"extern_kernels\.encke_(packed_)?norm", line)]
    assert len(norms) == 4 and norms[0] == norms[1] and norms[2] == norms[3]


def reads(line: str) -> str:
    """The first argument of a call."""
    return line.partition("extern_kernels.")[2].partition("(")[2].partition(",")[0]


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return self.net(x)


def half_step(dynamic: bool) -> tuple[str, list[Tensor], list[Tensor]]:
    """Return the code of the forward graph in half precision, gradients and running statistics."""
    made, x = Half(), images().to(DEVICE, memory_format=torch.channels_last)
    compiled = compile(made, backend="inductor", dynamic=dynamic)
    encke.attach(compiled, TWO)
    with torch._inductor.config.patch(force_disable_caches=True):
        gradient, codes = run_and_get_code(lambda: gradients(compiled, x))
    torch._dynamo.reset()
    return codes[0], gradient, [t.float() for t in made.buffers()]


@functools.cache
def half_step_without_statistics() -> tuple[str, list[Tensor], list[Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewrites, "fuses_encoder", lambda *settings: False)
        return half_step(dynamic=False)


# Two more graphs for the C++ compiler. tests/compiled/test_rewrites.py tests the statistics without it.
@pytest.mark.soak
@pytest.mark.parametrize("dynamic", [True, False])
def test_statistics_come_from_encoders(everywhere: None, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    plain_code, plain_gradients, plain_statistics = half_step_without_statistics()
    distances: list[int] = []
    update = rewrites.update_early

    def spy(graph: torch.fx.Graph) -> None:
        update(graph)
        order = {node: i for i, node in enumerate(graph.nodes)}
        copies = [node for node in order if node.target == torch.ops.aten.copy_.default]
        distances.extend(order[node] - order[node.args[1]] for node in copies if value(node).dim() == 1)

    monkeypatch.setattr(rewrites, "update_early", spy)
    code, found, statistics = half_step(dynamic)
    assert error(found, plain_gradients) < 1e-2 and error(statistics, plain_statistics) < 1e-4
    assert code.count("extern_kernels.encke_site_pack_moments(") == 2
    assert "torch.ops.encke.site_pack_moments.default(" not in code
    # Running statistics are written where they are computed.
    assert distances == [1] * 4
    # What is packed and read by a convolution is stored once.
    called = [line for line in code.splitlines() if "extern_kernels." in line]
    encoded = [reads(line) for line in called if "encke_site_pack(" in line]
    assert (
        len(encoded) == 1 and encoded == [reads(line) for line in called if "extern_kernels.convolution(" in line][:1]
    )
    assert code.count("extern_kernels.encke_site_pack_norm_relu(") == 1
    assert "welford" in plain_code and "welford" not in code


@pytest.mark.soak
def test_operators_are_called_where_functions_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowerings, "DIRECT_ON", set())
    code, _ = code_and_gradients()
    assert "extern_kernels.encke_" not in code and "torch.ops.encke.packed_decode.default(" in code


def test_what_has_gaps_is_left_to_operators() -> None:
    x = torch.empty(4, 6, 8)
    assert all(map(lowerings.without_gaps, (x, x.transpose(0, 2), x[:1])))
    assert not any(map(lowerings.without_gaps, (x[:, :, ::2], x[:, :3], x[:1].expand(4, 6, 8))))
