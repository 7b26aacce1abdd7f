"""Inductor calls our functions: the same gradients, no dispatcher between, memory that it may call aligned."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import encke
from encke.compiled import lowerings, rewrites
from encke.compiled.names import value
from tests.compiled.common import TWO, compile, constant_codecs, error, gradients, images, net

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_compiler = pytest.mark.skipif(
    DEVICE == "cpu" and shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"
)
pytestmark = [needs_compiler, pytest.mark.slow]
CALLED = {
    "run time": ("site_pack", "packed_decode", "packed_gate", "packed_norm_sums", "packed_norm_apply"),
    "constant": ("site_encode", "site_decode", "site_gate", "norm_sums", "norm_apply"),
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
    monkeypatch.setattr(rewrites, "NORMS_ON", {"cuda", "cpu"})
    monkeypatch.setattr(rewrites, "FUSE_MIN_BYTES", 1)
    monkeypatch.setattr(rewrites, "SPLIT_CONV_MIN_BYTES", 1)


@pytest.mark.parametrize(("dynamic", "codecs"), [(False, "run time"), (True, "run time"), (False, "constant")])
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


@pytest.mark.parametrize("dynamic", [False, True])
def test_statistics_come_from_encoders(everywhere: None, monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    x, found, codes = images().to(DEVICE, memory_format=torch.channels_last), [], []
    distances: list[int] = []
    update = rewrites.update_early

    def spy(graph: torch.fx.Graph) -> None:
        update(graph)
        order = {node: i for i, node in enumerate(graph.nodes)}
        copies = [node for node in order if node.target == torch.ops.aten.copy_.default]
        distances.extend(order[node] - order[node.args[1]] for node in copies if value(node).dim() == 1)

    monkeypatch.setattr(rewrites, "update_early", spy)
    for on in (True, False):
        if not on:
            monkeypatch.setattr(rewrites, "encoder_measures", lambda *settings: False)
        made = Half()
        compiled = compile(made, backend="inductor", dynamic=dynamic)
        encke.attach(compiled, TWO)
        with torch._inductor.config.patch(force_disable_caches=True):
            gradient, code = run_and_get_code(lambda compiled=compiled: gradients(compiled, x))
        found.append(gradient)
        codes.append(code[0])
        found.append([t.float() for t in made.buffers()])
        torch._dynamo.reset()
    assert error(found[0], found[2]) < 1e-2 and error(found[1], found[3]) < 1e-4
    assert codes[0].count("extern_kernels.encke_site_pack_moments(") == 2
    assert "torch.ops.encke.site_pack_moments.default(" not in codes[0]
    # Running statistics are written where they are computed.
    assert distances == [1] * 4
    # What is packed and read by a convolution is stored once.
    called = [line for line in codes[0].splitlines() if "extern_kernels." in line]
    encoded = [reads(line) for line in called if "encke_site_pack(" in line]
    assert len(encoded) == 2 and encoded == [reads(line) for line in called if "extern_kernels.convolution(" in line]
    assert "welford" in codes[1] and "welford" not in codes[0]


def test_the_gradient_that_batch_norm_reads_twice_is_stored_once(everywhere: None) -> None:
    code, _ = code_and_gradients()
    lines = [line for line in code.splitlines() if "extern_kernels.encke_packed_norm" in line]
    read = [line.partition("(")[2].partition(",")[0] for line in lines]
    assert len(read) == 4 and read[0] == read[1] and read[2] == read[3]


def test_operators_are_called_where_functions_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowerings, "DIRECT_ON", set())
    code, _ = code_and_gradients()
    assert "extern_kernels.encke_" not in code and "torch.ops.encke.packed_decode.default(" in code


def test_what_has_gaps_is_left_to_operators() -> None:
    x = torch.empty(4, 6, 8)
    assert all(map(lowerings.without_gaps, (x, x.transpose(0, 2), x[:1])))
    assert not any(map(lowerings.without_gaps, (x[:, :, ::2], x[:, :3], x[:1].expand(4, 6, 8))))
